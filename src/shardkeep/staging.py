"""The Snapshot: this process's shards in host memory, safe from whatever the training loop does next.

On CPU a shard is taken as a view: while the view lives, XLA leaves its buffer alone even if the array is donated
(a canary test watches that). On an accelerator it is a copy to the host. NumPy arrays can be changed by anyone,
so they are copied: at once for a save in the background, block by block while writing for one in the foreground.
"""

import logging
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from shardkeep.arrays import ArraySpec, Region, dtype_name
from shardkeep.errors import UnsupportedLeafError
from shardkeep.planning import LeafPlan
from shardkeep.tree import Leaf
from shardkeep.values import is_plain

log = logging.getLogger("shardkeep")

Array = np.ndarray[Any, Any]
_HUGE = 2 << 20
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Shard:
    """One region's data in host memory. `stable`: nobody can change it while it is written."""

    data: Array
    stable: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The leaves as they will be recorded, and the shards they are made of."""

    leaves: tuple[LeafPlan, ...]
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.data.nbytes for shard in self.shards)


def take_snapshot(leaves: Sequence[Leaf], *, keep: bool) -> Snapshot:
    """Every leaf in host memory. `keep`: the snapshot outlives the call, so mutable arrays are copied."""
    _refuse_unsupported(leaves)
    for leaf in leaves:
        if isinstance(leaf.value, jax.Array) and not _is_on_cpu(leaf.value) and not _is_prng_key(leaf.value):
            leaf.value.copy_to_host_async()  # all transfers under way before the first is waited for
    plans: list[LeafPlan] = []
    shards: list[Shard] = []
    for leaf in leaves:
        if isinstance(leaf.value, np.ndarray):
            plans.append(_stage_numpy(leaf, shards, keep))
        elif isinstance(leaf.value, jax.Array):
            plans.append(_stage_jax(leaf, shards))
        else:
            plans.append(LeafPlan(leaf.path, "value", value=leaf.value))
    return Snapshot(tuple(plans), tuple(shards))


def staged_bytes(leaves: Sequence[Leaf]) -> int:
    """How much memory a snapshot of these leaves holds on to."""
    return sum(leaf.value.nbytes for leaf in leaves if isinstance(leaf.value, jax.Array | np.ndarray))


def _stage_numpy(leaf: Leaf, shards: list[Shard], keep: bool) -> LeafPlan:
    array: Array = leaf.value
    native = array.dtype.newbyteorder("=")
    extra = {} if array.dtype == native else {"order": array.dtype.str[0]}
    spec = ArraySpec(array.shape, native)
    if keep or not array.flags.c_contiguous or extra:
        shards.append(Shard(np.array(array, dtype=native, order="C", copy=True), stable=True))
    else:
        shards.append(Shard(array, stable=False))
    held = (Region.whole(spec.shape),)
    return LeafPlan(leaf.path, "numpy", spec, extra=extra, held=held, first_held=len(shards) - 1)


def _stage_jax(leaf: Leaf, shards: list[Shard]) -> LeafPlan:
    array: jax.Array = leaf.value
    kind, extra = "jax", _sharding_record(array)
    if _is_prng_key(array):
        kind, extra = "prng", {"impl": str(jax.random.key_impl(array))}
        array = jax.random.key_data(array)
    first = len(shards)
    held: list[Region] = []
    for region, data in _held(array):
        held.append(region)
        shards.append(Shard(data, stable=True))
    spec = ArraySpec(array.shape, np.dtype(array.dtype))
    return LeafPlan(leaf.path, kind, spec, extra=extra, held=tuple(held), first_held=first)


def _held(array: jax.Array) -> list[tuple[Region, Array]]:
    """Each region this process holds, once, with its data."""
    if array.is_fully_replicated:  # one device, or the same on all
        return [(Region.whole(array.shape), _contiguous(np.asarray(array.addressable_data(0))))]
    found: dict[Region, Any] = {}
    for shard in array.addressable_shards:
        found.setdefault(Region.from_index(shard.index, array.shape), shard)
    return [(region, _contiguous(np.asarray(shard.data))) for region, shard in found.items()]


def _contiguous(data: Array) -> Array:
    return data if data.flags.c_contiguous else np.array(data, order="C", copy=True)


def _sharding_record(array: jax.Array) -> dict[str, Any]:
    """How a named sharding laid the array out, for people and for loading onto a mesh with the same axis names."""
    sharding = array.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.is_fully_replicated:
        return {}
    spec = [list(e) if isinstance(e, tuple) else e for e in cast(Any, sharding.spec)]
    if not all(isinstance(e, str | list | None) for e in spec):
        return {}
    return {"sharding": {"spec": spec, "mesh": dict(sharding.mesh.shape)}}


def _is_prng_key(array: jax.Array) -> bool:
    return is_prng_dtype(array.dtype)


def is_prng_dtype(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def _is_on_cpu(array: jax.Array) -> bool:
    return next(iter(array.sharding.device_set)).platform == "cpu"


def _refuse_unsupported(leaves: Sequence[Leaf]) -> None:
    """`UnsupportedLeafError` naming every leaf that cannot be saved, before anything happens."""
    problems = [(leaf.key, problem) for leaf in leaves if (problem := _problem(leaf.value))]
    if problems:
        shown = "\n".join(f"  {key or '(the tree itself)'}: {problem}" for key, problem in problems[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UnsupportedLeafError(f"{len(problems)} leaves cannot be saved; nothing was written:\n{shown}{more}")


def _problem(value: Any) -> str | None:
    if isinstance(value, Tracer):
        return "a value inside jit, grad or vmap has no data; save outside of the transformed function"
    if isinstance(value, jax.Array):
        return _array_problem(value)
    if isinstance(value, np.ndarray | np.generic):
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            return f"a {type(value).__name__} holds more than its data; save its parts as plain arrays"
        try:
            dtype_name(value.dtype)
        except TypeError:
            return f"NumPy dtype {value.dtype} has no stored form; convert it to numbers, or to a list of str or bytes"
        return None
    if is_plain(value):
        return None
    if isinstance(value, jax.ShapeDtypeStruct):
        return "an abstract array (ShapeDtypeStruct) has no data"
    if callable(value):
        return f"a function or class ({getattr(value, '__name__', value)!s:.60}) is not data; filter it out first"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"a {kind} is neither an array nor a plain value; register it as a PyTree node or leave it out"


def _array_problem(array: jax.Array) -> str | None:
    if array.is_deleted():
        return "the array has been deleted or donated; save before its buffer is given away"
    if not array.is_fully_addressable:
        return "the array spans several processes, which this version of shardkeep does not save"
    if _is_prng_key(array):
        known = isinstance(jax.random.key_impl(array), str)
        return None if known else "a PRNG key of an unregistered implementation; save jax.random.key_data of it"
    try:
        dtype_name(np.dtype(array.dtype))
    except TypeError:
        return f"dtype {array.dtype} has no stored form"
    return None


def aligned_empty(nbytes: int) -> Array:
    """Fresh host memory that JAX can use without a copy: page-aligned, in huge pages where that pays."""
    if nbytes < _HUGE:
        memory = np.empty(nbytes + 64, dtype=np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes]
    # Not reserved: a large piece may be read in part, and only the pages touched count.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


class MemoryBudget:
    """How many bytes pending snapshots and loads in progress may hold together."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._used = 0
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        if self._limit is None:
            text = os.environ.get("SHARDKEEP_MEMORY_BUDGET")
            self._limit = int(text) if text else available_memory() // 2
        return self._limit

    def set(self, nbytes: int | None) -> None:
        if nbytes is not None and nbytes <= 0:
            raise ValueError(f"a memory budget must be positive, not {nbytes}")
        with self._changed:
            self._limit = nbytes
            self._changed.notify_all()

    def take(self, nbytes: int, what: str) -> None:
        """Wait until `nbytes` fit. A single request larger than the budget waits until it is alone."""
        with self._changed:
            if not self._fits(nbytes):
                log.warning(
                    "shardkeep: %s waits: %d bytes are held by earlier saves, the budget is %d",
                    what,
                    self._used,
                    self.limit,
                )
                self._changed.wait_for(lambda: self._fits(nbytes))
            self._used += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self._used == 0 or self._used + nbytes <= self.limit


budget = MemoryBudget()


def set_memory_budget(nbytes: int | None) -> None:
    """Bound the host memory that pending saves and running loads hold together; None restores the default.

    The default is half of what the machine (or the container) has free, or `SHARDKEEP_MEMORY_BUDGET` bytes.
    A `save_async` that would go beyond it waits for earlier saves and logs that it does.

    >>> set_memory_budget(8 << 30)
    >>> set_memory_budget(None)
    """
    budget.set(nbytes)


def available_memory() -> int:
    """Bytes of memory this process may still use: the machine's, or the container's if that is less."""
    free = _meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in _cgroup_files():
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            free = min(free, max(most - now, 0))
    return max(free, 64 << 20)


def _cgroup_files() -> list[tuple[str, str]]:
    """(limit, usage) files of this process's memory cgroups, from its own up to the root."""
    found: list[tuple[str, str]] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = "/sys/fs/cgroup" if controllers == "" else "/sys/fs/cgroup/memory"
        names = ("memory.max", "memory.current")
        names = names if controllers == "" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts), -1, -1):
            place = "/".join([base, *parts[:depth]])
            found.append((f"{place}/{names[0]}", f"{place}/{names[1]}"))
    return found


def _meminfo(name: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # absent, or "max": no limit
        return None
