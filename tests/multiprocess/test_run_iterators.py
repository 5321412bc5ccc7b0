"""The states of data iterators of several processes: each its own, or one for all."""

from pathlib import Path

import pytest

import shardkeep
from multiprocess.cluster import Kept
from shardkeep.errors import ProcessError
from shardkeep.runs.iterators import put_back

SCRIPT = """
from shardkeep.runs.iterators import Global, put_back, take
taken = take({"train": {"seen": 10 + index}, "shared": Global({"epoch": 2})})
shardkeep.save(root / "x", taken.tree)
load = lambda mode: shardkeep.load(root / "x", per_process=mode)
own = put_back({"train": None, "shared": None}, taken.kinds, size, load)
more = put_back({"train": None}, taken.kinds, 3, lambda _: {"train": [0, 1, 2]}, lambda s, n: [sum(s), max(s)][:n])
fewer = caught(put_back, {"train": None}, taken.kinds, 3, load)
different = caught(shardkeep.save, root / "y", take({"shared": Global({"epoch": index})}).tree)
say(own=own, more=more, fewer=fewer["message"], different=different, kinds=taken.kinds)
"""


def test_each_process_gets_its_own_state_and_all_get_the_global_one(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(SCRIPT, tmp_path)
    for index, process in enumerate(said):
        assert process["own"] == {"train": {"seen": 10 + index}, "shared": {"epoch": 2}}
        assert process["more"] == {"train": [3, 2][index]}
        assert "was saved by 3 processes, each its own, but now there are 2. Pass redistribute=" in process["fewer"]
        assert process["different"]["kind"] == "ProcessError"
        assert "leaf shared/epoch" in process["different"]["message"]
    kinds = said[0]["kinds"]
    load = lambda mode: shardkeep.load(tmp_path / "x", per_process=mode)  # noqa: E731
    with pytest.raises(ProcessError, match="was saved by 2 processes, each its own, but now there is 1"):
        put_back({"train": None}, kinds, 2, load)
    states = put_back({"train": None, "shared": None}, kinds, 2, load, lambda states, _: [states])
    assert states == {"train": [{"seen": 10}, {"seen": 11}], "shared": {"epoch": 2}}
