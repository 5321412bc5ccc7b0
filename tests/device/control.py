"""What a program on the simulated device sees and sets: held transfers, counters, the log, limits.

A program that `device.runner` starts has this module's names. The library is the one that JAX has loaded.
"""

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

Direction = Literal["out", "in"]  # seen from the devices: towards the host, or towards them
Memory = Literal["device", "pinned_host"]

_DIRECTIONS = {"out": 0, "in": 1}
_MEMORIES = {"device": 1, "pinned_host": 2}


class Record(NamedTuple):
    """One line of the log. `what`: enqueued, started, finished or failed (a transfer), deleted (an array), or a mark.

    Transfers are numbered as they are enqueued. `origin` and `target` are "host", "device" or "pinned".
    """

    what: str
    transfer: int
    origin: str
    target: str
    device: int
    bytes: int


def _library() -> Any:
    library = ctypes.CDLL(os.environ["SIMULATED_LIBRARY"])
    library.simulated_permit.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.simulated_set_rate.argtypes = [ctypes.c_int, ctypes.c_double]
    library.simulated_set_capacity.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.simulated_fail_after.argtypes = [ctypes.c_int64]
    library.simulated_mark.argtypes = [ctypes.c_char_p]
    library.simulated_await.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_double]
    library.simulated_report.restype = ctypes.c_char_p
    return library


_LIBRARY = _library()


def _numbers(direction: Direction | None) -> list[int]:
    return list(_DIRECTIONS.values()) if direction is None else [_DIRECTIONS[direction]]


def hold(direction: Direction | None = None) -> None:
    """Let no further transfer begin, of one direction or of both. They can still be enqueued."""
    for number in _numbers(direction):
        _LIBRARY.simulated_hold(number)


def release(direction: Direction | None = None) -> None:
    """Let held transfers begin."""
    for number in _numbers(direction):
        _LIBRARY.simulated_release(number)


@contextmanager
def held(direction: Direction | None = None) -> Iterator[None]:
    """Transfers are held while the block runs."""
    hold(direction)
    try:
        yield
    finally:
        release(direction)


def permit(direction: Direction, count: int = 1) -> None:
    """Let this many held transfers begin, while the others stay held."""
    _LIBRARY.simulated_permit(_DIRECTIONS[direction], count)


def wait_for(counter: str, value: int, seconds: float = 60) -> None:
    """Return once a counter ("enqueued", "finished", "deleted_while_read", …) has reached a value."""
    if not _LIBRARY.simulated_await(counter.encode(), value, seconds):
        raise TimeoutError(f"{counter} is {counters().get(counter, 0)} after {seconds} s, not {value}")


def counters() -> dict[str, int]:
    """Everything that is counted, since the start or the last `reset`; what never happened is 0.

    - `enqueued`, `finished`: transfers of any kind.
    - `device_to_host`, `device_to_host_bytes`, and so on for every pair of host, device and pinned.
    - `out_under_way`, `out_most_under_way`, `out_most_bytes_under_way` (and `in_…`): enqueued and not finished.
    - `device_live_bytes`, `device_peak_bytes` (and `pinned_…`): memory in use.
    - `semantics_during_call`, `semantics_until_transfer`, `semantics_zero_copy`: what JAX promised of host memory.
    - `deleted_while_read`, `deleted_while_viewed`: arrays deleted under a transfer, or under a NumPy view.
    - `views_taken`, `views`: views of the memory of an array, all and those that still exist.
    - `allocation_failures`.
    """
    return _Counters(_report()["counters"])


class _Counters(dict[str, int]):
    """Counters of which those that were never touched are 0."""

    def __missing__(self, name: str) -> int:
        return 0


def log() -> list[Record]:
    """What happened, in order, since the start or the last `reset`."""
    return [Record(*fields) for fields in _report()["log"]]


def _report() -> dict[str, Any]:
    return json.loads(_LIBRARY.simulated_report())


def reset() -> None:
    """Begin to count and to log anew. Transfers keep their numbers. Not possible while transfers are under way."""
    if not _LIBRARY.simulated_reset():
        raise RuntimeError("transfers are under way")


def mark(text: str) -> None:
    """Put a line of the program's own into the log."""
    _LIBRARY.simulated_mark(json.dumps(text)[1:-1].encode())


def set_rate(gigabytes_per_second: float, direction: Direction | None = None) -> None:
    """Give each link a bandwidth, in 1e9 bytes per second; 0: as fast as memory allows."""
    for number in _numbers(direction):
        _LIBRARY.simulated_set_rate(number, gigabytes_per_second * 1e9)


def set_capacity(memory: Memory, size: int | None) -> None:
    """Limit what all devices of this process have together in a memory; more raises RESOURCE_EXHAUSTED."""
    _LIBRARY.simulated_set_capacity(_MEMORIES[memory], -1 if size is None else size)


def set_poison(on: bool) -> None:
    """Choose whether freed memory is filled with 0xDD and kept for a while; it is, unless a program measures time."""
    _LIBRARY.simulated_set_poison(int(on))


def set_touch(on: bool) -> None:
    """Whether memory of the devices is resident from its allocation on, so that it can be told from the host's."""
    _LIBRARY.simulated_set_touch(int(on))


def set_column_major(on: bool) -> None:
    """Choose the default layout of arrays: their first axis becomes the most minor one. Call it before any exist."""
    _LIBRARY.simulated_set_column_major(int(on))


def fail_after(others: int = 0) -> None:
    """Let one transfer fail: the one that comes after this many others, counted from now."""
    _LIBRARY.simulated_fail_after(others)


__all__ = [
    "Record",
    "counters",
    "fail_after",
    "held",
    "hold",
    "log",
    "mark",
    "permit",
    "release",
    "reset",
    "set_capacity",
    "set_column_major",
    "set_poison",
    "set_rate",
    "set_touch",
    "wait_for",
]
