"""What the header of an HDF5 object says, message by message: shapes, dtypes, layouts, filters, links."""

import struct

import numpy as np

from shardkeep.foreign.base import UnreadableError
from shardkeep.model.arrays import DType, dtype_from_name
from shardkeep.model.fastclass import fast_dataclass

NOWHERE = 0xFFFFFFFFFFFFFFFF  # an address that is not set
_MASK = 0xFFFFFFFF  # checksums have 32 bits
# Where the exponent of a float begins, the bits in it, where the mantissa begins, the bits in that, the bias.
_FLOATS = {
    (10, 5, 0, 10, 15): "float16",
    (7, 8, 0, 7, 127): "bfloat16",
    (23, 8, 0, 23, 127): "float32",
    (52, 11, 0, 52, 1023): "float64",
}


@fast_dataclass
class Message:
    """A message in the header of an object: its kind, what it says, and where that is in the file."""

    kind: int
    data: bytes
    at: int


@fast_dataclass
class DataLayout:
    """Where the bytes of an array are: in one run, or in chunks of a shape, whose tree is at the offset."""

    offset: int
    nbytes: int | None
    chunk: tuple[int, ...] | None = None


def parse_shape(data: bytes) -> tuple[int, ...]:
    """The shape that a dataspace message gives."""
    version, rank = data[0], data[1]
    if version not in (1, 2) or rank > 32:
        raise ValueError("a dataspace is damaged")
    if version == 2 and data[3] == 2:
        raise UnreadableError("it is an empty dataset without a shape")
    return struct.unpack_from(f"<{rank}Q", data, 8 if version == 1 else 4)


def parse_dtype(data: bytes) -> DType | None:
    """The dtype that a datatype message gives, as it is stored; None for raw bytes, whose meaning is said elsewhere."""
    kind, flags = data[0] & 15, int.from_bytes(data[1:4], "little")
    (size,) = struct.unpack_from("<L", data, 4)
    order = ">" if flags & 1 else "<"
    if kind == 0 and size in (1, 2, 4, 8) and struct.unpack_from("<2H", data, 8) == (0, 8 * size):
        return np.dtype(f"{order}{'i' if flags & 8 else 'u'}{size}")
    if kind == 1 and not flags & 64 and struct.unpack_from("<2H", data, 8) == (0, 8 * size):
        name = _FLOATS.get(struct.unpack_from("<4BL", data, 12))
        if name == "bfloat16" and order == "<":
            return dtype_from_name(name)
        if name is not None and name != "bfloat16":
            return np.dtype(name).newbyteorder(order)
    if kind == 8 and size == 1 and flags == 2 and b"FALSE\0" in data and b"TRUE\0" in data:
        return np.dtype(bool)
    if kind == 5 and size == 2:
        return None
    raise UnreadableError(f"it holds values of HDF5's class {kind} with {size} bytes, which JAX does not support")


def parse_layout(message: Message) -> DataLayout:
    """Where the bytes of an array are."""
    data = message.data
    version, kind = data[0], data[1]
    if version not in (3, 4) or kind > 2:
        raise UnreadableError("its data is in external files, or it was written by HDF5 before 1.6.3")
    if kind == 0:
        return DataLayout(message.at + 4, struct.unpack_from("<H", data, 2)[0])
    if kind == 1:
        return DataLayout(*struct.unpack_from("<2Q", data, 2))
    if version == 4:
        raise UnreadableError("it uses a chunk index of HDF5 1.10 or later; write the file without libver")
    rank, tree = struct.unpack_from("<BQ", data, 2)
    return DataLayout(tree, None, struct.unpack_from(f"<{rank}L", data, 11)[:-1])


def parse_filters(data: bytes) -> tuple[int, ...]:
    """The numbers of the filters that chunks went through."""
    version, count = data[0], data[1]
    if version not in (1, 2) or count > 32:
        raise ValueError("a filter pipeline is damaged")
    found: list[int] = []
    at = 8 if version == 1 else 2
    for _ in range(count):
        number = struct.unpack_from("<H", data, at)[0]
        named = version == 1 or number >= 256
        length = struct.unpack_from("<H", data, at + 2)[0] if named else 0
        at += 4 if named else 2
        values = struct.unpack_from("<H", data, at + 2)[0]
        at += 4 + (-(-length // 8) * 8 if version == 1 else length) + 4 * values
        at += 4 * (values % 2) if version == 1 else 0
        found.append(number)
    return tuple(found)


def parse_link(data: bytes) -> tuple[str, int]:
    """The name and the address of what a link message leads to, in the same file."""
    version, flags = data[0], data[1]
    at = 2
    kind = data[at] if flags & 8 else 0
    at += (1 if flags & 8 else 0) + (8 if flags & 4 else 0) + (1 if flags & 16 else 0)
    width = 1 << (flags & 3)
    length = int.from_bytes(data[at : at + width], "little")
    name = data[at + width : at + width + length].decode()
    if version != 1 or len(name.encode()) != length:
        raise ValueError("a link is damaged")
    if kind != 0:
        raise UnreadableError(f"{name[:200]!r} is a link, perhaps to another file; links are not followed")
    return name, struct.unpack_from("<Q", data, at + width + length)[0]


def parse_text_attribute(data: bytes, name: str) -> tuple[int, int, int] | bytes | None:
    """The text of an attribute of this name, or where it is: its length, and the address and number in a heap."""
    version = data[0]
    sizes = struct.unpack_from("<3H", data, 2)
    at = 9 if version == 3 else 8
    parts: list[bytes] = []
    for size in sizes:
        parts.append(data[at : at + size])
        at += -(-size // 8) * 8 if version == 1 else size
    if parts[0].rstrip(b"\0") != name.encode() or version not in (1, 2, 3):
        return None
    kind = parts[1][0] & 15
    return struct.unpack_from("<LQL", data, at) if kind == 9 else data[at:] if kind == 3 else None


def lookup3(data: bytes) -> int:
    """Bob Jenkins's hash, which HDF5 has as the checksum of its newer structures."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    last = max(len(data) - 1, 0) // 12 * 12  # the last 1 to 12 bytes are mixed otherwise
    for at in range(0, last, 12):
        x, y, z = struct.unpack_from("<3L", data, at)
        a, b, c = (a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK
        for shift_a, shift_b, shift_c in ((4, 6, 8), (16, 19, 4)):
            a, c = ((a - c) & _MASK) ^ _turned(c, shift_a), (c + b) & _MASK
            b, a = ((b - a) & _MASK) ^ _turned(a, shift_b), (a + c) & _MASK
            c, b = ((c - b) & _MASK) ^ _turned(b, shift_c), (b + a) & _MASK
    if not data:
        return c
    x, y, z = struct.unpack("<3L", data[last:].ljust(12, b"\0"))
    a, b, c = (a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK
    c = ((c ^ b) - _turned(b, 14)) & _MASK
    a = ((a ^ c) - _turned(c, 11)) & _MASK
    b = ((b ^ a) - _turned(a, 25)) & _MASK
    c = ((c ^ b) - _turned(b, 16)) & _MASK
    a = ((a ^ c) - _turned(c, 4)) & _MASK
    b = ((b ^ a) - _turned(a, 14)) & _MASK
    return ((c ^ b) - _turned(b, 24)) & _MASK


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _MASK


def fletcher32(data: bytes) -> int:
    """The checksum that HDF5's filter of this name puts after a chunk."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2").astype(np.int64)
    first = second = 0
    for start in range(0, words.size, 1 << 16):
        block = words[start : start + (1 << 16)]
        second += first * block.size + int((np.arange(block.size, 0, -1) * block).sum())
        first += int(block.sum())
    return _folded(second) << 16 | _folded(first)


def _folded(total: int) -> int:
    return (total - 1) % 65535 + 1 if total else 0
