"""Four processes: what two do, on more meshes, and what takes more than one other process."""

from pathlib import Path

import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept
from multiprocess.inside import arrays_of, values_of
from multiprocess.test_agreement import DIFFER, VARIANTS
from multiprocess.test_background import TRAIN
from multiprocess.test_faults import FAIL, FAULTS
from multiprocess.test_roundtrip import LOAD, SAVE, SAVED, load_here
from multiprocess.test_shares import STATES
from support import FORMATS, mesh_of

pytestmark = pytest.mark.processes4


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 1)])
def test_four_save_and_four_two_or_one_load(
    four: Kept, pair: Kept, tmp_path: Path, kind: str, shape: tuple[int, int]
) -> None:
    four.run(SAVE.format(number=3, kind=kind, shape=shape, turn=shape[0]), tmp_path)
    path = tmp_path / f"saved{FORMATS[kind][0]}"
    assert shardkeep.verify(path).ok
    load_here(path, 3)
    for cluster, size in ((four, 4), (pair, 2)):
        said = cluster.run(LOAD.format(path=str(path), number=3), tmp_path)
        assert [process["wrong"] for process in said] == [[]] * size
    assert left_overs(path) == set()


@pytest.mark.parametrize("kind", SAVED)
def test_two_or_one_save_and_four_load(four: Kept, pair: Kept, tmp_path: Path, kind: str) -> None:
    ending, arguments = FORMATS[kind]
    pair.run(SAVE.format(number=5, kind=kind, shape=(2, 2), turn=3), tmp_path)
    shardkeep.save(tmp_path / f"one{ending}", arrays_of(values_of(5), mesh_of(4, 2)), **arguments)
    for name in ("saved", "one"):
        said = four.run(LOAD.format(path=str(tmp_path / f"{name}{ending}"), number=5), tmp_path)
        assert [process["wrong"] for process in said] == [[]] * 4


def test_bytes_are_written_once_and_evenly(four: Kept, tmp_path: Path) -> None:
    said = four.run(
        f"STATES = {STATES!r}\n"
        + """
found = {}
for name, how in STATES.items():
    report = shardkeep.save(root / name, eval(how.replace("(2, 2)", "(4, 2)")))
    found[name] = [report.share, report.nbytes]
say(found=found)
""",
        tmp_path,
    )
    for name in STATES:
        shares = [process["found"][name][0] for process in said]
        total = said[0]["found"][name][1]
        print(f"{name}: {[f'{share:,}' for share in shares]}")
        assert sum(shares) == total
        assert max(shares) < 1.15 * total / 4, f"{name}: {shares}"
        assert min(shares) > 0.85 * total / 4, f"{name}: {shares}"
        assert shardkeep.verify(tmp_path / name).ok


def test_arrays_on_some_of_the_processes(four: Kept, tmp_path: Path) -> None:
    """Processes that hold nothing of an array take part all the same."""
    said = four.run(
        """
values = {"middle": pattern("float32", (512, 1024)), "copies": pattern("bfloat16", (512, 1024))}
values["all"] = np.arange(8, dtype=np.int32)
some = Mesh(np.array(jax.devices()[2:6]), ("a",))
tree = {
    "middle": put(values["middle"], NamedSharding(some, P("a"))),
    "copies": put(values["copies"], NamedSharding(some, P())), "all": spread(values["all"], P("a")),
}
report = shardkeep.save(root / "x", tree)
shardkeep.save(root / "t", tree, format="zarr")
wrong = []
for name in ("x", "t"):
    wrong += differences(shardkeep.load(root / name, mesh=mesh_over((8, 1))), values)
    wanted = {n: jax.ShapeDtypeStruct((512, 1024), values[n].dtype, sharding=NamedSharding(some, P("a"))) for n in tree}
    loaded = shardkeep.load(root / name, template={n: wanted[n] for n in ("middle", "copies")})
    if index in (1, 2):
        wrong += differences(loaded, {n: values[n] for n in loaded})
    elif any(array.addressable_shards for array in loaded.values()):
        wrong.append("there is something where nothing was wanted")
say(wrong=wrong, share=report.share)
""",
        tmp_path,
    )
    assert [process["wrong"] for process in said] == [[]] * 4
    assert said[0]["share"] < 10_000 < said[1]["share"]


def test_every_difference_of_one_is_named_to_all(four: Kept, tmp_path: Path) -> None:
    variants = {name: how for name, (how, _) in VARIANTS.items()}
    said = four.run(f"VARIANTS = {variants!r}\n" + DIFFER, tmp_path)
    for process in said:
        assert process["loaded"] == 7
        for name, (*errors, files) in process["found"].items():
            assert not files, f"{name}: {files}"
            for kind, message, _ in errors:
                assert kind == "ProcessError", name
                assert "process 3" in message, f"{name}: {message}"
                assert all(word in message for word in VARIANTS[name][1]), f"{name}: {message}"


def test_all_raise_what_one_process_met(four: Kept, tmp_path: Path) -> None:
    more = {"format": "zarr"}
    script = FAIL.replace("mesh_over((2, 2))", "mesh_over((4, 2))")
    said = four.run(f"FAULTS, CULPRIT, KIND = {FAULTS!r}, 2, {more!r}\n" + script, tmp_path)
    for number, process in enumerate(said):
        assert process["wrong"] == []
        for name, errors in process["found"].items():
            for error in errors:
                assert error["kind"] == FAULTS[name][2], f"{name}, process {number}: {error}"
                assert error["wrong"] == []
                assert number == 2 or "process 2" in error["message"], f"{name}, process {number}: {error}"
                assert error["seconds"] < 5
    assert left_overs(tmp_path / "x") == set()


def test_training_is_undisturbed(four: Kept, tmp_path: Path) -> None:
    said = four.run(
        TRAIN.replace("mesh_over((4, 1))", "mesh_over((8, 1))")
        + """
undisturbed = local(train(20))
pending = []
def save(number, state):
    tree = dict(zip(("w", "m", "count"), state))
    pending.append(shardkeep.save_async(root / f"{number % 3}", tree, overwrite=True))
state = train(20, save)
for p in pending:
    p.wait()
loaded = shardkeep.load(root / "2", mesh=mesh)
say(same=local(state) == undisturbed, loaded=local([loaded[n] for n in ("w", "m", "count")]) == local(state))
""",
        tmp_path,
    )
    assert said == [{"same": True, "loaded": True}] * 4


def test_a_call_that_only_some_make(four: Kept, tmp_path: Path) -> None:
    said = four.run(
        """
tree = {"w": spread(np.ones((8, 8), np.float32), P("a"))}
with environment(SHARDKEEP_PROCESS_DEADLINE="2"):
    found = caught(shardkeep.save, root / "x", tree) if index in (0, 2) else None
    meet(root, "alone", index, size)
shardkeep.save(root / "y", tree)
say(found=found)
""",
        tmp_path,
    )
    for number in (0, 2):
        assert "processes 1, 3 did not make this call within 2 s" in said[number]["found"]["message"]
    assert shardkeep.exists(tmp_path / "y")
