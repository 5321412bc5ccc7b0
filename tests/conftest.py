"""Every test runs on eight CPU devices.

`from support import …` and `from faults import …` work in every test file, and in the programs that tests start.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from faults.spawner import Spawner
    from shardkeep.processes.group import Group

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

ROOT = Path(__file__).parents[1]
PATH = [str(ROOT), str(ROOT / "tests")]
sys.path[:0] = PATH
_inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*PATH, *filter(None, _inherited)]))

signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whatever was inherited: tests and the programs they start get signals

# The same examples in every run: a failure is a change of ours, not of the dice.
settings.register_profile(
    "shardkeep",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("shardkeep")


@pytest.fixture(autouse=True)
def _tmp_in_doctests(doctest_namespace: dict[str, object], tmp_path: Path) -> None:
    """Docstring examples write below `tmp`."""
    doctest_namespace["tmp"] = tmp_path


@pytest.fixture(scope="module")
def spawner() -> Iterator["Spawner"]:
    """Starts processes under fault."""
    if "SHARDKEEP_TEST_AS" in os.environ:
        pytest.skip("faults are made with what only Linux has")
    from faults.spawner import Spawner  # only where it is needed: it compiles a library

    with Spawner() as spawner:
        yield spawner


@pytest.fixture(scope="module")
def three() -> Iterator[list["Group"]]:
    """Three processes' worth of groups, in this one."""
    from multiprocess.service import groups

    with groups(3) as made:
        yield made
