"""Values that differ between processes: each saves its own, and gets it back."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from buckets.fixtures import Place, make_place
from faults.sweep import left_overs
from multiprocess.cluster import Kept, all_well, run_cluster
from servers.gcs import GCSServer, gcs_process
from support import FORMATS, assert_same

# The value of a process: other lengths, structures and types on each, and on the last one more than a row.
VALUE = """
def value_of(process, size, large=False):
    state = {"process": process, "shards": list(range(process * 3)), "buffer": np.arange(process * 1000)}
    if process == size - 1:
        state["last"] = (b"x" * 5000, None, [{"rng": np.random.default_rng(process).bit_generator.state}])
        if large:
            state["large"] = np.full(3 << 20, 7.0)
    return state
"""
namespace: dict[str, Any] = {"np": np}
exec(VALUE, namespace)
value_of = namespace["value_of"]

SAVE = (
    VALUE
    + """
from support import save_as
values = pattern("float32", (8, 8))
def tree(large=False):
    data = {"it": [shardkeep.PerProcess(value_of(index, size, large))], "rank": shardkeep.PerProcess(index)}
    return {"w": spread(values, P("a")), "data": data, "step": 7}
"""
)

ROUNDTRIP = (
    SAVE
    + """
from support import FORMATS
wrong = {}
for kind in KINDS:
    path = save_as(kind, root / kind / "x", tree())
    mine = {"it": [value_of(index, size)], "rank": index}
    every = {"it": [[value_of(i, size) for i in range(size)]], "rank": list(range(size))}
    template = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh_over(), P("b", "a")))}
    template["data"] = {"it": [shardkeep.PerProcess(None)], "rank": 0}
    loads = {
        "plain": ({}, mine), "mesh": ({"mesh": mesh_over()}, mine), "read once": ({"broadcast": True}, mine),
        "no mmap": ({"mmap": False}, mine), "include": ({"include": "rank"}, {"rank": index}),
        "template": ({"template": template}, mine), "all": ({"per_process": "all"}, every),
        "all, read once": ({"per_process": "all", "broadcast": True}, every),
    }
    for name, (arguments, expected) in loads.items():
        loaded = shardkeep.load(path, **arguments)
        try:
            assert_same(loaded["data"], expected)
            assert "w" not in loaded or holds(loaded["w"], values), "w"
        except AssertionError as error:
            wrong[f"{kind}, {name}"] = str(error)
say(wrong=wrong)
"""
)


def check_here(path: Path, size: int) -> None:
    """One process is told how many saved it, and gets all values if it asks for them."""
    assert shardkeep.verify(path).ok
    assert left_overs(path) == set()
    with pytest.raises(
        shardkeep.ProcessError, match=rf"leaf data/it/0 \(and 1 more leaf\) .* of {size} processes, and 1 "
    ):
        shardkeep.load(path)
    assert_same(shardkeep.load(path, per_process="all")["data"]["it"][0], [value_of(i, size) for i in range(size)])
    assert shardkeep.load(path, include="^w|step")["step"] == 7
    assert shardkeep.inspect(path).leaves["data/it/0"].processes == size


def test_each_of_two_processes_gets_its_own_value_back(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(f"KINDS = {sorted(FORMATS)!r}\n" + ROUNDTRIP, tmp_path, timeout=120)
    assert [process["wrong"] for process in said] == [{}, {}]
    for kind, (ending, _) in FORMATS.items():
        check_here(tmp_path / kind / f"x{ending}", 2)


@pytest.mark.processes4
def test_four_processes_and_two_of_another_job(four: Kept, pair: Kept, tmp_path: Path) -> None:
    said = four.run(f"KINDS = {sorted(FORMATS)!r}\n" + ROUNDTRIP, tmp_path, timeout=240)
    assert [process["wrong"] for process in said] == [{}] * 4
    for kind, (ending, _) in FORMATS.items():
        check_here(tmp_path / kind / f"x{ending}", 4)
    said = pair.run(
        """
own = caught(shardkeep.load, root / "safetensors" / "x")
every = shardkeep.load(root / "safetensors" / "x", per_process="all")["data"]["rank"]
say(own=own, every=every, part=shardkeep.load(root / "safetensors" / "x", include="step"))
""",
        tmp_path,
    )
    for process in said:
        assert process["own"]["kind"] == "ProcessError"
        assert "of 4 processes, and 2 processes are loading it" in process["own"]["message"]
        assert process["every"] == [0, 1, 2, 3]
        assert process["part"] == {"step": 7}


def test_another_number_of_processes_is_refused_on_all_of_them(pair: Kept, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "one", {"data": shardkeep.PerProcess({"epoch": 3}), "step": 1})
    said = pair.run(
        """
own = caught(shardkeep.load, root / "one")
every = shardkeep.load(root / "one", per_process="all")
different = caught(shardkeep.load, root / "one", per_process="all" if index else "own")
say(own=own, every=every, part=shardkeep.load(root / "one", template={"step": 0}), different=different)
""",
        tmp_path,
    )
    for process in said:
        assert process["own"]["kind"] == "ProcessError"
        assert (
            "leaf data is a PerProcess value of 1 process, and 2 processes are loading it" in process["own"]["message"]
        )
        assert process["own"]["seconds"] < 5
        assert process["every"] == {"data": [{"epoch": 3}], "step": 1}
        assert process["part"] == {"step": 1}
        assert "per_process own" in process["different"]["message"]


def test_a_save_in_the_background_keeps_the_value_of_the_call(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
wrong = []
for name, more in {"a": {}, "b": {"format": "zarr", "compression": "zstd"}, "c.safetensors": {}}.items():
    state = {"position": index, "buffer": np.full(1 << 16, index)}
    pending = shardkeep.save_async(root / name, {"data": shardkeep.PerProcess(state)}, **more)
    state["position"] = -1
    state["buffer"][:] = -1
    pending.wait()
    loaded = shardkeep.load(root / name)["data"]
    if loaded["position"] != index or not (loaded["buffer"] == index).all():
        wrong.append([name, loaded["position"]])
say(wrong=wrong)
""",
        tmp_path,
    )
    assert [process["wrong"] for process in said] == [[], []]


def test_each_process_writes_and_reads_only_its_own_value(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
tree = {"data": shardkeep.PerProcess({"buffer": np.full(24 << 20, index, np.uint8)})}
shares = [shardkeep.save(root / name, tree, **more).share for name, more in KINDS.items()]
traffic = Traffic()
read = []
for name in KINDS:
    traffic.reset()
    loaded = shardkeep.load(root / name, mmap=False)
    assert (loaded["data"]["buffer"] == index).all()
    read.append(traffic.since()["read"])
say(shares=shares, read=read)
""".replace("KINDS", '{"a": {}, "b": {"format": "zarr"}}'),
        tmp_path,
    )
    for process in said:
        for nbytes in (*process["shares"], *process["read"]):
            assert 24 << 20 <= nbytes < 34 << 20, process  # rows of 16 MiB: two for each
    assert shardkeep.inspect(tmp_path / "a").leaves["data"].shape == (4, 16 << 20)


def test_very_different_lengths_waste_less_than_a_row_for_each(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
value = {"buffer": np.full(40 << 20 if index == 0 else 8, index, np.uint8)}
for name in ("a", "x.safetensors"):
    shardkeep.save(root / name, {"data": shardkeep.PerProcess(value)})
    loaded = shardkeep.load(root / name)["data"]["buffer"]
    assert loaded.size == value["buffer"].size and (loaded == index).all()
say(done=True)
""",
        tmp_path,
    )
    assert all(process["done"] for process in said)
    assert shardkeep.inspect(tmp_path / "a").nbytes == 4 << 24


DISAGREE: dict[str, tuple[str, list[str]]] = {
    "only on one": ("tree['data'] = 7 if index else shardkeep.PerProcess(7)", ["leaf data: a PerProcess value"]),
    "another key": ("tree['other' if index else 'more'] = shardkeep.PerProcess(1)", ["PerProcess", "(nothing)"]),
    "not wrapped": ("tree['data'] = {'position': index}", ["leaf data/position", "shardkeep.PerProcess(value)"]),
    "NumPy, not wrapped": ("tree['data'] = np.full(3, index)", ["leaf data: int64[3]", "shardkeep.PerProcess(value)"]),
}


@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_presence_must_agree_and_values_that_differ_lead_to_perprocess(pair: Kept, tmp_path: Path, ending: str) -> None:
    variants = {name: how for name, (how, _) in DISAGREE.items()}
    said = pair.run(
        f"VARIANTS, ENDING = {variants!r}, {ending!r}\n"
        + """
found = {}
for name, how in VARIANTS.items():
    tree = {"w": spread(np.ones((8, 8), np.float32), P("a"))}
    exec(how)
    found[name] = caught(shardkeep.save, root / ("x" + ENDING), tree)
bad = caught(shardkeep.save, root / ("x" + ENDING), {"d": shardkeep.PerProcess(print if index else 1)})
say(found=found, bad=bad, files=list(files_below(root)))
""",
        tmp_path,
    )
    for process in said:
        assert not [name for name in process["files"] if "x" in name.split("/")[0]]
        assert process["bad"]["kind"] == "UnsupportedLeafError"
        for name, error in process["found"].items():
            assert error["kind"] == "ProcessError", f"{name}: {error}"
            assert "processes passed different arguments; nothing was written" in error["message"]
            assert all(word in error["message"] for word in DISAGREE[name][1]), f"{name}: {error}"


DIE = (
    SAVE
    + """
path = root / ("x" + ENDING)
shardkeep.save(path, tree(), **MORE)
meet(root, "saved", index, size)
os.environ["SHARDKEEP_PROCESS_SILENCE"] = "2"
if index == 1:
    exec(HOW)
error = caught(shardkeep.save, path, {**tree(), "step": 8}, overwrite=True, **MORE)
say(error=error)
os._exit(0)
"""
)
TELLING = """
share = shardkeep.processes.operation.Operation.share
def die(self, value=None):
    if self._gathers == 2:  # its lengths are handed in, those of the others not read yet
        os.kill(os.getpid(), signal.SIGKILL)
    return share(self, value)
shardkeep.processes.operation.Operation.share = die
"""
GATHERING = """
import shardkeep.saving.snapshot
shardkeep.saving.snapshot.gather_value = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_dies_leaves_the_old_values_of_all(tmp_path: Path) -> None:
    deaths = {
        "telling": ("", {}, TELLING),
        "writing": ("", {"format": "zarr"}, "fault(path, 'kill', 2, 'write')"),
        "gathering": (".safetensors", {}, GATHERING),
    }
    with ThreadPoolExecutor(3) as pool:
        running = {
            name: pool.submit(
                run_cluster, f"ENDING, MORE, HOW = {ending!r}, {more!r}, {how!r}\n" + DIE, tmp_path / name, timeout=60
            )
            for name, (ending, more, how) in deaths.items()
        }
    for name, outcomes in running.items():
        survivor, victim = outcomes.result()
        assert victim.code == -9, victim.output[-3000:]
        assert "error" in survivor.said, f"{name}: {survivor.output[-3000:]}"
        assert survivor.said["error"]["kind"] == "ProcessError", f"{name}: {survivor.said}"
        path = tmp_path / name / ("x" + deaths[name][0])
        loaded = shardkeep.load(path, per_process="all")
        assert loaded["step"] == 7
        assert_same(loaded["data"]["it"][0], [value_of(i, 2) for i in range(2)])
        assert shardkeep.verify(path).ok


def test_the_documented_manager_saves_and_loads_them(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        SAVE
        + """
import shardkeep.serialization.async_manager as async_manager
manager = async_manager.AsyncCheckpointManager(enable_validation=True)
mesh = mesh_over((4, 1))
wrong = []
manager.save(tree(), str(root / "a"), mesh)
loaded, _ = manager.load(str(root / "a"), mesh, partition_rules=[(".*", P())], validate=True)
manager.save_pytree(tree(), str(root / "b"), mesh, prefix="model")
like = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32), "data": {"it": [{}], "rank": shardkeep.PerProcess(0)}}
again, _ = manager.load_pytree(str(root / "b"), mesh, prefix="model", partition_rules=[(".*", P())])
templated, _ = manager.load_pytree(
    str(root / "b"), mesh, prefix="model", partition_rules=[(".*", P())], template={**like, "data": tree()["data"]}
)
for found in (again, templated):
    assert_same(found["data"], {"it": [value_of(index, size)], "rank": index})
assert_same(loaded["data"]["it"], {"0": value_of(index, size)})
say(done=True)
""",
        tmp_path,
        timeout=120,
    )
    assert all(process["done"] for process in said)


def test_values_are_checked_like_all_other_bytes(pair: Kept, tmp_path: Path) -> None:
    """A value of one process that is damaged fails the load on all of them."""
    pair.run(SAVE + "shardkeep.save(root / 'x', tree(), format='zarr')", tmp_path)
    chunk = tmp_path / "x" / "data" / "it" / "0" / "1.0"
    raw = bytearray(chunk.read_bytes())
    raw[100] ^= 1
    chunk.write_bytes(raw)
    said = pair.run("say(error=caught(shardkeep.load, root / 'x'))", tmp_path)
    for process in said:
        assert process["error"]["kind"] == "IntegrityError"
        assert "leaf 'data/it/0'" in process["error"]["message"]
    assert not shardkeep.verify(tmp_path / "x").ok


def test_two_processes_save_their_values_to_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        SAVE
        + """
import json
for url in json.loads(URLS):
    for name, more in {"a": {}, "b": {"format": "zarr"}, "c.safetensors": {}}.items():
        shardkeep.save_async(f"{url}/{name}", tree(large=name == "a"), **more).wait()
        assert_same(shardkeep.load(f"{url}/{name}")["data"]["it"], [value_of(index, size, name == "a")])
say(done=True)
"""
    )
    with gcs_process("--bucket", "bucket") as url:
        gs, s3 = Place("gs", GCSServer, "per-process", url), make_place("s3")
        variables = {"STORAGE_EMULATOR_HOST": url, **s3.environment()}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        urls = [gs.url, s3.url]
        said = all_well(
            run_cluster(f"URLS = {json.dumps(urls)!r}\n" + script, tmp_path / "room", environment=variables)
        )
        assert all(process["done"] for process in said)
        for place in urls:
            for name in ("a", "b", "c.safetensors"):
                path = f"{place}/{name}"
                assert shardkeep.verify(path).ok
                every = shardkeep.load(path, per_process="all")["data"]
                assert_same(every["it"][0], [value_of(i, 2, name == "a") for i in range(2)])
                assert every["rank"] == [0, 1]
