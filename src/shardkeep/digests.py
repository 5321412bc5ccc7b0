"""Digests of host memory: 128-bit XXH3 over raw bytes, in fixed blocks so that a part can be checked alone."""

from collections.abc import Iterator

import xxhash

from shardkeep.errors import IntegrityError

BLOCK = 4 << 20  # small enough to stay in cache between hashing and copying, large enough that digests weigh nothing

ALGORITHM = "xxh3-128"

_BEFORE_SEAL = b'digest":"'


def digest(data: "memoryview | bytes | bytearray") -> str:
    """The digest of one block.

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def block_count(nbytes: int) -> int:
    """How many blocks (so how many digests) `nbytes` have."""
    return -(-nbytes // BLOCK)


def blocks(first: int, last: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of blocks `first` to `last` of something `nbytes` long."""
    for number in range(first, last):
        yield number, number * BLOCK, min((number + 1) * BLOCK, nbytes)


def seal(text: bytes) -> bytes:
    """A document that names its own digest: `text` with its 32 zeros after `digest":"` filled in."""
    at = text.index(_BEFORE_SEAL) + len(_BEFORE_SEAL)
    return text[:at] + xxhash.xxh3_128_hexdigest(text).encode() + text[at + 32 :]


def check_seal(document: bytes, where: str) -> None:
    """`IntegrityError` unless `document` is exactly what `seal` made."""
    at = document.find(_BEFORE_SEAL, 0, 200) + len(_BEFORE_SEAL)
    if (
        at < len(_BEFORE_SEAL)
        or digest(document[:at] + b"0" * 32 + document[at + 32 :]).encode() != document[at : at + 32]
    ):
        raise IntegrityError(f"{where} is damaged: it does not match its own digest")
