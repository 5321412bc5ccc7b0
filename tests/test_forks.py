"""Forked children: a clear error for what they cannot do, and NumPy arrays saved and loaded on a local disk."""

from pathlib import Path

import pytest

from support import run_python

CHILD = """
import os, sys, warnings
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp, numpy as np, shardkeep

path, what = sys.argv[1], sys.argv[2]
array = jnp.ones((1 << 22,))
shardkeep.save(path + "/there", {"a": array})
pending = shardkeep.save_async(path + "/run", {"a": array})
child = os.fork()
if child == 0:
    try:
        if what == "wait":
            pending.wait()
        if what == "done":
            pending.done()
        if what == "save jax":
            shardkeep.save(path + "/other", {"a": array})
        if what == "load jax":
            shardkeep.load(path + "/there")
        if what == "save":
            shardkeep.save(path + "/other", {"a": np.arange(3)})
            shardkeep.save_async(path + "/other", {"a": np.arange(4)}, overwrite=True).wait()
            print(shardkeep.load(path + "/other"), shardkeep.verify(path + "/other").ok)
        if what == "same":
            shardkeep.save(path + "/run", {"a": np.arange(3)}, overwrite=True)
            print("saved")
    except shardkeep.ConflictError:
        print("saved")
    except shardkeep.ProcessError as error:
        print(str(error)[:200])
    sys.stdout.flush()
    os._exit(0)
ended = os.waitpid(child, 0)[1]
try:
    pending.wait()
except (shardkeep.ConflictError, shardkeep.CheckpointExistsError):
    pass  # the child was faster: it committed during this save, or before it began
print("parent", ended, shardkeep.verify(path + "/run").ok)
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("wait", "from which this process was forked"),
        ("done", "from which this process was forked"),
        ("save jax", "forked after its parent had used JAX"),
        ("load jax", "forked after its parent had used JAX"),
        ("save", "{'a': array([0, 1, 2, 3])} True"),
        ("same", "saved"),
    ],
)
def test_a_child_forked_during_a_save(what: str, said: str, tmp_path: Path) -> None:
    printed = run_python(CHILD, str(tmp_path), what, timeout=60)
    assert said in printed
    assert printed.endswith("parent 0 True\n")


def test_a_child_forked_before_jax_was_used_can_use_it(tmp_path: Path) -> None:
    printed = run_python(
        """
import os, sys
import jax, jax.numpy as jnp, shardkeep
child = os.fork()
if child == 0:
    shardkeep.save(sys.argv[1], {"a": jnp.arange(3)})
    print(shardkeep.load(sys.argv[1])["a"].sum(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
""",
        str(tmp_path / "run"),
        timeout=60,
    )
    assert printed == "3\n0\n"
