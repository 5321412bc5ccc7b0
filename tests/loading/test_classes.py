"""A load names the classes that it cannot rebuild, and how to get them back."""

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import shardkeep
from support import Keyed

_MODULE = """
from dataclasses import dataclass
from typing import NamedTuple

import jax


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    w: jax.Array


class Moments(NamedTuple):
    mu: jax.Array
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package `elsewhere` with classes in its private module; whoever saves imports it, and nobody else has."""
    for name in ("__init__", "_src/__init__", "_src/layers", "models"):
        (tmp_path / "elsewhere" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "elsewhere" / f"{name}.py").write_text("")
    (tmp_path / "elsewhere/__init__.py").write_text("from elsewhere._src import layers as layers")
    (tmp_path / "elsewhere/_src/layers.py").write_text(_MODULE)
    (tmp_path / "elsewhere/models.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "elsewhere"]:
        del sys.modules[name]


def _messages(path: Path, caplog: pytest.LogCaptureFixture) -> tuple[Any, list[str]]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shardkeep"):
        loaded = shardkeep.load(path)
    return loaded, caplog.messages


@pytest.mark.parametrize(
    ("module", "advised"), [("elsewhere._src.layers", "elsewhere"), ("elsewhere.models", "elsewhere.models")]
)
def test_the_import_that_a_load_names_brings_the_class_back(
    module: str, advised: str, elsewhere: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classes = elsewhere(module)
    shardkeep.save(tmp_path / "c", {"layer": classes.Layer(jnp.ones(2)), "moments": classes.Moments(jnp.ones(2))})
    _forget()
    loaded, (opaque, namedtuple) = _messages(tmp_path / "c", caplog)
    assert isinstance(loaded["layer"], shardkeep.OpaqueNode)
    assert "Layer cannot be rebuilt and is loaded as OpaqueNode" in opaque
    assert opaque.endswith(f"Pass template= to get the class back, or import {advised} before loading")
    assert type(loaded["moments"]).__name__ == "Moments"
    assert "Moments is not imported" in namedtuple
    assert "is loaded as a plain namedtuple with the saved fields" in namedtuple
    assert namedtuple.endswith(f"Pass template= to get the class back, or import {advised} before loading")

    elsewhere(advised)
    loaded, messages = _messages(tmp_path / "c", caplog)
    assert (type(loaded["layer"]).__module__, type(loaded["moments"]).__module__) == (module, module)
    assert not messages


def test_several_modules_are_named_once_and_without_the_packages_around_them(
    elsewhere: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private, public = elsewhere("elsewhere._src.layers"), elsewhere("elsewhere.models")
    shardkeep.save(tmp_path / "c", [private.Moments(1), public.Moments(2), private.Layer(3), public.Layer(4)])
    _forget()
    _, messages = _messages(tmp_path / "c", caplog)
    assert [m.partition(". ")[2] for m in messages] == [
        "Pass template= to get the classes back, or import elsewhere.models before loading"
    ] * 2


def test_no_import_is_named_where_none_helps(elsewhere: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Auxiliary data that was not saved, a class of a module that is imported, and a class made by a function."""
    classes = elsewhere("elsewhere.models")
    shardkeep.save(tmp_path / "aux", Keyed(1, 2, tag=len))
    local = type("Moments", (classes.Moments,), {"__qualname__": "make.<locals>.Moments"})
    shardkeep.save(tmp_path / "local", local(1))
    shardkeep.save(tmp_path / "gone", classes.Moments(1))
    del classes.Moments
    for name in ("aux", "local", "gone"):
        _, (message,) = _messages(tmp_path / name, caplog)
        assert message.endswith("Pass template= to get the class back"), message
