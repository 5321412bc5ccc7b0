"""Every bit of every dtype that JAX has comes through whatever processes send each other."""

from pathlib import Path

import pytest

from multiprocess.cluster import Kept

SCRIPT = """
from shardkeep.serialization.sharding_utils import apply_sharding_tree
from shardkeep.serialization.utils import apply_gather_functions, broadcast_tensor, reshard, to_host
from support import all_bits, every_dtype
mesh = mesh_over((2, 2))
turned = NamedSharding(Mesh(np.array(jax.devices()[::-1]).reshape(2, 2), ("a", "b")), P("b"))
everywhere = NamedSharding(turned.mesh, P())
wrong = []

def check(name, array, expected):
    if not holds(array, expected):
        wrong.append(name)

def moves(dtype):
    values = all_bits(dtype)
    array = put(values, NamedSharding(mesh, P("a", "b")))
    mine = values if index == 0 else np.zeros_like(values)
    check(f"{dtype}: to_host", to_host(array, None, mesh, False), values)
    check(f"{dtype}: to_host offloaded", to_host(array, None, mesh, True), values)
    check(f"{dtype}: gathered", apply_gather_functions({"x": array}, True, False, False)["x"], values)
    for name, target in {"turned": turned, "replicated": everywhere}.items():
        moved = reshard(array, target)
        check(f"{dtype}: {name}", moved, values)
        check(f"{dtype}: {name} from one device", reshard(jax.device_put(values), target), values)
        check(f"{dtype}: {name} by a tree", apply_sharding_tree({"x": array}, {"x": target})["x"], values)
        check(f"{dtype}: {name} by a function", apply_sharding_tree({"x": array}, {"x": lambda _: target})["x"], values)
        if moved.sharding != target:
            wrong.append(f"{dtype}: {moved.sharding} is not {target}")
        for limit in (40, 1 << 20):
            check(f"{dtype}: broadcast, {name}", broadcast_tensor(jax.device_put(mine), limit, target), values)
            check(f"{dtype}: NumPy broadcast, {name}", broadcast_tensor(mine, limit, target), values)
    check(f"{dtype}: broadcast", broadcast_tensor(jax.device_put(mine), 40), values)

def files():
    values = {dtype: all_bits(dtype) for dtype in every_dtype()}
    tree = {dtype: put(v, NamedSharding(mesh, P("a", "b"))) for dtype, v in values.items()}
    for path, arguments in {"few": {}, "zarr": {"format": "zarr"}, "x.safetensors": {}}.items():
        shardkeep.save(root / path, tree, **arguments)
        for how in ({}, {"shardings": turned}, {"shardings": everywhere, "broadcast": True},
                    {"shardings": {dtype: lambda _: turned for dtype in values}, "mesh": mesh}):
            loaded = shardkeep.load(root / path, **how)
            for dtype in values:
                check(f"{dtype}: {path} {list(how)}", loaded[dtype], values[dtype])
"""


def test_every_bit_survives_every_move(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(SCRIPT + "for dtype in every_dtype(): moves(dtype)\nsay(wrong=wrong)\n", tmp_path, timeout=250)
    assert [process["wrong"] for process in said] == [[], []]


def test_every_bit_survives_saves_and_loads(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(SCRIPT + "files()\nsay(wrong=wrong)\n", tmp_path, timeout=250)
    assert [process["wrong"] for process in said] == [[], []]


@pytest.mark.processes4
def test_every_bit_survives_among_four(four: Kept, tmp_path: Path) -> None:
    script = SCRIPT.replace("mesh_over((2, 2))", "mesh_over((2, 4))").replace(".reshape(2, 2)", ".reshape(4, 2)")
    said = four.run(
        script + "for dtype in every_dtype(): moves(dtype)\nfiles()\nsay(wrong=wrong)\n", tmp_path, timeout=280
    )
    assert [process["wrong"] for process in said] == [[], [], [], []]
