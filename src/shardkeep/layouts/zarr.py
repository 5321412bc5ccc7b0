"""The zarr format: one zarr v2 array per leaf, one chunk per saved shard or row of shards.

An uncompressed chunk file holds exactly the C-order bytes of its region, so it is written with plain writes and can be
mapped as an array. If a chunk consists of several shards along its first axis, the same holds for each of them, because
their bytes follow one another.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardkeep.layouts.codecs import RAW, Codec
from shardkeep.layouts.plan import Draft, FilePlan, PiecePlan, StagedArray, StagedLeaf, TreePlan, WrittenFile, arrays_of
from shardkeep.model.arrays import NUMPY_NAMES, ArraySpec, DType, Region, cut, split_counts
from shardkeep.model.naming import leaf_directories
from shardkeep.model.shares import Shares
from shardkeep.model.tree import Path
from shardkeep.model.values import JsonObject
from shardkeep.processes.operation import LEADER

ZARRAY, ZGROUP = ".zarray", ".zgroup"
ZGROUP_BYTES = b'{"zarr_format": 2}'

_RAW_LIMIT = 256 << 20  # bytes of a chunk, which other programs read as a whole
_COMPRESSED_LIMIT = 64 << 20  # bytes: a compressed chunk is decoded as a whole, by one thread
_WHOLE = 2 << 20  # this saves files; the shards of larger arrays stay separate, so that each can be mapped
_STACKED = 16 << 20  # the size limit of a chunk that consists of several shards
# zarr v2 does not define names for these; TensorStore accepts their own.
_EXTENDED = frozenset(
    (
        "bfloat16",
        "int4",
        "int2",
        "float4_e2m1fn",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
)


@dataclass(frozen=True)
class ZarrLayout:
    """One directory per leaf, readable by TensorStore and zarr.

    Args:
        codec: How chunks are stored.
        most: The size limit of a chunk in bytes, if it is below the default.
        groups: Whether the files that make zarr groups of the directories above arrays are files of the tree. In a
            local directory, they belong to all trees in it.
    """

    codec: Codec = RAW
    most: int | None = None
    groups: bool = False
    name: str = "zarr"
    gathers: bool = False

    @property
    def limit(self) -> int:
        """The size limit of a chunk in bytes."""
        return min(_RAW_LIMIT if self.codec is RAW else _COMPRESSED_LIMIT, self.most or _RAW_LIMIT)

    @property
    def whole(self) -> float:
        return min(_WHOLE, self.limit)

    def describe(self) -> str:
        return f"{self.name}, compression {self.codec.name}"

    def check(self, paths: Sequence[Path]) -> None:
        """Do nothing: any leaf has a name here."""

    def split(self, spec: ArraySpec, region: Region) -> list[Region]:
        return cut(region, split_counts(region.shape, spec.dtype.itemsize, self.limit))

    def lay_out(self, leaves: Sequence[StagedLeaf], pieces: Sequence[PiecePlan], draft: Draft) -> list[FilePlan]:
        arrays = arrays_of(leaves)
        places = leaf_directories([array.path for array in arrays])
        inside: list[list[PiecePlan]] = [[] for _ in arrays]
        for piece in pieces:
            inside[piece.array].append(piece)
        each = zip(arrays, inside, places, strict=True)
        files = [file for array, some, place in each if some for file in self._array(array, some, place)]
        groups = groups_above(f"{place}/{ZARRAY}" for place in places) if self.groups else set[str]()
        if draft.process == LEADER:
            files += [FilePlan(name, ZGROUP_BYTES, (), len(ZGROUP_BYTES)) for name in sorted(groups)]
        return files

    def claimed(self, leaves: Sequence[StagedLeaf]) -> list[str]:
        """The directories of all arrays, and the files in them that there always are."""
        places = leaf_directories([array.path for array in arrays_of(leaves)])
        return [name for place in places for name in (place, f"{place}/{ZARRAY}")]

    def complete(self, plan: TreePlan, file: FilePlan, written: WrittenFile) -> bytes:
        return file.header

    def _array(self, array: StagedArray, pieces: list[PiecePlan], place: str) -> list[FilePlan]:
        """The files of an array that this process writes. Its description is written by who writes the first chunk."""
        spec = array.spec
        chunk = self._chunk(spec, pieces[0], array.shares)
        document = json.dumps(zarray(spec, chunk, self.codec)).encode()
        if spec.nbytes == 0:  # there is no chunk: the empty piece is recorded at the end of .zarray
            empty = replace(pieces[0], offset=len(document))
            return [FilePlan(f"{place}/{ZARRAY}", document, (empty,), len(document))]
        files: list[FilePlan] = []
        if not any(pieces[0].region.start):
            files.append(FilePlan(f"{place}/{ZARRAY}", document, (), len(document)))
        for index, inside in _by_chunk(pieces, chunk).items():
            offsets = itertools.accumulate((piece.nbytes for piece in inside), initial=0)
            placed = tuple(piece.placed(at, "") for piece, at in zip(inside, offsets, strict=False))
            size = sum(piece.nbytes for piece in inside) if self.codec is RAW else None
            name = f"{place}/{'.'.join(map(str, index)) or '0'}"
            files.append(FilePlan(name, b"", placed, size, self.codec))
        return files

    def _chunk(self, spec: ArraySpec, piece: PiecePlan, shares: Shares | None) -> tuple[int, ...]:
        """The chunk shape: that of a piece, or of several that one process writes and that follow one another."""
        part = piece.region.shape
        chunk = [max(n, 1) for n in part]
        if self.codec is not RAW or part == spec.shape or spec.nbytes == 0:
            return tuple(chunk)
        last = next((axis for axis, n in enumerate(chunk) if n > 1), len(chunk) - 1)
        room = min(_STACKED, self.limit) // piece.nbytes
        for axis in range(last, -1, -1):
            extent, count = chunk[axis], spec.shape[axis] // chunk[axis]
            for times in (n for n in range(min(count, room), 0, -1) if count % n == 0):
                chunk[axis] = extent * times
                if times == 1 or shares is None or _is_by_one(shares, part, chunk):
                    break
            if chunk[axis] < spec.shape[axis]:
                break
            room //= count
        return tuple(chunk)


def _by_chunk(pieces: Sequence[PiecePlan], chunk: Sequence[int]) -> dict[tuple[int, ...], list[PiecePlan]]:
    """The pieces in each chunk, in the order of their bytes."""
    found: dict[tuple[int, ...], list[PiecePlan]] = {}
    for piece in pieces:
        index = tuple(a // n for a, n in zip(piece.region.start, chunk, strict=True))
        found.setdefault(index, []).append(piece)
    for inside in found.values():
        inside.sort(key=lambda piece: piece.region.start)
    return found


def _is_by_one(shares: Shares, part: Sequence[int], chunk: Sequence[int]) -> bool:
    """Whether each chunk is written by a single process, if each cell is divided into parts of this shape."""
    split = [n // m for n, m in zip(shares.cell, part, strict=True)]
    return shares.is_by_one(split, [n // m for n, m in zip(chunk, part, strict=True)])


def groups_above(names: Iterable[str]) -> set[str]:
    """The `.zgroup` files that make zarr groups of the directories above some arrays.

    >>> sorted(groups_above(["layers/0/w/.zarray", "layers/0/w/0.0"]))
    ['.zgroup', 'layers/.zgroup', 'layers/0/.zgroup']
    """
    found: set[str] = set()
    ending = f"/{ZARRAY}"
    for directory in (name[: -len(ending)] for name in names if name.endswith(ending)):
        while directory:
            directory = directory.rpartition("/")[0]
            group = f"{directory}/{ZGROUP}" if directory else ZGROUP
            if group in found:
                break
            found.add(group)
    return found


def zarray(spec: ArraySpec, chunk: Sequence[int], codec: Codec) -> JsonObject:
    """The content of `.zarray`, which describes an array to zarr readers."""
    return {
        "zarr_format": 2,
        "shape": list(spec.shape),
        "chunks": list(chunk),
        "dtype": zarr_dtype(spec.dtype),
        "compressor": None if codec is RAW else {"id": codec.name, "level": codec.level},
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }


def zarr_dtype(dtype: DType) -> str:
    """The dtype's name in `.zarray`. Types that zarr lacks are stored as unsigned integers of the same width."""
    if dtype.name in _EXTENDED:
        return dtype.name
    return dtype.str if dtype.name in NUMPY_NAMES else np.dtype(f"u{dtype.itemsize}").str
