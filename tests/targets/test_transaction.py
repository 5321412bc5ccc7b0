"""Whole or not at all: saves that are killed, interrupted, refused by the disk, or in each other's way."""

import errno
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from faults.spawner import Fault, Pause, Spawner
from faults.states import make, same
from faults.sweep import SCENARIOS, left_overs, sweep
from shardkeep.layouts.assembly import assemble, part_of
from shardkeep.layouts.plan import Draft, StagedArray, WrittenFile, plan_save
from shardkeep.model.arrays import ArraySpec
from shardkeep.model.leaves import UNSHARDED
from shardkeep.model.shares import Shares, Writers
from shardkeep.model.tree import flatten
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.local.store import LocalStore
from shardkeep.targets.directory import Directory
from shardkeep.targets.transaction import Transaction
from support import assert_same, mesh_of

# `SHARDKEEP_SWEEP=1 make test` disturbs every call; by default a sample, another one for each scenario.
EVERY = int(os.environ.get("SHARDKEEP_SWEEP", "7"))
SAVES = [name for name in SCENARIOS if "delete" not in name]


@pytest.fixture
def room() -> Iterator[Path]:
    """A place in memory: what is proved here is order, not durability, and thousands of fsyncs take minutes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory) / "room"


def _first(name: str) -> int:
    return 1 + random.Random(name).randrange(EVERY)


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_any_call_leaves_the_old_state_or_the_new_one(name: str, room: Path, spawner: Spawner) -> None:
    """SIGKILL, in the middle of a write where the call is one; then the next save works and leaves nothing behind."""
    assert sweep(SCENARIOS[name], EVERY, mode="torn", first=_first(name), room=room, spawner=spawner) > 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_call_that_fails_leaves_one_state_and_a_true_error(name: str, room: Path, spawner: Spawner) -> None:
    """EIO once: the error is shardkeep's and tells whether the save was committed."""
    sweep(SCENARIOS[name], EVERY, mode="fail", first=_first(name), room=room, spawner=spawner)


@pytest.mark.parametrize("name", SAVES)
def test_ctrl_c_at_any_call_leaves_the_old_state_or_the_new_one(name: str, room: Path, spawner: Spawner) -> None:
    sweep(SCENARIOS[name], EVERY, mode="interrupt", first=_first(name), room=room, spawner=spawner)


@pytest.mark.parametrize("name", ["overwrite, safetensors", "overwrite, tensorstore", "exchange, single to several"])
def test_ctrl_c_again_and_again_leaves_the_old_state_or_the_new_one(name: str, room: Path, spawner: Spawner) -> None:
    """Whoever presses it once presses it again, while what was begun is being cleaned up."""
    sweep(SCENARIOS[name], EVERY, mode="interrupt", again=True, room=room, spawner=spawner)


COMMITS = [
    "overwrite, safetensors",
    "first, tensorstore",
    "exchange, several to several",
    "exchange, single to several",
    "exchange, several to single",
]


@pytest.mark.parametrize("mode", ["kill", "fail", "interrupt"])
@pytest.mark.parametrize("name", COMMITS)
def test_faults_at_the_rename_that_commits(name: str, mode: str, room: Path, spawner: Spawner) -> None:
    sweep(SCENARIOS[name], mode=mode, calls="rename", room=room, spawner=spawner)


@pytest.mark.parametrize("mode", ["fail", "interrupt"])
@pytest.mark.parametrize("name", COMMITS)
def test_faults_at_every_fsync(name: str, mode: str, room: Path, spawner: Spawner) -> None:
    """After a failed fsync the error says committed, not committed or unknown; nothing that is committed is deleted."""
    every = 1 if "safetensors" in name or EVERY == 1 else 3
    sweep(SCENARIOS[name], every, mode=mode, calls="fsync", room=room, spawner=spawner)


@pytest.mark.parametrize("name", ["overwrite, safetensors", "overwrite, tensorstore", "exchange, several to several"])
def test_a_disk_that_stays_broken_leaves_the_old_state_or_the_new_one(name: str, room: Path, spawner: Spawner) -> None:
    """From one call on everything fails, the clean-up too."""
    sweep(SCENARIOS[name], EVERY, mode="fail", again=True, room=room, spawner=spawner)


@pytest.mark.parametrize("name", ["overwrite, safetensors", "first, tensorstore", "exchange, single to single"])
def test_a_disk_that_fills_up_in_the_middle_of_a_write(name: str, room: Path, spawner: Spawner) -> None:
    scenario = SCENARIOS[name]
    sweep(scenario, 2, mode="fail", code=errno.ENOSPC, calls="write", room=room, spawner=spawner)


def test_no_space_for_a_write_says_how_much_is_needed(tmp_path: Path, spawner: Spawner) -> None:
    fault = Fault(str(tmp_path), "fail", 2, errno.ENOSPC, calls="write")
    outcome = spawner.run("save", fault, path=str(tmp_path / "run"), kind="plain", number=1)
    assert outcome.error == "NotEnoughSpaceError"
    assert "bytes" in outcome.message
    assert "Nothing was committed" in outcome.message
    assert not shardkeep.exists(tmp_path / "run")


def test_an_unreadable_outcome_is_called_unknown_and_deletes_nothing(tmp_path: Path, spawner: Spawner) -> None:
    """The directory's fsync fails after the rename, and then the manifest cannot be read back either."""
    path = tmp_path / "run"
    shardkeep.save(path, make("plain", 1))
    counted = spawner.run(
        "save", Fault(str(tmp_path), calls="fsync,open,read"), path=str(path), kind="plain", number=2, overwrite=True
    )
    outcomes = set()
    for at in range(max(counted.calls - 25, 1), counted.calls + 1):
        fault = Fault(str(tmp_path), "fail", at, again=True, calls="fsync,open,read")
        outcome = spawner.run("save", fault, path=str(path), kind="plain", number=2, overwrite=True)
        outcomes.add(outcome.error)
        state = shardkeep.load(path)
        assert same(state, make("plain", state["step"])), f"at {at}: {outcome.message}"
        assert shardkeep.verify(path).ok
        if outcome.error == "CommitUnknownError":
            assert "unknown" in outcome.message
            assert "nothing was deleted" in outcome.message
    assert "CommitUnknownError" in outcomes


@pytest.mark.parametrize("format", ["safetensors", "tensorstore"])
def test_overwriting_with_anything_else_leaves_only_the_new_tree(tmp_path: Path, format: Any) -> None:
    """Other shapes, dtypes, structures and shardings, more and fewer leaves, in a row over one another."""
    rows = NamedSharding(mesh_of(8), PartitionSpec("a"))
    columns = NamedSharding(mesh_of(2, 4), PartitionSpec("b", "a"))
    wide = np.arange(1 << 19, dtype=np.float32).reshape(1024, 512)
    trees = [
        {"w": jax.device_put(wide, rows), "b": jnp.ones(3)},
        {"w": jax.device_put(wide + 1, columns), "b": jnp.ones(4)},
        {"w": jnp.asarray(wide[:7]).astype(jnp.bfloat16)},
        {"w": {"inner": np.int8([1, 2])}, "b": [1, 2.5, "text"]},
        {},
        np.float64([1.5]),
        {"w": np.zeros((0, 4)), "more": [np.arange(i) for i in range(5)]},
    ]
    for tree in trees:
        shardkeep.save(tmp_path / "run", tree, format=format, overwrite=True)
        assert_same(shardkeep.load(tmp_path / "run"), tree)
        assert shardkeep.verify(tmp_path / "run").ok
        assert left_overs(tmp_path / "run") == set()


def test_changing_the_format_of_a_tree_leaves_only_the_new_files(tmp_path: Path) -> None:
    for number, format in enumerate(("safetensors", "tensorstore", "safetensors", "tensorstore")):
        shardkeep.save(tmp_path / "run", make("plain", number), format=format, overwrite=True)  # type: ignore[arg-type]
        assert same(shardkeep.load(tmp_path / "run"), make("plain", number))
        assert left_overs(tmp_path / "run") == set()


def test_overwriting_one_prefix_leaves_the_others(tmp_path: Path) -> None:
    for number, prefix in enumerate(("model", "optimizer", "model.ema", None)):
        shardkeep.save(tmp_path / "run", make("plain", number), prefix=prefix, format="zarr")
    shardkeep.save(tmp_path / "run", make("other", 9), prefix="model", overwrite=True)
    shardkeep.save(tmp_path / "run", make("other", 8), prefix=None, overwrite=True, format="zarr")
    for prefix, state in {
        "model": ("other", 9),
        "optimizer": ("plain", 1),
        "model.ema": ("plain", 2),
        None: ("other", 8),
    }.items():
        assert same(shardkeep.load(tmp_path / "run", prefix=prefix), make(*state)), prefix
    assert left_overs(tmp_path / "run") == set()


def test_a_save_whose_prefix_another_process_changed_is_refused(tmp_path: Path, spawner: Spawner) -> None:
    path = tmp_path / "run"
    shardkeep.save(path, make("plain", 1))
    pause = Pause(tmp_path / "pause")
    slow = spawner.start("save", _before_commit(path, pause), path=str(path), kind="plain", number=2, overwrite=True)
    pause.reached()
    shardkeep.save(path, make("plain", 3), overwrite=True)
    pause.go()
    outcome = slow.wait()
    assert outcome.error == "ConflictError"
    assert "not committed" in outcome.message
    assert same(shardkeep.load(path), make("plain", 3))
    assert left_overs(path) == set()


def _before_commit(path: Path, pause: Pause) -> Fault:
    """Stops a save when it has written its first data file."""
    return Fault(str(path), "pause", 2, calls="write", pause=str(pause.path))


def test_a_save_of_another_prefix_does_not_conflict(tmp_path: Path, spawner: Spawner) -> None:
    path = tmp_path / "run"
    pause = Pause(tmp_path / "pause")
    slow = spawner.start("save", _before_commit(path, pause), path=str(path), kind="plain", number=2, prefix="a")
    pause.reached()
    shardkeep.save(path, make("plain", 3), prefix="b")
    shardkeep.save(path, make("plain", 4), prefix="b", overwrite=True)
    pause.go()
    assert slow.wait().ok
    assert same(shardkeep.load(path, prefix="a"), make("plain", 2))
    assert same(shardkeep.load(path, prefix="b"), make("plain", 4))
    assert left_overs(path) == set()


def test_a_live_save_is_not_cleaned_up_and_stops_a_delete(tmp_path: Path, spawner: Spawner) -> None:
    path = tmp_path / "run"
    shardkeep.save(path, make("plain", 1), prefix="b")
    pause = Pause(tmp_path / "pause")
    slow = spawner.start("save", _before_commit(path, pause), path=str(path), kind="plain", number=2, prefix="a")
    pause.reached()
    with pytest.raises(shardkeep.ConflictError, match="nothing was deleted"):
        shardkeep.delete(path)
    assert same(shardkeep.load(path, prefix="b"), make("plain", 1))
    pause.go()
    assert slow.wait().ok
    assert same(shardkeep.load(path, prefix="a"), make("plain", 2))


@pytest.mark.parametrize("target", ["run", "model.safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_processes_that_save_first_to_one_target(
    tmp_path: Path, spawner: Spawner, target: str, overwrite: bool
) -> None:
    """One of them wins; the other is told, or comes second. What is there is whole, and nothing is left over."""
    more = {"max_shard_size": 400} if target.endswith("safetensors") else {"format": "zarr"}
    for attempt in range(6):
        path = tmp_path / str(attempt) / target
        both = [
            spawner.start("save", path=str(path), kind="plain", number=n, overwrite=overwrite, **more) for n in (1, 2)
        ]
        outcomes = [child.wait() for child in both]
        told = {outcome.error for outcome in outcomes}
        assert told <= {"", "ConflictError", "CheckpointExistsError"}, outcomes
        assert "" in told
        winners = [n for n, outcome in zip((1, 2), outcomes, strict=True) if outcome.ok]
        state = shardkeep.load(path)
        assert state["step"] in winners
        assert same(state, make("plain", state["step"]))
        assert shardkeep.verify(path).ok
        assert left_overs(path) == set()


@pytest.mark.parametrize("target", ["run", "model.safetensors"])
def test_a_save_that_began_before_another_was_committed_harms_it_not(
    tmp_path: Path, spawner: Spawner, target: str
) -> None:
    """The first stops at each of its first calls while the second goes all the way: theirs stays whole."""
    more = {"max_shard_size": 400} if target.endswith("safetensors") else {"format": "zarr"}
    for at in (1, 2, 3, 5, 8):
        place = tmp_path / str(at)
        place.mkdir()
        pause = Pause(tmp_path / f"pause-{at}")
        fault = Fault(str(place), "pause", at, calls="create", pause=str(pause.path))
        slow = spawner.start("save", fault, path=str(place / target), kind="plain", number=1, **more)
        pause.reached()
        fast = spawner.start("save", path=str(place / target), kind="plain", number=2, **more)
        try:
            first = fast.wait(1.5)
        except TimeoutError:  # the first holds the lock where it stopped
            first = None
        pause.go()
        second = slow.wait()
        state = shardkeep.load(place / target)
        assert same(state, make("plain", state["step"])), (at, first, second)
        assert shardkeep.verify(place / target).ok, at
        if first is not None:
            assert left_overs(place / target) == set(), at


def test_threads_that_save_different_prefixes_lose_nothing(tmp_path: Path) -> None:
    """Four threads, four prefixes, one directory, again and again, half of them in the background."""
    path = tmp_path / "run"
    errors: list[BaseException] = []

    def save(prefix: str) -> None:
        try:
            for number in range(8):
                arguments: Any = {
                    "prefix": prefix,
                    "overwrite": True,
                    "format": ("safetensors", "tensorstore")[number % 2],
                }
                tree = make("fewer", number)
                if number % 3:
                    shardkeep.save(path, tree, **arguments)
                else:
                    shardkeep.save_async(path, tree, **arguments).wait()
                assert same(shardkeep.load(path, prefix=prefix), tree)
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)

    threads = [threading.Thread(target=save, args=(prefix,)) for prefix in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for prefix in "abcd":
        assert same(shardkeep.load(path, prefix=prefix), make("fewer", 7))
    assert left_overs(path) == set()


def test_processes_that_save_different_prefixes_lose_nothing(tmp_path: Path, spawner: Spawner) -> None:
    path = tmp_path / "run"
    children = [
        spawner.start("save_often", path=str(path), kind="fewer", first=0, count=10, prefix=prefix, format=format)
        for prefix, format in (("a", "safetensors"), ("b", "tensorstore"), ("c", "tensorstore"))
    ]
    for child in children:
        outcome = child.wait()
        assert outcome.ok, outcome
    for prefix in "abc":
        assert same(shardkeep.load(path, prefix=prefix), make("fewer", 9))
    assert left_overs(path) == set()


def test_the_first_save_gets_clean_names_and_later_ones_their_own(tmp_path: Path) -> None:
    path = tmp_path / "run"
    shardkeep.save(path, {"w": np.ones(3)}, format="zarr")
    assert (path / "w" / ".zarray").is_file()
    shardkeep.save(path, {"w": np.ones(3)}, format="zarr", overwrite=True)
    names = {file.name for tree in shardkeep.inspect(path).trees.values() for file in tree.files}
    assert all(name.startswith("~") for name in names)
    for name in names:
        assert (path / name).samefile(path / name.partition("/")[2]), "a second name of the same file"


@pytest.mark.parametrize("order", [0, 1])
def test_trees_whose_names_overlap_on_disk_stay_apart(tmp_path: Path, order: int) -> None:
    """A leaf called like a prefix, and a prefix whose leaves are called like that leaf's chunks."""
    path = tmp_path / "run"
    trees: list[tuple[str | None, Any]] = [
        (None, {"model": np.arange(3.0), "a": {"b": np.arange(2)}}),
        ("model", {"0": np.arange(4.0), "w": np.arange(5.0)}),
        ("a", {"b": np.arange(6), ".zarray": np.arange(7)}),
        ("a.b", np.arange(8)),
        ("a/b/c", {"0": np.arange(9)}),
    ]
    for prefix, tree in trees if order == 0 else trees[::-1]:
        shardkeep.save(path, tree, prefix=prefix, format="zarr")
    for prefix, tree in trees:
        assert_same(shardkeep.load(path, prefix=prefix or ""), tree)
    for prefix, tree in trees[1:3]:
        shardkeep.save(path, tree, prefix=prefix, format="zarr", overwrite=True)
    for prefix, tree in trees:
        assert_same(shardkeep.load(path, prefix=prefix or ""), tree)
    assert shardkeep.verify(path).ok
    assert left_overs(path) == set()


def test_files_that_are_not_ours_stay(tmp_path: Path, spawner: Spawner) -> None:
    """Unknown files beside, between and under the names of a tree survive overwrites, dead saves and delete."""
    path = tmp_path / "run"
    for name in ("notes.txt", "w/notes.txt", "layers/0/mine", "manifest.txt", "~/x", ".shardkeep.txt"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    for number in range(3):
        shardkeep.save(path, make("plain", number), format="zarr", overwrite=True)
    fault = Fault(str(path), "kill", 30)
    assert spawner.run("save", fault, path=str(path), kind="plain", number=4, overwrite=True, format="zarr").signal
    shardkeep.save(path, make("plain", 5), overwrite=True)
    shardkeep.delete(path)
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert files == {"notes.txt", "w/notes.txt", "layers/0/mine", "manifest.txt", "~/x", ".shardkeep.txt"}


def test_a_foreign_file_under_a_name_of_ours_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "w").mkdir(parents=True)
    (path / "w" / "0").write_text("precious")
    (path / "layers").write_text("a file where a directory would be")
    shardkeep.save(path, make("plain", 1), format="zarr")
    assert same(shardkeep.load(path), make("plain", 1))
    assert (path / "w" / "0").read_text() == "precious"
    assert (path / "layers").read_text() == "a file where a directory would be"


def test_names_recorded_by_a_dead_save_cannot_reach_outside(tmp_path: Path) -> None:
    """A record is only a file: one that was tampered with must not make a clean-up delete other people's files."""
    path = tmp_path / "run"
    shardkeep.save(path, make("plain", 1))
    precious = tmp_path / "precious"
    precious.write_text("x")
    records = path / ".shardkeep" / "saves"
    records.mkdir(exist_ok=True)
    (records / ("a" * 32)).write_text('["../precious"]\n')
    (records / ("b" * 32)).write_text(f'["{precious}"]\n')
    (records / ("c" * 32)).write_bytes(b"\xff\x00[not json")
    (records / ("d" * 32)).write_text('{"manifest.json": 1}\n["manifest.json"]\n')
    shardkeep.save(path, make("plain", 2), prefix="other")
    assert precious.read_text() == "x"
    assert same(shardkeep.load(path, prefix=""), make("plain", 1))


def test_a_linked_directory_does_not_lead_a_clean_up_outside(tmp_path: Path) -> None:
    """Names stay below the checkpoint also where one of its directories is a link to somewhere else."""
    path, outside = tmp_path / "run", tmp_path / "outside"
    shardkeep.save(path, make("plain", 1))
    outside.mkdir()
    (outside / "precious").write_text("x")
    (path / "link").symlink_to(outside)
    records = path / ".shardkeep" / "saves"
    records.mkdir(exist_ok=True)
    (records / ("a" * 32)).write_text('["link/precious"]\n')
    shardkeep.save(path, make("plain", 2), overwrite=True)
    assert (outside / "precious").exists()


@pytest.mark.parametrize("target", ["run", "model.safetensors"])
def test_a_directory_that_vanishes_during_a_save_is_an_error(tmp_path: Path, spawner: Spawner, target: str) -> None:
    """Taking the lock for the commit makes the directory anew: a manifest in it would name files that are not there."""
    more = {"max_shard_size": 400} if target.endswith("safetensors") else {}
    place = tmp_path / "place"
    save: dict[str, Any] = {"path": str(place / target), "kind": "plain", "number": 1, **more}
    calls = spawner.run("save", Fault(str(place), calls="fsync"), **save).calls
    refused = 0
    for at in range(1, calls + 1):
        shutil.rmtree(place)
        pause = Pause(tmp_path / f"pause-{at}")
        slow = spawner.start("save", Fault(str(place), "pause", at, calls="fsync", pause=str(pause.path)), **save)
        pause.reached()
        shutil.rmtree(place)
        pause.go()
        outcome = slow.wait()
        refused += "removed or renamed" in outcome.message
        assert outcome.ok or "StorageError" in outcome.bases, outcome
        if list(place.rglob("*.json")):  # a manifest, or an index
            assert outcome.ok
            assert same(shardkeep.load(place / target), make("plain", 1)), at
        place.mkdir(exist_ok=True)
    assert refused


@pytest.mark.parametrize("found", [None, 3])
def test_files_of_other_processes_are_looked_for_just_before_the_commit(tmp_path: Path, found: int | None) -> None:
    """One that is missing, or shorter than its process said, prevents the commit."""
    shardkeep.save(tmp_path, {"w": np.zeros(3)})
    target = Directory(LocalStore(str(tmp_path)))
    skeleton, _ = flatten({"w": 0})
    shares = Shares((4,), (2,), Writers(np.array([0, 1])))
    spec = ArraySpec((4,), np.dtype(np.uint8))
    leaf = StagedArray(("w",), spec, UNSHARDED, shares.of(0), shares=shares)
    draft = Draft("5" * 32, "", skeleton, {}, "", process=0, processes=2)
    with Scope("a save") as scope:
        transaction = scope.add(Transaction(target))
        plan = transaction.begin(plan_save(target.layout, [leaf], [draft]), overwrite=True)
        if found is not None:
            (tmp_path / "theirs").write_bytes(b"1" * found)
        part = part_of(plan.trees[0], [WrittenFile(4098, "0" * 32, (("0" * 32,),))])
        tree = assemble(plan.trees[0], {0: part, 1: part})
        with pytest.raises(shardkeep.StorageError, match=r"theirs, written by process 1, is missing or truncated"):
            transaction.commit({"": tree}, {"theirs": (4, 1)})
    assert_same(shardkeep.load(tmp_path), {"w": np.zeros(3)})
    assert left_overs(tmp_path) == ({"theirs"} if found is not None else set())
