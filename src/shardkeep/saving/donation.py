"""Detects whether the training loop donates its arrays, and copies them for background saves if it does.

A snapshot made of views is free until the loop donates the arrays. XLA then has to allocate new memory for the next
state, and touching new memory for the first time takes much longer than copying. Saves therefore check whether arrays
are donated while they are being saved. If so, later saves copy the arrays into memory that is reused from save to save,
and XLA gets its memory back immediately.
"""

import heapq
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from shardkeep.model.arrays import Array
from shardkeep.runtime.budget import budget
from shardkeep.runtime.crew import Crew, Task
from shardkeep.runtime.hostmemory import PAGE, Shard, aligned_empty, lay_out, release_freed
from shardkeep.saving.transfer import AnyShard
from shardkeep.system import after_fork_in_child

_COPY_FROM = 64 << 20  # below this size, allocating new memory is fast enough
_WATCHED = 4  # arrays: one alone may be a constant that no step replaces
_WATCHED_BYTES = 4 << 20  # they are copied at every save, which takes less than a millisecond
_PART = 16 << 20  # bytes that one task copies: enough to outweigh handing out the task
# Seconds: XLA frees memory when a step ends, which takes milliseconds or seconds.
_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_LOOK = 0.01  # seconds between two looks whether the next save has begun


class Donations:
    """What is known about the training loop, and the owner of the memory for copies of its arrays.

    What it keeps for the next save is idle memory of the budget: a load that needs it gets it.
    """

    def __init__(self) -> None:
        self.expected = False
        self._free: list[Array] = []  # at most one
        self._wanted = 0
        self._preparing = threading.RLock()
        self._hurry = False

    def watch(self, sized: Iterable[tuple[int, jax.Array]]) -> list[jax.Array]:
        """Choose a few small arrays to check again after the save.

        They are always copied: whether an array was donated cannot be told while a view of it exists.
        """
        chosen: list[jax.Array] = []
        left = _WATCHED_BYTES
        fitting = ((nbytes, number, array) for number, (nbytes, array) in enumerate(sized) if 0 < nbytes <= left)
        for nbytes, _, array in heapq.nsmallest(_WATCHED, fitting):
            left -= nbytes
            if left >= 0:
                chosen.append(array)
        return chosen

    def learn(self, watched: Sequence[jax.Array], shards: Sequence[AnyShard] = ()) -> None:
        """Check whether the watched arrays were donated during the save; the next save acts accordingly."""
        if watched:
            self.expected = any(array.is_deleted() for array in watched)
        copied = [shard.data.nbytes for shard in shards if not shard.private] if self.expected else ()
        self._wanted = lay_out(copied)[1] if copied else 0
        if not self.expected:
            self._free.clear()

    def settle(self, shards: Sequence[AnyShard], crew: Crew) -> tuple[tuple[AnyShard, ...], Array | None]:
        """Shards that nothing can change or donate, and the memory of the copied ones, to be passed to `give_back`."""
        nbytes = sum(shard.nbytes for shard in shards if not shard.private) if self.expected else 0
        all_of_them = nbytes >= _COPY_FROM
        copied = [not shard.private and (all_of_them or not shard.stable) for shard in shards]
        if not any(copied):
            return tuple(shards), None
        starts, total = lay_out([shard.data.nbytes for shard, copy in zip(shards, copied, strict=True) if copy])
        memory = self._take(total)
        tasks: list[Task] = []
        settled: list[AnyShard] = []
        places = iter(starts)
        for shard, copy in zip(shards, copied, strict=True):
            if not copy:
                settled.append(shard)
                continue
            start = next(places)
            raw, target = shard.data.reshape(-1).view(np.uint8), memory[start : start + shard.data.nbytes]
            settled.append(Shard(target.view(shard.data.dtype).reshape(shard.data.shape), stable=True))
            for at in range(0, raw.size, _PART):
                tasks.append(partial(np.copyto, target[at : at + _PART], raw[at : at + _PART]))
        crew.run(tasks)
        return tuple(settled), memory

    def _take(self, total: int) -> Array:
        self._hurry = True
        with self._preparing:
            self._hurry, self._wanted = False, 0
        with suppress(IndexError):
            memory = self._free.pop()
            if total <= memory.size <= 2 * total:
                return memory
            del memory  # free it before allocating new memory
        if self.expected and total >= _COPY_FROM:  # as in `prepare`, which was interrupted
            release_freed()
        return aligned_empty(total)

    def prepare(self) -> None:
        """Allocate and touch the memory for the next save in advance."""
        with self._preparing:
            wanted, self._wanted = self._wanted, 0
            if wanted >= _COPY_FROM and not self._free:
                freed = 0
                for pause in _PAUSES:  # the snapshot kept as much memory from XLA; a step may still be using it
                    if self._is_disturbed(pause):
                        return
                    freed += release_freed()
                    if freed >= wanted // 2:
                        break
                memory = aligned_empty(wanted)
                for start in range(0, memory.size, _PART):
                    if self._is_disturbed():  # the next save touches the rest, on all its threads
                        break
                    memory[start : start + _PART : PAGE] = 0
                self.give_back(memory)

    def _is_disturbed(self, pause: float = 0.0) -> bool:
        """Whether the next save starts or the program ends within `pause` seconds."""
        until = time.monotonic() + pause
        while not self._hurry and threading.main_thread().is_alive():
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _LOOK))
        return True

    def give_back(self, memory: Array | None) -> None:
        """Keep one block of memory for the next save while donations are expected."""
        if memory is not None and _COPY_FROM <= memory.size <= budget.limit and self.expected:
            self._free[:] = [memory]

    @property
    def nbytes(self) -> int:
        """The size of the memory that is kept for the next save."""
        return sum(memory.size for memory in tuple(self._free))

    def drop(self) -> None:
        """Release what is kept for the next save, which then takes new memory."""
        self._free.clear()


@dataclass(eq=False)
class Staging:
    """The memory of one snapshot that outlives the call. Add it to a `Scope`, which gives the memory back.

    Args:
        crew: The threads that copy.
        copy: Whether to copy every array, and not only what the program could change.
    """

    crew: Crew
    copy: bool = False
    watched: list[jax.Array] = field(default_factory=list[jax.Array])  # to find out whether the loop donates its arrays
    _shards: tuple[AnyShard, ...] | None = None
    _memory: Array | None = None

    def settle(self, shards: Sequence[AnyShard]) -> tuple[tuple[AnyShard, ...], Array | None]:
        """Shards that nothing can change or donate, and the memory of the copied ones."""
        if self.copy:
            shards = [shard if shard.private else Shard(shard.data, stable=False) for shard in shards]
        self._shards, self._memory = donations.settle(shards, self.crew)
        return self._shards, self._memory

    def release(self) -> None:
        """Note whether the loop donates its arrays, and give the memory back."""
        watched, shards, memory = self.watched, self._shards, self._memory
        self.watched, self._shards, self._memory = [], None, None
        if shards is not None and (watched or memory is not None):
            donations.learn(watched, shards)
            donations.give_back(memory)


donations = Donations()
budget.add_idle(donations)
after_fork_in_child(donations.__init__)
