"""Bytes between processes: one process is enough to see that pieces of any size make up the whole.

`tests/multiprocess/test_bits.py` compares every bit of every dtype over several processes, and
`tests/multiprocess/test_collectives.py` what each of them gets and how much of it at a time.
"""

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from shardkeep.errors import ProcessError
from shardkeep.processes import collectives
from shardkeep.processes.collectives import _row_sizes, gather_bytes, send_from_leader, share_bytes
from support import assert_same, mesh_of, pattern


@pytest.mark.parametrize("limit", [1, 7, 1 << 20])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 4)])
def test_an_array_arrives_whole_in_pieces_of_any_size(
    shape: tuple[int, ...], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda part: sent.append(part.size) or part)
    array = pattern("float32", shape)
    assert_same(send_from_leader(array, limit), array)
    assert sum(sent) == array.nbytes
    assert all(size <= limit for size in sent)


@pytest.mark.parametrize(
    ("longest", "limit", "rows"),
    [(0, 8, []), (1, 8, [1]), (9, 8, [8, 1]), (21, 8, [8, 8, 8]), (5, 7, [4, 1]), (3, 0, [1, 1, 1]), (6, 64, [8])],
)
def test_rows_are_powers_of_two_within_the_limit(longest: int, limit: int, rows: list[int]) -> None:
    assert _row_sizes(longest, limit) == rows


@pytest.mark.parametrize("leader_only", [True, False])
def test_the_bytes_of_the_only_process_are_what_it_gets(leader_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SENT", 8)
    (row,) = gather_bytes(np.arange(21, dtype=np.uint8), [21], leader_only)
    assert row.tolist() == list(range(21))


@pytest.mark.parametrize("error", [JaxRuntimeError("INTERNAL: connection"), ValueError("UNKNOWN: connection")])
def test_a_process_that_ended_is_one_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    for name in ("_replicated", "_gathered"):
        monkeypatch.setattr(collectives, name, fail)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", fail)
    with pytest.raises(ProcessError, match=r"another process ended while arrays were being gathered \(\w+: connection"):
        gather_bytes(np.zeros(3, np.uint8), [3], leader_only=True)
    with pytest.raises(ProcessError, match="another process ended while arrays were being sent to other processes"):
        share_bytes([[np.zeros(3, np.uint8)]], [3], (0,))
    with pytest.raises(ProcessError, match="another process ended while arrays were being sent to all processes"):
        send_from_leader(np.zeros(3))


def test_an_error_of_our_own_is_not_blamed_on_another_process() -> None:
    with pytest.raises(ValueError, match="a mistake"), collectives._explained("sent"):
        raise ValueError("a mistake")


def test_an_array_is_gathered_from_the_shards_that_are_here() -> None:
    array = jax.device_put(pattern("float32", (16, 3)), NamedSharding(mesh_of(8), PartitionSpec("a")))
    assert_same(collectives.gather_array(array), np.asarray(array))
