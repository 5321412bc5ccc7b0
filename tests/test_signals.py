"""Tests and programs under test do not depend on the signals that the test run inherited."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from signals import START, usual_signals_meanwhile

# What `nohup` and `&` in a script do, and what a parent that blocks signals does; then the program is run as it is.
INHERITED = {
    "ignored": "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])",
}
inherited = pytest.mark.parametrize("how", INHERITED)


def run(how: str, code: str) -> str:
    first = f"import os, signal, sys; {INHERITED[how]}; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", first, code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


STRIKE = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
    print("nothing")
except KeyboardInterrupt:
    print("interrupted")
"""


@inherited
def test_a_program_under_test_is_interrupted_whatever_it_inherited(how: str) -> None:
    assert run(how, STRIKE) == "nothing\n"
    assert run(how, START + STRIKE) == "interrupted\n"


def test_signals_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with usual_signals_meanwhile():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt, match="^$"):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before


@inherited
def test_where_interrupts_are_not_taken_saves_and_commands_just_run(how: str, tmp_path: Path) -> None:
    """The library leaves signals alone: with Ctrl-C ignored or blocked, none of it ends a save or a command."""
    code = f"""
import os, signal, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np, shardkeep
from shardkeep.cli.main import main
handler, mask = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])
over = threading.Event()
def strike():
    while not over.wait(0.002):
        os.kill(os.getpid(), signal.SIGINT)
striking = threading.Thread(target=strike)
striking.start()
pending = shardkeep.save_async({str(tmp_path / "run")!r}, {{"w": np.ones(1 << 18)}})
pending.wait()
assert shardkeep.load({str(tmp_path / "run")!r})["w"].sum() == 1 << 18
assert main(["verify", {str(tmp_path / "run")!r}]) == 0
over.set()
striking.join()
assert (signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == (handler, mask)
"""
    assert "ok" in run(how, code)
