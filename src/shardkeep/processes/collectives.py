"""Data that goes through JAX's collectives: as plain bytes, in bounded pieces. All processes must make each call.

Collectives on numbers change some of them: sums turn -0.0 into 0.0, small floats lose the payload of NaNs, and those on
2-bit integers corrupt memory. Bytes arrive as they were sent. One device of each process takes part, with at most
`SENT` bytes at a time, however many processes there are.
"""

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkeep.errors import ProcessError
from shardkeep.jaxapi import (
    device_put,
    jit,
    own_computation,
    permute,
    private_part,
    process_count,
    process_index,
    service_error,
    transfers_allowed,
)
from shardkeep.model.arrays import Array, Region, common_slices
from shardkeep.processes.assignment import share_out
from shardkeep.runtime.hostmemory import aligned_empty

SENT = 64 << 20  # bytes on a device in one collective: more are not faster, and models leave devices little memory
_AXIS = "processes"
_STATUS = re.compile("[A-Z_]+: ")  # errors of compiled code that JAX has called before begin so, and are ValueErrors


def send_from_leader(array: Array, limit: int = SENT) -> Array:
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


def share_bytes(
    streams: Sequence[Iterable[Array]], lengths: Sequence[int], processes: tuple[int, ...], limit: int = SENT
) -> None:
    """Give each of some processes the bytes that the others of them have. Only these processes make the call.

    Args:
        streams: For each of the processes the memory of its bytes, as uint8 arrays: those of this process are sent, and
            those of the others are filled. An iterator goes on when an array is full.
        lengths: How many bytes each of the processes has. They are the same on all.
        processes: Their indices.
        limit: The most bytes on a device.
    """
    cursors = [_Cursor(stream) for stream in streams]
    mine = cursors[processes.index(process_index())]
    with _explained("sent to other processes"):
        mesh = _mesh_of(processes)
        for row in _row_sizes(max(lengths), limit // len(processes)):
            sent = aligned_empty(row)
            mine.copy_to(sent)
            rows = np.asarray(_replicated(mesh)(_as_row(sent, mesh)).addressable_data(0)).reshape(-1, row)
            for cursor, received in zip(cursors, rows, strict=True):
                if cursor is not mine:
                    cursor.copy_from(received)


def gather_bytes(mine: Array, lengths: Sequence[int], leader_only: bool = False) -> list[Array]:
    """The bytes of every process, by its index.

    Args:
        mine: The bytes of this process.
        lengths: How many each process has.
        leader_only: Whether only the leader gets them, and the others an empty list.
    """
    processes = tuple(range(len(lengths)))
    if not leader_only:
        rows = [mine if process == process_index() else aligned_empty(n) for process, n in enumerate(lengths)]
        share_bytes([[row] for row in rows], lengths, processes)
        return rows
    leads = process_index() == processes[0]
    rows = [aligned_empty(n) for n in lengths] if leads else []
    cursor, cursors = _Cursor([mine]), [_Cursor([row]) for row in rows]
    with _explained("gathered"):
        mesh = _mesh_of(processes)
        for row in _row_sizes(max(lengths), SENT // _next_power(len(processes))):
            sent = aligned_empty(row)
            cursor.copy_to(sent)
            gathered = _gathered(mesh)(_as_row(sent, mesh)).addressable_data(0)
            gathered.block_until_ready()
            received = np.asarray(gathered).reshape(-1, row) if leads else ()
            for target, data in zip(cursors, received, strict=False):
                target.copy_from(data)
    return rows


def gather_lengths(length: int) -> list[int]:
    """The numbers of all processes, by their index."""
    size = process_count()
    rows = gather_bytes(np.array([length], np.int64).view(np.uint8), [8] * size)
    return [int(row.view(np.int64)[0]) for row in rows]


def gather_array(array: jax.Array, leader_only: bool = False) -> Array:
    """An array that is sharded over processes, complete on each of them; with `leader_only`, empty on the others."""
    index, size = process_index(), process_count()
    dtype = np.dtype(array.dtype)
    (shares,) = share_out([array], size, gathered=False)
    assert shares is not None, "it is an array"
    lengths = [shares.size_of(i) * dtype.itemsize for i in range(size)]
    mine = np.empty(lengths[index], np.uint8)
    with transfers_allowed():
        parts = {Region.from_index(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        wanted = shares.of(index)
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
    rows = gather_bytes(mine, lengths, leader_only)
    whole: Array = np.empty(array.shape if rows else (0,), dtype)
    filled_of = [0] * size
    for region, writer in shares if rows else ():
        start, end = filled_of[writer], filled_of[writer] + region.size * dtype.itemsize
        whole[region.slices] = rows[writer][start:end].view(dtype).reshape(region.shape)
        filled_of[writer] = end
    return whole


class _Cursor:
    """A place in bytes that are scattered over several arrays, from the start to the end."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._rest = iter(arrays)
        self._left: Array | None = next(self._rest, None)

    def copy_to(self, memory: Array) -> None:
        """Copy the next bytes, as many as there are and fit."""
        for part, place in self._next(memory):
            place[...] = part

    def copy_from(self, memory: Array) -> None:
        """Fill the next bytes."""
        for part, data in self._next(memory):
            part[...] = data

    def _next(self, memory: Array) -> Generator[tuple[Array, Array]]:
        while self._left is not None and memory.size:
            left = self._left
            count = min(left.size, memory.size)
            yield left[:count], memory[:count]
            memory = memory[count:]
            self._left = left[count:] if count < left.size else next(self._rest, None)


def _row_sizes(longest: int, limit: int) -> list[int]:
    """The bytes that each process sends in one collective after another. Powers of two: few programs are compiled."""
    most = _next_power(limit + 1) // 2 or 1
    left = longest % most
    return [most] * (longest // most) + ([_next_power(left)] if left else [])


def _next_power(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def _mesh_of(processes: tuple[int, ...]) -> Mesh:
    """One device of each process."""
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[process] for process in processes]), (_AXIS,))


def _as_row(row: Array, mesh: Mesh) -> jax.Array:
    """An array with a row of each process, on its device."""
    here = device_put(row, mesh.local_devices[0])
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    return jax.make_array_from_single_device_arrays((mesh.size * row.size,), sharding, [here])


@lru_cache(maxsize=256)
def _replicated(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """A function that gives each device all rows."""
    return jit(_same, NamedSharding(mesh, PartitionSpec()))


def _same(x: jax.Array) -> jax.Array:
    return x


@lru_cache(maxsize=16)
def _gathered(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """A function that brings all rows to the first device, and none to a device that need not pass it on.

    In each of log2(n) steps every second of the devices that still have rows sends all of them to the one before. What
    the other devices hold in the end is of no use.
    """
    count = mesh.size

    def collect(rows: jax.Array) -> jax.Array:
        step = 1
        while step < count:
            pairs = [(sender, sender - step) for sender in range(step, count, 2 * step)]
            rows = jnp.concatenate([rows, permute(rows, _AXIS, pairs)])
            step *= 2
        return rows

    spec = PartitionSpec(_AXIS)
    return jit(jax.shard_map(collect, mesh=mesh, in_specs=spec, out_specs=spec), NamedSharding(mesh, spec))


@contextmanager
def _explained(done: str) -> Generator[None]:
    """What JAX raises if a process is gone, as a `ProcessError`. Transfers and computations are allowed inside."""
    try:
        with own_computation():
            yield
    except (service_error(), ValueError) as error:
        if isinstance(error, ValueError) and not _STATUS.match(str(error)):
            raise
        raise ProcessError(f"another process ended while arrays were being {done} ({error})") from error
