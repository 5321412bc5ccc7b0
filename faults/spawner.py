"""Processes under fault, made quickly: one process imports everything once and forks a child for each action.

The spawning process runs with the shim preloaded. A child arms it, runs one action of `faults.states` and reports.
"""

import atexit
import contextlib
import ctypes
import errno as errnos
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from signals import usual_signals

HERE = Path(__file__).parent
CHANGES = "create,write,fsync,rename,link,unlink,rmdir,mkdir"
MODES = {"count": 1, "kill": 2, "torn": 3, "interrupt": 4, "fail": 5, "pause": 6, "step": 7}


@dataclass(frozen=True)
class Fault:
    """What happens to a process: at call number `at` of those in `calls` that touch `root`."""

    root: str
    mode: str = "count"
    at: int = 0
    errno: int = errnos.EIO
    again: bool = False  # a failing call keeps failing from then on
    calls: str = CHANGES
    pause: str = ""  # where `<pause>.reached` appears, and `<pause>.go` is waited for; "step": `<pause>.<call>.…`


@dataclass(frozen=True)
class Outcome:
    """How a process ended: `signal` if it was killed, `error` (type, its bases, message) if the action raised."""

    signal: int = 0
    code: int = 0  # what a program ended with
    calls: int = 0  # how many calls were counted
    value: Any = None
    error: str = ""
    bases: tuple[str, ...] = ()
    message: str = ""
    log: str = ""

    @property
    def ok(self) -> bool:
        return not self.signal and not self.error


@cache
def shim() -> Path:
    """The shim, compiled once for each test process."""
    path = Path(tempfile.mkdtemp(prefix="shardkeep-shim-")) / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(HERE / "shim.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    path.parent.chmod(0o755)
    return path


class Spawner:
    """Starts processes that share what was imported before, the module of their `actions`; close it at the end."""

    def __init__(self, actions: str = "faults.states") -> None:
        env = {
            **os.environ,
            "LD_PRELOAD": str(shim()),
            "SHARDKEEP_SHIM": str(shim()),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.spawner", actions],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self, action: str, fault: Fault | None = None, uid: int | None = None, program: bool = False, **arguments: Any
    ) -> "Child":
        """Begin an action in a process of its own; as a `program` it ends as programs do, and only its log is told."""
        request = {"action": action, "fault": vars(fault) if fault else None, "uid": uid, "arguments": arguments}
        pid, report = self._ask({**request, "program": program})
        return Child(self, pid, report)

    def run(self, action: str, fault: Fault | None = None, uid: int | None = None, **arguments: Any) -> Outcome:
        """Run an action in a process of its own, to its end."""
        return self.start(action, fault, uid, **arguments).wait()

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the spawning process has ended"
        return json.loads(line)

    def wait(self, pid: int, report: str, seconds: float) -> Outcome:
        status = self._ask({"wait": pid, "seconds": seconds})
        if status is None:
            raise TimeoutError(f"process {pid} was still running after {seconds} s")
        text = Path(report).read_text()
        Path(report).unlink()
        told = json.loads(text.splitlines()[-1]) if text.startswith("{") else {"log": text}
        told["bases"] = tuple(told.get("bases", ()))
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
        return Outcome(signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, code=code, **told)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> "Spawner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Child:
    """A process that was started."""

    def __init__(self, spawner: Spawner, pid: int, report: str) -> None:
        self.pid = pid
        self._spawner, self._report = spawner, report

    def wait(self, seconds: float = 60) -> Outcome:
        return self._spawner.wait(self.pid, self._report, seconds)

    def ended(self, seconds: float) -> bool:
        """Whether it has ended, or does so within that time."""
        deadline = time.monotonic() + seconds
        while not (ended := Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return ended

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@dataclass
class Pause:
    """A place where a process stops until it is told to go on."""

    path: Path

    def reached(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.path.with_name(self.path.name + ".reached").exists():
            assert time.monotonic() < deadline, "the process never came to the pause"
            time.sleep(0.002)

    def go(self) -> None:
        self.path.with_name(self.path.name + ".go").touch()


def _main() -> None:
    """The spawning process: a request on each line of standard input, an answer on each line of standard output."""
    usual_signals()  # before there are threads, which inherit the mask
    _, actions = sys.argv if len(sys.argv) > 1 else ("", "faults.states")
    states = importlib.import_module(actions)  # before the first fork, once for all

    library = ctypes.CDLL(os.environ["SHARDKEEP_SHIM"])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer: Any = _wait(request["wait"], request["seconds"])
        else:
            descriptor, report = tempfile.mkstemp(prefix="shardkeep-report-")
            pid = os.fork()
            if pid == 0 and request["program"]:
                return _program(request, descriptor, library, states)
            if pid == 0:
                _child(request, descriptor, library, states)
            os.close(descriptor)
            answer = [pid, report]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _wait(pid: int, seconds: float) -> int | None:
    watch = os.pidfd_open(pid)
    try:
        if not select.select([watch], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
    finally:
        os.close(watch)
    return os.waitpid(pid, 0)[1]


def _child(request: Any, descriptor: int, library: ctypes.CDLL, states: Any) -> None:
    """Run one action and end, without the spawner's clean-up."""
    atexit._clear()
    usual_signals()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = tempfile.TemporaryFile()  # noqa: SIM115  (ends with the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    told: dict[str, Any] = {}
    try:
        if request["uid"] is not None:
            os.setgroups([])
            os.setgid(request["uid"])
            os.setuid(request["uid"])
        _arm(request["fault"], library)
        told["value"] = getattr(states, request["action"])(**request["arguments"])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:  # noqa: BLE001  (all of it is reported)
        kinds = tuple(base.__name__ for base in type(error).__mro__)
        told |= {"error": type(error).__name__, "bases": kinds, "message": str(error)}
        traceback.print_exc()
    sys.stderr.flush()
    log.seek(0)
    told |= {"calls": library.shim_count(), "log": log.read().decode(errors="replace")}
    os.write(descriptor, json.dumps(told).encode())
    os._exit(0)


def _program(request: Any, descriptor: int, library: ctypes.CDLL, states: Any) -> None:
    """Run one action as a program does: what it raises ends it, and the interpreter is left in the usual way."""
    usual_signals()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _arm(request["fault"], library)
    getattr(states, request["action"])(**request["arguments"])


def _arm(fault: Any, library: ctypes.CDLL) -> None:
    if fault:
        library.shim_arm(
            os.fsencode(os.path.realpath(fault["root"])),
            fault["calls"].encode(),
            MODES[fault["mode"]],
            fault["at"],
            fault["errno"],
            int(fault["again"]),
            os.fsencode(fault["pause"]),
        )


if __name__ == "__main__":
    _main()
