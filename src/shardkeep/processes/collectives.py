"""Data that goes through JAX's collectives: as plain bytes, in bounded pieces. All processes must make each call.

Collectives on numbers change some of them: sums turn -0.0 into 0.0, small floats lose the payload of NaNs, and those on
2-bit integers corrupt memory. Bytes arrive as they were sent.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardkeep.errors import ProcessError
from shardkeep.jaxapi import private_part, process_count, process_index, service_error, transfers_allowed
from shardkeep.model.arrays import Array, Region, common_slices
from shardkeep.processes.assignment import share_out
from shardkeep.runtime.hostmemory import aligned_empty

_SENT = 64 << 20  # bytes that go through one collective


def send_from_leader(array: Array, limit: int = _SENT) -> Array:
    """The leader's array on every process. The others pass one of the same shape and dtype, whose values are ignored.

    Args:
        array: The array.
        limit: The most bytes to send at once.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    memory = aligned_empty(raw.size)
    with _explained("sent to all processes"):
        for start in range(0, raw.size, limit):
            part = np.asarray(multihost_utils.broadcast_one_to_all(raw[start : start + limit]))
            memory[start : start + part.size] = part
    return memory.view(array.dtype).reshape(array.shape)


def gather_bytes(mine: Array, lengths: Sequence[int], keep: bool = True) -> list[Array]:
    """The bytes of every process, by its index.

    Args:
        mine: The bytes of this process.
        lengths: How many each process has.
        keep: Whether this process wants them. If not, it takes part and gets an empty list.
    """
    gathered: list[Array] = [np.empty(length, np.uint8) for length in lengths] if keep else []
    step = max(_SENT // len(lengths), 1)
    with _explained("gathered"):
        for start in range(0, max(lengths), step):
            sent = np.zeros(min(step, max(lengths) - start), np.uint8)
            sent[: max(mine.size - start, 0)] = mine[start : start + sent.size]
            everyones = np.asarray(multihost_utils.process_allgather(sent))
            for row, target in zip(everyones, gathered, strict=False):
                part = target[start : start + sent.size]
                part[...] = row[: part.size]
    return gathered


def gather_lengths(length: int) -> list[int]:
    """The numbers of all processes, by their index."""
    size = process_count()
    rows = gather_bytes(np.array([length], np.int64).view(np.uint8), [8] * size)
    return [int(row.view(np.int64)[0]) for row in rows]


def gather_array(array: jax.Array, keep: bool = True) -> Array:
    """An array that is sharded over processes, complete on each of them, or on those with `keep`."""
    index, size = process_index(), process_count()
    dtype = np.dtype(array.dtype)
    (shares,) = share_out([array], size, gathered=False)
    lengths = [sum(region.size for region, writer in shares if writer == i) * dtype.itemsize for i in range(size)]
    mine = np.empty(lengths[index], np.uint8)
    with transfers_allowed():
        parts = {Region.from_index(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        wanted = [region for region, writer in shares if writer == index]
        sent = {r: private_part(p) for r, p in parts.items() if any(r == w or r.intersect(w) for w in wanted)}
        for part in sent.values():
            part.copy_to_host_async()
        shards = {region: np.asarray(part) for region, part in sent.items()}
    filled = 0
    for region, writer in shares:
        if writer == index and region.size:
            part = mine[filled : filled + region.size * dtype.itemsize].view(dtype).reshape(region.shape)
            filled += part.nbytes
            for there, data in shards.items():
                here, inside = common_slices(region, there)
                if part[here].size:
                    part[here] = data[inside]
    rows = gather_bytes(mine, lengths, keep)
    whole: Array = np.empty(array.shape if keep else (0,), dtype)
    filled_of = [0] * size
    for region, writer in shares if keep else ():
        start, end = filled_of[writer], filled_of[writer] + region.size * dtype.itemsize
        whole[region.slices] = rows[writer][start:end].view(dtype).reshape(region.shape)
        filled_of[writer] = end
    return whole


@contextmanager
def _explained(done: str) -> Generator[None]:
    """What JAX raises if a process is gone, as a `ProcessError`. Transfers are allowed inside."""
    try:
        with transfers_allowed():
            yield
    except service_error() as error:
        raise ProcessError(f"another process ended while arrays were being {done} ({error})") from error
