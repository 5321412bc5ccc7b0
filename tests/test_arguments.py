"""Arguments that must be True or False are refused if they are anything else, before anything is written."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep

TREE = {"w": np.arange(3.0)}
WRONG: list[Any] = ["yes", "", 1, None, np.ones(2, bool)]

CALLS: dict[str, Callable[..., Any]] = {
    "save": lambda path, **given: shardkeep.save(path, TREE, **given),
    "save_async": lambda path, **given: shardkeep.save_async(path, TREE, **given).wait(),
    "load": shardkeep.load,
    "plan_load": shardkeep.plan_load,
    "verify": shardkeep.verify,
    "Run.save": lambda path, **given: _with_run(path, lambda run: run.save(2, TREE, **given).wait()),
    "Run.watch": lambda path, **given: list(shardkeep.Run(path).watch(timeout=0, **given)),
    "Run.load": lambda path, **given: shardkeep.Run(path).load(**given),
    "Run.resume": lambda path, **given: _with_run(path, lambda run: run.resume(TREE, **given)),
}
OF_LOAD = ("verify", "mmap", "progress")
ARGUMENTS = [
    *(("save", name) for name in ("overwrite", "progress")),
    *(("save_async", name) for name in ("overwrite", "progress", "copy")),
    *((call, name) for call in ("load", "plan_load", "Run.load", "Run.resume") for name in OF_LOAD),
    ("verify", "progress"),
    ("Run.save", "pin"),
    ("Run.watch", "hold"),
]


def _with_run(path: Path, call: Callable[[shardkeep.Run], Any]) -> Any:
    with shardkeep.Run(path) as run:
        return call(run)


def _files(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}


def test_every_such_argument_is_among_those_that_are_tried() -> None:
    """But for those of functions that take the arguments of others: `plan_load`, `Run.load` and `Run.resume`."""
    functions: dict[str, Any] = {name: getattr(shardkeep, name) for name in shardkeep.__all__}
    functions |= {f"Run.{name}": function for name, function in inspect.getmembers(shardkeep.Run, inspect.isfunction)}
    found = {
        (name, each.name)
        for name, function in functions.items()
        if inspect.isfunction(function) and not name.rpartition(".")[2].startswith("_")
        for each in inspect.signature(function).parameters.values()
        if type(each.default) is bool
    }
    assert found == {pair for pair in ARGUMENTS if pair[0] not in ("plan_load", "Run.load", "Run.resume")}


@pytest.mark.parametrize(("call", "name"), ARGUMENTS)
def test_what_is_neither_true_nor_false_is_refused_and_numpys_bools_are_not(
    call: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    if call.startswith("Run."):
        _with_run(path, lambda run: run.save(1, TREE).wait())
    elif not call.startswith("save"):
        shardkeep.save(path, TREE)
    before = _files(tmp_path)
    for wrong in WRONG:
        with pytest.raises(TypeError, match=f"{name} must be True or False, not"):
            CALLS[call](path, **{name: wrong})
    assert _files(tmp_path) == before, "nothing was written"
    CALLS[call](path, **{name: np.False_})


def test_a_run_without_steps_refuses_them_too(tmp_path: Path) -> None:
    with shardkeep.Run(tmp_path / "run") as run, pytest.raises(TypeError, match="verify must be True or False"):
        run.resume(TREE, verify="no")


def test_broadcast_takes_numpys_bools(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", TREE)
    assert shardkeep.load(tmp_path / "c", broadcast=np.False_)["w"][2] == 2  # type: ignore[arg-type]
