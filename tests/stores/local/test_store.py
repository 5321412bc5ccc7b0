"""The local store: locks and records that end with their process, exact writes, full disks, forbidden places."""

import errno
import fcntl
import mmap
import os
import re
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from faults.spawner import Fault, Pause, Spawner
from faults.states import make, same
from faults.sweep import left_overs
from shardkeep import system
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.local import locks
from shardkeep.stores.local import store as local_store
from shardkeep.stores.local.descriptors import Descriptor, make_directories, sync_path, write_at
from shardkeep.stores.local.mapping import MAPPABLE
from shardkeep.stores.local.mounts import mount_of
from shardkeep.stores.local.store import LocalStore
from shardkeep.stores.location import location
from support import hold

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other users need root")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "store"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Sixteen MiB of disk."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def open_room() -> Iterator[Path]:
    """A directory that other users can reach (pytest's own is closed to them)."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def _fill(path: Path, size: int) -> None:
    path.write_bytes(b"x" * size)


def _in_fresh_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestLock:
    def test_excludes_other_holders_until_it_is_released(self, store: LocalStore) -> None:
        refused: list[BaseException] = []

        def enter() -> None:
            try:
                with LocalStore(store.url).lock(0.05):
                    pass
            except shardkeep.ConflictError as error:
                refused.append(error)

        with store.lock(1):
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
        assert "timed out waiting for the lock" in str(refused[0])
        with LocalStore(store.url).lock(0.05):
            pass

    def test_counts_never_two_threads_inside(self, store: LocalStore) -> None:
        inside, most = 0, 0

        def work() -> None:
            nonlocal inside, most
            for _ in range(50):
                with LocalStore(store.url).lock(20):
                    inside += 1
                    most = max(most, inside)
                    inside -= 1

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == 1

    def test_whoever_waits_for_a_lock_that_is_deleted_gets_the_new_one(self, store: LocalStore) -> None:
        """A delete removes the lock file: waiting for the removed file would let two in."""
        entered = threading.Event()

        def waiter() -> None:
            with LocalStore(store.url).lock(20):
                entered.set()

        with store.lock(1):
            thread = threading.Thread(target=waiter)
            thread.start()
            store.remove_control()
        thread.join()
        assert entered.is_set()
        with store.lock(1):
            assert Path(store.url, ".shardkeep", "lock").exists()

    def test_a_forked_child_does_not_keep_the_lock(self, store: LocalStore) -> None:
        """Data loaders fork while a save runs: the child inherits the open file, and must not inherit the lock."""
        _in_fresh_python(
            f"""
            import os, time
            from shardkeep.stores.local.store import LocalStore
            store = LocalStore({store.url!r})
            with store.lock(1):
                child = os.fork()
                if child == 0:
                    time.sleep(20)
                    os._exit(0)
            try:
                with store.lock(1):
                    pass
            finally:
                os.kill(child, 9)
            """
        )

    def test_a_forked_child_does_not_keep_a_record_alive(self, store: LocalStore) -> None:
        _in_fresh_python(
            f"""
            import os, time
            from shardkeep.runtime.scopes import Scope
            from shardkeep.stores.local.store import LocalStore
            store = LocalStore({store.url!r})
            held = store.hold("saves/1")
            held.take(b"[]")
            child = os.fork()
            if child == 0:
                time.sleep(20)
                os._exit(0)
            try:
                held.release()
                taken = store.try_hold("saves/1", Scope("a test"))
                assert taken is not None, "a save that has ended still counts as running"
            finally:
                os.kill(child, 9)
            """
        )


class TestRecords:
    def test_a_held_record_cannot_be_taken_over(self, store: LocalStore) -> None:
        held = hold(store, "saves/1", b"[]")
        assert store.try_hold("saves/1", Scope("a test")) is None
        held.append(b'["more"]')
        assert store.read("saves/1") == b'[]\n["more"]\n'
        held.release()
        taken = store.try_hold("saves/1", Scope("a test"))
        assert taken is not None
        taken.remove()
        assert store.children("saves") == []
        assert store.try_hold("saves/1", Scope("a test")) is None

    def test_a_record_that_could_not_be_written_is_not_held(self, tmp_path: Path, spawner: Spawner) -> None:
        """Otherwise the failed save would count as running, and stop deletes, as long as its process lives."""
        path = str(tmp_path / "run")
        shardkeep.save(path, make("plain", 1))
        fault = Fault(path, "fail", 1, errno.ENOSPC, calls="write")
        outcome = spawner.run("fail_then_delete", fault, path=path, kind="plain", number=2)
        assert outcome.ok, outcome
        assert not shardkeep.exists(path)

    def test_a_claim_is_given_once(self, store: LocalStore) -> None:
        won: list[bool] = []
        threads = [threading.Thread(target=lambda: won.append(store.claim("claims/x"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False] * 7 + [True]


class TestFiles:
    def test_a_new_file_never_replaces_one(self, store: LocalStore) -> None:
        with store.create("a/b/c", 100) as file:
            file.write(0, [memoryview(b"first")])
        with pytest.raises(FileExistsError, match="exists"):
            store.create("a/b/c", 100)
        assert store.read("a/b/c") == b"first"

    def test_many_buffers_and_empty_ones_are_written_in_order(self, tmp_path: Path) -> None:
        pieces = [bytes([i % 251]) * (i % 5) for i in range(5000)]
        with Descriptor(str(tmp_path / "x"), os.O_RDWR | os.O_CREAT) as file:
            write_at(file, 3, [memoryview(p) for p in pieces])
        assert (tmp_path / "x").read_bytes() == b"\0\0\0" + b"".join(pieces)

    def test_a_write_that_takes_little_at_a_time_is_completed(self) -> None:
        """A pipe takes part of a large buffer; no byte may be lost or doubled. (pwritev needs a file: a size limit.)"""
        _in_fresh_python(
            """
            import os, resource, signal, tempfile
            from shardkeep.stores.local.descriptors import Descriptor, write_at
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
            fd, path = tempfile.mkstemp()
            os.close(fd)
            try:
                write_at(Descriptor(path, os.O_RDWR), 0, [memoryview(b"a" * 3000), memoryview(b"b" * 3000)])
            except OSError as error:
                assert error.filename == path and error.errno == 27, error
            else:
                raise AssertionError("a file beyond the limit was accepted")
            assert open(path, "rb").read() == b"a" * 3000 + b"b" * 2000
            os.unlink(path)
            """
        )

    def test_replace_gives_readers_the_old_or_the_new(self, tmp_path: Path) -> None:
        path = tmp_path / "document"
        LocalStore(str(path.parent)).replace(path.name, b"0" * 1000)
        done = threading.Event()
        wrong: list[bytes] = []

        def read() -> None:
            while not done.is_set():
                data = path.read_bytes()
                if len(data) != 1000 or len(set(data)) != 1:
                    wrong.append(data)

        thread = threading.Thread(target=read)
        thread.start()
        for i in range(100):
            LocalStore(str(path.parent)).replace(path.name, str(i % 10).encode() * 1000)
        done.set()
        thread.join()
        assert wrong == []
        assert os.listdir(tmp_path) == ["document"]

    def test_remove_takes_directories_that_become_empty_and_no_others(self, store: LocalStore) -> None:
        for name in ("a/b/c", "a/b/d", "a/e", "f/g"):
            store.create(name, 100).close()
        store.remove(["a/b/c", "a/b/d", "gone", "gone/too", "f/g/h"])
        assert store.children("") == ["a", "f"]
        assert store.children("a") == ["e"]
        store.remove(["a/e", "f/g"])
        assert store.children("") == []
        assert os.path.isdir(store.url)

    def test_reading_beyond_the_end_is_an_error(self, store: LocalStore) -> None:
        with store.create("x", 100) as file:
            file.write(0, [memoryview(b"12345")])
        with store.open("x") as stored, pytest.raises(EOFError, match="ends before byte 8"):
            stored.read_into(3, np.empty(5, np.uint8))

    def test_a_mapping_starts_anywhere_and_outlives_its_file(self, store: LocalStore) -> None:
        data = np.random.default_rng(0).integers(0, 255, 5 * mmap.PAGESIZE, np.uint8)
        with store.create("x", 100) as file:
            file.write(0, [memoryview(data)])
        for offset in (0, 1, 4095, 4096, 4097, 9000):
            with store.open("x") as stored:
                mapping = stored.map(offset, 5000)
            assert mapping is not None
            mapping.bring_in(0, 5000)
            assert mapping.data.tobytes() == data[offset : offset + 5000].tobytes()
            assert not mapping.data.flags.writeable
        os.unlink(store.locate("x"))
        assert mapping.data.tobytes() == data[offset : offset + 5000].tobytes()

    def test_a_mapped_file_that_is_cut_short_is_an_error_not_a_crash(self, store: LocalStore) -> None:
        with store.create("x", 100) as file:
            file.write(0, [memoryview(b"x" * 5 * mmap.PAGESIZE)])
        with store.open("x") as stored:
            mapping = stored.map(0, 5 * mmap.PAGESIZE)
        assert mapping is not None
        os.truncate(store.locate("x"), 100)
        with pytest.raises(OSError, match=re.escape(store.locate("x"))):
            mapping.bring_in(0, 5 * mmap.PAGESIZE)

    def test_a_name_is_taken_by_a_file_a_link_or_a_file_in_its_way(self, store: LocalStore) -> None:
        store.create("a/b", 100).close()
        os.symlink("nowhere", store.locate("link"))
        assert store.is_taken(["a/b"])
        assert store.is_taken(["link"])
        assert store.is_taken(["free", "a/b/c/d"])
        assert not store.is_taken(["a/c", "d/e"])

    def test_a_link_takes_the_place_of_a_file_and_writes_to_none(self, store: LocalStore) -> None:
        for name in ("a", "b"):
            store.write_new(name, 1, [memoryview(name.encode())])
        store.link("a", "deep/er/c")
        other = store.open("deep/er/c")
        assert os.path.samefile(store.locate("a"), store.locate("deep/er/c"))
        for _ in range(2):  # the second time it is the right file already
            store.link("b", "deep/er/c")
            assert os.path.samefile(store.locate("b"), store.locate("deep/er/c"))
        found = np.zeros(1, np.uint8)
        other.read_into(0, found)
        other.close()
        assert (store.read("a"), store.read("b"), found.tobytes()) == (b"a", b"b", b"a")
        assert os.listdir(store.locate("deep/er")) == ["c"]

    def test_a_link_takes_the_place_of_a_link_not_of_what_that_leads_to(
        self, store: LocalStore, tmp_path: Path
    ) -> None:
        store.write_new("a", 1, [memoryview(b"a")])
        (tmp_path / "outside").write_text("mine")
        os.symlink(tmp_path / "outside", store.locate("b"))
        store.link("a", "b")
        assert os.path.samefile(store.locate("a"), store.locate("b"))
        assert (tmp_path / "outside").read_text() == "mine"
        os.symlink(tmp_path, store.locate("out"))
        with pytest.raises(shardkeep.IntegrityError, match="out/c is behind a symbolic link that leads out of"):
            store.link("a", "out/c")

    def test_a_link_to_nothing_is_an_error(self, store: LocalStore) -> None:
        with pytest.raises(FileNotFoundError, match="absent"):
            store.link("absent", "deep/b")

    @pytest.mark.parametrize("size", [0, 5, 20 << 20])
    def test_a_copy_where_there_are_no_links(
        self, size: int, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

        monkeypatch.setattr(system, "link", refuse)
        data = np.random.default_rng(0).bytes(size)
        new = store.write_new("a", size, [memoryview(data)])
        new.close() if new is not None else None
        for _ in range(2):
            store.link("a", "deep/b")
            assert store.read("deep/b") == data
        assert not os.path.samefile(store.locate("a"), store.locate("deep/b"))

    def test_directories_are_made_at_the_same_time_by_many(self, tmp_path: Path) -> None:
        errors: list[BaseException] = []

        def make_all() -> None:
            try:
                for i in range(40):
                    make_directories(str(tmp_path / str(i) / "a" / "b"))
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=make_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []

    def test_a_file_in_the_way_of_a_directory_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError, match="file"):
            make_directories(str(tmp_path / "file" / "below"))

    @pytest.mark.parametrize("mappable", [True, False])
    def test_sizes_of_many_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappable: bool) -> None:
        """On a network file system, where each look may be a round trip, several threads look."""
        store = LocalStore(str(tmp_path))
        for i in range(100):
            (tmp_path / str(i)).write_bytes(b"1" * i)
        (tmp_path / "directory").mkdir()
        lookers: set[int] = set()
        size = LocalStore.size

        def looked(self: LocalStore, name: str) -> int | None:
            lookers.add(threading.get_ident())
            time.sleep(0.001)
            return size(self, name)

        monkeypatch.setattr(LocalStore, "size", looked)
        monkeypatch.setattr(LocalStore, "mappable", mappable)
        assert store.sizes(str(i) for i in range(100)) == {str(i): i for i in range(100)}
        assert (len(lookers) > 1) == (not mappable)
        assert store.sizes(["7", "none", "directory"]) == {"7": 7, "none": None, "directory": None}

    def test_only_local_file_systems_are_mapped(self, tmp_path: Path) -> None:
        assert mount_of(str(tmp_path)).kind in MAPPABLE
        assert mount_of("/proc").kind not in MAPPABLE
        assert LocalStore(str(tmp_path)).free_bytes() > 0


class TestLocation:
    @pytest.mark.parametrize("path", ["", "a\0b", "ftp://host/x", "s3://", "gs:///x", "gs://b/../x", "file://host/x"])
    def test_what_is_no_local_path_is_refused(self, path: str) -> None:
        with pytest.raises(ValueError, match=r"path|host|knows|bucket|part"):
            location(path)

    def test_forms_of_one_path_are_one_place(self, tmp_path: Path) -> None:
        text = str(tmp_path / "run")
        forms: list[Any] = [
            text,
            text + "/",
            tmp_path / "run",
            f"file://{text}",
            f"file://localhost{text}",
            f"{text}/../run",
        ]
        forms += [f"file://{text}/", f"file://{text}/../run"]
        assert {str(location(form)) for form in forms} == {text}


@pytest.mark.parametrize("format", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_and_directories_honour_the_umask(tmp_path: Path, umask: int, format: Any) -> None:
    before = os.umask(umask)
    try:
        shardkeep.save(tmp_path / "new" / "run", make("plain", 1), format=format)
        shardkeep.save(tmp_path / "new" / "model.safetensors", make("plain", 1))
    finally:
        os.umask(before)
    for path in (tmp_path / "new").rglob("*"):
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


@needs_root
class TestFullDisk:
    @pytest.mark.parametrize("target", ["run", "model.safetensors"])
    def test_too_little_space_is_told_before_anything_is_written(self, small_disk: Path, target: str) -> None:
        path = small_disk / target
        shardkeep.save(path, {"w": np.ones(1000)})
        before = LocalStore(str(small_disk)).free_bytes()
        with pytest.raises(shardkeep.NotEnoughSpaceError, match=r"needs [\d,]+ bytes and [\d,]+ are free") as caught:
            shardkeep.save(path, {"w": np.ones(4 << 20)}, overwrite=True)
        needed, free = (
            int(n.replace(",", "")) for n in re.findall(r"([\d,]{5,}) (?:bytes and|are free)", str(caught.value))
        )
        assert needed > 32 << 20 > free
        assert_intact(path, {"w": np.ones(1000)})
        assert before - LocalStore(str(small_disk)).free_bytes() < 64 << 10
        shardkeep.save(path, {"w": np.ones(1 << 20)}, overwrite=True)

    @pytest.mark.parametrize("format", ["safetensors", "tensorstore"])
    def test_a_disk_filled_by_someone_else_meanwhile(self, small_disk: Path, spawner: Spawner, format: str) -> None:
        """ENOSPC in the middle of a write: the old checkpoint is intact and the space is given back."""
        path = small_disk / "run"
        shardkeep.save(path, make("plain", 1))
        pause = Pause(small_disk.parent / "pause")
        fault = Fault(str(path), "pause", 3, calls="create", pause=str(pause.path))
        child = spawner.start("save", fault, path=str(path), kind="wide", number=2, overwrite=True, format=format)
        pause.reached()
        _fill(small_disk / "other", 12 << 20)
        pause.go()
        outcome = child.wait()
        assert outcome.error == "NotEnoughSpaceError", outcome
        assert re.search(r"needs [\d,]+ bytes and [\d,]+ are free", outcome.message)
        assert "Nothing was committed" in outcome.message
        (small_disk / "other").unlink()
        assert_intact(path, make("plain", 1))
        assert left_overs(path) == set()
        assert LocalStore(str(small_disk)).free_bytes() > 15 << 20
        shardkeep.save(path, make("wide", 3), overwrite=True)

    def test_an_async_save_reports_a_full_disk_in_wait(self, small_disk: Path) -> None:
        pending = shardkeep.save_async(small_disk / "run", {"w": np.ones(4 << 20)})
        with pytest.raises(shardkeep.NotEnoughSpaceError, match="are free"):
            pending.wait()
        assert not shardkeep.exists(small_disk / "run")

    def test_a_read_only_disk_is_named(self, small_disk: Path) -> None:
        shardkeep.save(small_disk / "run", make("plain", 1))
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(shardkeep.AccessError, match="Read-only file system"):
            shardkeep.save(small_disk / "run", make("plain", 2), overwrite=True)
        with pytest.raises(shardkeep.AccessError, match="Read-only file system"):
            shardkeep.save(small_disk / "new", make("plain", 2))
        with pytest.raises(shardkeep.AccessError, match="Read-only file system"):
            shardkeep.delete(small_disk / "run")
        assert_intact(small_disk / "run", make("plain", 1))


def assert_intact(path: Path, tree: Any) -> None:
    assert same(shardkeep.load(path), tree)
    assert shardkeep.verify(path).ok


@needs_root
class TestOtherUsers:
    """What a user meets in a directory that belongs to someone else."""

    def test_saving_where_one_may_not_write(self, open_room: Path, spawner: Spawner) -> None:
        for target in ("new", "deep/new/run", "model.safetensors"):
            outcome = spawner.run("save", uid=NOBODY, path=str(open_room / target), kind="plain", number=1)
            assert outcome.error == "AccessError", outcome
            assert "Permission denied" in outcome.message
            assert str(open_room) in outcome.message
        assert os.listdir(open_room) == []

    def test_saving_over_someone_elses_checkpoint(self, open_room: Path, spawner: Spawner) -> None:
        for target in ("run", "model.safetensors"):
            shardkeep.save(open_room / target, make("plain", 1))
            outcome = spawner.run(
                "save", uid=NOBODY, path=str(open_room / target), kind="plain", number=2, overwrite=True
            )
            assert outcome.error == "AccessError", outcome
            assert_intact(open_room / target, make("plain", 1))

    def test_deleting_someone_elses_checkpoint(self, open_room: Path, spawner: Spawner) -> None:
        for target in ("run", "model.safetensors"):
            shardkeep.save(open_room / target, make("plain", 1))
            outcome = spawner.run("delete", uid=NOBODY, path=str(open_room / target))
            assert outcome.error == "AccessError", outcome
            assert_intact(open_room / target, make("plain", 1))

    def test_reading_needs_no_right_to_write(self, open_room: Path, spawner: Spawner) -> None:
        for target in ("run", "model.safetensors"):
            shardkeep.save(open_room / target, make("plain", 1))
            assert spawner.run("load", uid=NOBODY, path=str(open_room / target), kind="plain", number=1).ok
            assert spawner.run("check", uid=NOBODY, path=str(open_room / target)).value == [True, True]

    @pytest.mark.parametrize("closed", ["directory", "manifest.json", "data", "parent"])
    def test_reading_what_one_may_not_read(self, open_room: Path, spawner: Spawner, closed: str) -> None:
        """An error that says so: not "there is nothing there", and never half a tree."""
        path = open_room / "parent" / "run"
        shardkeep.save(path, make("plain", 1))
        (data,) = path.glob("*.safetensors")
        shut = {"directory": path, "manifest.json": path / "manifest.json", "data": data, "parent": path.parent}[closed]
        shut.chmod(0)
        for action in ("load", "check"):
            arguments: Any = {"kind": "plain", "number": 1} if action == "load" else {}
            outcome = spawner.run(action, uid=NOBODY, path=str(path), **arguments)
            if action == "check" and closed == "data":
                assert outcome.value == [True, False]  # verify reports it as a problem
                continue
            assert outcome.error == "AccessError", outcome
            assert "Permission denied" in outcome.message
        shut.chmod(0o755)
        assert_intact(path, make("plain", 1))

    def test_reading_an_exchange_file_one_may_not_read(self, open_room: Path, spawner: Spawner) -> None:
        path = open_room / "model.safetensors"
        shardkeep.save(path, make("plain", 1))
        path.chmod(0)
        outcome = spawner.run("load", uid=NOBODY, path=str(path), kind="plain", number=1)
        assert outcome.error == "AccessError", outcome
        assert str(path) in outcome.message

    def test_a_shared_directory_serves_two_users(self, open_room: Path, spawner: Spawner) -> None:
        """With a group-writable directory (here: open to all) and umask, each may add a prefix."""
        open_room.chmod(0o777)
        before = os.umask(0)
        try:
            shardkeep.save(open_room / "run", make("plain", 1), prefix="a")
        finally:
            os.umask(before)
        outcome = spawner.run("save", uid=NOBODY, path=str(open_room / "run"), kind="plain", number=2, prefix="b")
        assert outcome.ok, outcome
        shardkeep.save(open_room / "run", make("plain", 3), prefix="b", overwrite=True)
        assert same(shardkeep.load(open_room / "run", prefix="a"), make("plain", 1))
        assert same(shardkeep.load(open_room / "run", prefix="b"), make("plain", 3))


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are synced from now on."""
    paths: list[str] = []

    def sync(path: str) -> None:
        paths.append(os.path.relpath(path, tmp_path))
        sync_path(path)

    monkeypatch.setattr(locks, "sync_path", sync)
    monkeypatch.setattr(local_store, "sync_path", sync)
    return paths


@pytest.mark.parametrize("has_record", [True, False])
def test_new_directories_are_synced_with_the_record_or_else_when_the_lock_is_released(
    tmp_path: Path, synced: list[str], has_record: bool
) -> None:
    store = LocalStore(str(tmp_path / "a" / "b"))
    with store.lock():
        assert synced == []
        if has_record:
            store.hold(f"{store.saves}/{'1' * 32}").take(b"[]")
            assert sorted(synced) == [".", "a", "a/b", "a/b/.shardkeep", "a/b/.shardkeep/saves"]
            synced.clear()
    assert sorted(synced) == ([] if has_record else [".", "a", "a/b"])
    with store.lock():
        pass
    assert len(synced) == (0 if has_record else 3)  # nothing is new


@pytest.mark.parametrize(("how", "error"), [("waits in vain", shardkeep.ConflictError), ("disk is full", OSError)])
def test_new_directories_are_synced_if_the_lock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str], how: str, error: type[Exception]
) -> None:
    """The next save finds them, and does not know that they are new."""
    store = LocalStore(str(tmp_path / "a"))
    make, taken = os.mkdir, list[int]()

    def mkdir(path: str) -> None:
        if how == "disk is full" and path.endswith(".shardkeep"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        make(path)
        if path.endswith(".shardkeep"):  # another program is faster
            taken.append(os.open(f"{path}/lock", os.O_RDWR | os.O_CREAT))
            fcntl.flock(taken[0], fcntl.LOCK_EX)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(error), store.lock(0.01):
        pass
    list(map(os.close, taken))
    assert sorted(set(synced)) == [".", "a"]


def test_a_lock_held_by_another_program_gives_a_conflict_that_names_it(store: LocalStore) -> None:
    make_directories(store.url)
    with store.lock(1):
        pass
    descriptor = os.open(store.locate(".shardkeep/lock"), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(shardkeep.ConflictError, match=re.escape(store.locate(".shardkeep/lock"))), store.lock(0.01):
        pass
    os.close(descriptor)


@pytest.mark.parametrize("part", ["", "saves", "claims", "lock"])
@pytest.mark.parametrize("target", ["run", "model.safetensors"])
def test_a_control_directory_that_is_a_link_is_refused_and_nothing_behind_it_is_touched(
    tmp_path: Path, target: str, part: str
) -> None:
    """A checkpoint from someone else must not make a save or a delete remove files elsewhere."""
    path, victim = tmp_path / target, tmp_path / "victim"
    for name in ("letter", "saves/letter", "claims/letter"):
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).touch()
    shardkeep.save(path, {"w": np.ones(3)})
    control = path / ".shardkeep" if target == "run" else tmp_path / f".{target}.shardkeep"
    if control.exists():
        control.rename(tmp_path / "aside")
    if part:
        control.mkdir()
    (control / part).symlink_to(victim / "new" if part == "lock" else victim)
    before = sorted(victim.rglob("*"))
    with pytest.raises(shardkeep.IntegrityError, match=r"is a symbolic link, which shardkeep never creates"):
        shardkeep.save(path, {"w": np.zeros(3)}, overwrite=True)
    with pytest.raises(shardkeep.IntegrityError, match=r"is a symbolic link, which shardkeep never creates"):
        shardkeep.delete(path)
    assert sorted(victim.rglob("*")) == before
    assert shardkeep.load(path)["w"].sum() == 3


def test_nothing_is_written_behind_a_link_that_leads_out(tmp_path: Path) -> None:
    path, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    path.mkdir()
    (path / "w").symlink_to(victim)
    shardkeep.save(path, {"w": np.ones(3)}, format="zarr")
    assert shardkeep.load(path)["w"].sum() == 3
    for arguments in ({}, {"format": "zarr"}):
        with pytest.raises(shardkeep.IntegrityError, match=r"is below a symbolic link that leads out of"):
            shardkeep.save(path, {"w": np.ones(3)}, prefix="w.x", **arguments)
    assert list(victim.iterdir()) == []


def test_nothing_is_listed_behind_a_link_that_leads_out(tmp_path: Path) -> None:
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "run" / "own").mkdir(parents=True)
    (tmp_path / "run" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "run" / "in").symlink_to(tmp_path / "run")
    store = LocalStore(str(tmp_path / "run"))
    for name in ("out", "out/deep"):
        with pytest.raises(shardkeep.IntegrityError, match=r"is, or is below, a symbolic link that leads out of"):
            store.children(name)
    assert (store.children(""), store.children("in"), store.children("own")) == (["in", "out", "own"],) * 2 + ([],)
    assert LocalStore(str(tmp_path / "run"), confined=False).children("out") == ["deep"]


def test_a_record_that_nests_for_ever_counts_for_nothing(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)})
    saves = tmp_path / "run" / ".shardkeep" / "saves"
    saves.mkdir(exist_ok=True)
    (saves / ("0" * 32)).write_bytes(b"[" * 100_000)
    shardkeep.save(tmp_path / "run", {"w": np.zeros(3)}, overwrite=True)
    assert left_overs(tmp_path / "run") == set()
