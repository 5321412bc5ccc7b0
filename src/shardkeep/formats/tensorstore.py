"""The TensorStore format: one zarr v2 array per leaf, one chunk per saved shard, small ones together.

An uncompressed chunk file is exactly the C-order bytes of its region, so it is written with plain writes and
can be mapped straight into an array.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardkeep.arrays import NUMPY_NAMES, ArraySpec, Region, cut, split_counts
from shardkeep.naming import leaf_directories
from shardkeep.planning import FilePlan, LeafPlan, PiecePlan

_RAW_LIMIT = 256 << 20
_COMPRESSED_LIMIT = 64 << 20
_WHOLE = 2 << 20  # fewer files; larger arrays are not put together, so that each shard can be mapped
# zarr v2 has no names for these; TensorStore takes them under their own.
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


class TensorstoreFormat:
    """A directory per leaf, readable by TensorStore, zarr and eFormer."""

    name: str = "tensorstore"

    def __init__(self, compression: str | None = None, limit: int | None = None) -> None:
        """`limit`: bytes a chunk may have, where that is less than it may have anyway."""
        self.compression = compression
        self._limit = min(_COMPRESSED_LIMIT if compression else _RAW_LIMIT, limit or _RAW_LIMIT)
        self.whole = min(_WHOLE, self._limit)

    def split(self, spec: ArraySpec, region: Region) -> list[Region]:
        return cut(region, split_counts(region.shape, spec.dtype.itemsize, self._limit))

    def lay_out(
        self, leaves: Sequence[LeafPlan], pieces: Sequence[PiecePlan], directory: str, save_id: str
    ) -> list[FilePlan]:
        arrays = [i for i, leaf in enumerate(leaves) if leaf.spec]
        start = f"{directory}/" if directory else ""
        places = [start + d for d in leaf_directories([leaves[i].path for i in arrays])]
        by_leaf: dict[int, list[PiecePlan]] = {i: [] for i in arrays}
        for piece in pieces:
            by_leaf[piece.leaf].append(piece)
        return [
            file for i, place in zip(arrays, places, strict=True) for file in self._array(leaves[i], by_leaf[i], place)
        ]

    def _array(self, leaf: LeafPlan, pieces: list[PiecePlan], place: str) -> list[FilePlan]:
        spec = leaf.spec
        assert spec is not None
        chunk = tuple(max(n, 1) for n in pieces[0].region.shape)
        document = json.dumps(zarray(spec, chunk, self.compression)).encode()
        if spec.nbytes == 0:  # no chunk: the empty piece is recorded at the end of the description
            empty = replace(pieces[0], offset=len(document))
            return [FilePlan(f"{place}/.zarray", document, (empty,), len(document), empty.writer)]
        files = [FilePlan(f"{place}/.zarray", document, (), len(document), pieces[0].writer)]
        for piece in pieces:
            index = [a // n for a, n in zip(piece.region.start, chunk, strict=True)]
            size = None if self.compression else piece.nbytes
            files.append(FilePlan(f"{place}/{'.'.join(map(str, index)) or '0'}", b"", (piece,), size, piece.writer))
        return files


def zarray(spec: ArraySpec, chunk: Sequence[int], compression: str | None) -> dict[str, Any]:
    """The description zarr readers want beside the chunks."""
    return {
        "zarr_format": 2,
        "shape": list(spec.shape),
        "chunks": list(chunk),
        "dtype": zarr_dtype(spec.dtype),
        "compressor": {"id": compression, "level": 1} if compression else None,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }


def zarr_dtype(dtype: np.dtype[Any]) -> str:
    """The name a zarr reader knows; types it lacks are stored as unsigned integers of the same width."""
    if dtype.name in _EXTENDED:
        return dtype.name
    return dtype.str if dtype.name in NUMPY_NAMES else np.dtype(f"u{dtype.itemsize}").str
