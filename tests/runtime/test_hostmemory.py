"""Host memory, aligned as JAX likes it."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.runtime import hostmemory
from shardkeep.runtime.hostmemory import Slabs, aligned_empty, available_memory, release_freed


@pytest.mark.parametrize("nbytes", [1, 64, 1000, (2 << 20) - 1, 2 << 20, 5 << 20])
def test_memory_is_aligned_as_jax_wants_it(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert (memory.dtype, memory.size) == (np.uint8, nbytes)
    assert memory.ctypes.data % 64 == 0
    memory[:] = 7


@given(st.lists(st.integers(0, 3000), max_size=30))
def test_slabs_hand_out_aligned_memory_that_does_not_overlap(sizes: list[int]) -> None:
    slabs = Slabs(sizes)
    taken = [slabs.take(size) for size in sizes]
    for number, memory in enumerate(taken):
        assert memory.size == sizes[number]
        memory[:] = number
    for number, memory in enumerate(taken):
        assert (memory == number).all()
        assert memory.size == 0 or memory.ctypes.data % 64 == 0


def test_what_is_larger_than_a_slab_has_memory_of_its_own() -> None:
    sizes = [1 << 20, 40 << 20, 1 << 20, 40 << 20]
    slabs = Slabs(sizes)
    small, large, more, last = (slabs.take(size) for size in sizes)
    owners = {id(memory.base) for memory in (small, large, more, last)}
    assert [memory.size for memory in (small, large, more, last)] == sizes
    assert len(owners) == 4  # or a small one would keep a large one


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_what_the_c_library_keeps_of_freed_memory_is_given_back() -> None:
    """Every second piece stays in use, so that nothing goes by itself."""
    pieces = [np.ones(100_000, np.uint8) for _ in range(2000)]
    del pieces[::2]
    assert release_freed() > 50 << 20
    assert all(piece.all() for piece in pieces)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 4096, 1_000_003, (2 << 20) - 1, 2 << 20, (3 << 20) + 7])
def test_aligned_memory_is_aligned_writable_and_of_the_size_asked_for(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert memory.shape == (nbytes,)
    assert nbytes == 0 or memory.ctypes.data % 64 == 0
    memory[:] = 7
    assert memory.flags.writeable
    assert (memory == 7).all()


def test_two_pieces_of_memory_do_not_overlap() -> None:
    a, b = aligned_empty(1000), aligned_empty(1000)
    a[:], b[:] = 1, 2
    assert (a == 1).all()


def test_available_memory_is_that_of_the_machine_or_the_container() -> None:
    text = Path("/proc/meminfo").read_text()
    total = next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemTotal"))
    assert 64 << 20 <= available_memory() <= total


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts_and_its_page_cache_does_not(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files as the kernel writes them; test_warming.py asks a real group of the version that is mounted."""
    group = tmp_path / ("memory/job/step" if version == 1 else "job/step")
    group.mkdir(parents=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for place, limit in ((group, "max" if version == 2 else "9223372036854771712"), (group.parent, str(1 << 30))):
        (place / names[0]).write_text(f"{limit}\n")
        (place / names[1]).write_text(f"{800 << 20}\n")
        start = "total_" if version == 1 else ""
        fields = {"inactive_file": 300 << 20, "active_file": 100 << 20, "active_anon": 400 << 20}
        (place / "memory.stat").write_text("".join(f"{start}{name} {value}\n" for name, value in fields.items()))
    (tmp_path / "cgroup").write_text("5:cpu:/\n4:memory:/job/step\n0::/\n" if version == 1 else "0::/job/step\n")
    monkeypatch.setattr(hostmemory, "_CGROUPS", str(tmp_path))
    monkeypatch.setattr(hostmemory, "_OWN_CGROUPS", str(tmp_path / "cgroup"))
    assert available_memory() == (1 << 30) - (400 << 20)
    (group.parent / "memory.stat").unlink()
    assert available_memory() == (1 << 30) - (800 << 20)
