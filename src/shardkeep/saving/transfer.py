"""Transfers from accelerators to host memory.

Each region that a save needs leaves exactly one of the devices that hold it; the devices are chosen so that all links
carry about the same. All transfers are started before the first is waited for, and are read from the very objects on
which they were started: JAX keeps a host copy with the array object that was asked for it, and no other finds it there.
These objects are our own, so nothing stays with the caller's arrays.

Where the device has `pinned_host` memory, and the setting allows it, a region is copied there. From the moment that
copy is enqueued the caller may donate or delete the array. Everywhere else the array must live until its data arrived.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import SingleDeviceSharding

from shardkeep.config import PINNED_HOST, read
from shardkeep.errors import HostMemoryError, TreeError
from shardkeep.jaxapi import device_put, drop_host_copies, local_parts, private_part, transfers_allowed
from shardkeep.model.arrays import Array, Region
from shardkeep.runtime.crew import Crew, Task
from shardkeep.runtime.hostmemory import Shard
from shardkeep.runtime.scopes import Latch
from shardkeep.saving.cutting import cut_on_device, is_exhausted

_ENQUEUED_AT_ONCE = 256 << 20  # bytes, by one call: after an error, they are transferred again
_PINNED = "pinned_host"

Copies = Sequence[tuple[int, Any]]  # parts of an array that have the same region: their numbers and devices


class Arriving:
    """The data of one region that is on its way from a device: a `Shard` whose data waits for it.

    Args:
        array: The array.
        copies: The parts of it that have the region: the number of each, and its device. One of them will do.
        nbytes: The size of the region.
        cut: The region within the part; None if it is all of it.
    """

    __slots__ = (
        "_array",
        "_cut",
        "_data",
        "_dtype",
        "_lock",
        "_part",
        "_sent",
        "arrived",
        "copies",
        "is_over",
        "nbytes",
    )
    stable = True
    private = True

    def __init__(self, array: jax.Array, copies: "Copies", nbytes: int, cut: Region | None = None) -> None:
        self.copies, self.nbytes = copies, nbytes
        self.arrived = 0.0  # when it had, by `time.perf_counter`
        self.is_over = False
        self._array: jax.Array | None = array
        self._cut, self._dtype = cut, np.dtype(array.dtype)
        self._part: jax.Array | None = None  # on the device
        self._sent: jax.Array | None = None  # what the transfer was started on
        self._data: Array | None = None
        self._lock = threading.RLock()

    @property
    def is_started(self) -> bool:
        return self._sent is not None or self.arrived > 0 or self.is_over

    @property
    def is_safe(self) -> bool:
        """Whether the caller may donate the array."""
        return self.arrived > 0 or (self._sent is not None and self._sent is not self._part)

    def take_part(self, number: int) -> jax.Array:
        """Choose the part, and return what has to be transferred of it."""
        assert self._array is not None
        part = local_parts(self._array, number + 1)[number]
        piece = None if self._cut is None else cut_on_device(part, self._cut)
        if piece is not None:
            part, self._cut = piece, None
        self._part = part
        return part

    def start(self) -> None:
        """Start the transfer to ordinary host memory."""
        assert self._part is not None
        self._part = sent = private_part(self._part)
        sent.copy_to_host_async()
        self._sent, self._array = sent, None

    def note_pinned(self, sent: jax.Array) -> None:
        """Its copy to pinned memory is enqueued."""
        self._sent, self._array = sent, None

    @property
    def data(self) -> Array:
        """The data in host memory. Waits for it."""
        found = self._data
        if found is not None:
            return found
        with transfers_allowed():
            return self._receive()

    def wait(self) -> None:
        """Wait for the data if it is on its way. The caller has allowed transfers, once for many of them."""
        with self._lock:
            if self._sent is not None:
                self._receive()

    def _receive(self) -> Array:
        """Wait for the data, and let go of the array on the device."""
        with self._lock:
            if self._data is None:
                assert self._sent is not None, "it was not started, or is released"
                self._data = self._form(self._read(self._sent))
                self.arrived = time.perf_counter()
                if self._sent is self._part:
                    self._sent = None  # the copy in ordinary memory is the array's own
                self._part = None
            return self._data

    def glance(self) -> Array:
        """The data in host memory, which is not kept if the transfer has not been started yet."""
        with self._lock:
            if self.is_started:
                return self.data
            assert self._array is not None
            number, _ = self.copies[0]
            with transfers_allowed():
                whole = np.asarray(private_part(local_parts(self._array, number + 1)[number]))
            return self._form(whole)

    def _form(self, data: Array) -> Array:
        """What was transferred as the region that it is of: contiguous, with the dtype of the array."""
        if self._cut is not None:
            data = data[self._cut.slices]
        return (data if data.flags.c_contiguous else np.array(data, order="C", copy=True)).view(self._dtype)

    def _read(self, sent: jax.Array) -> Array:
        try:
            return np.asarray(sent)
        except JaxRuntimeError as error:
            part = self._part
            if sent is part or part is None or not is_exhausted(error):
                error.add_note(f"shardkeep was transferring {self.nbytes:,} bytes of an array that is being saved")
                raise
            if part.is_deleted():
                raise HostMemoryError(
                    "the pinned host memory was exhausted after save_async had returned, and the arrays have been "
                    "donated or deleted since; nothing was committed. Set SHARDKEEP_PINNED_HOST=never, or give JAX "
                    f"more pinned memory ({error})"
                ) from error
            self._sent = self._part = private_part(part)
            return np.asarray(self._part)

    def release(self) -> None:
        """Let go of the host memory. The data is written, or never will be."""
        with self._lock:
            self.is_over = True
            self._data = self._sent = self._part = self._array = None


AnyShard: TypeAlias = Shard | Arriving


class Transfers:
    """The transfers of one save. Add it to a `Scope`, which lets go of what they hold.

    Attributes:
        room: The host memory in bytes that they may take at a time; None if there is enough for all at once.
    """

    def __init__(self) -> None:
        self.room: int | None = None
        self._all: list[Arriving] = []
        self._load: Counter[Any] = Counter()  # bytes by device
        self._enqueued = Latch()  # all are, or never will be
        self._is_cancelled = False
        self._exhausted: set[Any] = set()  # devices whose pinned memory is

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def nbytes(self) -> int:
        return _size_of(self._all)

    @property
    def in_batches(self) -> bool:
        """Whether they are started bit by bit, while what has arrived is written."""
        return self.room is not None and self.nbytes > self.room

    def add(self, arriving: Arriving) -> Arriving:
        self._all.append(arriving)
        return arriving

    def start(self, some: Sequence[Arriving] | None = None) -> None:
        """Start these, by default all, without waiting for any."""
        if self._is_cancelled:
            raise TreeError("save_async was interrupted before it had transferred all arrays; nothing was committed")
        todo = [arriving for arriving in (self._all if some is None else some) if not arriving.is_started]
        with transfers_allowed():
            pinned: list[tuple[Arriving, jax.Array, Any]] = []
            ordinary: list[Arriving] = []
            staged = {device for arriving in todo for _, device in arriving.copies} - self._exhausted
            staged = set(filter(_has_pinned_memory, staged))
            for arriving, number, device in self._choose(todo):
                part = arriving.take_part(number)
                if device in staged:
                    pinned.append((arriving, part, device))
                else:
                    ordinary.append(arriving)
            ordinary += self._stage(pinned)
            for arriving in ordinary:
                arriving.start()
        if all(arriving.is_started for arriving in self._all):
            self._enqueued.set()

    def _choose(self, todo: Sequence[Arriving]) -> list[tuple[Arriving, int, Any]]:
        """A part, and the device it is on, for each: those without a choice first, then the largest."""
        chosen: list[tuple[Arriving, int, Any]] = []
        for arriving in sorted(todo, key=lambda each: (len(each.copies) > 1, -each.nbytes)):
            number, device = min(arriving.copies, key=lambda copy: self._load[copy[1]])
            self._load[device] += arriving.nbytes
            chosen.append((arriving, number, device))
        return chosen

    def _stage(self, todo: Sequence[tuple[Arriving, jax.Array, Any]]) -> list[Arriving]:
        """Enqueue copies to pinned memory; returns those for which there is none left."""
        left: list[Arriving] = []
        for group in _groups(todo):
            places = [SingleDeviceSharding(device, memory_kind=_PINNED) for _, _, device in group]
            try:
                copies = [] if left else device_put([part for _, part, _ in group], places)
            except JaxRuntimeError as error:
                if not is_exhausted(error):
                    raise
                copies = []
                self._exhausted.update(device for _, _, device in group)
            for (arriving, _, _), copy in zip(group, copies, strict=False):
                arriving.note_pinned(copy)
            left += [arriving for arriving, _, _ in group[len(copies) :]]
        return left

    def wait(self, until_safe: bool = False) -> None:
        """Wait until all data has arrived. In batches, this waits for the thread that writes to start the last one.

        Args:
            until_safe: Only wait until the caller may donate or delete every array.
        """
        if self.in_batches:
            self._enqueued.wait()
        with transfers_allowed():
            for arriving in self._all:
                if not (until_safe and arriving.is_safe):
                    arriving.wait()

    def arrived(self) -> float:
        """When the last one had arrived, by `time.perf_counter`."""
        return max((arriving.arrived for arriving in self._all), default=0.0)

    def cancel(self) -> None:
        """Start no more of them: the arrays may be donated now."""
        self._is_cancelled = True

    def release(self) -> None:
        """Let go of all arrays and host memory."""
        for arriving in self._all:
            arriving.release()
        self._enqueued.set()
        if self._all:
            drop_host_copies()

    def run(self, tasks: Sequence[tuple[Task, Sequence[Arriving]]], crew: Crew) -> None:
        """Run tasks that read the data of transfers, each of which is let go of after its last task.

        The transfers of one batch of tasks are under way while the tasks of the batch before it are run.
        """
        uses = _Uses(arriving for _, some in tasks for arriving in some)
        for arriving in self._all:
            if not uses.count[arriving]:
                arriving.release()
        following = self._batches(tasks)
        batch = following.pop(0)
        self.start([arriving for _, some in batch for arriving in some])
        while batch:
            upcoming = following.pop(0) if following else []
            self.start([arriving for _, some in upcoming for arriving in some])
            crew.run([partial(uses.run, task, some) for task, some in batch])
            batch = upcoming

    def _batches(self, tasks: Sequence[tuple[Task, Sequence[Arriving]]]) -> list[list[tuple[Task, Sequence[Arriving]]]]:
        """The tasks in order, in batches whose transfers take at most half of the room."""
        if not self.in_batches or self.room is None:
            return [list(tasks)]
        batches: list[list[tuple[Task, Sequence[Arriving]]]] = [[]]
        inside: set[Arriving] = set()
        filled = 0
        for task, some in tasks:
            if batches[-1] and filled + _size_of(set(some) - inside) > self.room // 2:
                batches.append([])
                inside, filled = set[Arriving](), 0
            batches[-1].append((task, some))
            filled += _size_of(set(some) - inside)
            inside.update(some)
        return batches


def _size_of(some: Iterable[Arriving]) -> int:
    return sum(arriving.nbytes for arriving in some)


class _Uses:
    """How many tasks have yet to read the data of each transfer."""

    def __init__(self, read: Iterable[Arriving]) -> None:
        self.count = Counter(read)
        self._lock = threading.Lock()

    def run(self, task: Callable[[], None], some: Sequence[Arriving]) -> None:
        task()
        with self._lock:
            self.count.subtract(some)
            over = [arriving for arriving in some if not self.count[arriving]]
        for arriving in over:
            arriving.release()


def _has_pinned_memory(device: Any) -> bool:
    """Whether arrays of this device go through pinned memory."""
    setting = read(PINNED_HOST)
    if setting == "never" or (setting == "auto" and device.platform not in ("gpu", "cuda", "rocm")):
        return False
    return any(memory.kind == _PINNED for memory in device.addressable_memories())


def _groups(todo: Sequence[tuple[Arriving, jax.Array, Any]]) -> list[list[tuple[Arriving, jax.Array, Any]]]:
    """The transfers to enqueue, those of one call together."""
    groups: list[list[tuple[Arriving, jax.Array, Any]]] = []
    room = 0
    for each in todo:
        if not groups or each[0].nbytes > room:
            groups.append([])
            room = max(_ENQUEUED_AT_ONCE, each[0].nbytes)
        groups[-1].append(each)
        room -= each[0].nbytes
    return groups
