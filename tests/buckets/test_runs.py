"""Runs in buckets: leases in place of file locks, few requests, holds that other hosts respect."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import obstore
import pytest

import shardkeep
from buckets.fixtures import Both, Place
from shardkeep import Keep, Run
from shardkeep.errors import CheckpointNotFoundError, ConflictError, IntegrityError
from shardkeep.runs.control import Control, WriterLock
from shardkeep.stores.location import location


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(16, step), "n": step}


def numbers(run: Run) -> list[int]:
    return [step.number for step in run.steps()]


def test_a_run_trains_resumes_and_deletes_in_a_bucket(place: Place) -> None:
    url = f"{place.url}/run"
    for begin in (0, 6):
        with Run(url, save_every=2, keep=Keep(last=2)) as run:
            state, step = run.resume(state_of(0), iterators={"data": 0})
            assert (step, state["n"]) == (begin, begin)
            for number in range(step + 1, step + 8):
                run.step(number, state_of(number), metrics={"loss": 1 / number}, iterators={"data": number})
            run.wait()
        assert numbers(run) == [begin + 4, begin + 6]
        assert [s.metrics["loss"] for s in run.steps()] == [1 / (begin + 4), 1 / (begin + 6)]
    run.pin(10)
    run.record(10, {"eval": float("nan")})
    with Run(url, keep=Keep(last=1)) as run:
        assert run.resume(state_of(0), iterators={"data": 0})[1] == 12
        assert run.resumed is not None
        assert run.resumed.iterators == {"data": 12}
        run.save(13, state_of(13))
        run.wait()
        assert numbers(run) == [10, 13]
    left = {name.split("/")[1] for name in place.names("run")}
    assert left == {".shardkeep-run", "step_10", "step_13"}
    assert not any("/writer" in name or "/lock" in name for name in place.names("run/.shardkeep-run"))


def test_a_damaged_step_in_a_bucket_is_skipped_and_replaced(place: Place) -> None:
    url = f"{place.url}/run"
    with Run(url, save_every=1, keep=None) as run:
        run.resume(state_of(0))
        for step in (1, 2, 3):
            run.step(step, state_of(step))
    (data,) = [name for name in place.names("run/step_3") if name.endswith(".safetensors")]
    content = bytearray(place.get(data))
    content[-3] ^= 1
    place.put(data, bytes(content))
    place.put("run/step_2/manifest.json", b"")
    with Run(url, save_every=1, keep=None) as run:
        assert run.resume(state_of(0))[1] == 1
        assert run.resumed is not None
        assert [number for number, _ in run.resumed.skipped] == [3, 2]
        run.step(2, state_of(22))
        run.step(3, state_of(33))
    assert run.load()["n"] == 33
    assert [(s.number, s.state) for s in run.steps()] == [(1, "usable"), (2, "usable"), (3, "usable")]


@pytest.mark.parametrize("lost", ["manifest.json", ""])
def test_a_step_whose_objects_someone_removed_is_skipped_and_saved_again(place: Place, lost: str) -> None:
    """The index still names it, and some servers list it as an empty directory."""
    url = f"{place.url}/run"
    with Run(url, save_every=1, keep=None) as run:
        run.resume(state_of(0))
        for step in (1, 2, 3):
            run.step(step, state_of(step))
    for name in place.names("run/step_3"):
        if name.endswith(lost):
            obstore.delete(place.client, name)
    with Run(url, save_every=1, keep=None) as run:
        assert run.resume(state_of(0))[1] == 2
        left = {s.number: s.state for s in run.steps()}
        assert left == {1: "usable", 2: "usable", **({3: "damaged"} if lost else {})}
        assert run.step(3, state_of(33)) is not None
        run.wait()
        assert [(s.number, s.state) for s in run.steps()] == [(1, "usable"), (2, "usable"), (3, "usable")]
    assert shardkeep.load(f"{url}/step_3")["n"] == 33


def test_a_step_that_was_deleted_is_gone_for_all_and_can_be_saved_again(place: Place) -> None:
    """Some servers go on listing it as an empty directory."""
    url = f"{place.url}/run"
    with Run(url, save_every=1, keep=None) as run:
        run.resume(state_of(0))
        for step in (1, 2, 3):
            run.step(step, state_of(step))
        run.delete(3)
        assert numbers(run) == numbers(Run(url)) == [1, 2]
        run.delete(2)
        assert run.save(2, state_of(22)).wait().files
        run.wait()
        assert numbers(run) == numbers(Run(url)) == [1, 2]
        assert run.load(2)["n"] == 22


def test_two_threads_of_a_writer_may_write_the_index(place: Place) -> None:
    """The loop does when it replaces a step, while housekeeping does after the commit of the one before."""
    with Run(f"{place.url}/run", save_every=1, keep=None) as run:
        run.resume(state_of(0))
        run.step(1, state_of(1))
        run.wait()

        def write() -> None:
            for _ in range(20):
                run._index.write(run._index.read())

        with ThreadPoolExecutor(2) as threads:
            for each in [threads.submit(write) for _ in range(2)]:
                each.result()
        run.resume(state_of(0), step=1)
    assert numbers(run) == [1]


def test_an_old_step_with_a_damaged_manifest_stays_marked_and_the_others_are_deleted(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """In a bucket the index is believed, so that the damage is seen only when the step is deleted."""
    url = f"{place.url}/run"
    with Run(url, save_every=1, keep=Keep(last=2)) as run:
        run.resume(state_of(0))
        for step in (1, 2):
            run.step(step, state_of(step))
        run.wait()
        place.put("run/step_1/manifest.json", b"{}")
        for step in (3, 4, 5):
            run.step(step, state_of(step))
        run.wait()
        assert [(s.number, s.state) for s in run.steps()] == [(1, "damaged"), (4, "usable"), (5, "usable")]
        assert caplog.text.count("step_1 was not deleted") == 1
        assert {mark.kind for mark in Control(location(url)).marks()} == {"damaged"}
    Control(location(url)).mark("deleting", "step_1", run.steps()[0].save_id)  # as by a deleter that died
    with Run(url, save_every=1, keep=Keep(last=2)) as run:
        assert run.resume(state_of(0))[1] == 5
        run.step(6, state_of(6))
        run.wait()
        assert [(s.number, s.state) for s in run.steps()] == [(1, "damaged"), (5, "usable"), (6, "usable")]
        with pytest.raises(IntegrityError, match="is not a shardkeep manifest"):
            run.delete(1)
        assert [(s.number, s.state) for s in run.steps()] == [(1, "damaged"), (5, "usable"), (6, "usable")]


def test_a_thousand_steps_are_listed_with_few_requests(watched: Place) -> None:
    """By a reader, from the index; and the newest and the best are read and checked themselves."""
    url = f"{watched.url}/run"
    with Run(url, keep=None) as run:
        run.save(1, state_of(1))
        run.wait()
        for step in range(2, 4):
            run.save(step, state_of(step))
    document = json.loads(watched.get("run/.shardkeep-run/index.json"))
    first = document["steps"]["step_1"]
    for step in range(4, 1001):
        document["steps"][f"step_{step}"] = {**first, "metrics": {"loss": 1.0 + step}}
        watched.put(f"run/step_{step}/manifest.json", b"{}")
    watched.put("run/.shardkeep-run/index.json", json.dumps(document).encode())
    reader = Run(url, keep=Keep(last=3, best=2, metric="loss", mode="min"))
    reader.record(3, {"loss": 0.5})
    watched.forget()
    steps = reader.steps()
    assert [s.number for s in steps] == list(range(1, 1001))
    assert len(watched.requests) <= 20
    watched.forget()
    best = reader.best()
    assert best is not None
    assert best.number == 3
    assert len(watched.requests) <= 25


def test_requests_of_a_save_with_its_housekeeping(watched: Place) -> None:
    with Run(f"{watched.url}/run", keep=Keep(last=2)) as run:
        for step in range(1, 5):
            run.save(step, state_of(step))
            run.wait()
        watched.forget()
        run.save(5, state_of(5))
        run.wait()
        # The save itself takes about 15, listing and the index about 10, deleting a step about 20.
        assert len(watched.requests) <= 60


WRITER = """
import sys, time
from shardkeep.runs.control import Control, WriterLock
from shardkeep.stores.location import location
place = location(sys.argv[1])
if sys.argv[2] == "writer":
    WriterLock(place).take()
else:
    hold = Control(place).take_hold("step_1")
print("ready", flush=True)
time.sleep(600)
"""


def other(place: Place, url: str, what: str) -> "subprocess.Popen[str]":
    """Another program that writes the run, or holds its first step."""
    variables = {**os.environ, **place.environment()}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, url, what], stdout=subprocess.PIPE, text=True, env=variables
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_lease_that_is_renewed_is_refused_and_one_that_is_not_is_waited_out(
    both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHARDKEEP_LEASE", "3")

    def scenario(place: Place) -> None:
        url = f"{place.url}/run"
        writer = other(place, url, "writer")
        lock = WriterLock(location(url))
        with pytest.raises(ConflictError, match=f"another program writes to the run .*: process {writer.pid} on"):
            lock.take()
        writer.kill()
        writer.communicate()
        lock.take()
        lock.release()

    both.run(scenario)
    assert "waiting up to 3 s for the lease" in caplog.text


def test_a_writer_that_was_suspended_finds_that_it_was_replaced(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither saves nor deletes any more."""
    monkeypatch.setenv("SHARDKEEP_LEASE", "2")

    def scenario(place: Place) -> None:
        url = f"{place.url}/run"
        with Run(url, on_error="raise") as run:
            run.save(1, state_of(1)).wait()
            writer = run._writer
            assert writer is not None
            lease: Any = writer._lock._held
            lease._over.wait(0)
            lease._is_renewed = False
            lease._lock.acquire()  # as if the program were suspended: nothing is renewed
            try:
                second = Run(url)
                second.resume(state_of(0))
            finally:
                lease._lock.release()
            time.sleep(2.1)
            with pytest.raises(ConflictError, match="was taken over"):
                run.save(2, state_of(2))
            second.save(2, state_of(22))
            second.close()
        assert shardkeep.load(f"{url}/step_2")["n"] == 22

    both.run(scenario)


def test_a_hold_of_another_program_keeps_a_step_until_its_lease_has_expired(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDKEEP_LEASE", "3")

    def scenario(place: Place) -> None:
        url = f"{place.url}/run"
        with Run(url, keep=Keep(last=1)) as run:
            run.save(1, state_of(1)).wait()
            reader = other(place, url, "hold")
            run.save(2, state_of(2))
            run.wait()
            assert numbers(run) == [1, 2]
            reader.send_signal(signal.SIGKILL)
            reader.communicate()
            time.sleep(4)
            run.save(3, state_of(3))
            run.wait()
            assert numbers(run) == [3]
            assert Control(location(url)).marks() == []
            with pytest.raises(CheckpointNotFoundError, match="has no step 1"), run.hold(1):
                pass

    both.run(scenario)


def test_the_end_of_a_program_leaves_no_lock_in_the_bucket(place: Place) -> None:
    script = (
        "import sys, numpy as np, shardkeep\n"
        "run = shardkeep.Run(sys.argv[1], save_every=1)\n"
        "run.resume({'w': np.zeros(3)})\n"
        "run.step(1, {'w': np.ones(3)})\n"
    )
    url = f"{place.url}/run"
    variables = {**os.environ, **place.environment()}
    done = subprocess.run(
        [sys.executable, "-c", script, url], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not [name for name in place.names("run") if name.endswith("/writer")]
    with Run(url) as run:
        assert run.resume({"w": np.zeros(3)})[1] == 1
