"""What is missing is said first, whatever else is wrong with the arguments of a load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkeep
from shardkeep.eformer.manager import AsyncCheckpointManager
from shardkeep.serialization.serialization import tree_deserialize_leaves
from shardkeep.serialization.sharding_utils import create_sharding_tree_from_index
from support import mesh_of

TWO_AXES = mesh_of(2, 4)
BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "prefix": {"prefix": "../x"},
    "prefix of another kind": {"prefix": 5},
    "dtype": {"dtype": "float99"},
    "include": {"include": "("},
    "include of another kind": {"include": 5},
    "mmap": {"mmap": "sometimes"},
    "rules without a mesh": {"partition_rules": [("w", P("a"))]},
    "rules that are none": {"mesh": TWO_AXES, "partition_rules": [5]},
    "an axis the mesh lacks": {"mesh": TWO_AXES, "partition_rules": [(".*", P("nope"))]},
    "shardings": {"shardings": {"w": 5}},
    "template": {"template": {"w": object()}},
    "a template with a function": {"template": {"w": len}},
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_what_is_missing_is_told_before_what_is_wrong_with_the_arguments(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / "nope", tmp_path / "nope.safetensors"):
        with pytest.raises(FileNotFoundError, match="no checkpoint at .*nope"):
            shardkeep.load(path, **BAD_ARGUMENTS[name])
        if not BAD_ARGUMENTS[name].keys() & {"mmap", "template"}:
            with pytest.raises(FileNotFoundError, match="no checkpoint at .*nope"):
                shardkeep.abstract(path, **BAD_ARGUMENTS[name])
    shardkeep.save(tmp_path / "run", {"w": np.ones((8, 8))})
    try:
        shardkeep.load(tmp_path / "run", **BAD_ARGUMENTS[name])
    except FileNotFoundError as error:
        raise AssertionError("it is there") from error
    except (ValueError, TypeError) as error:
        assert "no checkpoint" not in str(error)  # noqa: PT017  (some arguments are used only where they matter)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": TWO_AXES},
        {"mesh": TWO_AXES, "prefix": "x"},
        {"mesh": TWO_AXES, "partition_rules": [(".*", P("nope"))]},
        {"mesh": None, "partition_rules": [(".*", P("a"))]},
        {"mesh": None, "shardings": {"w": 5}},
        {"mesh": None, "prefix": "../x"},
        {"mesh": None, "chunk_size": 0},
    ],
    ids=str,
)
def test_so_it_is_in_the_documented_api(tmp_path: Path, options: dict[str, Any]) -> None:
    manager = AsyncCheckpointManager(enable_validation=True)
    path = tmp_path / "nope"
    calls: list[Callable[[], Any]] = [
        lambda: manager.load(path, **options),
        lambda: manager.load(path, **options, dtype="float99"),
        lambda: manager.load(path, **options, validate=True),
        lambda: manager.load_pytree(path, **{"prefix": "m", **options}, template={"w": object()}),
        lambda: manager.load_tree_parallel(path, shardings={"w": 5}, dtype="float99"),
        lambda: manager.load_tree_parallel(path, prefix_filter="model", dtype="float99"),
        lambda: tree_deserialize_leaves(path, **options),
        lambda: tree_deserialize_leaves(path, **options, manager=manager),
        lambda: create_sharding_tree_from_index(path, options["mesh"], "../x", 5),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError, match="no checkpoint at .*nope"):
            call()
