"""Saves to one target are made in the order of the calls; one that would wait for itself is refused."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.runtime.save_queue import QueueEntry
from shardkeep.runtime.scopes import Scope
from signals import usual_signals_meanwhile
from support import run_python


def test_a_save_behind_another_one_that_it_interrupted_is_refused_and_names_both(tmp_path: Path) -> None:
    with Scope("saving to /first") as below:
        below.add(QueueEntry(str(tmp_path), below)).enter()
        with pytest.raises(shardkeep.ConflictError, match="signal handler") as refused:
            shardkeep.save(tmp_path, {"a": 1})
    assert "saving to /first" in str(refused.value)
    assert f"saving to {tmp_path}" in str(refused.value)
    assert shardkeep.save(tmp_path, {"a": 1}).path == str(tmp_path)


def test_so_is_one_behind_a_third_that_waits_for_the_interrupted_one(tmp_path: Path) -> None:
    with Scope("saving to /first") as below:
        below.add(QueueEntry(str(tmp_path), below)).enter()
        between = shardkeep.save_async(tmp_path, {"a": 2})
        with pytest.raises(shardkeep.ConflictError, match="signal handler"):
            shardkeep.save(tmp_path, {"a": 3}, overwrite=True)
    between.wait(30)
    assert shardkeep.load(tmp_path) == {"a": 2}


HANDLER = """
import os, signal, sys
import numpy as np
import shardkeep
from shardkeep.saving import store as saving

path, other = sys.argv[1], sys.argv[2]
state = {"w": np.ones(1 << 20)}

def handler(number, frame):
    shardkeep.save(other, {"preempted": 1}, overwrite=True)
    try:
        shardkeep.save(path, {"preempted": 1}, overwrite=True)
    except shardkeep.ConflictError as error:
        print("refused:", "signal handler" in str(error))

signal.signal(signal.SIGTERM, handler)
write = saving.write_files
def interrupted(*arguments):
    saving.write_files = write
    os.kill(os.getpid(), signal.SIGTERM)
    return write(*arguments)
saving.write_files = interrupted
shardkeep.save(path, state, overwrite=True)
print(shardkeep.load(path)["w"].size, shardkeep.load(other))
"""


def test_a_handler_can_save_elsewhere_and_is_refused_where_it_would_wait_for_itself(tmp_path: Path) -> None:
    printed = run_python(HANDLER, str(tmp_path / "run"), str(tmp_path / "preempted"), timeout=60)
    assert printed == f"refused: True\n{1 << 20} {{'preempted': 1}}\n"


def test_an_interrupt_while_waiting_lets_nobody_overtake(tmp_path: Path) -> None:
    """The second of three is interrupted while it waits: the third still waits for the first."""
    go = threading.Event()
    order: list[str] = []
    with Scope("first") as held:
        first = held.add(QueueEntry(str(tmp_path / "run"), held))
        first.enter()

        def second() -> None:
            with Scope("second") as scope:
                entry = scope.add(QueueEntry(str(tmp_path / "run"), scope))
                entry.enter()
                go.set()
                raise_in = threading.Timer(0.05, lambda: None)
                raise_in.start()
                raise KeyboardInterrupt  # as if raised by the wait

        interrupted = threading.Thread(target=_quietly, args=(second,))
        interrupted.start()
        assert go.wait(30)
        interrupted.join()
        third = threading.Thread(
            target=lambda: (shardkeep.save(tmp_path / "run", {"a": 1}), order.append("third")), daemon=True
        )
        third.start()
        third.join(0.3)
        assert order == []
        order.append("first")
    third.join(30)
    assert order == ["first", "third"]
    assert QueueEntry.line == []


def _quietly(action: Any) -> None:
    try:
        action()
    except KeyboardInterrupt:
        pass


def test_ctrl_c_while_waiting_keeps_the_order_for_real(tmp_path: Path) -> None:
    with usual_signals_meanwhile(), Scope("a running save") as held:
        first = held.add(QueueEntry(str(tmp_path / "run"), held))
        done: list[bool] = []

        def hold_it() -> None:
            with Scope("another thread's save") as scope:
                entry = scope.add(QueueEntry(str(tmp_path / "run"), scope))
                entry.enter()
                entered.set()
                leave.wait(30)
                done.append(True)

        entered, leave = threading.Event(), threading.Event()
        holder = threading.Thread(target=hold_it)
        holder.start()
        assert entered.wait(30)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            shardkeep.save(tmp_path / "run", {"b": np.ones(3)})
        third = shardkeep.save_async(tmp_path / "run", {"c": 3})
        with pytest.raises(TimeoutError, match="still running"):
            third.wait(0.3)
        assert done == []
        leave.set()
        holder.join()
        third.wait(30)
        assert done == [True]
        first.release()
    assert shardkeep.load(tmp_path / "run") == {"c": 3}


def test_urls_never_touch_the_working_directory(tmp_path: Path) -> None:
    """A bucket saved to from a directory that is gone: what fails is the bucket, in words, and nothing is left."""
    printed = run_python(
        """
import os, sys
os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
import numpy as np, shardkeep
import obstore  # now: Python 3.13.0 cannot import extension modules without a working directory
from faults.interrupts import leaks
os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])
try:
    shardkeep.save_async("s3://bucket/x", {"a": np.ones(3)}).wait()
except shardkeep.StorageError as error:
    print(type(error).__name__)
print(leaks())
""",
        str(_made(tmp_path / "gone")),
        timeout=120,
    )
    assert printed == "StorageError\n[]\n"


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("name", ["run", "model.safetensors"])
def test_a_load_before_wait_says_that_the_save_is_running(name: str, tmp_path: Path) -> None:
    """Even if nothing is there yet: `save_async` followed by `load` is a likely mistake."""
    (tmp_path / "linked").symlink_to(tmp_path)
    shardkeep.save(tmp_path / "other", {"a": 1})
    with Scope("saving") as scope:
        scope.add(QueueEntry(str(tmp_path.resolve() / name), scope)).enter()
        for path in (tmp_path / name, tmp_path / "linked" / name):
            for action in (shardkeep.load, shardkeep.inspect, shardkeep.abstract):
                with pytest.raises(
                    shardkeep.IncompleteCheckpointError,
                    match=r"holds no committed checkpoint yet: a save by this process, started \S+ \S+ UTC, "
                    r"is running\. Call wait\(\) on it first$",
                ):
                    action(path)
            assert not shardkeep.exists(path)
        assert shardkeep.load(tmp_path / "other") == {"a": 1}
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="there is nothing there"):
        shardkeep.load(tmp_path / name)
