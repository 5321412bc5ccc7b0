"""HDF5 files as trees of arrays, read with h5py: of an array that lies in one run, only where its bytes are.

libhdf5 is asked for nothing that leads out of the file (external links and storage, virtual datasets), runs code that
is not its own (filters from plugins) or takes more memory than the bytes in the file justify.
"""

import io
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np

from shardkeep.errors import CheckpointNotFoundError
from shardkeep.foreign.windows import ByteFile
from shardkeep.model.arrays import NUMPY_NAMES, Array, ArraySpec, Region, dtype_from_name, is_possible
from shardkeep.model.records import record
from shardkeep.model.tree import Path

if TYPE_CHECKING:
    import h5py  # which is optional
    from _typeshed import WriteableBuffer

MAGIC = b"\x89HDF\r\n\x1a\n"
_BLOCK = 64 << 10  # bytes read at once: what describes the arrays of a model is often in one or two of them
_MOST_BLOCKS = 64  # that are kept: 4 MiB
_DEEPEST = 50  # levels of groups
_MOST_GROUPS = 1 << 18  # groups and datasets
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}  # those in h5py itself; others are plugins
_BEST_RATIO = 1040  # what deflate can make of one byte is a little less
_LARGEST_CHUNK = 1 << 30  # bytes: libhdf5 decompresses a chunk as a whole
_CHUNKED = 2  # H5D_CHUNKED


class UnreadableError(ValueError):
    """The file is not damaged, but holds something that is not read."""


@record
class FoundDataset:
    """An array in a file.

    Attributes:
        spec: Its shape and dtype, in the byte order of this machine.
        path: The names of the groups that it is in, and its own.
        offset: Where its bytes lie, if they lie there in C order and in this machine's byte order.
        chunks: The shape of the parts that are read as a whole.
    """

    spec: ArraySpec
    path: Path
    offset: int | None
    chunks: tuple[int, ...]


@contextmanager
def open_hdf5(file: ByteFile, where: str) -> Generator["Opened"]:
    """An HDF5 file. Whatever libhdf5 finds wrong with it is a `ValueError`.

    Raises:
        CheckpointNotFoundError: h5py is not installed.
    """
    try:
        import h5py
    except ImportError:
        raise CheckpointNotFoundError(
            f"no checkpoint that can be read at {where}: it is an HDF5 file, which needs h5py: pip install "
            "'shardkeep[keras]'"
        ) from None
    try:
        with h5py.File(_Stream(file), "r") as opened:
            yield Opened(opened)
    except (OSError, RuntimeError, KeyError, TypeError, OverflowError, UnicodeError, RecursionError) as error:
        if isinstance(error, CheckpointNotFoundError):
            raise
        raise ValueError(f"libhdf5 cannot read it: {error}") from error


class Opened:
    """An HDF5 file that is open."""

    def __init__(self, file: "h5py.File") -> None:
        self._file = file

    def find(self) -> list[FoundDataset]:
        """Its datasets. Groups without any are left out. `UnreadableError` for what is not read."""
        import h5py

        found: list[FoundDataset] = []
        seen: set[int] = set()

        def walk(group: h5py.Group, path: Path) -> None:
            seen.add(h5py.h5o.get_info(group.id).addr)
            if len(path) > _DEEPEST or len(seen) + len(found) > _MOST_GROUPS:
                raise UnreadableError(f"it has more than {_DEEPEST} levels of groups, or more than {_MOST_GROUPS:,}")
            for name in group:
                inner = (*path, name)
                if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                    raise UnreadableError(f"{_shown(inner)} is a link, perhaps to another file; links are not followed")
                child = group[name]
                if isinstance(child, h5py.Dataset):
                    found.append(_describe(child, inner))
                elif isinstance(child, h5py.Group):
                    if h5py.h5o.get_info(child.id).addr in seen:
                        raise ValueError(f"the group {_shown(inner)} is there twice")
                    walk(child, inner)

        walk(self._file, ())
        return found

    def read(self, path: Path, spec: ArraySpec, region: Region) -> Array:
        """A region of a dataset, which must have this spec."""
        dataset = self._dataset(path, spec)
        if not region.size:
            return np.empty(region.shape, spec.dtype)
        data = cast(Array, dataset[region.slices])
        data = data.view(spec.dtype) if dataset.dtype.kind == "V" else data
        return np.array(data, spec.dtype, order="C", copy=True).reshape(region.shape)

    def describe(self, path: Path, spec: ArraySpec) -> FoundDataset:
        """A dataset, which must have this spec."""
        return _describe(self._dataset(path, spec), path)

    def _dataset(self, path: Path, spec: ArraySpec) -> "h5py.Dataset":
        import h5py

        group: h5py.Group = self._file
        for name in path[:-1]:
            child = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
            if not isinstance(child, h5py.Group):
                raise ValueError(f"{_shown(path)} is not there")
            group = child
        dataset = group[path[-1]] if path and isinstance(group.get(path[-1], getlink=True), h5py.HardLink) else None
        if not isinstance(dataset, h5py.Dataset) or _describe(dataset, path).spec != spec:
            raise ValueError(f"{_shown(path)} is another array")
        return dataset


def _describe(dataset: "h5py.Dataset", path: Path) -> FoundDataset:
    """A dataset, if everything about it is such that it can be read safely."""
    name, shape = _shown(path), dataset.shape
    if dataset.is_virtual or dataset.external:
        raise UnreadableError(f"{name} has its data in other files, which are not read")
    if shape is None:
        raise UnreadableError(f"{name} is an empty dataset without a shape")
    stored = dataset.dtype
    dtype = stored.newbyteorder("=")
    if stored.kind == "V" and stored.names is None and stored.itemsize == 2 and _text(dataset, "dtype") == "bfloat16":
        dtype = dtype_from_name("bfloat16")  # as Keras writes it
    elif dtype.name not in NUMPY_NAMES:
        raise UnreadableError(f"{name} holds {stored}, which is not one of JAX's dtypes")
    spec = ArraySpec(tuple(shape), dtype)
    if not is_possible(shape, dtype.itemsize):
        raise ValueError(f"{name} has the impossible shape {shape}")
    if dataset.id.get_create_plist().get_layout() == _CHUNKED:
        return FoundDataset(spec, path, None, _check_chunks(dataset, spec, name))
    if spec.nbytes and dataset.id.get_storage_size() != spec.nbytes:
        raise ValueError(f"{name} has {dataset.id.get_storage_size():,} bytes of its {spec.nbytes:,}")
    offset = dataset.id.get_offset()
    plain = stored.kind == "V" or (stored.isnative and stored.kind in "iuf")
    return FoundDataset(spec, path, offset if plain and spec.nbytes else None, (1, *shape[1:]) if shape else ())


def _check_chunks(dataset: "h5py.Dataset", spec: ArraySpec, name: str) -> tuple[int, ...]:
    """The shape of a dataset's chunks, all of which are there."""
    chunks = dataset.chunks or ()
    made = dataset.id.get_create_plist()
    filters = [made.get_filter(number)[0] for number in range(made.get_nfilters())]
    unknown = [str(number) for number in filters if number not in _FILTERS]
    if unknown:
        known = ", ".join(_FILTERS.values())
        raise UnreadableError(f"{name} is compressed with filter {unknown[0]}; those that are read are {known}")
    if len(chunks) != len(spec.shape) or 0 in chunks:
        raise ValueError(f"{name} has impossible chunks")
    count = math.prod(-(-n // c) for n, c in zip(spec.shape, chunks, strict=True))
    one, there = math.prod(chunks) * spec.dtype.itemsize, dataset.id.get_storage_size()
    if dataset.id.get_num_chunks() != count:
        raise ValueError(f"{name} has {dataset.id.get_num_chunks():,} of its {count:,} chunks")
    if one > _LARGEST_CHUNK or one * count > there * (_BEST_RATIO if filters else 1):
        raise ValueError(f"{name} has chunks of {one:,} bytes, which cannot be in {there:,}")
    return tuple(chunks)


def _text(dataset: "h5py.Dataset", name: str) -> object:
    return dataset.attrs.get(name)


def _shown(path: Sequence[str]) -> str:
    return repr("/".join(path)[:200])


class _Stream(io.RawIOBase):
    """A file for libhdf5, which reads it in very small parts."""

    def __init__(self, file: ByteFile) -> None:
        self._file, self._at = file, 0
        self._blocks: dict[int, Array] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, buffer: "WriteableBuffer") -> int:
        into = np.frombuffer(memoryview(buffer), np.uint8)
        count = max(min(into.size, self._file.size - self._at), 0)
        done = 0
        while done < count:
            skip = self._at % _BLOCK
            if skip == 0 and count - done >= _BLOCK:
                length = (count - done) // _BLOCK * _BLOCK
                self._file.read_into(self._at, into[done : done + length])
            else:
                part = self._block(self._at // _BLOCK)[skip : skip + count - done]
                into[done : done + part.size] = part
                length = part.size
            done, self._at = done + length, self._at + length
        return done

    def _block(self, number: int) -> Array:
        if number not in self._blocks:
            if len(self._blocks) >= _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            block = np.empty(min(_BLOCK, self._file.size - number * _BLOCK), np.uint8)
            self._file.read_into(number * _BLOCK, block)
            self._blocks[number] = block
        return self._blocks[number]
