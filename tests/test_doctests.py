"""Every example in a docstring runs and gives what it says."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import shardkeep


def _modules() -> list[str]:
    found = pkgutil.walk_packages(shardkeep.__path__, "shardkeep.")
    return ["shardkeep", *(module.name for module in found if not module.name.endswith("__main__"))]


def _tests(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    return [test for test in doctest.DocTestFinder().find(module, name) if test.examples]


@pytest.mark.parametrize("name", _modules())
def test_examples_of_the_module_give_what_they_say(name: str, tmp_path: Path) -> None:
    runner = doctest.DocTestRunner(verbose=False)
    printed: list[str] = []
    for number, test in enumerate(_tests(name)):
        test.globs["tmp"] = tmp_path / str(number)
        runner.run(test, out=printed.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(printed)


def test_there_are_examples() -> None:
    examples = [example for name in _modules() for test in _tests(name) for example in test.examples]
    assert len(examples) > 30


@pytest.mark.parametrize("name", ["save", "save_async", "load", "inspect", "verify", "exists", "delete"])
def test_every_main_function_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(shardkeep, name).__doc__ or "")
