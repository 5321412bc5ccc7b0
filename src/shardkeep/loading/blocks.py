"""The stored bytes of a tree, block by block: files opened, pieces read or mapped, decoded and checked.

`load`, `verify` and `convert` all read through `BlockReader`. Whatever is wrong with the bytes is an `IntegrityError`
that says which leaf, file and bytes it is about.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardkeep.errors import IntegrityError, damage_of
from shardkeep.layouts.codecs import codec_of_encoded
from shardkeep.model.arrays import Array
from shardkeep.model.digests import BLOCK, block_count, blocks, digest
from shardkeep.model.leaves import Piece, StoredArray
from shardkeep.model.manifest import DataFile
from shardkeep.stores.base import MappedFile, Store, StoredFile
from shardkeep.targets.recorded import open_file

PART = 16 << 20  # bytes of a piece that one task reads

Range = tuple[int, int]  # blocks of a piece: the first, and the one after the last


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Reads blocks of the pieces of a saved tree."""

    store: Store
    files: Sequence[DataFile]
    compression: str | None = None
    verify: bool = True  # whether digests are compared
    mapped: bool = True  # whether files may be mapped

    def where(self, number: int) -> str:
        """The path or URL of a file, for messages."""
        return self.store.locate(self.files[number].name)

    def open(self, number: int, key: str | None = None) -> StoredFile:
        """A file of the tree, which is there and has its size. `key` is the leaf that it is opened for."""
        return open_file(self.store, self.files[number], key)

    def map(
        self, number: int, start: int, end: int, leaf: StoredArray, needed: Sequence[Range] = ()
    ) -> MappedFile | None:
        """Bytes of a file as memory, which `needed` (offset, length) are read of; None if it can map no more."""
        with self.open(number, leaf.key) as file:
            try:
                return file.map(start, end - start, needed)
            except OSError as error:
                if error.errno != errno.ENOMEM:  # the process has as many mappings as allowed
                    raise
                return None
            except EOFError as error:
                raise damage_of(error, leaf.key, self.where(number)) from error

    def fill(self, number: int, start: int, memory: Array, key: str | None = None) -> None:
        """Read bytes of a file as they are stored."""
        with self.open(number, key) as file:
            try:
                file.read_into(start, memory)
            except EOFError as error:
                raise damage_of(error, key, self.where(number)) from error

    def read(self, leaf: StoredArray, piece: Piece, blocks: Range, memory: Array) -> None:
        """Read blocks of a piece, decoded, and check them. A piece that is encoded is read as a whole."""
        if piece.stored is None:
            self.fill(piece.file, piece.offset + blocks[0] * BLOCK, memory, leaf.key)
        else:
            packed = np.empty(piece.stored, np.uint8)
            self.fill(piece.file, piece.offset, packed, leaf.key)
            self.decode(leaf, piece, packed, memory)
        self.check(leaf, piece, blocks, memory)

    def decode(self, leaf: StoredArray, piece: Piece, packed: Array, memory: Array) -> None:
        """Decode a compressed or bit-packed piece, never beyond its declared size."""
        # A compressed piece is all there is in its file; a packed one of another program is a part of it.
        known = None if self.compression is None else self.files[piece.file].header_digest
        try:
            if known is not None and digest(packed.data) != known:
                raise ValueError("it does not match its digest")
            codec_of_encoded(self.compression).decode(packed, memory)
        except ValueError as problem:
            where = self.where(piece.file)
            span = (piece.offset, piece.offset + packed.size)
            raise IntegrityError(f"{where} is damaged: {problem}", leaf=leaf.key, file=where, span=span) from problem

    def check(self, leaf: StoredArray, piece: Piece, chosen: Range, data: Array) -> None:
        """`IntegrityError` unless blocks match their digests. Pieces without digests are not checked."""
        first, last = chosen
        if not self.verify or piece.digests is None:
            return
        if last - first == 1 and digest(data.data) == piece.digests[first]:
            return
        for number, start, end in blocks(first, last, piece.length):
            if digest(data[start - first * BLOCK : end - first * BLOCK].data) != piece.digests[number]:
                where, span = self.where(piece.file), (piece.offset + start, piece.offset + end)
                at = f" between bytes {span[0]:,} and {span[1]:,}"
                if piece.stored is not None:  # these are not the bytes that are stored
                    at, span = "", (piece.offset, piece.offset + piece.stored)
                problem = f"{where} is damaged{at}: the data does not match its digest"
                raise IntegrityError(problem, leaf=leaf.key, file=where, span=span)


def parts_of(piece: Piece, chosen: Sequence[Range] | None = None) -> list[Range]:
    """Blocks of a piece, by default all, in ranges of the size of a task. An encoded piece is read as a whole."""
    total = block_count(piece.length)
    if piece.stored is not None:
        return [(0, total)]
    found = [(0, total)] if chosen is None else list(chosen)
    if piece.length <= PART:
        return found
    step = PART // BLOCK
    return [(a, min(a + step, last)) for first, last in found for a in range(first, last, step)]
