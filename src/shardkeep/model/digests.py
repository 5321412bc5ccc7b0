"""Digests of host memory: 128-bit XXH3 of raw bytes, one per fixed-size block, so that a part can be checked alone."""

from collections.abc import Iterator

import xxhash

from shardkeep.errors import IntegrityError

# Small enough to stay in the cache between hashing and copying, large enough that digests take no space to speak of.
BLOCK = 4 << 20

ALGORITHM = "xxh3-128"

_BEFORE_SEAL = b'digest":"'


def digest(data: "memoryview | bytes | bytearray") -> str:
    """The digest of one block.

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def block_count(nbytes: int) -> int:
    """The number of blocks in `nbytes`, and so of digests.

    >>> block_count(BLOCK + 1)
    2
    """
    return -(-nbytes // BLOCK)


def blocks(first: int, last: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """The (number, start, end) of each block from `first` up to, but not including, `last`, out of `nbytes`."""
    for number in range(first, last):
        yield number, number * BLOCK, min((number + 1) * BLOCK, nbytes)


def seal(text: bytes) -> bytes:
    """A document that contains its own digest: the 32 zeros after `digest":"` in `text` are replaced by it."""
    at = text.index(_BEFORE_SEAL) + len(_BEFORE_SEAL)
    return text[:at] + xxhash.xxh3_128_hexdigest(text).encode() + text[at + 32 :]


def check_seal(document: bytes, where: str) -> None:
    """Raise `IntegrityError` unless `document` is exactly what `seal` returned. `where` names it in the message."""
    at = document.find(_BEFORE_SEAL, 0, 200) + len(_BEFORE_SEAL)
    if (
        at < len(_BEFORE_SEAL)
        or digest(document[:at] + b"0" * 32 + document[at + 32 :]).encode() != document[at : at + 32]
    ):
        raise IntegrityError(f"{where} is damaged: it does not match its own digest", file=where)
