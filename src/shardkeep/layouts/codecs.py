"""Codecs: how the bytes of a piece are stored in its file."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import zstandard

from shardkeep.model.arrays import Array


class Codec(Protocol):
    """A way to store bytes. Those of a piece that is encoded are stored, and read, all at once."""

    @property
    def name(self) -> str | None:
        """Its name in the manifest; None if it has none there."""
        ...

    @property
    def level(self) -> int | None:
        """The compression level, which `.zarray` files record; None if nothing is compressed."""
        ...

    def encode(self, raw: memoryview) -> memoryview:
        """The bytes to store."""
        ...

    def decode(self, stored: Array, memory: Array) -> None:
        """Fill `memory` with the decoded bytes; `ValueError` if there are more or fewer, or they are damaged."""
        ...


@dataclass(frozen=True)
class Raw:
    """Bytes as they are. Their place in a file is known before they are written."""

    name: None = None
    level: None = None

    def encode(self, raw: memoryview) -> memoryview:
        return raw

    def decode(self, stored: Array, memory: Array) -> None:
        if stored.size != memory.size:
            raise ValueError(f"it has {stored.size:,} bytes instead of {memory.size:,}")
        memory[...] = stored


@dataclass(frozen=True)
class Zstd:
    """Bytes compressed with Zstandard."""

    name: str = "zstd"
    level: int = 1

    def encode(self, raw: memoryview) -> memoryview:
        return memoryview(zstandard.ZstdCompressor(level=self.level).compress(raw))

    def decode(self, stored: Array, memory: Array) -> None:
        view = memoryview(memory.data)
        filled = 0
        try:
            with zstandard.ZstdDecompressor().stream_reader(stored.data) as reader:
                while filled < memory.size:
                    count = reader.readinto(view[filled:])  # pyright: ignore[reportUnknownMemberType]  (its parameter)
                    if not count:
                        break
                    filled += count
                complete = filled == memory.size and not reader.read(1)  # never beyond the declared size
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        if not complete:
            raise ValueError(f"it does not decompress to {memory.size:,} bytes")


@dataclass(frozen=True)
class Nibbles:
    """Two 4-bit values per byte, the low half first, as other programs write them; in memory each has a byte."""

    name: None = None
    level: None = None

    def encode(self, raw: memoryview) -> memoryview:
        values = np.frombuffer(raw, np.uint8)
        return memoryview((values[0::2] | values[1::2] << 4).tobytes())

    def decode(self, stored: Array, memory: Array) -> None:
        memory[0::2] = stored & 15
        memory[1::2] = stored >> 4


RAW, ZSTD, NIBBLES = Raw(), Zstd(), Nibbles()
CODECS: dict[str | None, Codec] = {None: RAW, "zstd": ZSTD}  # by the names in manifests, which `compression=` takes


def codec_of_encoded(compression: str | None) -> Codec:
    """The codec of the pieces that are stored encoded, in a tree with this `compression`.

    >>> codec_of_encoded("zstd").level
    1
    """
    return NIBBLES if compression is None else CODECS[compression]
