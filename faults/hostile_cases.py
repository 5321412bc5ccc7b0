"""A checkpoint to be made hostile, and a store in memory that it is read from."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faults.mutate import NASTY
from shardkeep.foreign.registry import open_array
from shardkeep.loading.blocks import BlockReader
from shardkeep.model.arrays import Region
from shardkeep.model.leaves import ForeignArray
from shardkeep.model.manifest import Tree
from shardkeep.runtime.hostmemory import aligned_empty
from shardkeep.stores.local.store import LocalStore
from shardkeep.targets.directory import Directory
from shardkeep.targets.exchange import Exchange

Files = dict[str, bytes]
_BUDGET = 1 << 20  # bytes of arrays that are read of one checkpoint
_MOST_CLAIMS = 8  # larger arrays of which one element is read


class Escape(BaseException):
    """A name that leaves the checkpoint was asked for."""


@dataclass(frozen=True)
class Case:
    """A small checkpoint; `start` is the part of it that changes, `close` makes files of a changed one."""

    name: str
    files: Files
    start: bytes
    close: Callable[[bytes], Files]
    words: Sequence[bytes] = tuple(NASTY)
    is_json: bool = True
    target: str = ""  # what is loaded, inside; "" for the directory
    parse: Callable[[bytes], object] | None = None  # what reads just this part

    @property
    def is_foreign(self) -> bool:
        """Whether it is one of eFormer's, of which there are many."""
        return ": " in self.name

    def read(self, text: bytes) -> None:
        """All that a load does before data are read, in memory; chunks that are compressed are unpacked."""
        if self.parse is not None:
            self.parse(text)
            return
        store = MemoryStore({**self.files, **self.close(text)})
        target: Any = Exchange(store, "model") if self.target else Directory(store)  # type: ignore[arg-type]
        manifest = target.read()
        for tree in manifest.trees.values():
            if len(text) % 4 == 0:  # it takes longer than all the rest
                tree.skeleton.rebuild([0] * len(tree.leaves))
            reader = BlockReader(store, tree.files, tree.compression, verify=False)  # type: ignore[arg-type]
            for leaf in tree.arrays:
                for piece in leaf.pieces:
                    if piece.stored is not None and piece.length < 1 << 20:
                        reader.read(leaf, piece, (0, 0), aligned_empty(piece.length))


class MemoryStore:
    """The reading half of a Store over a dict. It refuses what a file system would, and tells who wants to leave."""

    def __init__(self, files: Files) -> None:
        self.url, self.control, self.saves = "memory", ".shardkeep", ".shardkeep/saves"
        self.mappable, self.traits = False, LocalStore.traits
        self._files = files

    def locate(self, name: str) -> str:
        return f"memory/{name}"

    def _checked(self, name: str) -> str:
        if b"\0" in os.fsencode(name):
            raise ValueError("embedded null byte")
        if name.startswith("/") or ".." in name.split("/"):
            raise Escape(name)
        return name

    def read(self, name: str) -> bytes:
        try:
            return self._files[self._checked(name)]
        except KeyError:
            raise FileNotFoundError(name) from None

    def size(self, name: str) -> int | None:
        found = self._files.get(self._checked(name))
        return None if found is None else len(found)

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        return {name: self.size(name) for name in names}

    identity = size

    def open(self, name: str) -> "_MemoryFile":
        return _MemoryFile(self.read(name))

    def children(self, name: str) -> list[str]:
        start = f"{self._checked(name)}/" if name else ""
        return sorted({n[len(start) :].split("/")[0] for n in self._files if n.startswith(start)})

    def find_directories_with(self, name: str) -> list[str]:
        return sorted(os.path.dirname(n) for n in self._files if os.path.basename(n) == name)


class _MemoryFile:
    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read_into(self, offset: int, buffer: Any) -> None:
        part = self._data[offset : offset + buffer.size]
        if len(part) < buffer.size:
            raise EOFError("it ends before that")
        buffer[:] = np.frombuffer(part, np.uint8)

    def close(self) -> None:
        pass

    def __enter__(self) -> "_MemoryFile":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def read_arrays(store: Any, tree: Tree) -> None:
    """Read and check the arrays that other programs wrote; of those that claim to be large, the last element."""
    sizes = {file.name: file.size for file in tree.files}
    left, claims = _BUDGET, _MOST_CLAIMS
    for leaf in tree.arrays:
        if not isinstance(leaf.origin, ForeignArray):
            continue
        shape = leaf.spec.shape
        region = Region.whole(shape)
        left -= leaf.nbytes
        if left < 0:
            left += leaf.nbytes
            claims -= 1
            region = Region(tuple(extent - 1 for extent in shape), (1,) * len(shape))
        if claims >= 0:
            array = open_array(store, leaf)
            array.find_damage(sizes)
            assert array.read(region).shape == region.shape
            if region.shape == shape:
                array.check()


def files_in(room: Path) -> Files:
    """The files of a checkpoint by name, without what saves leave for each other."""
    return {
        str(p.relative_to(room)): p.read_bytes() for p in room.rglob("*") if p.is_file() and ".shardkeep" not in str(p)
    }
