"""Nothing piles up in a process that saves for long: a sample of what `make faults` does a thousand times."""

from pathlib import Path

from faults.life import Held, _grown, live
from faults.parallel import spread


def test_many_saves_leave_no_threads_descriptors_files_or_memory_behind(tmp_path: Path) -> None:
    assert spread(live, [(str(tmp_path), 70, 30)]) == [[]]


def test_growth_is_noticed() -> None:
    before = Held(100 << 20, 1, 9, 30)
    assert _grown(before, before) == []
    assert len(_grown(before, Held(200 << 20, 2, 10, 100))) == 3
