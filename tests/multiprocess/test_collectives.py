"""Bytes between processes: what each gets, and how much of it is on a device at a time."""

from pathlib import Path
from typing import Any

import pytest

from multiprocess.cluster import Kept, all_well, run_cluster

GATHER = """
from shardkeep.processes import collectives
collectives.SENT = 1 << 12
rows, results = [], []
as_row, gathered = collectives._as_row, collectives._gathered
def counted_row(row, mesh):
    rows.append(row.size)
    return as_row(row, mesh)
def counted_gathered(mesh):
    return lambda x: results.append(gathered(mesh)(x)) or results[-1]
collectives._as_row, collectives._gathered = counted_row, counted_gathered
lengths = [5000 + 700 * i for i in range(size)]
data = [pattern("uint8", (n,), seed=i) for i, n in enumerate(lengths)]
values = {"w": pattern("float32", (48, 64)), "v": pattern("int8", (24, 3))}
tree = {key: spread(array, P("a"), (size, len(jax.local_devices()))) for key, array in values.items()}
shardkeep.save(root / "x.safetensors", {**tree, "own": shardkeep.PerProcess(index)})
loaded = shardkeep.load(root / "x.safetensors")
right = [loaded["own"] == index, *(holds(loaded[key], values[key]) for key in values)]
rows.clear(), results.clear()
found = collectives.gather_bytes(data[index], lengths, leader_only=True)
here = [np.array_equal(a, b) for a, b in zip(found, data)]
on_device = max(part.nbytes for x in results for part in (x.addressable_data(0),))
one, sent = len(found), sum(rows)
everyone = collectives.gather_bytes(data[index], lengths)
right += [np.array_equal(a, b) for a, b in zip(everyone, data, strict=True)]
groups = [(0, 1), (0, size - 1), tuple(range(size)), (size - 2, size - 1)]
for group in sorted(set(groups)):
    if index in group:
        streams = [[data[p].copy() if p == index else np.zeros(lengths[p], np.uint8)] for p in group]
        collectives.share_bytes(streams, [lengths[p] for p in group], group, 1000)
        right += [np.array_equal(stream[0], data[p]) for stream, p in zip(streams, group)]
collectives._as_row, collectives._gathered, collectives.SENT = as_row, gathered, 64 << 20
say(right=right, here=here, rows=one, sent=sent, longest=max(lengths), on_device=on_device)
"""


def check(said: list[dict[str, Any]]) -> None:
    for number, process in enumerate(said):
        assert all(process["right"])
        assert process["here"] == ([True] * len(said) if number == 0 else []), "only the leader has them"
        assert process["on_device"] == 1 << 12, "as many processes as there may be: the limit"
        assert process["longest"] <= process["sent"] < process["longest"] + (1 << 12) / len(said)


def test_the_leader_gets_what_all_have(pair: Kept, tmp_path: Path) -> None:
    check(pair.run(GATHER, tmp_path))


def test_the_leader_gets_what_all_of_three_have(tmp_path: Path) -> None:
    """Of three processes the last sends to the first at once."""
    check(all_well(run_cluster(GATHER, tmp_path / "room", size=3, devices=1)))


@pytest.mark.processes4
def test_the_leader_gets_what_all_of_four_have(four: Kept, tmp_path: Path) -> None:
    check(four.run(GATHER, tmp_path))
