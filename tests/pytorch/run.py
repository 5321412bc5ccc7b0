"""Real torch and shardkeep in one process: each file that torch writes loads bit for bit. Run it by `make test-torch`.

Every function named `check_…` is called with an empty directory. torch needs an environment of its own, so this is no
part of the other tests; those read the files that `make_fixtures.py` wrote. Nothing is downloaded.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_ENABLE_X64"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import init_device_mesh

import shardkeep
from checks import run_checks
from pytorch import make_fixtures
from shardkeep.cli.main import main as command
from shardkeep.model.tree import flatten

P = PartitionSpec
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def bits_of(tree: Any) -> dict[str, list[Any]]:
    """The arrays of a loaded tree as `make_fixtures` describes tensors."""
    leaves = {leaf.key: leaf.value for leaf in flatten(tree)[1]}
    arrays = {key: np.asarray(leaf) for key, leaf in leaves.items() if isinstance(leaf, jax.Array | np.ndarray)}
    return {key: [array.dtype.name, list(array.shape), array.tobytes().hex()] for key, array in arrays.items()}


def same(path: Path, tree: Any, **options: Any) -> Any:
    """What torch saved is what `load` gives, and `verify` finds nothing."""
    found = shardkeep.load(path, **options)
    expected = make_fixtures.tensors_in(tree)
    loaded = bits_of(found)
    assert loaded.keys() == expected.keys(), loaded.keys() ^ expected.keys()
    for key, described in expected.items():
        assert loaded[key] == described, key
    assert shardkeep.verify(path).ok
    assert shardkeep.exists(path)
    return found


def check_what_the_fixtures_hold_is_what_this_torch_writes(path: Path) -> None:
    made = {**make_fixtures.write_files(path), **make_fixtures.write_parts(path)}
    for name, expected in made.items():
        assert bits_of(shardkeep.load(path / name)) == expected, name
        assert shardkeep.verify(path / name).ok, name


def check_every_optimizer_keeps_its_state(path: Path) -> None:
    made: dict[str, Any] = {
        "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        "adam": (torch.optim.Adam, {"amsgrad": True}),
        "adamw": (torch.optim.AdamW, {}),
        "adafactor": (torch.optim.Adafactor, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        "nadam": (torch.optim.NAdam, {}),
        "lbfgs": (torch.optim.LBFGS, {"max_iter": 3}),
    }
    for name, (kind, options) in made.items():
        module = torch.nn.Linear(5, 3)
        optimizer = kind(module.parameters(), **options)

        def closure(module: torch.nn.Module = module, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(torch.ones(2, 5)).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
        torch.save(state, path / f"{name}.pt")
        found = same(path / f"{name}.pt", state)
        assert found["step"] == 2, name
        groups = state["optimizer"]["param_groups"]
        assert found["optimizer"]["param_groups"] == groups, name


def check_tensors_of_any_layout(path: Path) -> None:
    """Random views of random storages, shared and not."""
    generator = torch.Generator().manual_seed(1)

    def number(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    names = (*make_fixtures.FLOATS, *make_fixtures.INTEGERS[:5], *make_fixtures.EIGHT_BITS)
    dtypes = [getattr(torch, name) for name in names]
    for turn in range(40):
        storages = [torch.randint(256, (2048,), dtype=torch.uint8, generator=generator) for _ in range(3)]
        typed = [storage.view(dtypes[number(len(dtypes))]) for storage in storages]
        tree: dict[str, Any] = {}
        for index in range(25):
            base = typed[number(3)]
            shape = [number(5) for _ in range(number(4))]
            strides = [number(9) for _ in shape]
            reach = sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
            tree[f"t{index}"] = base.as_strided(shape, strides, number(max(len(base) - reach - 1, 1)))
        torch.save(tree, path / f"{turn}.pt", pickle_protocol=2 + turn % 4)
        same(path / f"{turn}.pt", tree, mmap=bool(turn % 2))


def check_a_large_file_is_loaded_in_shards(path: Path) -> None:
    tree = {f"layers.{i}.w": torch.randn(1024, 2048) for i in range(8)} | {"t": torch.randn(2048, 1000).t()}
    torch.save(tree, path / "large.pt")
    for spec in (P("a", "b"), P("b"), P(None, "a"), P()):
        found = shardkeep.load(path / "large.pt", shardings=NamedSharding(MESH, spec))
        for i in range(8):
            np.testing.assert_array_equal(np.asarray(found["layers"][str(i)]["w"]), tree[f"layers.{i}.w"].numpy())
        np.testing.assert_array_equal(np.asarray(found["t"]), tree["t"].numpy())
    assert command(["convert", str(path / "large.pt"), str(path / "ours")]) == 0
    assert command(["diff", str(path / "large.pt"), str(path / "ours")]) == 0
    assert shardkeep.verify(path / "ours").unchecked == 0


def check_a_changed_byte_is_found(path: Path) -> None:
    tree = {f"w{i}": torch.randn(100) for i in range(5)}
    torch.save(tree, path / "x.pt")
    document = (path / "x.pt").read_bytes()
    for name, tensor in tree.items():
        at = document.index(tensor.numpy().tobytes())
        changed = bytearray(document)
        changed[at + 17] ^= 0x40
        (path / "y.pt").write_bytes(changed)
        (problem,) = shardkeep.verify(path / "y.pt").problems
        assert problem.leaf == name


def check_distributed_checkpoints_of_four_processes(path: Path) -> None:
    multiprocessing.spawn(make_fixtures._save_distributed, args=(4, str(path)), nprocs=4)
    assert bits_of(shardkeep.load(path / "dcp")) == json.loads((path / "dcp.json").read_text())
    assert shardkeep.verify(path / "dcp").ok


def _train_sharded(rank: int, world: int, into: str) -> None:
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29573", RANK=str(rank), WORLD_SIZE=str(world))
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(module, optimizer)
    state = {"model": weights, "optim": states, "epoch": 1}
    found = make_fixtures.tensors_in(state)
    os.chdir(into)
    dcp.save(state, checkpoint_id="dcp")
    if rank == 0:
        Path("expected.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def check_a_sharded_model_and_its_optimizer(path: Path) -> None:
    """FSDP on three processes, which share 7, 5 and 3 rows unevenly."""
    multiprocessing.spawn(_train_sharded, args=(3, str(path)), nprocs=3)
    found = bits_of(shardkeep.load(path / "dcp"))
    expected = json.loads((path / "expected.json").read_text())
    assert {key.replace(".", "/"): value for key, value in found.items()} == {
        key.replace(".", "/"): value for key, value in expected.items()
    }
    sharded = shardkeep.load(path / "dcp", include="^model/0/weight$", shardings=NamedSharding(MESH, P()))
    assert bits_of(sharded) == {"model/0/weight": expected["model/0/weight"]}


def check_one_process_saves_a_distributed_checkpoint(path: Path) -> None:
    state = {"w": torch.randn(300, 200), "nested": {"v": torch.arange(5)}, "step": 3, "names": ["a", "b"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(path / "dcp"))
    found = same(path / "dcp", state)
    assert (found["step"], found["names"]) == (3, ["a", "b"])


def main() -> int:
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}")
    return run_checks(globals())


if __name__ == "__main__":
    sys.exit(main())
