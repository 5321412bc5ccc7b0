"""The newest checkpoint is in the page cache, the one before is not, and nothing else is left by that."""

import copy
import dataclasses
import json
import logging
import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from faults.disks import disk, make_disk, missing
from faults.tracing import Injected, Point, Tracer, leaks
from servers.gcs import GCSServer
from shardkeep.runtime.budget import Claim, budget
from shardkeep.runtime.save_queue import QueueEntry
from shardkeep.runtime.scopes import Scope
from shardkeep.saving.warming import Warming
from shardkeep.stores.local.pagecache import send_out
from support import cached_pages, run_python

TREE = {"w": np.arange(6 << 20, dtype=np.float32), "n": np.ones((3, 700_001), np.uint8)}  # 26 MB
SMALL = {"w": np.ones(1 << 20)}  # 8 MiB
NBYTES = sum(array.nbytes for array in TREE.values())


@pytest.fixture(autouse=True)
def _none_before() -> Iterator[None]:
    """Each test begins without warm checkpoints of others, and ends without threads."""
    for warming in Warming.line:
        warming.leave()
    Warming.line.clear()
    others = leaks(0)  # of tests before this one
    yield
    assert leaks(but=others) == []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory on a file system whose files can leave the page cache."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 20))
    with open(probe, "rb") as opened:
        os.fsync(opened.fileno())
    send_out(str(probe))
    if cached_pages(probe):
        pytest.skip("files of this file system do not leave the page cache")
    return tmp_path


@contextmanager
def saving() -> Iterator[None]:
    """While this lasts, a save is in the queue."""
    entry = QueueEntry("elsewhere", Scope("a save of a test"))
    entry.enter()
    try:
        yield
    finally:
        entry.release()


def data_files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.stat().st_size > 1 << 20 and file.is_file()]


def cached(path: Path) -> float:
    """How much of a checkpoint's data is in the page cache: 1 for nearly all, since the kernel moves a few pages."""
    files = data_files(path)
    part = sum(map(cached_pages, files)) / sum(-(-file.stat().st_size // mmap.PAGESIZE) for file in files)
    return 1 if part > 0.8 else part


@pytest.mark.parametrize("how", ["save", "save_async", "zarr", "exchange", "trees"])
def test_what_was_saved_is_brought_in(place: Path, how: str) -> None:
    path = place / ("m.safetensors" if how == "exchange" else "step_1")
    with saving():
        if how == "save_async":
            report = shardkeep.save_async(path, TREE).wait()
        elif how == "trees":
            report = shardkeep.save(path, {"n": 1}, trees={"more": TREE})
        else:
            report = shardkeep.save(path, TREE, format="zarr" if how == "zarr" else "safetensors")
        assert not report.warm.wait(0)
        assert cached(place) < 0.05, "the save itself leaves nothing"
    assert report.warm.wait(600)
    assert cached(place) == 1
    assert report.nbytes >= NBYTES


def test_the_checkpoint_before_leaves(place: Path) -> None:
    reports = [shardkeep.save(place / "run" / "step_1", TREE)]
    assert reports[0].warm.wait(600)
    reports.append(shardkeep.save(place / "run" / "step_2", TREE))
    assert reports[1].warm.wait(600)
    assert cached(place / "run" / "step_1") < 0.05
    assert cached(place / "run" / "step_2") == 1
    assert [report.warm.wait(0) for report in reports] == [False, True]
    overwritten = shardkeep.save(place / "run" / "step_2", TREE, overwrite=True)
    assert overwritten.warm.wait(600)
    assert cached(place / "run" / "step_2") == 1
    assert len(Warming.line) == 1


def test_many_small_files(place: Path) -> None:
    tree = {f"w{i}": np.full(1 << 16, i, np.float32) for i in range(80)}  # 256 KiB each
    report = shardkeep.save(place / "step_1", tree, format="zarr")
    assert report.files == 160
    assert report.warm.wait(600)
    files = [file for file in (place / "step_1").rglob("*") if file.stat().st_size == 256 << 10]
    assert len(files) == 80
    assert sum(map(cached_pages, files)) > 70 * (256 << 10) // mmap.PAGESIZE


def test_series_side_by_side_stay_and_the_oldest_of_many_leaves(place: Path) -> None:
    names = [f"{letter}/step_1" for letter in "abcdefghi"]
    for name in names:
        assert shardkeep.save(place / name, TREE).warm.wait(600)
    assert [round(cached(place / name), 1) for name in names] == [0] + [1] * 8
    assert len(Warming.line) == 8


def test_a_run_keeps_its_newest_step_warm(place: Path) -> None:
    with shardkeep.Run(place / "run", save_every=1) as run:
        for step in (1, 2):
            run.step(step, TREE)
        run.wait()
        (warming,) = Warming.line
        assert warming.wait(60)
        assert [round(cached(step), 1) for step in sorted((place / "run").glob("step_*"))] == [0, 1]


def test_it_stops_while_a_save_is_running(place: Path) -> None:
    with saving():
        report = shardkeep.save(place / "step_1", TREE)
        assert not report.warm.wait(1)  # it looks several times
        assert cached(place / "step_1") < 0.05
    assert report.warm.wait(600)


def test_it_stops_while_a_snapshot_is_taken_and_while_a_load_is_running(place: Path) -> None:
    """Both hold a part of the memory budget."""
    claim = Claim(budget, Scope("a load of a test"))
    claim.take(1, "a load of a test")
    try:
        report = shardkeep.save(place / "step_1", TREE)
        assert not report.warm.wait(1)
        assert cached(place / "step_1") < 0.05
    finally:
        claim.release()
    assert report.warm.wait(600)


def test_a_newer_checkpoint_takes_the_place_of_one_that_is_not_warm_yet(place: Path) -> None:
    with saving():
        first = shardkeep.save(place / "step_1", TREE)
        second = shardkeep.save(place / "step_2", TREE)
        assert first.warm.wait(600) is False, "it is over, and nothing of it was read"
    assert second.warm.wait(600)
    assert cached(place / "step_1") < 0.05


@pytest.mark.parametrize("why", ["small", "never", "bucket"])
def test_some_are_not_warmed(place: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "never":
        monkeypatch.setenv("SHARDKEEP_WARM", "never")
    if why == "bucket":
        with GCSServer(["bucket"]) as server:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
            report = shardkeep.save("gs://bucket/step_1", TREE)
    else:
        report = shardkeep.save(place / "step_1", SMALL if why == "small" else TREE)
    assert report.warm.wait() is False
    assert Warming.line == []
    assert not [thread for thread in threading.enumerate() if thread.name == "shardkeep-warm"]


def test_a_wrong_setting_is_an_error_and_nothing_is_committed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKEEP_WARM", "on")
    for save in (shardkeep.save, lambda *arguments: shardkeep.save_async(*arguments).wait()):
        with pytest.raises(ValueError, match="SHARDKEEP_WARM must be auto or never, not 'on'"):
            save(place / "step_1", TREE)
    assert not shardkeep.exists(place / "step_1")


def _memory_group(limit: int) -> Path:
    """A new memory cgroup of the version that is mounted here."""
    base = Path("/sys/fs/cgroup/memory")
    names = ("memory.limit_in_bytes",) if base.is_dir() else ("memory.max",)
    group = (base if base.is_dir() else base.parent) / f"shardkeep-{os.getpid()}"
    try:
        group.mkdir()
        (group / names[0]).write_text(str(limit))
    except OSError:
        if group.is_dir():
            group.rmdir()
        pytest.skip("memory cgroups cannot be made here")
    return group


def test_a_container_with_little_memory_is_left_alone(place: Path) -> None:
    code = """
import logging, os, pathlib
logging.basicConfig(level=logging.INFO)
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
for count in (24, 2):
    report = shardkeep.save(pathlib.Path(sys.argv[2], f"{count}_times"), {"w": np.ones(count << 20)})
    print(report.warm.wait(600))
"""
    group = _memory_group(768 << 20)
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import sys, numpy as np, shardkeep" + code, str(group), str(place)],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
    finally:
        group.rmdir()
    assert done.stdout.split() == ["False", "True"]  # 192 MiB do not fit in four times beside the program, 16 MiB do
    assert "24_times is not kept in the page cache: " in done.stderr
    assert "bytes of memory are available, but it needs 805," in done.stderr
    assert cached(place / "24_times") < 0.05
    assert cached(place / "2_times") == 1


def test_a_checkpoint_that_is_deleted_leaves_nothing(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardkeep")
    with saving():
        report = shardkeep.save(place / "step_1", TREE)
        shardkeep.delete(place / "step_1")
    assert report.warm.wait(600) is False
    assert [record.getMessage() for record in caplog.records] == [
        f"{place / 'step_1'} was removed before it was in the page cache"
    ]
    assert str(place) not in Path("/proc/self/maps").read_text()
    assert not [link for link in os.listdir("/proc/self/fd") if str(place) in _target(link)]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_a_disk_that_cannot_be_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if why := missing("mkfs.ext4"):
        pytest.skip(why)
    image = make_disk(tmp_path / "image", 128 << 20)
    with disk(image, tmp_path / "disk") as place:
        with saving():
            report = shardkeep.save(place / "step_1", TREE)
            os.truncate(image, 4 << 20)
        assert report.warm.wait(600) is False
    assert f"{place / 'step_1'} cannot be read into the page cache: [Errno 5]" in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_the_program_does_not_wait_for_it(place: Path) -> None:
    """Neither at its end nor after the end of the main thread; nothing is printed."""
    code = """
shardkeep.save_async(sys.argv[1], {"w": np.ones(8 << 20)})
"""
    assert run_python("import sys" + code, str(place / "step_1")) == ""
    assert shardkeep.verify(place / "step_1").ok
    code = """
import atexit, time
from shardkeep.runtime.budget import Claim, budget
from shardkeep.runtime.save_queue import QueueEntry
from shardkeep.runtime.scopes import Scope
scope = Scope("a save that does not end")
QueueEntry("elsewhere", scope).enter()  # so it never begins to read
report = shardkeep.save(sys.argv[1], {"w": np.ones(8 << 20)})
atexit.register(lambda: print("ending"))
"""
    assert run_python("import sys" + code, str(place / "step_2")) == "ending\n"
    assert cached(place / "step_2") < 0.05


def test_a_forked_child_has_none(place: Path) -> None:
    with saving():
        report = shardkeep.save(place / "step_1", TREE)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, json.dumps([len(Warming.line), report.warm.wait(), leaks()]).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert json.loads(os.read(reader, 1000)) == [0, False, []]
        os.close(reader)
        os.close(writer)
    assert report.warm.wait(600)


def test_a_report_can_be_copied_and_pickled(place: Path) -> None:
    with saving():
        report = shardkeep.save(place / "step_1", TREE)
        for other in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
            assert other == report
            json.dumps(dataclasses.asdict(other))
            assert other.warm.wait() is False
    assert report.warm.wait(600)


def _interrupt() -> None:
    raise Injected


def test_an_interrupt_leaves_nothing(place: Path) -> None:
    """An exception is raised before each line that the thread of a save runs here."""
    path = str(place / "step_1")
    with Tracer(None) as every:
        shardkeep.save(path, TREE).warm.wait(600)
    lines = [line for file, line, thread in every.seen if file == "saving/warming.py" and thread == "caller"]
    assert len(lines) > 10
    others = leaks(0)
    for number, line in enumerate(lines):
        tracer = Tracer(Point("save", "saving/warming.py", line, "caller"), _interrupt)
        with pytest.raises(Injected), tracer:
            shardkeep.save(path, {**TREE, "number": number}, overwrite=True).warm.wait(600)
        assert tracer.hit
        assert leaks(but=others) == []
        assert shardkeep.load(path, include="number")["number"] == number, "it was committed before"
    assert shardkeep.save(path, TREE, overwrite=True).warm.wait(600)
    assert cached(place / "step_1") == 1
    assert len(Warming.line) == 1
