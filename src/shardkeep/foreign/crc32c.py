"""CRC-32C, which OCDBT and zarr v3 put after what they describe. In NumPy: nothing that is needed otherwise has it."""

from functools import lru_cache

import numpy as np

from shardkeep.model.arrays import Array

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_LANE = 256  # bytes that follow each other in one lane: so many steps are made for data of any length
_SMALL = 4 * _LANE  # below, plain Python is faster


def crc32c(data: bytes | memoryview) -> int:
    """The checksum of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    state = 0xFFFFFFFF
    lanes = len(data) // _LANE if len(data) >= _SMALL else 0
    if lanes:
        state = _lanes(np.frombuffer(data, np.uint8, lanes * _LANE).reshape(lanes, _LANE), state)
    table = _table()[1]
    for byte in bytes(data[lanes * _LANE :]):
        state = table[(state ^ byte) & 255] ^ state >> 8
    return state ^ 0xFFFFFFFF


def _lanes(rows: Array, state: int) -> int:
    """The state after rows of bytes: that of all rows at once, byte by byte, and then put together."""
    table = _table()[0]
    states = np.zeros(len(rows), np.uint32)
    states[0] = state
    for column in np.ascontiguousarray(rows.T):
        states = table[(states ^ column) & 255] ^ states >> 8
    shift = _shift()
    found = 0
    for each in states.tolist():  # what precedes a row is moved past its bytes
        found = shift[0][found & 255] ^ shift[1][found >> 8 & 255] ^ shift[2][found >> 16 & 255] ^ shift[3][found >> 24]
        found ^= each
    return found


@lru_cache(maxsize=1)
def _table() -> tuple[Array, list[int]]:
    """What a byte does to the state, as an array and as a list."""
    states = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        states = np.where(states & 1, states >> 1 ^ np.uint32(_POLYNOMIAL), states >> 1).astype(np.uint32)
    return states, states.tolist()


@lru_cache(maxsize=1)
def _shift() -> list[list[int]]:
    """What as many zero bytes as a lane has make of a state, by its four bytes."""
    table = _table()[0]
    tables: list[list[int]] = []
    for byte in range(4):
        states = np.arange(256, dtype=np.uint32) << np.uint32(8 * byte)
        for _ in range(_LANE):
            states = table[states & 255] ^ states >> 8
        tables.append(states.tolist())
    return tables
