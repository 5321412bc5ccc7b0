"""The control directory of a run: the writer's lock, marks, holds, late metrics, requests."""

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardkeep import Run
from shardkeep.errors import ConflictError
from shardkeep.runs.control import Control, WriterLock
from shardkeep.stores.location import location

HOLDER = """
import sys, time
from shardkeep.runs.control import Control, WriterLock
from shardkeep.stores.location import location
place = location(sys.argv[1])
kept = WriterLock(place) if sys.argv[2] == "writer" else Control(place)
kept = kept.take() if sys.argv[2] == "writer" else kept.take_hold("step_1")
print("ready", flush=True)
time.sleep(600)
"""


class Other:
    """Another program that holds the lock of a run, or a step."""

    def __init__(self, path: Path, what: str) -> None:
        arguments = [sys.executable, "-c", HOLDER, str(path), what]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def test_a_lock_has_one_holder_and_the_next_one_is_told_who_it_is(tmp_path: Path) -> None:
    first, second = WriterLock(location(tmp_path)), WriterLock(location(tmp_path))
    first.take()
    with pytest.raises(
        ConflictError, match=rf"this program has already opened .* process {os.getpid()} on .*, since 20.* UTC"
    ):
        second.take()
    first.confirm()
    first.release()
    second.take()
    with pytest.raises(ConflictError, match="no longer writes"):
        first.confirm()
    second.release()
    second.release()


def test_the_lock_of_a_killed_program_is_free_at_once(tmp_path: Path) -> None:
    other = Other(tmp_path, "writer")
    lock = WriterLock(location(tmp_path))
    with pytest.raises(ConflictError, match=f"process {other.process.pid} on"):
        lock.take()
    other.kill()
    lock.take()
    lock.release()


def test_of_many_that_want_a_free_lock_one_gets_it(tmp_path: Path) -> None:
    Other(tmp_path, "writer").kill()
    locks = [WriterLock(location(tmp_path)) for _ in range(8)]
    got: list[WriterLock] = []

    def take(lock: WriterLock) -> None:
        try:
            lock.take()
            got.append(lock)
        except ConflictError:
            pass

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].release()


def test_a_lock_whose_record_was_removed_is_lost(tmp_path: Path) -> None:
    lock = WriterLock(location(tmp_path))
    lock.take()
    (tmp_path / ".shardkeep-run" / "writer").unlink()
    with pytest.raises(ConflictError, match="was removed by another program"):
        lock.confirm()
    lock.release()


@pytest.mark.parametrize("step", ["step_1", "a~b~1", "x.tmp1"])
def test_marks_carry_all_in_their_names_and_belong_to_one_save(tmp_path: Path, step: str) -> None:
    control = Control(location(tmp_path))
    mark = control.mark("damaged", step, "id1", "a bit has flipped")
    control.mark("pinned", step, "id2")
    found = {(m.kind, m.step, m.save_id) for m in control.marks()}
    assert found == {("damaged", step, "id1"), ("pinned", step, "id2")}
    assert control.reason(mark) == "a bit has flipped"
    control.remove(control.marks())
    control.remove([mark])
    assert control.marks() == []
    assert control.reason(mark) == ""


def test_a_hold_lasts_until_it_is_released_or_its_program_dies(tmp_path: Path) -> None:
    control = Control(location(tmp_path))
    assert not control.is_held("step_1")
    mine = control.take_hold("step_1")
    other = Other(tmp_path, "hold")
    assert control.is_held("step_1")
    assert not control.is_held("step_11")
    mine.release()
    mine.release()
    assert control.is_held("step_1")
    other.kill()
    assert not control.is_held("step_1")


def test_the_holds_of_dead_readers_are_removed_once_they_are_old(tmp_path: Path) -> None:
    Other(tmp_path, "hold").kill()
    (record,) = (tmp_path / ".shardkeep-run" / "holds").iterdir()
    control = Control(location(tmp_path))
    assert not control.is_held("step_1")
    assert record.exists()
    os.utime(record, (1, 1))
    assert not control.is_held("step_1")
    assert not record.exists()


def test_who_opens_a_run_removes_old_holds_of_the_dead_on_steps_that_are_gone(tmp_path: Path) -> None:
    Other(tmp_path, "hold").kill()
    (record,) = (tmp_path / ".shardkeep-run" / "holds").iterdir()
    os.utime(record, (1, 1))
    hold = Control(location(tmp_path)).take_hold("step_2")
    with Run(tmp_path) as run:
        run.resume({"n": 0})
        run.wait()
        assert [each.name.partition("~")[0] for each in record.parent.iterdir()] == ["step_2"]
    hold.release()


def test_late_metrics_come_in_the_order_in_which_they_were_recorded(tmp_path: Path) -> None:
    control = Control(location(tmp_path))
    for value in (3.0, math.nan, -math.inf, 1.0):
        control.record_metrics("step_1", "id", {"loss": value})
    values = [control.read_metrics(record)["loss"] for record in control.metric_records()]
    assert [value for value in values if value == value] == [3.0, -math.inf, 1.0]
    assert math.isnan(values[1])


def test_metrics_that_a_crash_has_cut_short_are_ignored(tmp_path: Path) -> None:
    control = Control(location(tmp_path))
    control.record_metrics("step_1", "id", {"loss": 1.0})
    (record,) = control.metric_records()
    for content in (b"", b'{"los', b"[1]", b'{"loss": "high", "n": true}', b"[" * 100_000):
        (tmp_path / record.file).write_bytes(content)
        assert control.read_metrics(record) == {}
    (tmp_path / record.file).write_text(f'{{"most": 1e308, "over": -{"9" * 400}}}')
    assert control.read_metrics(record) == {"most": 1e308, "over": -math.inf}


def test_a_mark_whose_content_cannot_be_read_counts_and_gives_no_reason(tmp_path: Path) -> None:
    control = Control(location(tmp_path))
    mark = control.mark("damaged", "step_1", "id", "a bit was flipped")
    assert control.reason(mark) == "a bit was flipped"
    for content in (b"", b"[" * 100_000, b"[]", b"\xff"):
        (tmp_path / mark.file).write_bytes(content)
        assert control.marks() == [mark]
        assert control.reason(mark) == ""


def test_requests_wait_until_they_are_removed(tmp_path: Path) -> None:
    control = Control(location(tmp_path))
    assert control.requests() == []
    name = control.request_save()
    assert control.requests() == [name]
    control.remove_requests([name])
    assert control.requests() == []
