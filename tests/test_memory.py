"""Host memory, aligned as JAX likes it."""

import numpy as np
import pytest

from shardkeep.memory import aligned_empty


@pytest.mark.parametrize("nbytes", [1, 64, 1000, (2 << 20) - 1, 2 << 20, 5 << 20])
def test_memory_is_aligned_as_jax_wants_it(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert (memory.dtype, memory.size) == (np.uint8, nbytes)
    assert memory.ctypes.data % 64 == 0
    memory[:] = 7
