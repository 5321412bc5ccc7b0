"""No argument is decoration: each has a test in which changing it changes the outcome, or a reason why not."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from shardkeep.serialization.async_manager import AsyncCheckpointManager

HERE = Path(__file__).parent

# "function.argument" → the test. An argument a function cannot do without (what it is called for) needs none.
TESTS = {
    # serialization
    "join_key.prefix": "test_keys_are_joined_by_a_dot",
    "leaf_key_paths.prefix": "test_the_prefix_stands_in_front",
    "leaf_key_paths.is_leaf": "test_none_stays_none_unless_is_leaf_says_otherwise",
    "tree_serialize_leaves.manager": "test_with_a_manager_it_returns_before_the_commit",
    "tree_serialize_leaves.prefix": "test_several_trees_share_a_directory_under_prefixes",
    "tree_serialize_leaves.commit_callback": "test_the_commit_callback_runs_once_after_the_commit",
    "tree_serialize_leaves.write_index": "test_write_index_false_leaves_no_entry_but_a_manifest",
    "tree_deserialize_leaves.mesh": "test_arrays_go_to_the_mesh_or_to_the_default_device",
    "tree_deserialize_leaves.manager": "test_pending_saves_of_the_manager_are_waited_for",
    "tree_deserialize_leaves.prefix": "test_several_trees_share_a_directory_under_prefixes",
    "tree_deserialize_leaves.partition_rules": "test_rules_lay_arrays_out",
    "tree_deserialize_leaves.shardings": "test_shardings_lay_arrays_out",
    "tree_deserialize_leaves.callback": "test_the_callback_gets_array_and_key_and_its_result_counts",
    "tree_deserialize_leaves.chunk_size": "test_chunk_size_bounds_the_arrays_in_flight",
    # sharding_utils
    "apply_sharding_tree.sharding_tree": "test_each_kind_of_leaf_places_its_array",
    "apply_sharding_tree.mesh": "test_none_is_replicated_on_the_mesh_or_on_one_device",
    "create_sharding_tree_from_index.mesh": "test_without_a_default_arrays_are_replicated",
    "create_sharding_tree_from_index.prefix": "test_the_tree_of_a_prefix_has_its_shape",
    "create_sharding_tree_from_index.default_sharding": "test_a_default_may_be_a_sharding_a_spec_or_a_function",
    "make_itsharded.mesh": "test_addressable_arrays_become_replicated",
    "validate_sharding_tree.expected_structure": "test_structures_are_compared_by_their_leaves",
    # utils
    "apply_gather_functions.gather_fns": "test_gather_functions_apply_to_all_to_none_or_by_key",
    "apply_gather_functions.mismatch_allowed": "test_a_missing_gather_function_is_allowed_or_a_key_error",
    "apply_gather_functions.verbose": "test_verbose_shows_that_gathering_goes_on",
    "broadcast_tensor.memory_limit_bytes": "test_a_broadcast_limit_must_be_positive",
    "broadcast_tensor.target_sharding": "test_a_broadcast_lands_on_the_target_or_on_all_devices",
    "chunk_tensor_by_memory.memory_limit": "test_pieces_along_the_first_axis_stay_below_the_limit",
    "group_keys_by_shard_size.max_shard_size_bytes": "test_groups_keep_order_and_limit",
    "optimize_shard_layout.max_shard_size_bytes": "test_a_layout_keeps_families_together_and_the_limit",
    "read_process_array.shard_fns": "test_one_tensor_goes_through_function_callback_and_cast",
    "read_process_array.mismatch_allowed": "test_a_missing_shard_function_counts_or_is_a_key_error",
    "read_process_array.manager": "test_a_tensor_is_read_through_whatever_has_get_tensor",
    "read_process_array.callback": "test_one_tensor_goes_through_function_callback_and_cast",
    "read_process_array.dtype": "test_one_tensor_goes_through_function_callback_and_cast",
    "reshard.target_sharding": "test_reshard_really_reshards",
    "shard_filename.idx": "test_files_are_named_as_hugging_face_names_them",
    "shard_filename.total": "test_files_are_named_as_hugging_face_names_them",
    "to_host.float_dtype": "test_floats_are_cast_on_the_way_to_the_host",
    "to_host.mesh": "test_to_host_replicates_on_the_mesh_or_goes_to_the_cpu",
    "to_host.cpu_offload": "test_to_host_replicates_on_the_mesh_or_goes_to_the_cpu",
    # async_manager
    "__init__.enable": "test_disabled_saves_write_nothing_and_say_so_once",
    "__init__.float_dtype": "test_the_managers_dtype_counts_when_a_gather_is_asked_for",
    "__init__.verbose": "test_saves_are_quiet_unless_verbose",
    "__init__.gcs_bucket": "test_a_relative_path_lies_in_the_bucket_and_an_absolute_one_does_not",
    "__init__.enable_validation": "test_validation_records_the_sha256_of_each_array_as_stored",
    "__init__.enable_compression": "test_compression_is_zstd_on_the_chunks",
    "__init__.use_tensorstore": "test_use_tensorstore_chooses_the_format_and_the_name_only_among_safetensors",
    "save.mesh": "test_a_save_without_a_mesh_is_one_warning_and_arrays_keep_their_sharding",
    "save.gather_fns": "test_gather_functions_are_applied_and_missing_ones_allowed",
    "save.float_dtype": "test_a_saves_own_dtype_always_casts_floats_and_only_floats",
    "save.metadata": "test_metadata_comes_back_and_is_checked_before_anything_is_written",
    "save.callback": "test_the_callback_gets_the_path_after_the_commit",
    "save.prefix": "test_trees_of_several_prefixes_and_none_share_a_directory",
    "save.do_all_gather": "test_a_gather_stores_each_array_in_one_piece",
    "save.cpu_offload": "test_offloading_takes_arrays_to_host_memory_before_they_are_written",
    "save_pytree.mesh": "test_a_save_without_a_mesh_is_one_warning_and_arrays_keep_their_sharding",
    "save_pytree.prefix": "test_save_pytree_makes_a_directory_with_data_below_the_prefix",
    "save_pytree.do_all_gather": "test_a_gather_stores_each_array_in_one_piece",
    "save_pytree.cpu_offload": "test_offloading_takes_arrays_to_host_memory_before_they_are_written",
    "save_pytree.dtype": "test_a_saves_own_dtype_always_casts_floats_and_only_floats",
    "save_pytree.extras": "test_load_pytree_returns_the_extras",
    "save_pytree.write_index": "test_write_index_false_keeps_a_tree_out_of_eformers_index",
    "load.mesh": "test_a_mesh_of_several_axes_needs_to_be_told_more",
    "load.shardings": "test_shardings_may_have_any_form",
    "load.mismatch_allowed": "test_without_mismatches_allowed_a_key_no_rule_hits_is_an_error",
    "load.callback": "test_first_the_function_then_the_callback_then_the_cast",
    "load.partition_rules": "test_rules_search_the_joined_key_and_the_first_hit_wins",
    "load.dtype": "test_a_float_dtype_casts_floats_only",
    "load.validate": "test_validate_false_skips_the_digests",
    "load.prefix_filter": "test_prefix_filter_of_load_is_deprecated_and_acts_as_prefix",
    "load.prefix": "test_no_prefix_means_the_plain_tree_else_the_only_one",
    "load.use_async": "test_how_many_arrays_are_in_flight",
    "load.chunk_size": "test_how_many_arrays_are_in_flight",
    "load_pytree.mesh": "test_a_mesh_of_several_axes_needs_to_be_told_more",
    "load_pytree.prefix": "test_an_unknown_prefix_lists_those_there_are",
    "load_pytree.shardings": "test_shardings_may_have_any_form",
    "load_pytree.partition_rules": "test_rules_search_the_joined_key_and_the_first_hit_wins",
    "load_pytree.dtype": "test_a_float_dtype_casts_floats_only",
    "load_pytree.template": "test_a_templates_structure_float_dtypes_and_shardings_win",
    "load_pytree.strict_shapes": "test_without_strict_shapes_arrays_are_reshaped_or_the_template_stays",
    "load_pytree.callback": "test_first_the_function_then_the_callback_then_the_cast",
    "load_pytree.chunk_size": "test_how_many_arrays_are_in_flight",
    "load_tree_parallel.shardings": "test_a_sharding_may_be_a_sharding_a_function_or_none",
    "load_tree_parallel.mismatch_allowed": "test_without_mismatches_allowed_a_key_no_rule_hits_is_an_error",
    "load_tree_parallel.callback": "test_first_the_function_then_the_callback_then_the_cast",
    "load_tree_parallel.dtype": "test_a_float_dtype_casts_floats_only",
    "load_tree_parallel.validate": "test_validate_false_skips_the_digests",
    "load_tree_parallel.prefix_filter": "test_prefix_filter_of_the_parallel_load_keeps_keys_under_it",
}

# Accepted for compatibility, with the reason.
ACCEPTED = {
    "__init__.gcs_credentials_path": "buckets are not served yet, so there is nothing to present a key file to",
}

# What a function is called for.
SUBJECTS = {"self", "x", "xs", "k", "key", "pytree", "tree", "arrays", "state", "flat_state", "tensor", "array", "path"}
SUBJECTS |= {"path_str", "base_prefix", "gcs_path", "checkpoint_dir", "sharding_tree"}
METHODS = ["__init__", "save", "save_pytree", "load", "load_pytree", "load_tree_parallel"]


def _documented() -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(AsyncCheckpointManager, name) for name in METHODS}
    for module in ("serialization", "sharding_utils", "utils"):
        loaded = importlib.import_module(f"shardkeep.serialization.{module}")
        found |= {
            name: function
            for name, function in vars(loaded).items()
            if inspect.isfunction(function) and not name.startswith("_") and name in _names_documented()
        }
    return found


def _names_documented() -> set[str]:
    text = (HERE / "test_signatures.py").read_text()
    return set(re.findall(r'^        "(\w+)": \[', text, re.MULTILINE))


ARGUMENTS = [
    f"{name}.{parameter}"
    for name, function in _documented().items()
    for parameter in inspect.signature(function).parameters
]


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_argument_has_a_test_or_a_reason(argument: str) -> None:
    known = argument in TESTS or argument in ACCEPTED or argument.partition(".")[2] in SUBJECTS
    assert known, f"{argument} has neither a test in which it changes the outcome nor a reason to be there"


def test_every_test_that_is_named_exists() -> None:
    written = {
        name for file in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert set(TESTS.values()) <= written
    assert set(TESTS) | set(ACCEPTED) <= set(ARGUMENTS)
