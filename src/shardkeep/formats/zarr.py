"""Zarr v2 arrays that another program wrote, read through TensorStore (any compressor, order or separator).

They carry no digests, and TensorStore reads a missing chunk as zeros and decodes whatever size it finds, so every
chunk is looked at first: it must be there and hold exactly what the description declares.
"""

import io
import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from shardkeep.arrays import ArraySpec, Region, dtype_from_name, dtype_name
from shardkeep.errors import IntegrityError, MissingDataError
from shardkeep.manifest import StoredLeaf
from shardkeep.reading import Target
from shardkeep.stores.base import Store

ZARRAY = ".zarray"


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The description of an array."""

    spec: ArraySpec
    chunks: tuple[int, ...]
    compressor: str | None
    separator: str

    def chunk_names(self, region: Region) -> list[str]:
        """Names of the chunks that hold data of a region."""
        if region.size == 0:
            return []
        spans = [
            range(a // c, -(-(a + n) // c)) for a, n, c in zip(region.start, region.shape, self.chunks, strict=True)
        ]
        return [self.separator.join(map(str, index)) or "0" for index in itertools.product(*spans)]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.spec.dtype.itemsize


def describe(store: Store, directory: str) -> ZarrArray:
    """What `.zarray` says, checked."""
    name = f"{directory}/{ZARRAY}" if directory else ZARRAY
    where = store.locate(name)
    try:
        data = json.loads(store.read(name))
        shape, chunks = tuple(data["shape"]), tuple(data["chunks"])
        dtype = _dtype(data["dtype"])
        compressor = data["compressor"]["id"] if data.get("compressor") else None
        separator = data.get("dimension_separator", ".")
    except (FileNotFoundError, NotADirectoryError):
        raise MissingDataError(f"{where} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{where} is not a zarr description: {error}") from error
    whole = [n for n in (*shape, *chunks) if type(n) is not int or n < 0]
    too_large = math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**62 if not whole else True
    if too_large or len(shape) != len(chunks) or len(shape) > 32 or 0 in chunks or separator not in (".", "/"):
        raise IntegrityError(f"{where} describes an impossible array")
    return ZarrArray(ArraySpec(shape, dtype), chunks, compressor, separator)


def _dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str):
        raise TypeError("dtype is no string")
    if name[:1] in "<>|":
        return dtype_from_name(dtype_name(np.dtype(name)))
    return dtype_from_name(name)


def read_zarr(store: Store, target: Target) -> None:
    """Fill a target whose leaf is a zarr array of another program."""
    import tensorstore  # not needed for checkpoints of our own, and slow to import

    directory = target.leaf.extra["directory"]
    array = _described(store, target.leaf)
    for region in target.regions:
        _check_chunks(store, directory, array, region, target.leaf.key)
    context = tensorstore.Context()
    if store.remote:  # our client fetches, TensorStore decodes
        place: dict[str, Any] = {"driver": "memory", "path": "array/"}
        needed = {name for region in target.regions for name in array.chunk_names(region)}
        memory = tensorstore.KvStore.open(place, context=context).result()
        for name in (ZARRAY, *sorted(needed)):
            memory.write(name, store.read(f"{directory}/{name}")).result()
    else:
        place = {"driver": "file", "path": store.locate(directory) + os.sep}
    spec: dict[str, Any] = {"driver": "zarr", "kvstore": place, "recheck_cached_data": "open"}
    try:
        opened = tensorstore.open(spec, read=True, context=context).result()
        for number, region in enumerate(target.regions):
            data: Any = opened[region.slices].read(order="C").result()
            target.arrays[number] = np.array(data, dtype=array.spec.dtype, order="C", copy=True)
    except ValueError as error:
        raise IntegrityError(f"leaf {target.leaf.key!r}: {store.locate(directory)} cannot be read: {error}") from error


def check_zarr(store: Store, leaf: StoredLeaf) -> None:
    """`IntegrityError` unless an array of another program is as described, with every chunk there and of its size."""
    directory = leaf.extra["directory"]
    array = _described(store, leaf)
    _check_chunks(store, directory, array, Region.whole(array.spec.shape), leaf.key)


def _described(store: Store, leaf: StoredLeaf) -> ZarrArray:
    directory = leaf.extra["directory"]
    array = describe(store, directory)
    if array.spec != leaf.spec:
        raise IntegrityError(
            f"leaf {leaf.key!r}: {store.locate(directory)} describes {array.spec.dtype.name}"
            f"{list(array.spec.shape)}, the index says {leaf.dtype}{list(leaf.shape or ())}"
        )
    return array


def _check_chunks(store: Store, directory: str, array: ZarrArray, region: Region, key: str) -> None:
    names = [f"{directory}/{name}" for name in array.chunk_names(region)]
    sizes = store.sizes(names)
    missing = [name for name in names if sizes[name] is None]
    if missing:
        raise MissingDataError(
            f"leaf {key!r}: {len(missing)} of {len(names)} chunks are missing, among them {store.locate(missing[0])}; "
            "the save that wrote it never finished, or files were lost"
        )
    for name in names:
        _check_chunk(store, name, sizes[name], array, key)


def _check_chunk(store: Store, name: str, size: int | None, array: ZarrArray, key: str) -> None:
    """The chunk's decoded size, without decoding more than it may have."""
    if array.compressor is None:
        found = size
    elif array.compressor == "zstd":
        found = _zstd_size(store.read(name), array.chunk_bytes)
    else:
        return
    if found != array.chunk_bytes:
        raise IntegrityError(
            f"leaf {key!r}: {store.locate(name)} is damaged: it does not hold exactly {array.chunk_bytes:,} bytes"
        )


def _zstd_size(data: bytes, limit: int) -> int | None:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
            total = 0
            while total <= limit and (block := reader.read(1 << 20)):
                total += len(block)
    except zstandard.ZstdError:
        return None
    # A frame cut short just ends: the decoder says so only by giving fewer bytes.
    return total


def file_names(store: Store, directory: str, array: ZarrArray) -> Sequence[str]:
    """The files of an array that are there."""
    names = [f"{directory}/{name}" for name in (ZARRAY, *array.chunk_names(Region.whole(array.spec.shape)))]
    return [name for name, size in store.sizes(names).items() if size is not None]
