"""The libraries that are measured, all with the same four calls.

`save` returns when the checkpoint is durable. `start` begins one in the background and gives what waits for it; it is
None where a library has no such thing. `load` gives the arrays where the template wants them.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from trees import Tree

Wait = Callable[[], Any]


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Shardkeep:
    """Digests are written, and checked by every load unless it says otherwise."""

    format: Any = "safetensors"
    checks = True

    def __init__(self) -> None:
        import shardkeep

        self._library = shardkeep

    def save(self, path: Path, tree: Tree) -> None:
        self._library.save(path, tree, format=self.format)

    def start(self, path: Path, tree: Tree) -> Wait | None:
        return self._library.save_async(path, tree, format=self.format).wait

    def load(self, path: Path, template: Tree, verify: bool = True) -> Tree:
        return self._library.load(path, template=template, verify=verify)

    def delete(self, path: Path) -> None:
        self._library.delete(path)


class ShardkeepTensorStore(Shardkeep):
    format = "tensorstore"


class Orbax:
    checks = False

    def __init__(self) -> None:
        logging.disable(logging.WARNING)
        import orbax.checkpoint as ocp

        self._library = ocp
        self._checkpointer: Any = ocp.StandardCheckpointer()

    def save(self, path: Path, tree: Tree) -> None:
        self._checkpointer.save(path, tree)
        self._checkpointer.wait_until_finished()

    def start(self, path: Path, tree: Tree) -> Wait | None:
        self._checkpointer.save(path, tree)
        return self._checkpointer.wait_until_finished

    def load(self, path: Path, template: Tree, verify: bool = True) -> Tree:
        everything = self._checkpointer.metadata(path)
        named = set(getattr(everything, "item_metadata", everything) or ())
        if named <= set(template):
            return self._checkpointer.restore(path, template)
        some: Any = self._library.PyTreeCheckpointer()  # the standard one loads all or nothing
        arguments: Any = jax.tree.map(
            lambda each: self._library.ArrayRestoreArgs(sharding=each.sharding, dtype=each.dtype), template
        )
        return some.restore(
            path, args=self._library.args.PyTreeRestore(template, restore_args=arguments, partial_restore=True)
        )

    def delete(self, path: Path) -> None:
        import shutil

        shutil.rmtree(path)


class SafeTensors:
    """One file. It does not sync: the sync is added, so that it does what the others do."""

    checks = False

    def save(self, path: Path, tree: Tree) -> None:
        from safetensors.flax import save_file

        path.mkdir()
        save_file(dict(tree), path / "model.safetensors")  # it replaces the arrays of the dict it is given
        sync(path / "model.safetensors")
        sync(path)

    def start(self, path: Path, tree: Tree) -> Wait | None:
        return None

    def load(self, path: Path, template: Tree, verify: bool = True) -> Tree:
        from safetensors import safe_open
        from safetensors.flax import load_file

        file = path / "model.safetensors"
        place = {name: each.sharding for name, each in template.items()}
        with safe_open(file, framework="flax") as opened:
            if len(opened.keys()) == len(template):
                return jax.device_put(load_file(file), place)
            return {name: jax.device_put(opened.get_tensor(name), place[name]) for name in template}


class EFormer:
    checks = False

    def __init__(self) -> None:
        logging.disable(logging.WARNING)
        from eformer.serialization import AsyncCheckpointManager

        self._manager: Any = AsyncCheckpointManager()

    def save(self, path: Path, tree: Tree) -> None:
        self._manager.save(tree, str(path), _mesh(tree))
        os.sync()  # it does not wait for the disk

    def start(self, path: Path, tree: Tree) -> Wait | None:
        return None

    def load(self, path: Path, template: Tree, verify: bool = True) -> Tree:
        rules = [(f"^{name}$".replace(".", "[./]"), each.sharding) for name, each in template.items()]
        specs = [(rule, getattr(sharding, "spec", jax.sharding.PartitionSpec())) for rule, sharding in rules]
        specs.append((".*", jax.sharding.PartitionSpec()))  # it loads all or nothing
        return self._manager.load(str(path), _mesh(template), partition_rules=specs)[0]


def _mesh(tree: Tree) -> Any:
    sharding = next(iter(tree.values())).sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.mesh
    return jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))


class TorchDCP:
    """Torch's distributed checkpoint on one process, with the same memory as the JAX arrays."""

    checks = False

    def __init__(self) -> None:
        logging.disable(logging.WARNING)
        import warnings

        warnings.simplefilter("ignore")
        import torch
        import torch.distributed.checkpoint as dcp

        self._torch, self._library = torch, dcp

    def _tensors(self, tree: Tree) -> dict[str, Any]:
        return {name: self._torch.from_dlpack(value) for name, value in tree.items()}

    def save(self, path: Path, tree: Tree) -> None:
        self._library.save(self._tensors(tree), checkpoint_id=path, no_dist=True)

    def start(self, path: Path, tree: Tree) -> Wait | None:
        return None

    def load(self, path: Path, template: Tree, verify: bool = True) -> Tree:
        types = {"bfloat16": self._torch.bfloat16, "float32": self._torch.float32}
        state = {name: self._torch.empty(each.shape, dtype=types[each.dtype.name]) for name, each in template.items()}
        self._library.load(state, checkpoint_id=path, no_dist=True)
        return {name: jax.dlpack.from_dlpack(value) for name, value in state.items()}


CONTENDERS: dict[str, Callable[[], Any]] = {
    "shardkeep": Shardkeep,
    "shardkeep, tensorstore": ShardkeepTensorStore,
    "Orbax": Orbax,
    "safetensors.flax": SafeTensors,
    "eFormer": EFormer,
    "torch DCP": TorchDCP,
}


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result
