"""Bytes between processes: one process is enough to see that pieces of any size make up the whole.

`tests/multiprocess/test_bits.py` compares every bit of every dtype over several processes.
"""

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from shardkeep.errors import ProcessError
from shardkeep.processes import collectives
from shardkeep.processes.collectives import gather_bytes, send_from_leader
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


@pytest.mark.parametrize("keep", [True, False])
def test_rows_of_different_lengths_are_gathered_as_they_are(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process has more, so this one sends zeros at the end that nobody keeps."""
    mine, other = np.arange(5, dtype=np.uint8), np.arange(9, dtype=np.uint8)[::-1].copy()
    monkeypatch.setattr(collectives, "_SENT", 8)
    calls: list[int] = []

    def gather(part: np.ndarray) -> np.ndarray:
        start = sum(calls)
        calls.append(part.size)
        return np.stack([part, other[start : start + part.size]])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    found = gather_bytes(mine, [5, 9], keep)
    assert calls == [4, 4, 1]
    assert [row.tolist() for row in found] == ([mine.tolist(), other.tolist()] if keep else [])


def test_a_process_that_ended_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise JaxRuntimeError("connection closed")

    monkeypatch.setattr(multihost_utils, "process_allgather", fail)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", fail)
    with pytest.raises(ProcessError, match=r"another process ended while arrays were being gathered \(connection"):
        gather_bytes(np.zeros(3, np.uint8), [3])
    with pytest.raises(ProcessError, match="another process ended while arrays were being sent to all processes"):
        send_from_leader(np.zeros(3))


def test_an_array_is_gathered_from_the_shards_that_are_here() -> None:
    array = jax.device_put(pattern("float32", (16, 3)), NamedSharding(mesh_of(8), PartitionSpec("a")))
    assert_same(collectives.gather_array(array), np.asarray(array))
