"""The loading half of eFormer's documented manager."""

import logging
import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from jax.sharding import Mesh, PartitionSpec

from shardkeep.catalog import missing_first, open_checkpoint
from shardkeep.eformer.metadata import checker, compute_checksum, metadata_of
from shardkeep.eformer.paths import LoadPath, without_index
from shardkeep.errors import ShardingError
from shardkeep.foreign.zarr import has_zarr_arrays
from shardkeep.loading.load import load_request
from shardkeep.loading.request import LoadRequest, Policy, Treatment
from shardkeep.loading.shardings import Rules
from shardkeep.model.arrays import parse_dtype
from shardkeep.model.leaves import StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.reports import rate_of
from shardkeep.model.tree import Skeleton, nest
from shardkeep.processes.operation import Operation, join
from shardkeep.stores.location import Location, any_path_text, location, name_path

log = logging.getLogger("shardkeep")

Callback = Callable[[Any, str], Any]
Loaded: TypeAlias = tuple[Any, dict[str, Any]]  # a tree in its own structure, and its metadata
LoadedDicts: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # a tree as nested dicts, and its metadata
Check = Callable[[StoredLeaf, Any], None]


class CheckpointLoader:
    """Loads trees with the API that eFormer documents; `AsyncCheckpointManager` saves them too."""

    def __init__(
        self,
        verbose: bool,
        gcs_bucket: str | None,
        gcs_credentials_path: str | None,
        enable_validation: bool,
    ) -> None:
        self.verbose = verbose
        self.gcs_bucket = gcs_bucket
        self.gcs_credentials_path = gcs_credentials_path
        self.enable_validation = enable_validation

    def load(
        self,
        path: object,
        mesh: Mesh | None,
        shardings: Any = None,
        mismatch_allowed: bool = True,
        callback: Callback | None = None,
        partition_rules: Rules | None = None,
        dtype: object = None,
        validate: bool | None = None,
        prefix_filter: str | None = None,
        prefix: str | None = None,
        use_async: bool = True,
        chunk_size: int | None = None,
    ) -> LoadedDicts:
        """Load a tree as nested dicts with string keys, and its metadata.

        Args:
            path: A checkpoint directory, a Hugging Face folder, a safetensors file with or without its suffix, an index
                or a shard of one, or the `tensorstore_index.json` of a directory.
            mesh: The mesh to place arrays on. None: the default device. A mesh with several axes needs
                `partition_rules` or `shardings`.
            shardings: A PyTree, or a dict with dotted keys, of shardings, `PartitionSpec`s or functions.
            mismatch_allowed: Whether arrays that no rule matches are replicated, with a warning. If False, they are a
                `ValueError`.
            callback: Called as `callback(array, key)` for each array, with its dotted key; its result is returned.
            partition_rules: Pairs of a regular expression and a `PartitionSpec`; the first that matches the key, joined
                with `/`, wins. Rules come before `shardings`.
            dtype: The dtype to cast arrays of its kind to: a float dtype casts floats, an integer dtype integers.
            validate: Whether to check the recorded SHA-256 of each array. None: the manager's setting. False skips all
                checks, the digests too.
            prefix_filter: Deprecated; use `prefix`.
            prefix: The tree to load, if the directory has several.
            use_async: Whether to read several arrays at once.
            chunk_size: The most arrays to read at once. None: no limit but the memory budget.

        Returns:
            The tree, and the `CheckpointMetadata` as a dict, with the user's metadata under `custom_metadata`.
        """
        if prefix_filter is not None:
            warnings.warn("prefix_filter is deprecated; use prefix", DeprecationWarning, stacklevel=2)
            prefix = prefix_filter if prefix is None else prefix
        call = "load(path, mesh)"
        with join(f"loading {name_path(path)}") as operation, missing_first(place := self._located(path, call)):
            request = LoadRequest(
                prefix=prefix,
                mesh=mesh,
                rules=rules_for(mesh, partition_rules, shardings),
                shardings=shardings,
                dtype=None if dtype is None else parse_dtype(dtype),
                verbose=self.verbose,
                policy=Policy(
                    strict_rules=not mismatch_allowed,
                    all_jax=True,
                    in_flight=checked_chunk_size(chunk_size) if use_async else 1,
                ),
            )
            refuse_unsaid_layout(mesh, partition_rules, shardings)
            return self._load_dict(place, request, validate, callback, operation)

    def load_pytree(
        self,
        path: object,
        mesh: Mesh | None,
        *,
        prefix: str | None,
        shardings: Any = None,
        partition_rules: Rules | None = None,
        dtype: object = None,
        template: Any = None,
        strict_shapes: bool = True,
        callback: Callback | None = None,
        chunk_size: int | None = None,
    ) -> Loaded:
        """Load a tree in its own structure, or the template's, and the `extras` it was saved with.

        Args:
            path: The directory.
            mesh: See `load`. Without rules or shardings, arrays are replicated on it.
            prefix: The tree to load.
            shardings: See `load`.
            partition_rules: See `load`. Keys begin with the prefix.
            dtype: See `load`.
            template: A PyTree of arrays or `jax.ShapeDtypeStruct`s whose structure, float dtypes and shardings the
                result has.
            strict_shapes: Whether a shape that differs from the template's is a `ValueError`, and a missing leaf a
                `KeyError`. If False, arrays of the same size are reshaped, and others come from the template, with a
                warning.
            callback: See `load`.
            chunk_size: See `load`.

        Returns:
            The tree, and the extras.
        """
        call = "load_pytree(path, mesh)"
        with join(f"loading {name_path(path)}") as operation, missing_first(place := self._located(path, call)):
            request = LoadRequest(
                template=template,
                prefix=prefix,
                mesh=mesh,
                rules=rules_for(mesh, partition_rules, shardings),
                shardings=shardings,
                dtype=None if dtype is None else parse_dtype(dtype),
                verbose=self.verbose,
                policy=Policy(
                    strict_shapes=strict_shapes,
                    prefix_first=True,
                    all_jax=True,
                    in_flight=checked_chunk_size(chunk_size),
                ),
            )
            skeleton, leaves, tree = self._load(place, request, None, callback, operation)
        return skeleton.rebuild(leaves), dict(metadata_of(tree).get("custom_metadata") or {})

    def load_tree_parallel(
        self,
        path: object,
        shardings: Any = None,
        mismatch_allowed: bool = True,
        callback: Callback | None = None,
        dtype: object = None,
        validate: bool | None = None,
        prefix_filter: str | None = None,
    ) -> LoadedDicts:
        """Load a tree with several threads, as nested dicts with string keys, and its metadata.

        Args:
            path: See `load`.
            shardings: See `load`.
            mismatch_allowed: See `load`.
            callback: See `load`.
            dtype: See `load`.
            validate: See `load`.
            prefix_filter: Load only the leaves whose key is this or below it; or, if several trees share the directory,
                the tree with this prefix.

        Returns:
            The tree, and the `CheckpointMetadata` as a dict.
        """
        call = "load_tree_parallel(path)"
        with join(f"loading {name_path(path)}") as operation, missing_first(place := self._located(path, call)):
            name = None if prefix_filter is None else prefix_filter.replace(".", "/").strip("/")
            prefix = None if name is None else self._prefix_named(place, name)
            request = LoadRequest(
                prefix=prefix,
                include=None if name is None or prefix is not None else re.compile(rf"\A{re.escape(name)}(/|\Z)"),
                shardings=shardings,
                dtype=None if dtype is None else parse_dtype(dtype),
                verbose=self.verbose,
                policy=Policy(strict_rules=not mismatch_allowed, all_jax=True),
            )
            return self._load_dict(place, request, validate, callback, operation)

    @staticmethod
    def compute_checksum(array: Any) -> str:
        """The SHA-256 of an array's bytes in C order, as hexadecimal digits.

        Args:
            array: A JAX or NumPy array.
        """
        return compute_checksum(array)

    @staticmethod
    def is_tensorstore(path: object) -> bool:
        """Whether there is a checkpoint in the TensorStore format at `path`. Never raises.

        Args:
            path: The directory, or the index file in it.
        """
        try:
            _, manifest = open_checkpoint(location(CheckpointLoader.safe_loadpath(path)))
        except (OSError, ValueError):
            return False
        return any(has_zarr_arrays(tree) for tree in manifest.trees.values())

    @staticmethod
    def safe_loadpath(path: object) -> LoadPath:
        """The path without the name of the index file, as an object with `/`, `str()` and `exists()`.

        Args:
            path: The directory, or the index file in it.
        """
        return LoadPath(without_index(any_path_text(path, "safe_loadpath(path)")))

    def _tell(self, what: str, report: object) -> None:
        if self.verbose:
            log.warning("%s %s", what, report)

    def _located(self, path: object, call: str = "") -> Location:
        text = without_index(any_path_text(path, call))
        if self.gcs_bucket is not None and text and "://" not in text and not os.path.isabs(text):
            text = f"gs://{self.gcs_bucket}/{text}"
        place = location(text)
        return replace(place, key_file=self.gcs_credentials_path) if place.scheme == "gs" else place

    def _prefix_named(self, place: Location, name: str) -> str | None:
        """`name` as a prefix, if it is one and a load without it would be ambiguous."""
        trees = open_checkpoint(place)[1].trees
        prefix = name.replace("/", ".")
        return prefix if prefix in trees and "" not in trees and len(trees) > 1 else None

    def _load_dict(
        self,
        place: Location,
        request: LoadRequest,
        validate: bool | None,
        callback: Callback | None,
        operation: Operation,
    ) -> LoadedDicts:
        skeleton, leaves, tree = self._load(place, request, validate, callback, operation)
        return as_dict(skeleton, leaves), metadata_of(tree)

    def _load(
        self,
        place: Location,
        request: LoadRequest,
        validate: bool | None,
        callback: Callback | None,
        operation: Operation,
    ) -> tuple[Skeleton, list[Any], Tree]:
        started = time.perf_counter()
        check = self._checker(place, request, validate)
        policy = replace(request.policy, treat=treatment(check, callback))
        request = replace(request, verify=validate is not False, policy=policy)
        skeleton, leaves, tree = load_request(place, request, operation)
        seconds = time.perf_counter() - started
        rate = rate_of(tree.nbytes, seconds)
        self._tell("loaded", f"{place}: {tree.nbytes:,} bytes, {seconds:.3f} s ({rate})")
        return skeleton, leaves, tree

    def _checker(self, place: Location, request: LoadRequest, validate: bool | None) -> Check | None:
        """What compares each array with its recorded SHA-256; None if that is not asked for."""
        if not (self.enable_validation if validate is None else validate):
            return None
        _, manifest = open_checkpoint(place)
        return checker(manifest, manifest.tree(request.prefix), validate is True)


def as_dict(skeleton: Skeleton, leaves: list[Any]) -> dict[str, Any]:
    """Leaves as nested dicts with string keys."""
    return nest(list(zip(skeleton.paths(), leaves, strict=True)))


def refuse_unsaid_layout(mesh: Mesh | None, rules: Rules | None, shardings: Any) -> None:
    """A mesh with several axes does not say which of them shards what."""
    if mesh is not None and len(mesh.axis_names) > 1 and not rules and shardings is None:
        raise ShardingError(
            f"the mesh has the axes {', '.join(map(str, mesh.axis_names))}: pass partition_rules= or shardings= to say "
            "how arrays are sharded over them"
        )


def checked_chunk_size(chunk_size: int | None) -> int | None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    return chunk_size


def rules_for(mesh: Mesh | None, rules: Rules | None, shardings: Any) -> Rules | None:
    """The rules of a load. Where nothing says how arrays are sharded over a mesh, they are replicated on it."""
    return [("", PartitionSpec())] if mesh is not None and not rules and shardings is None else rules


def treatment(check: Check | None, callback: Callback | None) -> Treatment | None:
    """What is done with each array: check it, apply the user's sharding function, then the callback by dotted key."""
    if check is None and callback is None:
        return None

    def treat(array: Any, leaf: StoredLeaf, function: Callable[[Any], Any]) -> Any:
        if check is not None:
            check(leaf, array)
        array = function(array)
        return array if callback is None else callback(array, ".".join(leaf.path))

    return treat
