"""What a step costs when nothing is due: no system call, no access to a device, no message."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from runs.runs import ONE, new_state
from shardkeep import Run

LOOP = """
import os, sys
import jax, jax.numpy as jnp
from shardkeep import Run
with Run(sys.argv[1], save_every=(10**9, "10 h")) as run:
    state, step = run.resume(lambda: {"w": jnp.zeros(8)})
    loss = jnp.ones(())
    for step in range(1, 100):
        run.step(step, state, metrics={"loss": loss}, iterators={"train": 3})
    os.write(1, b"begin")
    for step in range(100, 10_100):
        run.step(step, state, metrics={"loss": loss}, iterators={"train": 3})
    os.write(1, b"end")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_step_that_is_not_due_makes_no_system_call(tmp_path: Path) -> None:
    """Of 10,000 calls. The interpreter may still take and give back its lock."""
    script, trace = tmp_path / "loop.py", tmp_path / "trace"
    script.write_text(LOOP)
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    arguments = ["strace", "-o", str(trace), sys.executable, str(script), str(tmp_path / "run")]  # the main thread
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = trace.read_text()
    inside = text[text.index('write(1, "begin"') : text.index('write(1, "end"')].splitlines()[1:]
    calls = {line.partition("(")[0] for line in inside}
    assert calls <= {"futex", "mprotect", "munmap", "mmap", "brk", "madvise", "sched_yield"}, inside[:20]
    assert len(inside) < 100


def test_a_step_that_is_not_due_calls_few_functions_and_none_of_jax(tmp_path: Path) -> None:
    called: list[str] = []

    def note(frame: object, event: str, thing: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_filename)  # type: ignore[attr-defined]
        elif event == "c_call":
            called.append(f"C {getattr(thing, '__module__', '')} {getattr(thing, '__name__', '')}")

    with Run(tmp_path / "run", save_every=1000) as run:
        state, _ = run.resume(new_state, shardings=ONE)
        loss = jnp.ones(())
        run.step(1, state)
        with jax.transfer_guard("disallow"):
            sys.setprofile(note)
            run.step(2, state, metrics={"loss": loss}, iterators={"train": {"at": 1}})
            sys.setprofile(None)
    # `max` of two integers, and switching the profile off.
    builtin = [name for name in called if name.startswith("C ")]
    assert all(name.startswith(("C builtins max", "C sys setprofile")) for name in builtin), builtin
    python = [name for name in called if not name.startswith("C ")]
    assert all("/shardkeep/runs/" in name for name in python), python
    assert len(python) <= 6
