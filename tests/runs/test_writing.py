"""What a process has while it writes to a run, taken and given back as a whole."""

import signal
import threading
from pathlib import Path

import pytest

from runs.runs import trained
from shardkeep.errors import CheckpointExistsError, ConflictError
from shardkeep.processes.operation import join
from shardkeep.runs.control import Control
from shardkeep.runs.index import RunIndex
from shardkeep.runs.schedule import Schedule
from shardkeep.runs.steps import StepName
from shardkeep.runs.writing import Writer
from shardkeep.stores.location import location


def writer_of(path: Path) -> Writer:
    control, name = Control(location(path)), StepName("step_{}")
    return Writer(control, RunIndex(control, name), name, Schedule(None), set())


def opened(path: Path) -> Writer:
    writer = writer_of(path)
    with join("opening") as operation:
        writer.open(operation, ["SIGUSR1"])
    return writer


def test_closing_gives_back_the_lock_the_signals_and_the_thread(tmp_path: Path) -> None:
    before, threads = signal.getsignal(signal.SIGUSR1), set(threading.enumerate())
    writer, control = opened(tmp_path), Control(location(tmp_path))
    assert signal.getsignal(signal.SIGUSR1) != before
    assert control.writer() is not None
    for _ in range(2):
        writer.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert control.writer() is None
    assert not [each for each in set(threading.enumerate()) - threads if each.name == "shardkeep-run"]


def test_what_goes_wrong_while_opening_leaves_nothing_behind(tmp_path: Path) -> None:
    writer, control = writer_of(tmp_path), Control(location(tmp_path))
    with join("opening") as operation, pytest.raises(ValueError, match="SIGNOTHING"):
        writer.open(operation, ["SIGNOTHING"])
    assert control.writer() is None
    opened(tmp_path).close()


def test_what_is_to_be_done_about_a_step_follows_from_its_state(tmp_path: Path) -> None:
    run = trained(tmp_path, [1, 2, 3])
    control = Control(location(tmp_path))
    control.mark("damaged", "step_3", run.steps()[2].save_id)
    writer = opened(tmp_path)
    with pytest.raises(CheckpointExistsError, match="has steps up to 2, but step 2 would be saved without resuming"):
        writer.decide(2)
    writer.resumed = True
    assert [writer.decide(number) for number in (2, 3, 4)] == ["skip", "replace", "save"]
    writer.close()
    with pytest.raises(ConflictError, match="no longer writes"):
        writer.decide(4)


def test_a_step_that_is_replaced_is_not_in_the_index_meanwhile(tmp_path: Path) -> None:
    """In a bucket the index is believed: it must not name what may be replaced at any moment."""
    run = trained(tmp_path, [1, 2])
    control = Control(location(tmp_path))
    control.mark("abandoned", "step_2", run.steps()[1].save_id)
    writer = opened(tmp_path)
    writer.resumed = True
    assert writer.decide(2) == "replace"
    assert '"step_2"' not in (tmp_path / ".shardkeep-run/index.json").read_text()
    writer.committed(2, [])
    writer.wait()
    assert '"step_2"' in (tmp_path / ".shardkeep-run/index.json").read_text()
    writer.close()
