"""Each process writes what it holds, once and evenly, and reads what it needs; nothing is sent around."""

from pathlib import Path

import pytest

import shardkeep
from multiprocess.cluster import Kept
from support import FORMATS

MB = 1 << 20

STATES = {
    # Everything is on every device.
    "replicated": "{str(i): spread(pattern('float32', (1 << (10 + i % 7), 61 + i)), P()) for i in range(40)}",
    # Parameters are cut over all devices, the rest is on every device.
    "half": "{str(i): spread(pattern('float32', (1 << 12, 64 + i)), P('a') if i % 2 else P()) for i in range(16)}",
    # Cut along one axis, which lies inside of each process: the processes hold the same.
    "inside": "{str(i): spread(pattern('float32', (1 << 12, 64 + i)), P('b'), (2, 2)) for i in range(16)}",
    # One array, much larger than all others.
    "one": "{'large': spread(pattern('float32', (1 << 13, 512)), P()), 'small': spread(np.ones(99, np.float32), P())}",
    # Each process has its own copy, equal to the others'.
    "local": "{str(i): jnp.asarray(pattern('float32', (1 << 12, 64 + i))) for i in range(8)}",
    # The last process has nothing of its own, the first has much.
    "lopsided": "{**{str(i): spread(pattern('float32', (1 << 12, 64)), P()) for i in range(16)}, **{f'own {i}': "
    "put(pattern('float32', (1 << 12, 64)), NamedSharding(Mesh(np.array(jax.devices()[:-1]), ('a',)), P())) "
    "for i in range(4)}}",
}


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_bytes_are_written_once_and_evenly(pair: Kept, tmp_path: Path, kind: str) -> None:
    """What a process writes, as the kernel counts it, is its share; the shares differ by less than 15 %."""
    said = pair.run(
        f"STATES, KIND = {STATES!r}, {FORMATS[kind][1]!r}\n"
        + """
traffic = Traffic()
found = {}
for name, how in STATES.items():
    tree = jax.block_until_ready(eval(how))
    traffic.reset()
    report = shardkeep.save(root / name, tree, **KIND)
    found[name] = {"share": report.share, "total": report.nbytes, **traffic.since()}
    found[name]["unique"] = sum(array.nbytes for array in tree.values())
say(found=found)
""",
        tmp_path,
    )
    for name in STATES:
        shares = [process["found"][name]["share"] for process in said]
        total, unique = said[0]["found"][name]["total"], said[0]["found"][name]["unique"]
        assert sum(shares) == total
        assert unique <= total < unique * 1.01 + 200_000, f"{name}: {unique:,} bytes became {total:,}"
        for process in said:
            facts = process["found"][name]
            assert facts["share"] <= facts["written"] < facts["share"] + 300_000, f"{name}: {facts}"
            assert facts["compiled"] == 0, "a save let JAX compute something"
        mean = total / len(shares)
        assert max(shares) < 1.15 * mean, f"{name}: {shares}"
        assert min(shares) > 0.85 * mean, f"{name}: {shares}"
        assert shardkeep.verify(tmp_path / name).ok


def test_nothing_is_gathered(pair: Kept, tmp_path: Path) -> None:
    """Saving and loading 128 MiB that no process sees whole: memory stays far from that, and JAX computes nothing."""
    said = pair.run(
        """
from shardkeep.serialization import AsyncCheckpointManager, tree_serialize_leaves
values = {str(i): np.full((1 << 11, 1 << 12), i, np.float32) for i in range(4)}
mesh = mesh_over((4, 1))
tree = {name: put(v, NamedSharding(mesh, P("a"))) for name, v in values.items()}
tree = jax.block_until_ready(jax.jit(lambda tree: tree)(tree))  # what may alias host memory would be copied
del values
gc.collect()
manager = AsyncCheckpointManager()
packed = AsyncCheckpointManager(use_tensorstore=False)
template = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in tree.items()}
calls = {
    "save": lambda: shardkeep.save(root / "a", tree),
    "save_async": lambda: shardkeep.save_async(root / "b", tree, format="zarr").wait(),
    "manager.save": lambda: manager.save(tree, root / "c", mesh),
    "manager.save_pytree": lambda: manager.save_pytree(tree, root / "d", mesh, prefix="model"),
    "manager.save_pytree packed": lambda: packed.save_pytree(tree, root / "e", mesh, prefix="model"),
    "tree_serialize_leaves": lambda: tree_serialize_leaves(root / "f", tree),
    "load": lambda: shardkeep.load(root / "a", template=template, mmap=False),
    "manager.load": lambda: manager.load(root / "c", mesh, partition_rules=[(".*", P("a"))]),
}
traffic = Traffic()
jax.jit(lambda x: x + index)(jnp.ones(3)).block_until_ready()
assert traffic.since()["compiled"] > 0, "what JAX compiles is not counted"
found = {}
for name, call in calls.items():
    traffic.reset()
    result = call()
    found[name] = traffic.since()
    del result
    gc.collect()
say(found=found)
""",
        tmp_path,
    )
    for process in said:
        for name, facts in process["found"].items():
            own = 64 * MB if "load" in name else 0
            assert own - 20 * MB < facts["memory"] < own + 56 * MB, f"{name}: {facts}"
            assert facts["compiled"] == 0, f"{name}: {facts}"


def test_a_process_reads_no_more_than_its_devices_need(pair: Kept, tmp_path: Path) -> None:
    values = "pattern('float32', (1 << 12, 1 << 12))"  # 64 MiB, saved as four shards of 16 MiB
    said = pair.run(
        f"values = {values}\n"
        + """
shardkeep.save(root / "rows", {"w": spread(values, P("a")), "other": spread(values[:2048], P())})
shardkeep.save(root / "columns", {"w": spread(values, P(None, "a"))})
shardkeep.save(root / "chunks", {"w": spread(values, P("a"))}, format="zarr")
shardkeep.save(root / "packed", {"w": spread(values, P("a"))}, format="zarr", compression="zstd")
traffic = Traffic()
found, wrong = {}, []

def count(name, path, spec, shape=(4, 1), **more):
    target = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=NamedSharding(mesh_over(shape), spec))}
    traffic.reset()
    loaded = shardkeep.load(root / path, template=target, mmap=False, **more)
    found[name] = traffic.since()["read"]
    if not holds(loaded["w"], values):
        wrong.append(name)

count("rows as rows", "rows", P("a"))
count("rows as halves", "rows", P("a"), (2, 2))
count("rows everywhere", "rows", P())
count("rows as columns", "rows", P(None, "a"))
count("columns as columns", "columns", P(None, "a"))
count("columns as rows", "columns", P("a"))
count("chunks as rows", "chunks", P("a"))
count("compressed as rows", "packed", P("a"))
traffic.reset()
rules = [("other", P("a"))]
part = shardkeep.load(root / "rows", include="other", mesh=mesh_over(), partition_rules=rules, mmap=False)
found["another leaf"] = traffic.since()["read"]
if not holds(part["other"], values[:2048]):
    wrong.append("another leaf")
count("rows as rows, shared", "rows", P("a"), broadcast=True)
count("rows everywhere, shared", "rows", P(), broadcast=True)
count("columns everywhere, shared", "columns", P(), broadcast=True)
count("rows as halves of each process, shared", "rows", P("b"), (2, 2), broadcast=True)
say(found=found, wrong=wrong)
""",
        tmp_path,
    )
    slack = 200_000  # manifest and the like
    for number, process in enumerate(said):
        assert process["wrong"] == []
        found = process["found"]
        for name in ("rows as rows", "rows as halves", "columns as columns", "chunks as rows", "compressed as rows"):
            assert 31 * MB < found[name] <= 32 * MB + slack, f"process {number}, {name}: {found[name] / MB:.1f} MiB"
        assert 64 * MB < found["rows everywhere"] <= 64 * MB + slack
        # Digests cover blocks of 4 MiB: where a process needs half of each row, or of each piece, whole blocks come.
        assert found["rows as columns"] <= 64 * MB + slack
        assert found["columns as rows"] <= 32 * MB + 4 * 4 * MB + slack
        assert 15 * MB < found["another leaf"] <= 16 * MB + slack
        for name in [name for name in found if name.endswith("shared")]:  # half of it, and the rest from the other
            assert 31 * MB < found[name] <= 32 * MB + slack, f"process {number}, {name}: {found[name] / MB:.1f} MiB"


def test_a_broadcast_gives_everyone_every_kind_of_leaf(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
wrong = []
for kind in ({}, {"format": "zarr"}):
    values = values_of(5)
    shardkeep.save(root / str(len(kind)), arrays_of(values, mesh_over((2, 2))), **kind)
    for turn, shape in enumerate([(4, 1), (2, 2)]):
        template = abstract_of(values, mesh_over(shape), turn)
        wrong += differences(shardkeep.load(root / str(len(kind)), template=template, broadcast=True), values)
    wrong += differences(shardkeep.load(root / str(len(kind)), broadcast=True), values)
say(wrong=wrong)
""",
        tmp_path,
    )
    assert [process["wrong"] for process in said] == [[], []]


def test_the_programs_transfer_guard_does_not_concern_loads(pair: Kept, tmp_path: Path) -> None:
    """Nor what the processes send one another: with broadcast, and when an array is broadcast or gathered."""
    said = pair.run(
        """
from contextlib import nullcontext
from shardkeep.serialization import utils
values = values_of(5)
shardkeep.save(root / "x", arrays_of(values, mesh_over((2, 2))))
template = abstract_of(values, mesh_over((4, 1)), 1)
tensor = jax.device_put(pattern("float32", (8, 8)))
wide = spread(pattern("float32", (8, 8)), P("a"))
everywhere = NamedSharding(mesh_over(), P())
wrong = []
for guard in ("disallow", "disallow_explicit"):
    for config in (False, True):
        jax.config.update("jax_transfer_guard", guard if config else "allow")
        try:
            with nullcontext() if config else jax.transfer_guard(guard):
                once = shardkeep.load(root / "x", template=template, broadcast=True)
                each = shardkeep.load(root / "x", template=template)
                sent = utils.broadcast_tensor(tensor, 64)
                moved = utils.reshard(wide, everywhere)
                gathered = utils.to_host(wide, None, None, True)
        finally:
            jax.config.update("jax_transfer_guard", "allow")
        wrong += differences(once, values) + differences(each, values)
        wrong += differences([sent, moved, gathered], [pattern("float32", (8, 8))] * 3)
say(wrong=wrong)
""",
        tmp_path,
    )
    assert [process["wrong"] for process in said] == [[], []]


def test_callbacks_come_once_on_the_first_process(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
from shardkeep.serialization import AsyncCheckpointManager, tree_serialize_leaves
calls = []
tree = {"w": spread(np.ones((8, 8), np.float32), P("a"))}
seen = lambda name: lambda *path: calls.append([name, shardkeep.exists(root / name), *map(str, path)])
with AsyncCheckpointManager() as manager:
    manager.save(tree, root / "a", mesh_over(), callback=seen("a"))
    manager.save_async(tree, root / "b", mesh_over(), callback=seen("b")).wait()
    tree_serialize_leaves(root / "c", tree, commit_callback=seen("c"))
    tree_serialize_leaves(root / "d", tree, manager, commit_callback=seen("d"))
say(calls=calls)
""",
        tmp_path,
    )
    assert said[0]["calls"] == [
        ["a", True, str(tmp_path / "a")],
        ["b", True, str(tmp_path / "b")],
        ["c", True],
        ["d", True],
    ]
    assert said[1]["calls"] == []
