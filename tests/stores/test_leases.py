"""Directories whose locks other hosts do not see, or that have no locks: what is alive is not taken for dead.

bindfs mounts one directory twice. What is locked through one mount is free through the other, as between two hosts on
Lustre with `-o localflock`, on BeeGFS, or on NFS with `nolock`.
"""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import shardkeep
from faults.spawner import Fault, Pause, Spawner, shim
from faults.states import make, same
from faults.sweep import left_overs
from multiprocess.cluster import Outcome, all_well, run_cluster
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.local import mounts
from shardkeep.stores.local.locks import HeldFile, LockFile
from shardkeep.stores.local.store import LocalStore
from support import hold

# Without the kernel's cache of attributes, which lasts as long as the leases of these tests.
BINDFS = ("bindfs", "-o", "attr_timeout=0,entry_timeout=0,negative_timeout=0")


class Hosts(NamedTuple):
    """One directory as two hosts see it."""

    one: Path
    other: Path


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("bindfs") is None or not os.path.exists("/dev/fuse"):
        pytest.skip("needs bindfs (the Debian package of that name) and /dev/fuse")
    real, found = tmp_path / "real", Hosts(tmp_path / "one", tmp_path / "other")
    mounted: list[Path] = []
    try:
        real.mkdir()
        for place in found:
            place.mkdir()
            done = subprocess.run([*BINDFS, str(real), str(place)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"FUSE file systems cannot be mounted here: {done.stderr.strip()}")
            mounted.append(place)
        yield found
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKEEP_LEASE", "2")


def test_the_two_do_not_see_each_others_locks(hosts: Hosts) -> None:
    """What the other tests stand on."""
    with (hosts.one / "file").open("w") as one, (hosts.other / "file").open() as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not mounts.mount_of(str(hosts.one)).shares_locks


def test_the_files_of_a_running_save_stay(hosts: Hosts, spawner: Spawner, tmp_path: Path) -> None:
    """Another job saves meanwhile, and cleans up what dead saves left."""
    pause = Pause(tmp_path / "pause")
    path = hosts.one / "run"
    fault = Fault(str(path), "pause", 3, calls="write", pause=str(pause.path))  # after the lock's and the record's
    child = spawner.start("save", fault, path=str(path), kind="wide", number=2)
    pause.reached()
    with pytest.raises(shardkeep.IncompleteCheckpointError, match="is running"):
        shardkeep.inspect(hosts.other / "run")
    with pytest.raises(shardkeep.ConflictError, match="running"):
        shardkeep.delete(hosts.other / "run")
    shardkeep.save(hosts.other / "run", {"w": np.arange(5)}, prefix="more")
    pause.go()
    outcome = child.wait()
    assert outcome.ok, outcome
    assert same(shardkeep.load(hosts.other / "run"), make("wide", 2))
    assert (shardkeep.load(hosts.other / "run", prefix="more")["w"] == np.arange(5)).all()
    assert shardkeep.verify(path).ok
    assert left_overs(path) == set()


@pytest.mark.usefixtures("_short")
def test_what_a_dead_save_left_goes_after_its_lease(hosts: Hosts, tmp_path: Path) -> None:
    with Spawner() as spawner:
        path = hosts.one / "run"
        shardkeep.save(path, make("plain", 1))
        outcome = spawner.run(
            "save", Fault(str(path), "kill", 3, calls="create"), path=str(path), kind="plain", number=2
        )
        assert outcome.signal == 9
        assert left_overs(path)
        time.sleep(2.5)
        shardkeep.save(hosts.other / "run", make("plain", 3), overwrite=True)
        assert left_overs(path) == set()
        assert same(shardkeep.load(path), make("plain", 3))


@pytest.mark.usefixtures("_short")
def test_a_record_is_renewed_and_expires_with_its_owner(hosts: Hosts) -> None:
    one, other = LocalStore(str(hosts.one)), LocalStore(str(hosts.other))
    assert one.has_leases
    held = hold(one, "saves/1", b"[]")
    for _ in range(6):
        time.sleep(0.5)
        assert other.is_held("saves/1")
        with other.lock(5), Scope("a test") as scope:
            assert other.try_hold("saves/1", scope) is None
    held.confirm(0)
    held.renewal.stop()  # as if its process had died: nothing renews it any more
    held.file.close()
    time.sleep(2.5)
    assert not other.is_held("saves/1")
    with other.lock(5), Scope("a test") as scope:
        taken = other.try_hold("saves/1", scope)
        assert taken is not None
        taken.remove()


@pytest.mark.usefixtures("_short")
def test_a_save_that_was_suspended_for_too_long_is_refused(hosts: Hosts) -> None:
    one, other = LocalStore(str(hosts.one)), LocalStore(str(hosts.other))
    held = hold(one, "saves/1", b"[]")
    with one.lock(5):
        one._guard.stop()
        held.renewal.stop()
        time.sleep(2.5)
        with other.lock(5), Scope("a test") as scope:
            taken = other.try_hold("saves/1", scope)
            assert taken is not None
            taken.remove()
        with pytest.raises(shardkeep.ConflictError, match="was removed by another program"):
            held.confirm(0)
        with pytest.raises(shardkeep.ConflictError, match="was taken over"):
            one.replace("manifest.json", b"{}")
    assert not os.path.exists(one.locate("manifest.json"))
    held.release()
    with other.lock(1):
        pass


def _lock_for(store: LocalStore, seconds: float) -> None:
    with store.lock(seconds):
        pass


def test_the_lock_is_held_by_one(hosts: Hosts) -> None:
    one, other = LocalStore(str(hosts.one)), LocalStore(str(hosts.other))
    with ThreadPoolExecutor(1) as pool, one.lock(1):
        late = pool.submit(_lock_for, other, 0.2).exception()
        assert isinstance(late, shardkeep.ConflictError)
        assert "timed out waiting for the lock" in str(late)
    with other.lock(1):
        pass
    assert sorted(os.listdir(one.locate(".shardkeep"))) == ["lock"]


@pytest.mark.usefixtures("_short")
def test_a_lock_that_has_expired_is_removed_once(hosts: Hosts) -> None:
    """By one of those who wait, even if one of them died while it removed it."""
    store = LocalStore(str(hosts.one))
    with store.lock(1):
        pass
    path = store.locate(".shardkeep/lock.held")
    for content in ("", "somebody"):
        Path(path).write_text(content)
        Path(f"{path}-{content}").touch()
        time.sleep(2.2)
        with store.lock(5):
            assert Path(path).read_text() not in ("", "somebody")
        assert sorted(os.listdir(store.locate(".shardkeep"))) == ["lock"]


def test_nobody_removes_the_lock_of_another_owner(tmp_path: Path) -> None:
    path = tmp_path / "lock.held"
    lock = LockFile(str(tmp_path / "lock"))
    lock.open(os.O_CREAT)
    first, second = HeldFile(str(path), lock), HeldFile(str(path), lock)
    first.take(0)
    path.unlink()  # it expired, and another program removed it
    second.take(0)
    first.release()
    assert path.read_text() == second._owner
    second.release()
    lock.release()
    assert os.listdir(tmp_path) == ["lock"]


# Both processes see the directory under one path, each through a mount of its own.
ELSEWHERE = 'mount --bind "$0" "$1" && shift && exec "$@"'

TOGETHER = """
import shardkeep.stores.local.mounts as mounts
if SHARING:
    mounts._SHARING = frozenset(["fuse"])
path = Path(PATH) / "run"
values = values_of(1)
tree = arrays_of(values, mesh_over((2, size)))
if index == 1 and not SHARING:
    fault(path, "pause", 2, "write")
shardkeep.save(path, tree)
say(wrong=differences(shardkeep.load(path, mesh=mesh_over((2, size))), values))
"""


@pytest.mark.parametrize("sharing", [False, True])
def test_a_save_of_processes_on_several_hosts(
    hosts: Hosts, tmp_path: Path, sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system promises to share its locks, and does not: then the processes notice."""
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("needs mount namespaces")
    seen = hosts.one
    command = ["unshare", "-m", "sh", "-c", ELSEWHERE, str(hosts.other), str(seen)]
    script = f"PATH, SHARING = {str(seen)!r}, {sharing}\n" + TOGETHER
    if sharing:
        monkeypatch.setattr(mounts, "_SHARING", frozenset(["fuse"]))
        outcomes = run_cluster(script, tmp_path / "room", commands={1: command}, timeout=100)
        assert "locks of other hosts are not visible here" in outcomes[1].output
        assert LocalStore(str(seen / "run")).has_leases
    else:
        outcomes = _while_another_job_saves(script, tmp_path, hosts, command)
    assert [process["wrong"] for process in all_well(outcomes)] == [[], []]
    assert shardkeep.verify(seen / "run").ok
    shardkeep.delete(seen / "run")
    assert not shardkeep.exists(seen / "run")


def _while_another_job_saves(script: str, tmp_path: Path, hosts: Hosts, command: list[str]) -> list[Outcome]:
    """Run two processes; while the second one writes, a third, on a host of its own, saves and cleans up."""
    third = tmp_path / "third"
    third.mkdir()
    subprocess.run([*BINDFS, str(tmp_path / "real"), str(third)], check=True)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run_cluster, script, tmp_path / "room", commands={1: command}, timeout=100)
            pause = Pause(hosts.one / "run.pause")
            pause.reached()
            shardkeep.save(third / "run", {"w": np.arange(5)}, prefix="more")
            pause.go()
            return running.result()
    finally:
        subprocess.run(["umount", "-l", str(third)], check=True)


WITHOUT_LOCKS = """
import ctypes, errno, fcntl, os, sys, threading, time
from pathlib import Path
import numpy as np
import shardkeep
from shardkeep.runtime.scopes import Scope
from shardkeep.stores.local.store import LocalStore
root, code = sys.argv[1], int(sys.argv[2])
ctypes.CDLL(os.environ["LD_PRELOAD"]).shim_arm(root.encode(), b"flock", 5, 1, code, 1, b"")
with open(f"{root}/x", "w") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        assert error.errno == code
    else:
        raise AssertionError("there are locks")
path = f"{root}/run"
shardkeep.save(path, {"w": np.arange(4)})
shardkeep.save_async(path, {"w": np.arange(5)}, overwrite=True).wait()
assert (shardkeep.load(path)["w"] == np.arange(5)).all()
one, other = LocalStore(path), LocalStore(path)
with one.lock(1):
    try:
        with other.lock(0.2):
            raise AssertionError("the lock is held twice")
    except shardkeep.ConflictError as error:
        assert "holds the lock" in str(error)
held = one.hold(".shardkeep/saves/1")
held.take(b"[]")
for _ in range(5):
    time.sleep(0.5)
    assert other.is_held(".shardkeep/saves/1")
    with other.lock(1), Scope("a test") as scope:
        assert other.try_hold(".shardkeep/saves/1", scope) is None
held.release()  # nothing renews it any more
time.sleep(1.5)
shardkeep.save(path, {"w": np.arange(6)}, overwrite=True)
assert one.children(".shardkeep/saves") == []
for number in (1, 2):  # the second one waits for no lease
    with shardkeep.Run(f"{root}/training") as run:
        run.save(number, {"w": np.arange(3)})
        run.wait()
        found = run.latest()
        assert found and found.number == number, (found, run.steps(), sorted(map(str, Path(root).rglob("*"))))
shardkeep.delete(path)
assert not os.path.exists(path)
"""


@pytest.mark.parametrize("code", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks(tmp_path: Path, code: str) -> None:
    """As Lustre without `-o flock`: what fails with it are all calls of `flock` below the directory."""
    environment = {**os.environ, "LD_PRELOAD": str(shim()), "SHARDKEEP_LEASE": "1", "JAX_PLATFORMS": "cpu"}
    script = textwrap.dedent(WITHOUT_LOCKS)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(getattr(errno, code))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
