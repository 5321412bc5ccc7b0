"""Real JAX processes on this machine: each runs the same script, finds the others, and tells what it saw.

`run_cluster` starts processes for one script, and is for those that kill, stop or end some of them. A `Cluster` stays:
its processes run one script after another, which costs no start; the first script that fails ends it.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.spawner import shim

_END = "ENDED "

PREAMBLE = """
from signals import usual_signals
usual_signals()
import ctypes, faulthandler, gc, inspect, json, os, signal, sys, threading, time, traceback
faulthandler.register(signal.SIGUSR2, sys.stdout)
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
index, size, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
root = Path(sys.argv[4])
if os.environ.get("TEST_SERVICE") == "outside":  # then it is there already, in a process of its own
    import types
    from jax._src.lib import _jax
    _jax.get_distributed_runtime_service = lambda *_, **__: types.SimpleNamespace(shutdown=lambda: None)
timeouts = {"heartbeat_timeout_seconds": int(os.environ.get("TEST_HEARTBEAT", "100")), "shutdown_timeout_seconds": 5}
known = inspect.signature(jax.distributed.initialize).parameters  # JAX 0.8 has no timeout for the shutdown
jax.distributed.initialize(
    f"127.0.0.1:{port}", size, index, coordinator_bind_address=f"127.0.0.1:{port}",
    **{name: seconds for name, seconds in timeouts.items() if name in known},
)
import shardkeep
from multiprocess.inside import *
"""

_SERVICE = """
import sys, time
from jax._src.lib import _jax
address, size = sys.argv[1:]
service = _jax.get_distributed_runtime_service(address, int(size), heartbeat_timeout=100, shutdown_timeout=5)
print("ready", flush=True)
time.sleep(600)
"""

# A process of a Cluster: one script for each line of its standard input.
_SERVE = """
import multiprocess.inside
_scope = dict(globals())
for _line in sys.stdin:
    _order = json.loads(_line)
    _here = {**_scope, "root": Path(_order["root"])}
    try:
        exec(compile(_order["script"], "script", "exec"), _here)
        _how = "well"
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        _how = "badly"
    del _here
    gc.collect()
    print("ENDED " + _how, flush=True)
"""


@dataclass
class Outcome:
    """How one process ended, and what it said."""

    code: int
    said: dict[str, Any]
    output: str
    seconds: float = field(default=0.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    script: str,
    root: Path,
    index: int,
    size: int,
    port: int,
    devices: int,
    environment: Mapping[str, str],
    command: list[str] | None = None,
) -> subprocess.Popen[str]:
    """One process of a cluster; `command` goes before Python."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False, dir=root.parent) as file:
        file.write(PREAMBLE + script)
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": "",
        "OPENBLAS_NUM_THREADS": "1",
        "LD_PRELOAD": str(shim()),
        **environment,
    }
    arguments = [*(command or []), sys.executable, file.name, str(index), str(size), str(port), str(root)]
    return subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
        start_new_session=True,
    )


def run_cluster(
    script: str,
    root: Path,
    size: int = 2,
    devices: int = 2,
    timeout: float = 120,
    environment: dict[str, str] | None = None,
    commands: Mapping[int, list[str]] | None = None,
    outside: bool = False,
) -> list[Outcome]:
    """Run `script` on `size` processes; whatever happens, none of them outlives the test.

    `commands` names, for some of the processes, what starts them (`unshare …`, `strace …`). `outside`: the coordination
    service is in a process of its own, and not in the first of them.
    """
    root.mkdir(parents=True, exist_ok=True)
    port = free_port()
    if outside:
        with service_process(f"127.0.0.1:{port}", size):
            variables = {**(environment or {}), "TEST_SERVICE": "outside"}
            return _run(script, root, size, devices, timeout, variables, commands or {}, port)
    return _run(script, root, size, devices, timeout, environment or {}, commands or {}, port)


@contextlib.contextmanager
def service_process(address: str, size: int) -> Iterator[subprocess.Popen[str]]:
    """A coordination service of JAX in a process of its own, which may be stopped and continued."""
    arguments = [sys.executable, "-c", _SERVICE, address, str(size)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            assert service.stdout.readline() == "ready\n"
            yield service
        finally:
            service.kill()


def _run(
    script: str,
    root: Path,
    size: int,
    devices: int,
    timeout: float,
    environment: Mapping[str, str],
    commands: Mapping[int, list[str]],
    port: int,
) -> list[Outcome]:
    begun = time.monotonic()
    processes = [start(script, root, i, size, port, devices, environment, commands.get(i)) for i in range(size)]
    outcomes: list[Outcome] = []
    try:
        # All are read at once: one that waits for its output to be taken would be late for the others.
        readers = [_Reader(process) for process in processes]
        for process, reader in zip(processes, readers, strict=True):
            late = not reader.wait(begun + timeout)
            if late:
                _kill(process)
                reader.wait(time.monotonic() + 10)
            output = reader.text + ("\nTIMED OUT" if late else "")
            outcomes.append(Outcome(process.wait(), said(output), output, reader.ended - begun))
    finally:
        for process in processes:
            _kill(process)
    return outcomes


class _Reader:
    """What a process prints, taken as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.text = ""
        self.ended = 0.0
        self._process = process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.text += line
        self.ended = time.monotonic()

    def wait(self, until: float) -> bool:
        self._thread.join(max(until - time.monotonic(), 0.1))
        return not self._thread.is_alive()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class Cluster:
    """Processes that stay together for many scripts. A script that fails, or takes too long, ends them."""

    def __init__(
        self, room: Path, size: int = 2, devices: int = 2, environment: Mapping[str, str] | None = None
    ) -> None:
        self.size, self.devices = size, devices
        room.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self._processes = [start(_SERVE, room, i, size, port, devices, environment or {}) for i in range(size)]
        self._lines: list[queue.SimpleQueue[str | None]] = [queue.SimpleQueue() for _ in range(size)]
        for process, lines in zip(self._processes, self._lines, strict=True):
            threading.Thread(target=self._listen, args=(process, lines), daemon=True).start()

    @staticmethod
    def _listen(process: subprocess.Popen[str], lines: "queue.SimpleQueue[str | None]") -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    def _stacks(self, number: int) -> str:
        """Where the threads of a process are."""
        self._processes[number].send_signal(signal.SIGUSR2)
        found = ""
        with contextlib.suppress(queue.Empty):
            while (line := self._lines[number].get(timeout=1)) is not None:
                found += line
        return found

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def run(self, script: str, root: Path, timeout: float = 60) -> list[dict[str, Any]]:
        """What each process said; all of them must get through the script."""
        root.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + timeout
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"script": script, "root": str(root)}) + "\n")
            process.stdin.flush()
        outputs: list[str] = []
        problems: list[str] = []
        for number, lines in enumerate(self._lines):
            output = ""
            while True:
                try:
                    line = lines.get(timeout=max(until - time.monotonic(), 1))
                except queue.Empty:
                    output += self._stacks(number)
                    problems.append(f"process {number} did not come to an end:\n{output[-6000:]}")
                    break
                if line is None:
                    problems.append(f"process {number} is gone:\n{output[-6000:]}")
                    break
                output += line
                if line.startswith(_END):
                    if line.strip() != _END + "well":
                        problems.append(f"process {number}:\n{output[-6000:]}")
                    break
            outputs.append(output)
        if problems:
            self.close()
            raise AssertionError("\n".join(problems))
        return [said(output) for output in outputs]

    def close(self) -> None:
        for process in self._processes:
            _kill(process)


@contextlib.contextmanager
def kept_cluster(room: Path, size: int, devices: int = 2) -> Iterator["Kept"]:
    """A Cluster for many tests, started when it is first needed and again after a test broke it."""
    kept = Kept(room, size, devices)
    try:
        yield kept
    finally:
        kept.close()


class Kept:
    """A Cluster that is there when it is needed."""

    def __init__(self, room: Path, size: int, devices: int) -> None:
        self._room, self._size, self._devices = room, size, devices
        self._cluster: Cluster | None = None

    def run(self, script: str, root: Path, timeout: float = 60) -> list[dict[str, Any]]:
        if self._cluster is None or not self._cluster.alive:
            self.close()
            self._cluster = Cluster(self._room, self._size, self._devices)
            self._cluster.run("", root)  # until all are there
        return self._cluster.run(script, root, timeout)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def said(output: str) -> dict[str, Any]:
    """What a process told the test with `say`, from all that it printed."""
    said: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("SAID "):
            said |= json.loads(line.removeprefix("SAID "))
    return said


def all_well(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """What the processes said, all of which must have ended well."""
    for number, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"process {number} ended with {outcome.code}:\n{outcome.output[-6000:]}"
    return [outcome.said for outcome in outcomes]
