"""HDF5 files as h5py and Keras write them: where their arrays are, without libhdf5, which hangs on some hostile files.

The format is described in https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html. What is read: groups
whose names are in one place, and arrays of numbers in one run, or in chunks that a B-tree lists. All else, such as
links, is refused by name. Nothing is looked at outside the file, and every structure only once.
"""

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from shardkeep.foreign.base import UnreadableError
from shardkeep.foreign.hdf5types import (
    NOWHERE,
    DataLayout,
    Message,
    fletcher32,
    lookup3,
    parse_dtype,
    parse_filters,
    parse_layout,
    parse_link,
    parse_shape,
    parse_text_attribute,
)
from shardkeep.foreign.windows import FileWindow
from shardkeep.model.arrays import Array, ArraySpec, DType, Region, dtype_from_name, is_possible
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.tree import Path

MAGIC = b"\x89HDF\r\n\x1a\n"
_DEEPEST = 50  # levels of groups, or of a B-tree
_MOST = 1 << 18  # structures in a file: groups, arrays, nodes of trees, chunks; each takes up to a kilobyte of memory
_MOST_NAMED = 64 << 20  # characters in the paths of all arrays, which repeat the names of what they are in
_LONGEST = 1 << 20  # bytes of a header, a node or a name
_LARGEST_CHUNK = 1 << 30  # bytes: a chunk is decompressed as a whole
_BEST_RATIO = 1040  # what deflate can make of one byte is a little less
_DEFLATE, _SHUFFLE, _FLETCHER = 1, 2, 3  # filters; others are plugins
# The kinds of messages that are looked at.
_SPACE, _LINKS, _TYPE, _LINK, _ELSEWHERE, _LAYOUT, _FILTERS, _ATTRIBUTE, _MORE, _TABLE = (
    1,
    2,
    3,
    6,
    7,
    8,
    11,
    12,
    16,
    17,
)


@fast_dataclass
class Chunk:
    """A stored part of an array: where it begins in the array, its bytes in the file, and which filters it skipped."""

    start: tuple[int, ...]
    offset: int
    length: int
    skipped: int


@fast_dataclass
class FoundDataset:
    """An array in a file.

    Attributes:
        spec: Its shape and dtype, in the byte order in which it is stored.
        offset: Where its bytes begin, if they lie in one run.
        header: Where its header is.
        chunk: The shape of its chunks; None if it lies in one run.
        chunks: Its chunks.
        filters: What each chunk went through, in that order.
    """

    spec: ArraySpec
    offset: int
    header: int
    chunk: tuple[int, ...] | None = None
    chunks: tuple[Chunk, ...] = ()
    filters: tuple[int, ...] = ()


@fast_dataclass
class UnreadDataset:
    """An array that holds something that is not read, and why."""

    reason: str


class Hdf5:
    """An HDF5 file that is read. Its methods raise `ValueError` for damage, `UnreadableError` for what is not read."""

    def __init__(self, window: FileWindow) -> None:
        self._window = window
        self._seen: set[int] = set()
        self._named = 0

    def find(self) -> list[tuple[Path, FoundDataset | UnreadDataset]]:
        """The arrays in the file, with the names of the groups that they are in, and their own."""
        try:
            found = list(self._walk(self._root(), ()))
        except (struct.error, IndexError) as error:
            raise ValueError(f"one of its structures is truncated ({error})") from error
        read = [dataset for _, dataset in found if isinstance(dataset, FoundDataset)]
        if sum(sum(c.length for c in d.chunks) if d.chunk else d.spec.nbytes for d in read) > self._window.size:
            raise ValueError("its arrays overlap")
        return found

    def dataset(self, header: int) -> FoundDataset:
        """The array with this header."""
        try:
            return self._dataset(header, self._messages(header))
        except (struct.error, IndexError) as error:
            raise ValueError(f"the header at byte {header:,} is truncated ({error})") from error

    def _read(self, offset: int, count: int) -> bytes:
        if count > _LONGEST:
            raise ValueError(f"its structure at byte {offset:,} is too large, with {count:,} bytes")
        return self._window.read(offset, count)

    def _visit(self, address: int) -> None:
        if address in self._seen:
            raise UnreadableError(f"the object at byte {address:,} has two names, or contains itself")
        self._seen.add(address)
        if len(self._seen) > _MOST:
            raise UnreadableError(f"it has more than {_MOST:,} groups and arrays")

    def _root(self) -> int:
        """The address of the header of the root group."""
        start = self._read(0, 12)
        version = start[8]
        if start[:8] != MAGIC or version > 3:
            raise ValueError("it does not start with an HDF5 signature")
        if version < 2:
            widths, at = self._read(13, 2), 24 if version == 0 else 28
            base, root = struct.unpack_from("<Q", self._read(at, 8))[0], struct.unpack("<Q", self._read(at + 40, 8))[0]
        else:
            widths = start[9:11]
            base, _, _, root, checksum = struct.unpack("<4QL", self._read(12, 36))
            if checksum != lookup3(self._read(0, 44)):
                raise ValueError("its first bytes do not match their checksum")
        if widths != b"\x08\x08" or base:
            raise UnreadableError("it has a user block, or its addresses are not 8 bytes wide")
        return root

    def _walk(self, header: int, path: Path) -> Iterator[tuple[Path, FoundDataset | UnreadDataset]]:
        """The arrays below a group, or the array that has this header."""
        self._visit(header)
        messages = self._messages(header)
        kinds = {message.kind for message in messages}
        try:
            if _LAYOUT in kinds:
                self._named += sum(map(len, path))
                if self._named > _MOST_NAMED:
                    raise UnreadableError(f"the paths of its arrays have more than {_MOST_NAMED:,} characters")
                yield path, self._found(header, messages)
                return
            children = list(self._children(messages))
        except ValueError as error:
            _name(error, path)
        if not kinds & {_TABLE, _LINKS, _LINK}:
            raise UnreadableError(f"{_shown(path)} is neither a group nor an array")
        if len(path) >= _DEEPEST:
            raise UnreadableError(f"it has more than {_DEEPEST} levels of groups")
        if len({name for name, _ in children}) < len(children):
            raise ValueError(f"two members of the group {_shown(path)} have the same name")
        for name, address in children:
            yield from self._walk(address, (*path, name))

    def _messages(self, header: int) -> list[Message]:
        """The messages in the header of an object."""
        newer = self._read(header, 4) == b"OHDR"
        found: list[Message] = []
        flags = 0
        if newer:
            flags = self._read(header + 5, 1)[0]
            at = header + 6 + (16 if flags & 32 else 0) + (4 if flags & 16 else 0)
            width = 1 << (flags & 3)
            size = int.from_bytes(self._read(at, width), "little")
            self._compare(header, at + width + size - header)
            blocks = [(at + width, size)]
        else:
            version, size = struct.unpack("<B7xL", self._read(header, 12))
            if version != 1:
                raise ValueError(f"there is no header at byte {header:,}")
            blocks = [(header + 16, size)]
        for offset, size in blocks:  # which grows
            data = self._read(offset, size)
            for message in _split(data, offset, newer, flags):
                if message.kind != _MORE:
                    found.append(message)
                    continue
                start, length = struct.unpack_from("<2Q", message.data)
                self._visit(start)
                if newer:
                    self._compare(start, length - 4, b"OCHK")
                blocks.append((start + 4, length - 8) if newer else (start, length))
        return found

    def _compare(self, start: int, length: int, begins: bytes = b"") -> None:
        """Compare a structure with the checksum after it."""
        data = self._read(start, length + 4)
        if not data.startswith(begins) or lookup3(data[:-4]) != struct.unpack("<L", data[-4:])[0]:
            raise ValueError(f"the structure at byte {start:,} does not match its checksum")

    def _children(self, messages: Sequence[Message]) -> Iterator[tuple[str, int]]:
        """The names of the members of a group, and the addresses of their headers."""
        for message in messages:
            if message.kind == _TABLE:
                tree, heap = struct.unpack_from("<2Q", message.data)
                sign, size, _, names = struct.unpack("<4s4xQQQ", self._read(heap, 32))
                if sign != b"HEAP":
                    raise ValueError(f"there is no heap of names at byte {heap:,}")
                for leaf in self._leaves(tree, 0, 8):
                    yield from self._symbols(leaf[1], names, size)
            elif message.kind == _LINK:
                yield parse_link(message.data)
            elif message.kind == _LINKS:
                (heap,) = struct.unpack_from("<Q", message.data, 10 if message.data[1] & 1 else 2)
                if heap != NOWHERE:
                    raise UnreadableError("it is a group in the format of HDF5 1.8; write the file without libver")

    def _leaves(self, node: int, kind: int, key: int, level: int | None = None) -> Iterator[tuple[bytes, int]]:
        """What a B-tree lists: keys of so many bytes, and addresses."""
        self._visit(node)
        sign, found, depth, count = struct.unpack("<4sBBH", self._read(node, 8))
        if sign != b"TREE" or found != kind or depth > _DEEPEST or (level is not None and depth != level):
            raise ValueError(f"there is no node of its B-tree at byte {node:,}")
        data = self._read(node + 24, count * (key + 8))
        for at in range(0, len(data), key + 8):
            (address,) = struct.unpack_from("<Q", data, at + key)
            if depth:
                yield from self._leaves(address, kind, key, depth - 1)
            else:
                yield data[at : at + key], address

    def _symbols(self, node: int, names: int, size: int) -> Iterator[tuple[str, int]]:
        self._visit(node)
        sign, count = struct.unpack("<4s2xH", self._read(node, 8))
        data = self._read(node + 8, 40 * count)
        if sign != b"SNOD":
            raise ValueError(f"there is no list of names at byte {node:,}")
        for at in range(0, len(data), 40):
            offset, header, cached = struct.unpack_from("<QQL", data, at)
            text, end, _ = self._read(names + offset, max(min(size - offset, 4096), 0)).partition(b"\0")
            if not end:
                raise ValueError(f"the name at byte {names + offset:,} is not terminated")
            name = text.decode()
            if cached == 2 or header == NOWHERE:
                raise UnreadableError(f"{name!r} is a link, perhaps to another file; links are not followed")
            yield name, header

    def _found(self, header: int, messages: Sequence[Message]) -> FoundDataset | UnreadDataset:
        """The array that a header describes. What one array holds does not keep the others from being read."""
        try:
            return self._dataset(header, messages)
        except UnreadableError as error:
            return UnreadDataset(str(error))

    def _dataset(self, header: int, messages: Sequence[Message]) -> FoundDataset:
        """The array that a header describes, if everything about it is such that it can be read."""
        by_kind = {message.kind: message for message in messages}
        if _ELSEWHERE in by_kind:
            raise UnreadableError("its data is in external files, which are not read")
        if not {_SPACE, _TYPE, _LAYOUT} <= by_kind.keys():
            raise ValueError("its header is incomplete")
        shape, dtype = parse_shape(by_kind[_SPACE].data), parse_dtype(by_kind[_TYPE].data)
        spec = ArraySpec(shape, self._opaque(messages) if dtype is None else dtype)
        if not is_possible(shape, spec.dtype.itemsize):
            raise ValueError(f"it has the invalid shape {shape}")
        layout = parse_layout(by_kind[_LAYOUT])
        if layout.chunk is not None:
            filters = parse_filters(by_kind[_FILTERS].data) if _FILTERS in by_kind else ()
            return self._chunked(FoundDataset(spec, 0, header, layout.chunk, (), filters), layout)
        if spec.nbytes and (layout.nbytes != spec.nbytes or layout.offset + spec.nbytes > self._window.size):
            raise ValueError(f"its data does not have {spec.nbytes:,} bytes: it was never written, or it is damaged")
        return FoundDataset(spec, layout.offset if spec.nbytes else 0, header)

    def _opaque(self, messages: Sequence[Message]) -> DType:
        """The dtype of elements of two raw bytes: Keras notes in an attribute that they are bfloat16."""
        for message in messages:
            text = parse_text_attribute(message.data, "dtype") if message.kind == _ATTRIBUTE else None
            if (self._text(*text) if isinstance(text, tuple) else text) == b"bfloat16":
                return dtype_from_name("bfloat16")
        raise UnreadableError("it holds raw bytes, not numbers that JAX supports")

    def _text(self, length: int, heap: int, number: int) -> bytes:
        """A text in a heap that objects share."""
        sign, size = struct.unpack("<4s4xQ", self._read(heap, 16))
        data = self._read(heap, size)
        at = 16
        while sign == b"GCOL" and at + 16 <= len(data):
            found, nbytes = struct.unpack_from("<H6xQ", data, at)
            if found == number:
                return data[at + 16 : at + 16 + min(length, nbytes)]
            if found == 0:
                break
            at += 16 + -(-nbytes // 8) * 8
        raise ValueError(f"text {number} is missing from the heap at byte {heap:,}")

    def _chunked(self, found: FoundDataset, layout: DataLayout) -> FoundDataset:
        """The array with its chunks, all of which must be there."""
        spec, shape = found.spec, found.chunk or ()
        unknown = [number for number in found.filters if number not in (_DEFLATE, _SHUFFLE, _FLETCHER)]
        if unknown:
            raise UnreadableError(f"it is compressed with HDF5's filter {unknown[0]}; only deflate is supported")
        one = math.prod(shape) * spec.dtype.itemsize
        if len(shape) != len(spec.shape) or 0 in shape or one > _LARGEST_CHUNK:
            raise ValueError(f"it has chunks of the invalid shape {shape}")
        count = math.prod(-(-n // c) for n, c in zip(spec.shape, shape, strict=True))
        chunks: dict[tuple[int, ...], Chunk] = {}
        if layout.offset != NOWHERE:
            for key, address in self._leaves(layout.offset, 1, 16 + 8 * len(shape)):
                length, skipped, *start = struct.unpack(f"<2L{len(shape)}Q8x", key)
                chunk = Chunk(tuple(start), address, length, skipped)
                if any(a % c or a >= n for a, c, n in zip(chunk.start, shape, spec.shape, strict=True)):
                    raise ValueError(f"it has a chunk at {chunk.start}, outside the array")
                if address + length > self._window.size or one > length * (_BEST_RATIO if found.filters else 1):
                    raise ValueError(f"its chunk at {chunk.start} is incomplete")
                chunks[chunk.start] = chunk
                if len(chunks) > _MOST:
                    raise UnreadableError(f"it has more than {_MOST:,} chunks")
        if len(chunks) != count:
            raise ValueError(f"it has {len(chunks):,} of its {count:,} chunks")
        return FoundDataset(spec, 0, found.header, found.chunk, tuple(chunks.values()), found.filters)


def read_chunks(window: FileWindow, found: FoundDataset, region: Region) -> Array:
    """A region of an array in chunks, as a new array in the byte order in which it is stored."""
    into = np.empty(region.shape, found.spec.dtype)
    shape = found.chunk or ()
    for chunk in found.chunks:
        common = Region(chunk.start, shape).intersect(region)
        if common is not None:
            whole = _decode(window.read(chunk.offset, chunk.length), found, chunk)
            part = common.within(Region(chunk.start, shape))
            into[common.within(region).slices] = whole.reshape(shape)[part.slices]
    return into


def _decode(data: bytes, found: FoundDataset, chunk: Chunk) -> Array:
    """The elements of a chunk."""
    dtype = found.spec.dtype
    nbytes = math.prod(found.chunk or ()) * dtype.itemsize
    for place in reversed(range(len(found.filters))):
        number = found.filters[place]
        if chunk.skipped >> place & 1:
            continue
        if number == _FLETCHER:
            data, stored = data[:-4], data[-4:]
            if fletcher32(data).to_bytes(4, "little") != stored:
                raise ValueError(f"the chunk at {chunk.start} does not match its checksum")
        elif number == _DEFLATE:
            data = _inflate(data, nbytes + 4, chunk)  # a checksum may be in it
        elif dtype.itemsize > 1:
            planes = np.frombuffer(data[: nbytes // dtype.itemsize * dtype.itemsize], np.uint8)
            data = planes.reshape(dtype.itemsize, -1).T.tobytes() if planes.size == nbytes else b""
    if len(data) != nbytes:
        raise ValueError(f"the chunk at {chunk.start} does not have {nbytes:,} bytes")
    return np.frombuffer(data, dtype)


def _inflate(data: bytes, most: int, chunk: Chunk) -> bytes:
    decoder = zlib.decompressobj()
    try:
        found = decoder.decompress(data, most)
    except zlib.error as error:
        raise ValueError(f"the chunk at {chunk.start} cannot be decompressed: {error}") from None
    if not decoder.eof:
        raise ValueError(f"the chunk at {chunk.start} is too short or too long")
    return found


def _split(data: bytes, offset: int, newer: bool, flags: int) -> Iterator[Message]:
    """The messages in a part of a header."""
    head = (6 if flags & 4 else 4) if newer else 8
    at = 0
    while at + head <= len(data):
        if newer:
            kind, size, told = struct.unpack_from("<BHB", data, at)
        else:
            kind, size, told = struct.unpack_from("<HHB", data, at)
        at += head
        if at + size > len(data):
            raise ValueError(f"a header is damaged at byte {offset + at:,}")
        if told & 2 and kind in (_SPACE, _TYPE, _LAYOUT, _FILTERS):
            raise UnreadableError("it uses shared header messages, which are not supported")
        yield Message(kind, data[at : at + size], offset + at)
        at += size


def _name(error: ValueError, path: Path) -> NoReturn:
    """Raise an error again that says which object it is about."""
    raise type(error)(f"{_shown(path)}: {error}") if type(error) in (ValueError, UnreadableError) else error


def _shown(path: Path) -> str:
    return repr("/".join(path)[:200])
