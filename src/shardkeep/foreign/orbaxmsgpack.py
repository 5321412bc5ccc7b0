"""The file `checkpoint` that Orbax wrote before version 0.6: the structure of a tree, and some or all of its values.

It is one MessagePack value, as in Flax's files. A leaf is a value or an array in the file, or the name of an array
beside it. `flax.training.checkpoints` and `save_args_from_target` put all arrays that are not sharded into the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from shardkeep.errors import IntegrityError
from shardkeep.foreign.flax import identity_of
from shardkeep.foreign.msgpack import scan_whole
from shardkeep.foreign.orbaxtree import OrbaxLeaf
from shardkeep.foreign.windows import FileWindow
from shardkeep.model.tree import Path, flatten
from shardkeep.stores.base import Store

AGGREGATE = "checkpoint"  # the name of the file
_BESIDE = ("PLACEHOLDER://", "AGGREGATED://")  # begin the name of an array beside the file
_CONTAINERS = {0xDC, 0xDD, 0xDE, 0xDF, *range(0x80, 0xA0)}  # first bytes of dicts and lists
_START = 24  # bytes that tell whether it is one


@dataclass(frozen=True)
class Aggregate:
    """What the file holds.

    Attributes:
        name: Its name in the checkpoint.
        size: Its size.
        tree: The tree, with an `OrbaxLeaf` for each array beside the file, and a `FoundArray` for each in it.
        values: What is in the file itself, by path.
        identity: A digest that tells it from others.
    """

    name: str
    size: int
    tree: object
    values: Mapping[Path, object]
    identity: str


def is_aggregate(store: Store, name: str) -> bool:
    """Whether there is such a file of this name. Other programs have files and directories that are called so."""
    if not store.size(name):
        return False
    with store.open(name) as file:
        start = FileWindow(file).read(0, min(_START, file.size))
    return start[0] in _CONTAINERS or any(prefix.encode() in start for prefix in _BESIDE)


def read_aggregate(store: Store, name: str) -> Aggregate | None:
    """What is in the file of this name; None if there is no such file. `IntegrityError` if it is damaged."""
    size = store.size(name)
    if size is None:
        return None
    where = store.locate(name)
    try:
        with store.open(name) as file:
            tree = _with_names(scan_whole(FileWindow(file)))
        leaves = flatten(tree)[1]
    except (ValueError, EOFError, MemoryError) as error:
        raise IntegrityError(f"{where} is damaged: {error}", file=where) from error
    values = {leaf.path: leaf.value for leaf in leaves if not isinstance(leaf.value, OrbaxLeaf)}
    return Aggregate(name, size, tree, values, identity_of(leaves, size))


def _with_names(value: object) -> object:
    """The value, with an `OrbaxLeaf` for each string in it that names an array."""
    if isinstance(value, dict):
        inside = cast("dict[str, object]", value)
        return {key: _with_names(each) for key, each in inside.items()}
    if isinstance(value, list):
        return [_with_names(each) for each in cast("list[object]", value)]
    if not isinstance(value, str) or not value.startswith(_BESIDE):
        return value
    return OrbaxLeaf.found(value.partition("://")[2])
