"""Host memory, aligned as JAX likes it."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
