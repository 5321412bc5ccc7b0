"""The memory budget: who waits for whom, and what the limit is."""

import logging
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep.config import MEMORY_BUDGET
from shardkeep.runtime.budget import Claim, MemoryBudget
from shardkeep.runtime.hostmemory import available_memory
from shardkeep.runtime.scopes import Scope


def test_what_fits_is_taken_at_once_and_what_does_not_waits(caplog: pytest.LogCaptureFixture) -> None:
    budget = MemoryBudget()
    budget.set(100)
    scope = Scope("a test")
    first, second = Claim(budget, scope), Claim(budget, scope)
    first.take(60, "the first")
    second.take(40, "the second")
    taken = threading.Event()

    def take() -> None:
        Claim(budget, Scope("a test")).take(50, "the third")
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    time.sleep(0.05)
    assert not taken.is_set()
    second.release()
    time.sleep(0.05)
    assert not taken.is_set()
    first.release()
    first.release()
    thread.join(5)
    assert taken.is_set()
    waits = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert waits == ["the third is waiting for memory: earlier saves hold 100 of the budget of 100 bytes"]


def test_more_than_the_budget_goes_alone() -> None:
    budget = MemoryBudget()
    budget.set(100)
    all_of_it = Claim(budget, Scope("a test"))
    all_of_it.take(1000, "all")
    all_of_it.release()
    assert budget.used == 0


def test_a_larger_budget_wakes_those_who_wait() -> None:
    budget = MemoryBudget()
    budget.set(100)
    Claim(budget, Scope("a test")).take(100, "first")
    thread = threading.Thread(target=lambda: Claim(budget, Scope("a test")).take(100, "second"))
    thread.start()
    time.sleep(0.02)
    budget.set(1000)
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_budget_must_be_positive(nbytes: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        shardkeep.set_memory_budget(nbytes)


def test_the_default_is_half_of_what_is_free() -> None:
    budget = MemoryBudget()
    budget.set(5)
    budget.set(None)
    assert 0.2 < budget.limit / available_memory() < 0.8


def test_the_variable_is_read_whenever_no_other_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget()
    half = budget.limit
    monkeypatch.setenv(MEMORY_BUDGET.variable, "12345")
    assert budget.limit == 12345
    budget.set(5)
    assert budget.limit == 5
    budget.set(None)
    monkeypatch.setenv(MEMORY_BUDGET.variable, "8GB")
    with pytest.raises(ValueError, match="SHARDKEEP_MEMORY_BUDGET must be a number of bytes greater than 0, not '8GB'"):
        _ = budget.limit
    monkeypatch.delenv(MEMORY_BUDGET.variable)
    assert 0.2 < budget.limit / half < 5


def test_a_small_budget_bounds_a_load_and_changes_nothing_in_it(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(1 << 19, dtype=jnp.float32), "b": [np.arange(1000 * i) for i in range(5)]}
    shardkeep.save(tmp_path / "run", tree)
    shardkeep.set_memory_budget(1)
    try:
        for mmap in (True, False):
            loaded = shardkeep.load(tmp_path / "run", mmap=mmap)  # type: ignore[arg-type]
            assert np.array_equal(np.asarray(loaded["w"]), np.asarray(tree["w"]))
            assert all(np.array_equal(a, b) for a, b in zip(loaded["b"], tree["b"], strict=True))
    finally:
        shardkeep.set_memory_budget(None)
