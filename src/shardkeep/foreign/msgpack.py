"""MessagePack as `flax.serialization` writes it, scanned for its structure: of arrays, only where their bytes are.

The format is described in https://github.com/msgpack/msgpack/blob/master/spec.md. Flax adds three kinds of extension:
arrays, complex numbers and NumPy scalars.
"""

import struct
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np

from shardkeep.foreign.windows import FileWindow
from shardkeep.model.arrays import ArraySpec, DType, dtype_from_name, is_possible
from shardkeep.model.fastclass import fast_dataclass

_MOST_VALUES = 1 << 20  # arrays, values and containers in one file: a byte can be one, and takes 200 bytes of memory
_MOST_NAMED = 64 << 20  # characters in the keys of all leaves, which repeat the names of what they are in
_DEEPEST = 100  # levels of containers; Python's stack has about a thousand frames
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # Flax's extension types
_CHUNKED = "__msgpack_chunked_array__"  # marks a dict that stands for an array above 1 GiB
_Value = TypeVar("_Value")
_Unpack = Callable[["Scanner", int], object]


@fast_dataclass
class FoundArray:
    """An array in a file, as its C-order bytes.

    Attributes:
        spec: Its shape and dtype.
        runs: Where its bytes are, in order: offsets and numbers of bytes. Several of them if Flax cut it in chunks.
        start: Where what stands for it begins.
    """

    spec: ArraySpec
    runs: tuple[tuple[int, int], ...]
    start: int


def scan(window: FileWindow, start: int = 0) -> tuple[object, int]:
    """The value that begins at an offset, with a `FoundArray` for each array in it, and where it ends.

    `ValueError` for what Flax does not write, or cannot be read safely.
    """
    scanner = Scanner(window, start)
    return scanner.value(0, 0), scanner.at


def scan_whole(window: FileWindow) -> object:
    """The value that a file consists of, as `scan` gives it. `ValueError` if there is anything behind it."""
    found, end = scan(window)
    if end != window.size:
        raise ValueError(f"its contents end at byte {end:,}, but it has {window.size:,} bytes")
    return found


def begins_a_dict(start: bytes) -> bool:
    """Whether these first bytes of a file can be those of a dict whose first key is a string."""
    sizes = {0xDE: 2, 0xDF: 4}
    if not 0x80 <= start[0] < 0x90 and start[0] not in sizes:
        return False
    key = start[1 + sizes.get(start[0], 0) :][:1]
    return 0xA0 <= key[0] < 0xC0 or 0xD9 <= key[0] <= 0xDB if key else start == b"\x80"


class Scanner:
    """Reads one value after the other. `at` is where the next one begins."""

    def __init__(self, window: FileWindow, at: int) -> None:
        self.at = at
        self._window = window
        self._values = self._named = 0
        self._in_extension = False

    def value(self, depth: int, named: int) -> object:
        """The next value. `named` is the number of characters in the names on the way to it."""
        start = self.at
        self._values += 1
        if self._values > _MOST_VALUES or depth > _DEEPEST:
            raise ValueError(f"it holds more than {_MOST_VALUES:,} values, or more than {_DEEPEST} levels")
        tag = self._take(1)[0]
        if 0x80 <= tag < 0x90:
            return self._dict(tag & 15, depth, named, start)
        if 0x90 <= tag < 0xA0:
            return self._list(tag & 15, depth, named)
        if tag in (0xDC, 0xDD):
            return self._list(self._number(2 << (tag - 0xDC)), depth, named)
        if tag in (0xDE, 0xDF):
            return self._dict(self._number(2 << (tag - 0xDE)), depth, named, start)
        self._named += named + depth
        if self._named > _MOST_NAMED:
            raise ValueError(f"the names of its leaves have more than {_MOST_NAMED:,} characters")
        return self._leaf(tag, start)

    def _leaf(self, tag: int, start: int) -> object:
        if tag < 0x80 or tag >= 0xE0:
            return tag if tag < 0x80 else tag - 0x100
        if tag < 0xC0:
            return self._text(tag & 31)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _NUMBERS:
            return struct.unpack(_NUMBERS[tag], self._take(struct.calcsize(_NUMBERS[tag])))[0]
        if 0xD9 <= tag <= 0xDB:
            return self._text(self._number(1 << (tag - 0xD9)))
        if 0xC4 <= tag <= 0xC6:
            return self._take(self._number(1 << (tag - 0xC4)))
        if 0xC7 <= tag <= 0xC9:
            return self._extension(self._number(1 << (tag - 0xC7)), start)
        if 0xD4 <= tag <= 0xD8:
            return self._extension(1 << (tag - 0xD4), start)
        raise ValueError(f"byte {start:,} is not valid MessagePack")

    def _take(self, count: int) -> bytes:
        data = self._window.read(self.at, count)
        self.at += count
        return data

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _text(self, length: int) -> str:
        return self._take(length).decode()

    def _list(self, count: int, depth: int, named: int) -> list[object]:
        self._expect(count)
        return [self.value(depth + 1, named + 4) for _ in range(count)]

    def _dict(self, count: int, depth: int, named: int, start: int) -> object:
        self._expect(2 * count)
        found: dict[str, object] = {}
        for _ in range(count):
            key = self.value(depth + 1, 0)
            if not isinstance(key, str):
                raise ValueError(f"a key before byte {self.at:,} is not a string")
            if key in found:
                raise ValueError(f"a dict has the key {key[:80]!r} twice")
            found[key] = self.value(depth + 1, named + len(key))
        return _join_chunks(found, start) if _CHUNKED in found else found

    def _expect(self, count: int) -> None:
        """Refuse more values than there are bytes left."""
        if count > self._window.size - self.at:
            raise ValueError(f"before byte {self.at:,} it declares {count:,} values, more than the file has bytes")

    def _extension(self, length: int, start: int) -> object:
        kind = self._take(1)[0]
        end = self.at + length
        if kind not in _EXTENSIONS:
            raise ValueError(f"the extension at byte {start:,} has type {kind}, which Flax does not write")
        if end > self._window.size or self._in_extension:  # one inside another has no end of its own
            raise ValueError(f"the value at byte {start:,} does not end before byte {end:,}")
        self._in_extension = True
        found = _EXTENSIONS[kind](self, start)
        self._in_extension = False
        if self.at != end:
            raise ValueError(f"the value at byte {start:,} does not have its declared length")
        return found

    def array(self, start: int) -> FoundArray:
        """The content of an array: its shape, the name of its dtype, and its bytes, which are passed over."""
        if self._take(1)[0] != 0x93:
            raise ValueError(f"there is no array at byte {start:,}")
        shape, name = _all_of(int, self.value(_DEEPEST - 1, 0)), self.value(_DEEPEST - 1, 0)
        name = name.decode("ascii", "replace") if isinstance(name, bytes) else name
        if shape is None or not isinstance(name, str):
            raise ValueError(f"the array at byte {start:,} has no shape or no dtype")
        spec = ArraySpec(tuple(shape), _dtype(name))
        tag = self._take(1)[0]
        if not 0xC4 <= tag <= 0xC6 or not is_possible(shape, spec.dtype.itemsize):
            raise ValueError(f"the array at byte {start:,} has the invalid shape {tuple(shape)}")
        length = self._number(1 << (tag - 0xC4))
        if length != spec.nbytes or self.at + length > self._window.size:
            raise ValueError(
                f"the array at byte {start:,} has {length:,} bytes, with room for {self._window.size - self.at:,}, "
                f"but {name}{list(shape)} has {spec.nbytes:,}"
            )
        self.at += length
        return FoundArray(spec, ((self.at - length, length),), start)

    def scalar(self, start: int) -> np.generic:
        """A NumPy scalar: a small array without axes."""
        found = self.array(start)
        ((offset, length),) = found.runs
        if found.spec.shape:
            raise ValueError(f"the scalar at byte {start:,} has the shape {found.spec.shape}")
        return np.frombuffer(self._window.read(offset, length), found.spec.dtype)[0]

    def complex_number(self, start: int) -> complex:
        """A complex number: a list of two floats."""
        parts = _all_of(float, self.value(_DEEPEST - 1, 0))
        if parts is None or len(parts) != 2:
            raise ValueError(f"the complex number at byte {start:,} does not have two parts")
        return complex(*parts)


def _all_of(kind: type[_Value], values: object) -> list[_Value] | None:
    """The values, if they are a list of this type."""
    if not isinstance(values, list):
        return None
    found = [value for value in cast("list[object]", values) if type(value) is kind]
    return cast("list[_Value]", found) if len(found) == len(cast("list[object]", values)) else None


def _dtype(name: str) -> DType:
    try:
        return dtype_from_name(name)
    except ValueError:
        raise ValueError(f"it holds an array of dtype {name[:80]!r}, which is not numeric") from None


def _join_chunks(stored: dict[str, object], start: int) -> FoundArray:
    """The array that Flax has cut in chunks: flat arrays, in order."""
    shape = _all_of(int, _in_order(stored.get("shape")))
    chunks = _all_of(FoundArray, _in_order(stored.get("chunks")))
    if not chunks or not shape:
        raise ValueError(f"the chunked array at byte {start:,} has no chunks or no shape")
    dtype = chunks[0].spec.dtype
    spec = ArraySpec(tuple(shape), dtype)
    whole = all(chunk.spec.dtype == dtype and len(chunk.spec.shape) == len(chunk.runs) == 1 for chunk in chunks)
    runs = tuple(run for chunk in chunks for run in chunk.runs)
    if not whole or not is_possible(shape, dtype.itemsize) or spec.nbytes != sum(length for _, length in runs):
        raise ValueError(f"the chunks of the array at byte {start:,} do not cover its shape {tuple(shape)}")
    return FoundArray(spec, runs, start)


def _in_order(numbered: object) -> list[object]:
    """The values of a dict with the keys "0", "1", ...; empty if it is something else."""
    found = cast("dict[str, object]", numbered) if isinstance(numbered, dict) else {}
    keys = [str(i) for i in range(len(found))]
    return [found[key] for key in keys] if found.keys() == set(keys) else []


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d",
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_EXTENSIONS: dict[int, _Unpack] = {
    _NDARRAY: Scanner.array,
    _COMPLEX: Scanner.complex_number,
    _SCALAR: Scanner.scalar,
}
