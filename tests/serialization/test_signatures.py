"""Every documented name is at its module path, with exactly the documented parameters."""

import dataclasses
import importlib
import inspect
from typing import Any

import jax.numpy as jnp
import pytest

import shardkeep.serialization
from shardkeep.serialization.async_manager import AsyncCheckpointManager, CheckpointMetadata

REQUIRED = inspect.Parameter.empty
KEYWORD_ONLY = "*"

# module → function → its parameters in order; KEYWORD_ONLY stands where the documentation has it.
FUNCTIONS: dict[str, dict[str, list[Any]]] = {
    "serialization": {
        "is_array_like": [("x", REQUIRED)],
        "leaf_key_paths": [("pytree", REQUIRED), ("prefix", ""), KEYWORD_ONLY, ("is_leaf", None)],
        "join_key": [("prefix", REQUIRED), ("k", REQUIRED)],
        "tree_serialize_leaves": [
            ("checkpoint_dir", REQUIRED),
            ("pytree", REQUIRED),
            ("manager", None),
            KEYWORD_ONLY,
            ("prefix", None),
            ("commit_callback", None),
            ("write_index", True),
        ],
        "tree_deserialize_leaves": [
            ("checkpoint_dir", REQUIRED),
            ("mesh", REQUIRED),
            ("manager", None),
            KEYWORD_ONLY,
            ("prefix", None),
            ("partition_rules", None),
            ("shardings", None),
            ("callback", None),
            ("chunk_size", None),
        ],
    },
    "sharding_utils": {
        "apply_sharding_tree": [("arrays", REQUIRED), ("sharding_tree", REQUIRED), ("mesh", None)],
        "create_sharding_tree_from_index": [
            ("checkpoint_dir", REQUIRED),
            ("mesh", None),
            ("prefix", None),
            ("default_sharding", None),
        ],
        "make_itsharded": [("xs", REQUIRED), ("mesh", REQUIRED)],
        "validate_sharding_tree": [("sharding_tree", REQUIRED), ("expected_structure", REQUIRED)],
    },
    "utils": {
        "apply_gather_functions": [
            ("state", REQUIRED),
            ("gather_fns", REQUIRED),
            ("mismatch_allowed", REQUIRED),
            ("verbose", REQUIRED),
        ],
        "broadcast_tensor": [("tensor", REQUIRED), ("memory_limit_bytes", REQUIRED), ("target_sharding", None)],
        "chunk_tensor_by_memory": [("tensor", REQUIRED), ("memory_limit", REQUIRED)],
        "derive_base_prefix_from_path": [("path_str", REQUIRED)],
        "estimate_array_nbytes": [("array", REQUIRED)],
        "estimate_available_memory": [],
        "flatten_for_broadcast": [("state", REQUIRED)],
        "group_keys_by_shard_size": [("flat_state", REQUIRED), ("max_shard_size_bytes", REQUIRED)],
        "index_filename": [("base_prefix", REQUIRED)],
        "is_gcs_path": [("path", REQUIRED)],
        "optimize_shard_layout": [("state", REQUIRED), ("max_shard_size_bytes", REQUIRED)],
        "parse_gcs_path": [("gcs_path", REQUIRED)],
        "read_process_array": [
            ("key", REQUIRED),
            ("shard_fns", REQUIRED),
            ("mismatch_allowed", REQUIRED),
            ("manager", REQUIRED),
            ("callback", None),
            ("dtype", None),
        ],
        "reshard": [("x", REQUIRED), ("target_sharding", REQUIRED)],
        "shard_filename": [("base_prefix", REQUIRED), ("idx", REQUIRED), ("total", REQUIRED)],
        "to_host": [("x", REQUIRED), ("float_dtype", REQUIRED), ("mesh", REQUIRED), ("cpu_offload", REQUIRED)],
    },
}

SAVE = [
    ("self", REQUIRED),
    ("tree", REQUIRED),
    ("path", REQUIRED),
    ("mesh", None),
    ("gather_fns", None),
    ("float_dtype", None),
    ("metadata", None),
    ("callback", None),
    ("prefix", None),
    ("do_all_gather", False),
    ("cpu_offload", False),
]
METHODS: dict[str, list[Any]] = {
    "__init__": [
        ("self", REQUIRED),
        ("enable", None),
        ("float_dtype", jnp.bfloat16),
        ("verbose", False),
        ("gcs_bucket", None),
        ("gcs_credentials_path", None),
        ("enable_validation", False),
        ("enable_compression", False),
        ("use_tensorstore", True),
    ],
    "save": SAVE,
    "save_tree": SAVE,
    "save_async": SAVE,
    "save_pytree": [
        ("self", REQUIRED),
        ("pytree", REQUIRED),
        ("path", REQUIRED),
        ("mesh", None),
        KEYWORD_ONLY,
        ("prefix", REQUIRED),
        ("do_all_gather", False),
        ("cpu_offload", True),
        ("dtype", None),
        ("extras", None),
        ("write_index", True),
    ],
    "load": [
        ("self", REQUIRED),
        ("path", REQUIRED),
        ("mesh", REQUIRED),
        ("shardings", None),
        ("mismatch_allowed", True),
        ("callback", None),
        ("partition_rules", None),
        ("dtype", None),
        ("validate", None),
        ("prefix_filter", None),
        ("prefix", None),
        ("use_async", True),
        ("chunk_size", None),
    ],
    "load_pytree": [
        ("self", REQUIRED),
        ("path", REQUIRED),
        ("mesh", REQUIRED),
        KEYWORD_ONLY,
        ("prefix", REQUIRED),
        ("shardings", None),
        ("partition_rules", None),
        ("dtype", None),
        ("template", None),
        ("strict_shapes", True),
        ("callback", None),
        ("chunk_size", None),
    ],
    "load_tree_parallel": [
        ("self", REQUIRED),
        ("path", REQUIRED),
        ("shardings", None),
        ("mismatch_allowed", True),
        ("callback", None),
        ("dtype", None),
        ("validate", None),
        ("prefix_filter", None),
    ],
    "wait_until_finished": [("self", REQUIRED)],
    "close": [("self", REQUIRED)],
}
STATIC = {"compute_checksum": [("array", REQUIRED)], "is_tensorstore": [("path", REQUIRED)]}
STATIC["safe_loadpath"] = [("path", REQUIRED)]

NAMES = [(module, name) for module, functions in FUNCTIONS.items() for name in functions]


def _parameters(function: Any) -> list[Any]:
    found: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and KEYWORD_ONLY not in found:
            found.append(KEYWORD_ONLY)
        assert parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        found.append((parameter.name, parameter.default))
    return found


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_function_has_the_documented_parameters(module: str, name: str) -> None:
    function = getattr(importlib.import_module(f"shardkeep.serialization.{module}"), name)
    assert _parameters(function) == FUNCTIONS[module][name]
    assert inspect.getdoc(function)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_documented_parameters(name: str) -> None:
    assert _parameters(getattr(AsyncCheckpointManager, name)) == METHODS[name]


@pytest.mark.parametrize("name", STATIC)
def test_a_static_method_has_the_documented_parameters(name: str) -> None:
    assert isinstance(inspect.getattr_static(AsyncCheckpointManager, name), staticmethod)
    assert _parameters(getattr(AsyncCheckpointManager, name)) == STATIC[name]


def test_global_manager_is_a_property() -> None:
    assert isinstance(inspect.getattr_static(AsyncCheckpointManager, "global_manager"), property)


def test_save_tree_is_the_same_function_as_save() -> None:
    assert AsyncCheckpointManager.save_tree is AsyncCheckpointManager.save


def test_metadata_is_a_dataclass_with_the_documented_fields() -> None:
    assert [(f.name, f.default) for f in dataclasses.fields(CheckpointMetadata)] == [
        ("version", shardkeep.__version__),
        ("timestamp", None),
        ("checksum", None),
        ("array_metadata", None),
        ("framework_version", None),
        ("custom_metadata", None),
    ]
    assert _parameters(CheckpointMetadata.to_dict) == [("self", REQUIRED)]
    assert _parameters(CheckpointMetadata.from_dict) == [("data", REQUIRED)]


def test_the_package_root_re_exports_the_four_names() -> None:
    from shardkeep.serialization import async_manager, serialization

    root = shardkeep.serialization
    assert root.AsyncCheckpointManager is async_manager.AsyncCheckpointManager
    assert root.CheckpointMetadata is async_manager.CheckpointMetadata
    assert root.tree_serialize_leaves is serialization.tree_serialize_leaves
    assert root.tree_deserialize_leaves is serialization.tree_deserialize_leaves


def test_every_manager_argument_is_an_attribute() -> None:
    given: dict[str, Any] = {
        "enable": False,
        "float_dtype": jnp.float32,
        "verbose": True,
        "gcs_bucket": "b",
        "gcs_credentials_path": "c",
        "enable_validation": True,
        "enable_compression": True,
        "use_tensorstore": False,
    }
    manager = AsyncCheckpointManager(**given)
    assert {name: getattr(manager, name) for name in given} == given
    defaults = AsyncCheckpointManager()
    assert [getattr(defaults, name) for name in given] == [default for _, default in METHODS["__init__"][1:]]
