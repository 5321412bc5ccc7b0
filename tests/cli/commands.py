"""What the tests of the command share: running it, here or in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardkeep.catalog import find
from shardkeep.cli.main import main
from shardkeep.stores.location import location
from support import record

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eformer"
GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
DEAD = "de" * 16  # the id of a save that died


@dataclass(frozen=True)
class Result:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


class Run:
    """Calls the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> Result:
        self._capsys.readouterr()
        code = main([str(word) for word in words])
        said = self._capsys.readouterr()
        return Result(code, said.out, said.err)

    def document(self, *words: object) -> Any:
        """The JSON of a command that ends well."""
        result = self(*words, "--json")
        assert result.code in (0, 1), result.err
        return result.document


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command, in this process."""
    return Run(capsys)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **more}


def run_command(words: Sequence[object], **more: str) -> Result:
    """The command in a process of its own, its output in pipes."""
    done = subprocess.run(
        [sys.executable, "-m", "shardkeep", *map(str, words)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def flip(path: Path, offset: int = -1) -> None:
    """Damage one byte of a file; counted from the end if negative."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(bytes(data))


def data_file(checkpoint: Path) -> Path:
    """The one data file of a checkpoint in the safetensors format."""
    (found,) = checkpoint.glob("*.safetensors")
    return found


def leave_dead_save(path: Path, save_id: str = DEAD) -> Path:
    """What a save leaves that died while it wrote: its record, unlocked, and a file of 1000 bytes."""
    if path.suffix == ".safetensors":
        path.parent.mkdir(parents=True, exist_ok=True)
    else:
        path.mkdir(parents=True, exist_ok=True)
    store = find(location(path)).store
    name = f"{store.control}/{save_id}.tmp" if path.suffix else f"{save_id}-00000.safetensors"
    if not store.children(store.saves):
        record(store, save_id, [name]).release()
    file = Path(store.locate(name))
    file.write_bytes(b"x" * 1000)
    return file


_KILLED = """
import os, signal, sys
import numpy as np
import shardkeep
def die_at_the_commit(event, arguments):
    if event == "open" and "manifest.json." in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die_at_the_commit)
shardkeep.save(sys.argv[1], {"a": np.ones(1000), "b": np.ones(10)}, format=sys.argv[2])
"""


def kill_save(path: Path, format: str) -> None:
    """A save that is killed when all is written and nothing committed."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(path), format],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
