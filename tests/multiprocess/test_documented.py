"""The documented API among several processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from multiprocess.cluster import Kept
from multiprocess.inside import differences, values_of
from shardkeep.serialization import AsyncCheckpointManager

START = """
from shardkeep.serialization import AsyncCheckpointManager, tree_deserialize_leaves, tree_serialize_leaves
from shardkeep.serialization.sharding_utils import (
    apply_sharding_tree, create_sharding_tree_from_index, make_itsharded, validate_sharding_tree,
)
from shardkeep.serialization.utils import apply_gather_functions, broadcast_tensor, reshard, to_host
mesh = mesh_over((2, 2))
"""

MANAGERS: dict[str, dict[str, Any]] = {
    "tensorstore": {},
    "zstd": {"enable_compression": True},
    "validated": {"enable_validation": True},
    "safetensors": {"use_tensorstore": False},
    "safetensors validated": {"use_tensorstore": False, "enable_validation": True},
}


@pytest.mark.parametrize("kind", [pytest.param(kind) if "validated" in kind else kind for kind in MANAGERS])
def test_a_manager_saves_and_loads(pair: Kept, tmp_path: Path, kind: str) -> None:
    said = pair.run(
        f"ARGUMENTS = {MANAGERS[kind]!r}\n"
        + START
        + """
values = [values_of(n) for n in range(3)]
trees = [arrays_of(v, mesh, n) for n, v in enumerate(values)]
wrong = []
rules = [("kernel|wide", P("b", "a")), (".*", P())]
with AsyncCheckpointManager(**ARGUMENTS) as manager:
    manager.save(trees[0], root / "x", mesh, metadata={"epoch": 1})
    manager.save_async(trees[1], root / "x", mesh, prefix="later")
    manager.save_pytree(trees[2], root / "x", mesh, prefix="model", extras={"epoch": 2})
    manager.wait_until_finished()
    for turn in range(2):
        template = abstract_of(values[2], mesh_over((4, 1)), turn)
        loaded, extras = manager.load_pytree(root / "x", mesh, prefix="model", template=template)
        wrong += differences(loaded, values[2])
    assert extras == {"epoch": 2}, extras
    loaded, metadata = manager.load(root / "x", mesh, partition_rules=rules, prefix="")
    assert metadata["custom_metadata"] == {"epoch": 1}, metadata
    wrong += differences(loaded["params"]["odd"], values[0]["params"]["odd"])
    wrong += differences(loaded["params"]["layers"]["0"], values[0]["params"]["layers"][0])
    assert loaded["params"]["layers"]["0"]["kernel"].sharding.spec == P("b", "a")
    loaded = tree_deserialize_leaves(root / "x", mesh, partition_rules=rules, prefix="later")
    wrong += differences(loaded["params"]["odd"], values[1]["params"]["odd"])
    assert loaded["step"] == 1
say(wrong=wrong)
""",
        tmp_path,
    )
    assert [process["wrong"] for process in said] == [[], []]
    manager = AsyncCheckpointManager(**MANAGERS[kind])
    loaded, _ = manager.load_pytree(tmp_path / "x", None, prefix="model", template=None)
    assert differences(loaded, values_of(2)) == []
    assert shardkeep.verify(tmp_path / "x").ok
    if "enable_validation" in MANAGERS[kind]:
        checksums = shardkeep.inspect(tmp_path / "x").tree("model").metadata["checksum"]
        kernel = values_of(2)["params"]["layers"][0]["kernel"]
        parts = {name: sha for name, sha in checksums.items() if name.startswith("params.layers.0.kernel")}
        assert parts, sorted(checksums)
        for name, sha in parts.items():
            bounds = [map(int, part.split(":")) for part in name.partition("[")[2].rstrip("]").split(",")]
            assert sha == AsyncCheckpointManager.compute_checksum(kernel[tuple(slice(*b) for b in bounds)])
        assert checksums["host"] == AsyncCheckpointManager.compute_checksum(values_of(2)["host"])


def test_exchange_files_with_checksums(pair: Kept, tmp_path: Path) -> None:
    pair.run(
        START
        + """
with AsyncCheckpointManager(use_tensorstore=False, enable_validation=True) as manager:
    manager.save(arrays_of(values_of(1), mesh), root / "model.safetensors", mesh)
""",
        tmp_path,
    )
    manager = AsyncCheckpointManager(use_tensorstore=False)
    tree, metadata = manager.load(tmp_path / "model.safetensors", None, validate=True)
    assert differences(tree["params"]["odd"], values_of(1)["params"]["odd"]) == []
    assert metadata["checksum"]


def test_gathering_casting_and_offloading(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        START
        + """
values = {"w": np.linspace(-2, 2, 64, dtype=np.float32).reshape(8, 8), "i": np.arange(8, dtype=np.int32)}
tree = {name: put(v, NamedSharding(mesh, P("a"))) for name, v in values.items()}
half = {"w": values["w"].astype(jnp.bfloat16), "i": values["i"]}
manager = AsyncCheckpointManager()
cases = {
    "gathered": ({"do_all_gather": True}, half),
    "gathered to the host": ({"do_all_gather": True, "cpu_offload": True}, half),
    "cast": ({"float_dtype": "bf16"}, half),
    "kept": ({"cpu_offload": True}, values),
    "by functions": ({"gather_fns": True}, values),
    "by a function": ({"gather_fns": {"i": lambda x: x * 2}}, {**values, "i": values["i"] * 2}),
}
wrong = []
for name, (how, expected) in cases.items():
    manager.save(tree, root / name, mesh, **how)
    loaded = shardkeep.load(root / name)
    wrong += [f"{name}: {text}" for text in differences({n: np.asarray(v) for n, v in loaded.items()}, expected)]
manager.save(tree, root / "no mesh", None, do_all_gather=True)
manager.save_pytree(tree, root / "pytree", mesh, prefix="m", dtype="bf16")
wrong += differences(manager.load_pytree(root / "pytree", mesh, prefix="m")[0], half)
wrong += differences(manager.load_pytree(root / "pytree", mesh, prefix="m", dtype="fp32")[0],
                     {"w": half["w"].astype(np.float32), "i": half["i"]})
say(wrong=wrong)
""",
        tmp_path,
    )
    assert [process["wrong"] for process in said] == [[], []]


def test_arrays_move_between_processes_exactly(pair: Kept, tmp_path: Path) -> None:
    """to_host, reshard, broadcast_tensor and their kin keep every bit, NaNs and negative zeros included."""
    said = pair.run(
        START
        + """
wrong = []

def check(name, array, expected, replicated=None):
    if not holds(array, expected):
        wrong.append(name)
    if replicated is not None and not (array.is_fully_replicated and len(array.sharding.device_set) == replicated):
        wrong.append(f"{name}: {array.sharding}")

for dtype in ("float32", "bfloat16", "float8_e5m2", "int32", "bool", "complex64", "int4"):
    values = pattern(dtype, (8, 12))
    array = put(values, NamedSharding(mesh, P("a", "b")))
    check(f"to_host {dtype}", to_host(array, None, mesh, False), values, 4)
    check(f"to_host offloaded {dtype}", to_host(array, None, mesh, True), values, 1)
    check(f"reshard {dtype}", reshard(array, NamedSharding(mesh, P("a", "b"))), values)
    mine = values if index == 0 else np.zeros_like(values)
    for limit in (1, 30, 1 << 20):
        check(f"broadcast {dtype} {limit}", broadcast_tensor(mine, limit), values, 4)
    target = NamedSharding(mesh_over((1, 4)), P(None, "b"))
    sent = broadcast_tensor(jnp.asarray(mine), 30, target)
    check(f"broadcast to a sharding {dtype}", sent, values)
    if not sent.sharding.is_equivalent_to(target, 2):
        wrong.append(f"broadcast {dtype}: {sent.sharding}")
for shape in ((), (0, 3), (1,)):
    values = pattern("float32", shape)
    check(f"broadcast {shape}", broadcast_tensor(values if index == 0 else np.zeros_like(values), 2), values, 4)
values = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
array = put(values, NamedSharding(mesh, P("a")))
check("to_host cast", to_host(array, "bf16", mesh, False), values.astype(jnp.bfloat16), 4)
gathered = apply_gather_functions({"a": array, "n": 3}, True, False, False)
check("gathered", gathered["a"], values)
resharded = reshard(array, NamedSharding(mesh_over((4, 1)), P(None, "b")))
check("reshard to another mesh", resharded, values)
check("reshard to replicated", reshard(array, NamedSharding(mesh, P())), values, 4)
made = make_itsharded({"local": jnp.asarray(values), "spread": array, "numpy": values, "text": "x"}, mesh)
check("make_itsharded", made["local"], values, 4)
if made["spread"] is not array or made["numpy"] is not values or made["text"] != "x":
    wrong.append("make_itsharded changed what it must not")
tree = {"spread": array, "local": jnp.asarray(values), "numpy": values, "none": array, "function": array}
shardings = {
    "spread": P(None, "b"), "local": NamedSharding(mesh, P("b")), "numpy": P("a"), "none": None,
    "function": lambda x: NamedSharding(mesh, P("b")),
}
for name, moved in apply_sharding_tree(tree, shardings, mesh).items():
    check(f"apply_sharding_tree {name}", moved, values, 4 if name == "none" else None)
alone = apply_sharding_tree({"x": jnp.asarray(values)}, {"x": None})["x"]
check("apply_sharding_tree without a mesh", alone, values, 1)
tree_serialize_leaves(root / "x", {"w": array, "deep": {"v": array}})
found = create_sharding_tree_from_index(root / "x", mesh, default_sharding=P("b"))
loaded = tree_deserialize_leaves(root / "x", mesh, shardings=found)
check("loaded as the index says", loaded["deep"]["v"], values)
if loaded["w"].sharding.spec != P("b") or not validate_sharding_tree(found, loaded):
    wrong.append(f"index: {loaded['w'].sharding}")
say(wrong=wrong)
""",
        tmp_path,
    )
    assert [process["wrong"] for process in said] == [[], []]


def test_managers_of_jax_wait_for_saves(pair: Kept, tmp_path: Path) -> None:
    """Again and again, on every process, also after a failure, and without a barrier that one of them misses."""
    said = pair.run(
        START
        + """
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
manager = GlobalAsyncCheckpointManager(timeout_secs=4)
tree = {"w": spread(pattern("float32", (512, 512)), P("a"))}
calls, late, seconds = [], [], []
for number in range(6):
    for name in ("a", "b") if number % 2 else ("a",):
        tree_serialize_leaves(root / f"{name}{number}", tree, manager, commit_callback=lambda: calls.append(0))
    started = time.monotonic()
    manager.wait_until_finished()
    seconds.append(time.monotonic() - started)
    late += [name for name in ("a", "b") if number % 2 and not shardkeep.exists(root / f"{name}{number}")]
if index == 1:
    fault(root, "fail", 1, "create")
tree_serialize_leaves(root / "bad", tree, manager, commit_callback=lambda: calls.append(1))
failed = caught(manager.wait_until_finished)
no_fault()
tree_serialize_leaves(root / "good", tree, manager, commit_callback=lambda: calls.append(2))
again = caught(manager.wait_until_finished)
say(calls=calls, late=late, seconds=seconds, failed=failed, again=again, good=shardkeep.exists(root / "good"))
""",
        tmp_path,
        timeout=40,
    )
    for number, process in enumerate(said):
        assert process["late"] == []
        assert max(process["seconds"]) < 2
        assert process["failed"]["kind"] == "StorageError"
        assert ("process 1" in process["failed"]["message"]) == (number == 0)
        assert process["again"]["kind"] is None
        assert process["good"]
    assert said[0]["calls"] == [0] * 9 + [2]
    assert said[1]["calls"] == []


BAD = "{'x': print} if index == 1 else None"
WRONG: dict[str, tuple[str, str]] = {
    "metadata": (f"manager.save(tree, root / 'x', mesh, metadata={BAD})", "MetadataError"),
    "extras": (f"manager.save_pytree(tree, root / 'x', mesh, prefix='m', extras={BAD})", "MetadataError"),
    "prefix": ("manager.save_pytree(tree, root / 'x', mesh, prefix='' if index == 1 else 'm')", "PrefixError"),
    "async": (f"manager.save_async(tree, root / 'x', mesh, metadata={BAD}).wait()", "MetadataError"),
    "format": ("shardkeep.save(root / 'x', tree, format='bogus' if index == 1 else 'safetensors')", "ProcessError"),
    "dtype": ("shardkeep.load(root / 'old', dtype='bogus' if index == 1 else None)", "ProcessError"),
    "layout": ("manager.load(root / 'old', mesh if index == 1 else None)", "ShardingError"),
}


def test_wrong_arguments_of_one_process_are_told_to_all_at_once(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        f"WRONG = {WRONG!r}\n"
        + START
        + """
manager = AsyncCheckpointManager()
tree = {"w": spread(np.ones((8, 8), np.float32), P("a"))}
shardkeep.save(root / "old", tree)
found = {}
with environment(SHARDKEEP_PROCESS_DEADLINE="4"):
    for name, (how, *_) in WRONG.items():
        found[name] = caught(eval, how, globals())
        meet(root, name, index, size)
shardkeep.save(root / "y", tree)
say(found=found)
""",
        tmp_path,
        timeout=60,
    )
    problems = [
        f"{name}, process {number}: {error}"
        for number, process in enumerate(said)
        for name, error in process["found"].items()
        if error["seconds"] > 2
        or (number == 0 and (error["kind"] != WRONG[name][1] or "process 1" not in error["message"]))
    ]
    assert not problems, "\n".join(problems)


def test_a_damaged_file_is_found_by_all_when_validating(pair: Kept, tmp_path: Path) -> None:
    """One process finds it; none waits for it in a collective."""
    said = pair.run(
        START
        + """
values = {str(i): np.full((8, 256), i, np.float32) for i in range(4)}
tree = {name: put(v, NamedSharding(mesh_over((4, 1)), P("a"))) for name, v in values.items()}
manager = AsyncCheckpointManager(enable_validation=True)
manager.save(tree, root / "x", mesh)
if index == 0:
    for name in ("1", "2"):
        with open(root / "x" / name / "1.0", "r+b") as file:
            file.write(b"damaged")
meet(root, "damaged", index, size)
error = caught(manager.load, root / "x", mesh_over((4, 1)), partition_rules=[(".*", P("a"))])
say(error=error)
""",
        tmp_path,
        timeout=8,
    )
    for number, process in enumerate(said):
        assert process["error"]["kind"] == "IntegrityError"
        assert ("process 1" in process["error"]["message"]) == (number == 0)


def test_values_come_back_in_one_process_as_they_were(pair: Kept, tmp_path: Path) -> None:
    pair.run(START + "tree_serialize_leaves(root / 'x', arrays_of(values_of(2), mesh), prefix='p')", tmp_path)
    loaded = shardkeep.load(tmp_path / "x", prefix="p")
    assert differences(loaded, values_of(2)) == []
    assert np.asarray(loaded["opt"][0].count) == 2


CHECKPOINTER = """
import datetime, time
from shardkeep.serialization import AsyncCheckpointManager, Checkpointer, CheckpointInterval
from shardkeep.serialization.checkpointer import find_latest_checkpoint, read_checkpoint_metadata
mesh = mesh_over((2, 2))
minute = datetime.timedelta(minutes=1)
now = [datetime.datetime(2026, 1, 1)]
def state(step):
    return {"w": spread(np.arange(8, dtype=np.float32) + step, P("a")), "step": step}
"""


def test_process_0_decides_when_a_checkpointer_saves(pair: Kept, tmp_path: Path) -> None:
    """Its clock alone makes a temporary checkpoint due; the clock of the other process always says so.

    A step without a save is no message between the processes, so a temporary one is saved at a later call.
    """
    said = pair.run(
        CHECKPOINTER
        + """
clock = lambda: now[0] if index == 0 else now[0] + len(calls) * 60 * minute
calls = []
checkpointer = Checkpointer(root / "base", minute, [CheckpointInterval(1000)], dt_now_injection=clock)
saved, due = [], []
def on_step(step):
    calls.append(step)
    before = checkpointer._last_save_step
    checkpointer.on_step(mesh, state(step), step=step)
    if checkpointer._last_save_step != before:
        saved.append(step)
step = -1
for _ in range(2):
    for _ in range(20):  # nothing is due
        on_step(step := step + 1)
    due.append(step + 1)
    now[0] += minute
    until = len(saved) + 1
    while len(saved) < until and step < 100_000:
        on_step(step := step + 1)
        time.sleep(0.001 * (index + 1))
checkpointer.wait_until_finished()
left = sorted(p.name for p in (root / "base").glob("run-*"))
tree, metadata = checkpointer.load_checkpoint(mesh, partition_rules=[(".*", P("b"))])
assert holds(tree["w"], np.arange(8, dtype=np.float32) + saved[-1]), metadata
on_step(200_000)
checkpointer.wait_until_finished()
del checkpointer
gc.collect()
ours = ("shardkeep-agreement", "shardkeep-announcer")
say(saved=saved, due=due, left=left, last=[p.name for p in (root / "base").glob("run-*")],
    threads=[t.name for t in threading.enumerate() if t.name in ours])
""",
        tmp_path,
    )
    assert said[0]["saved"] == said[1]["saved"]
    for due, saved in zip(said[0]["due"], said[0]["saved"][:2], strict=True):
        assert saved > due, "agreed on at a call, fulfilled at a later one"
    assert said[0]["left"] == [f"run-{said[0]['saved'][1]}"], "the temporary one before it is removed"
    assert said[0]["last"] == ["run-200000"], "a permanent one"
    assert [one["threads"] for one in said] == [[], []]


def test_a_checkpoint_is_described_once_the_callbacks_of_all_processes_are_through(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        CHECKPOINTER
        + """
checkpointer = Checkpointer(root / "base", None, [CheckpointInterval(1)])
described = root / "base" / "run-1" / "metadata.json"
seen = []
def save(destination, at, metadata):
    checkpointer.save_pytree(state(metadata["step"]), "model", destination=destination)
    if index == 1:
        time.sleep(0.5)
    seen.append(described.exists())
checkpointer.on_step(mesh, step=1, true_callbacks=[save])
seen.append(described.exists())
def refuse(*_):
    if index == 1:
        raise RuntimeError("no room here")
told = caught(checkpointer.on_step, mesh, step=2, true_callbacks=[save, refuse])
told_step = caught(checkpointer.on_step, mesh, state(3), step=3 + index)
path = checkpointer.save_pytree(state(5), "model", step=5)
seen.append((root / "base" / "run-5" / "metadata.json").exists())
latest = find_latest_checkpoint(root / "base")
say(seen=seen, told=told, told_step=told_step, latest=latest, path=path)
""",
        tmp_path,
    )
    for process in said:
        assert process["seen"] == [False, True, True, True], process["seen"]
        assert "no room here" in process["told"]["message"]
        assert "processes passed different arguments" in process["told_step"]["message"]
        assert process["latest"] == process["path"] == str(tmp_path / "base/run-5")
    assert not (tmp_path / "base/run-2/metadata.json").exists()
    assert not (tmp_path / "base/run-3").exists()
