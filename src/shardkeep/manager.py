"""AsyncCheckpointManager: eFormer's documented manager on shardkeep's one save path and one load path."""

import logging
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardkeep.arrays import parse_dtype
from shardkeep.choosing import Request
from shardkeep.commit import Target
from shardkeep.errors import PrefixError, ShardingError
from shardkeep.formats.eformer import INDEX
from shardkeep.gathering import apply_gather_functions, cast_floats, offload, parse_float_dtype
from shardkeep.loading import load_request
from shardkeep.loadpath import LoadPath
from shardkeep.manifest import StoredLeaf, Tree, check_metadata
from shardkeep.metadata import checker, checksums_of_parts, compute_checksum, describe_arrays, dotted_names, metadata_of
from shardkeep.opening import new_target, open_checkpoint
from shardkeep.pending import PendingSave
from shardkeep.processes import announced
from shardkeep.saving import SaveRequest, run_save, start_save
from shardkeep.sharding import Rules
from shardkeep.staging import is_prng_dtype
from shardkeep.stores.places import BucketPath, text_of
from shardkeep.tree import Skeleton, flatten, nest

if TYPE_CHECKING:  # it imports TensorStore, which only this one property needs
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

log = logging.getLogger("shardkeep")

Callback = Callable[[Any, str], Any]


class AsyncCheckpointManager:
    """Saves and loads trees as eFormer documents it. Each argument is an attribute that may be set later.

    `enable=False` turns saving off. `float_dtype` is what floats are cast to when a gather is asked for. `verbose`
    shows progress and a summary. `gcs_bucket` takes relative paths into that bucket, with the key file
    `gcs_credentials_path`. `enable_validation` records a SHA-256 of each array. `enable_compression` is zstd on
    TensorStore chunks. `use_tensorstore=False` saves safetensors.

    >>> import jax.numpy as jnp
    >>> with AsyncCheckpointManager() as manager:
    ...     _ = manager.save({"w": jnp.ones(3)}, str(tmp / "run"), mesh=None, metadata={"step": 1})
    ...     tree, metadata = manager.load(str(tmp / "run"), mesh=None)
    >>> tree["w"].shape, metadata["custom_metadata"]
    ((3,), {'step': 1})
    """

    def __init__(
        self,
        enable: bool | None = None,
        float_dtype: Any = jnp.bfloat16,
        verbose: bool = False,
        gcs_bucket: str | None = None,
        gcs_credentials_path: str | None = None,
        enable_validation: bool = False,
        enable_compression: bool = False,
        use_tensorstore: bool = True,
    ) -> None:
        self.enable = enable
        self.float_dtype = float_dtype
        self.verbose = verbose
        self.gcs_bucket = gcs_bucket
        self.gcs_credentials_path = gcs_credentials_path
        self.enable_validation = enable_validation
        self.enable_compression = enable_compression
        self.use_tensorstore = use_tensorstore
        self._global_manager: GlobalAsyncCheckpointManager | None = None
        self._pending: list[PendingSave] = []
        self._lock = threading.RLock()

    def save(
        self,
        tree: Any,
        path: Any,
        mesh: Mesh | None = None,
        gather_fns: bool | Mapping[str, Any] | None = None,
        float_dtype: Any = None,
        metadata: Mapping[str, Any] | None = None,
        callback: Callable[[str], None] | None = None,
        prefix: str | None = None,
        do_all_gather: bool = False,
        cpu_offload: bool = False,
    ) -> str:
        """Save a tree, replacing the one of that prefix; the path is returned once it is durable."""
        if self._is_off(path):
            return text_of(path)
        with announced(f"saving to {path}"):
            prepared = self._prepared(tree, mesh, gather_fns, float_dtype, do_all_gather, cpu_offload)
            self._tell("saved", run_save(self._request(prepared, path, metadata, callback, prefix)))
        return text_of(path)

    save_tree = save

    def save_async(
        self,
        tree: Any,
        path: Any,
        mesh: Mesh | None = None,
        gather_fns: bool | Mapping[str, Any] | None = None,
        float_dtype: Any = None,
        metadata: Mapping[str, Any] | None = None,
        callback: Callable[[str], None] | None = None,
        prefix: str | None = None,
        do_all_gather: bool = False,
        cpu_offload: bool = False,
    ) -> PendingSave:
        """Like `save`, but returns after the snapshot; `wait_until_finished` (or the handle) tells the rest."""
        if self._is_off(path):
            return PendingSave.nothing(text_of(path))
        with announced(f"saving to {path}"):
            prepared = self._prepared(tree, mesh, gather_fns, float_dtype, do_all_gather, cpu_offload)
            return self.follow(start_save(self._request(prepared, path, metadata, callback, prefix)))

    def save_pytree(
        self,
        pytree: Any,
        path: Any,
        mesh: Mesh | None = None,
        *,
        prefix: str,
        do_all_gather: bool = False,
        cpu_offload: bool = True,
        dtype: Any = None,
        extras: Mapping[str, Any] | None = None,
        write_index: bool = True,
    ) -> str:
        """Save a tree with its exact structure into a directory, its data below `<path>/<prefix>/`."""
        if self._is_off(path):
            return text_of(path)
        with announced(f"saving to {path}"):
            if not isinstance(prefix, str) or not prefix:
                raise PrefixError(f"save_pytree needs a prefix, a string that is not empty, not {prefix!r}")
            prepared = self._prepared(pytree, mesh, None, dtype, do_all_gather, cpu_offload)
            request = self._request(prepared, path, extras, None, prefix, directory=True, indexed=write_index)
            self._tell("saved", run_save(request))
        return text_of(path)

    def load(
        self,
        path: Any,
        mesh: Mesh | None,
        shardings: Any = None,
        mismatch_allowed: bool = True,
        callback: Callback | None = None,
        partition_rules: Rules | None = None,
        dtype: Any = None,
        validate: bool | None = None,
        prefix_filter: str | None = None,
        prefix: str | None = None,
        use_async: bool = True,
        chunk_size: int | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A tree as nested dicts of strings, and its metadata."""
        if prefix_filter is not None:
            warnings.warn("prefix_filter is deprecated; use prefix", DeprecationWarning, stacklevel=2)
            prefix = prefix_filter if prefix is None else prefix
        with announced(f"loading {path}"):
            request = Request(
                prefix=prefix,
                mesh=mesh,
                rules=partition_rules,
                shardings=shardings,
                dtype=None if dtype is None else parse_dtype(dtype),
                strict_rules=not mismatch_allowed,
                follow_saved=False,
                all_jax=True,
                in_flight=checked_chunk_size(chunk_size) if use_async else 1,
                callback=_by_name(callback),
                verbose=self.verbose,
            )
            refuse_unsaid_layout(mesh, partition_rules, shardings)
            return self._load_dict(path, request, validate)

    def load_pytree(
        self,
        path: Any,
        mesh: Mesh | None,
        *,
        prefix: str,
        shardings: Any = None,
        partition_rules: Rules | None = None,
        dtype: Any = None,
        template: Any = None,
        strict_shapes: bool = True,
        callback: Callback | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """A tree in its own structure (or the template's), and the `extras` it was saved with."""
        with announced(f"loading {path}"):
            request = Request(
                template=template,
                prefix=prefix,
                mesh=mesh,
                rules=partition_rules,
                shardings=shardings,
                dtype=None if dtype is None else parse_dtype(dtype),
                strict_shapes=strict_shapes,
                follow_saved=False,
                prefix_first=True,
                all_jax=True,
                in_flight=checked_chunk_size(chunk_size),
                callback=_by_name(callback),
                verbose=self.verbose,
            )
            skeleton, leaves, tree = self._load(path, request, None)
        return skeleton.rebuild(leaves), dict(metadata_of(tree).get("custom_metadata") or {})

    def load_tree_parallel(
        self,
        path: Any,
        shardings: Any = None,
        mismatch_allowed: bool = True,
        callback: Callback | None = None,
        dtype: Any = None,
        validate: bool | None = None,
        prefix_filter: str | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A tree read by several threads at once; `prefix_filter` keeps the keys equal to it or under it.

        Where several trees share a directory, it names one of them.
        """
        name = None if prefix_filter is None else prefix_filter.replace(".", "/").strip("/")
        prefix = None if name is None else self._prefix_named(path, name)
        request = Request(
            prefix=prefix,
            include=None if name is None or prefix is not None else re.compile(rf"\A{re.escape(name)}(/|\Z)"),
            shardings=shardings,
            dtype=None if dtype is None else parse_dtype(dtype),
            strict_rules=not mismatch_allowed,
            follow_saved=False,
            all_jax=True,
            callback=_by_name(callback),
            verbose=self.verbose,
        )
        return self._load_dict(path, request, validate)

    @staticmethod
    def compute_checksum(array: Any) -> str:
        """SHA-256 of the array's C-order bytes, in hex."""
        return compute_checksum(array)

    @staticmethod
    def is_tensorstore(path: Any) -> bool:
        """Whether a checkpoint in the TensorStore format is there; never raises."""
        try:
            _, manifest = open_checkpoint(AsyncCheckpointManager.safe_loadpath(path))
        except (OSError, ValueError):
            return False
        return any(
            tree.format == "tensorstore" or any(leaf.kind == "zarr" for leaf in tree.leaves)
            for tree in manifest.trees.values()
        )

    @staticmethod
    def safe_loadpath(path: Any) -> "LoadPath":
        """The path without the name of the index, as an object with `/`, `str()` and `exists()`."""
        text = text_of(path)
        if text == INDEX:
            return LoadPath(".")
        return LoadPath(text[: -len(INDEX)].rstrip("/") or "/" if text.endswith("/" + INDEX) else text)

    @property
    def global_manager(self) -> "GlobalAsyncCheckpointManager":
        """JAX's own manager, always the same one."""
        from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

        with self._lock:
            if self._global_manager is None:
                self._global_manager = GlobalAsyncCheckpointManager()
        return self._global_manager

    def wait_until_finished(self) -> None:
        """Wait for every pending save; raises the first failure, after all have ended."""
        with self._lock:
            pending, self._pending = self._pending, []
        failures: list[BaseException] = []
        for save in pending:
            try:
                self._tell("saved", save.wait())
            except Exception as error:  # noqa: BLE001  (the first is raised below, the others were logged)
                failures.append(error)
        if self._global_manager is not None:
            self._global_manager.wait_until_finished()
        if failures:
            raise failures[0]

    check_for_errors = wait_until_finished

    def close(self) -> None:
        """Wait for pending saves and raise what failed."""
        self.wait_until_finished()

    def __enter__(self) -> "AsyncCheckpointManager":
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as error:
            if raised is None:
                raise
            # Why the block failed is told nowhere else.
            log.error("shardkeep: a pending save failed too, beside the %s: %s", raised.__name__, error)

    def follow(self, pending: PendingSave) -> PendingSave:
        """Count a save among those `wait_until_finished` covers."""
        with self._lock:
            done = [save for save in self._pending if save.done_well()]
            self._pending = [save for save in self._pending if save not in done] + [pending]
        for save in done:
            self._tell("saved", save.report)
        return pending

    def _tell(self, what: str, report: object) -> None:
        if self.verbose:
            log.warning("shardkeep: %s %s", what, report)

    def _is_off(self, path: Any) -> bool:
        if self.enable is False:
            log.warning("shardkeep: saving is disabled: nothing was written to %s", path)
            return True
        return False

    def _located(self, path: Any) -> str:
        text = str(self.safe_loadpath(path))
        if self.gcs_bucket is not None and text and "://" not in text and not os.path.isabs(text):
            return BucketPath(f"gs://{self.gcs_bucket}/{text}", self.gcs_credentials_path)
        return BucketPath(text, self.gcs_credentials_path) if text.startswith("gs://") else text

    def _prefix_named(self, path: Any, name: str) -> str | None:
        """`name` as a prefix, if it is one and without it a load could not tell which tree is meant."""
        trees = open_checkpoint(self._located(path))[1].trees
        prefix = name.replace("/", ".")
        return prefix if prefix in trees and "" not in trees and len(trees) > 1 else None

    def _target(self, path: Any, directory: bool) -> Target:
        format = "tensorstore" if self.use_tensorstore else "safetensors"
        compression = "zstd" if self.use_tensorstore and self.enable_compression else None
        return new_target(self._located(path), format, compression, None, directory or self.use_tensorstore)

    def _prepared(
        self, tree: Any, mesh: Mesh | None, gather_fns: Any, float_dtype: Any, do_all_gather: bool, cpu_offload: bool
    ) -> Any:
        """The tree as it will be stored: gathered, cast and moved to the host as asked."""
        if mesh is None:
            log.warning("shardkeep: no mesh given: a CPU mesh serves gathering, arrays keep their sharding")
        tree = apply_gather_functions(tree, gather_fns, mismatch_allowed=True, verbose=self.verbose)
        dtype = float_dtype if float_dtype is not None else self.float_dtype if do_all_gather else None
        if dtype is not None:
            parse_float_dtype(dtype)
        skeleton, leaves = flatten(tree)
        values: list[Any] = []
        for leaf in leaves:
            value = cast_floats(leaf.value, dtype)
            # What spans processes goes to the hosts as it lies, when the snapshot is taken.
            moves = do_all_gather or (cpu_offload and isinstance(value, jax.Array) and value.is_fully_addressable)
            if isinstance(value, jax.Array) and not is_prng_dtype(value.dtype) and moves:
                value = offload(value, leaf.key, mesh, cpu_offload or mesh is None)
            values.append(value)
        return skeleton.rebuild(values)

    def _request(
        self,
        tree: Any,
        path: Any,
        metadata: Mapping[str, Any] | None,
        callback: Callable[[str], None] | None,
        prefix: str | None,
        directory: bool = False,
        indexed: bool = True,
    ) -> SaveRequest:
        leaves = [leaf for leaf in flatten(tree)[1] if isinstance(leaf.value, jax.Array | np.ndarray)]
        names = dotted_names([leaf.path for leaf in leaves])
        arrays = {name: leaf.value for name, leaf in zip(names, leaves, strict=True)}
        return SaveRequest(
            target=self._target(path, directory),
            tree=tree,
            prefix=prefix,
            metadata=describe_arrays(arrays, check_metadata(metadata), self.enable_validation),
            checksums=checksums_of_parts(arrays) if self.enable_validation else {},
            overwrite=True,
            indexed=indexed,
            on_commit=None if callback is None else lambda: callback(text_of(path)),
            verbose=self.verbose,
        )

    def _load_dict(self, path: Any, request: Request, validate: bool | None) -> tuple[dict[str, Any], dict[str, Any]]:
        skeleton, leaves, tree = self._load(path, request, validate)
        return as_dict(skeleton, leaves), metadata_of(tree)

    def _load(self, path: Any, request: Request, validate: bool | None) -> tuple[Skeleton, list[Any], Tree]:
        started = time.perf_counter()
        skeleton, leaves, tree = load_request(self._located(path), self._validated(path, request, validate))
        seconds = time.perf_counter() - started
        rate = tree.nbytes / seconds / 1e9
        self._tell("loaded", f"{text_of(path)}: {tree.nbytes:,} bytes, {seconds:.3f} s ({rate:.2f} GB/s)")
        return skeleton, leaves, tree

    def _validated(self, path: Any, request: Request, validate: bool | None) -> Request:
        """The request with the checks that `validate` asks for."""
        if validate is False:
            return replace(request, verify=False)
        if not (self.enable_validation if validate is None else validate):
            return request
        _, manifest = open_checkpoint(self._located(path))
        return replace(request, check=checker(manifest, manifest.tree(request.prefix), validate is True))


def as_dict(skeleton: Skeleton, leaves: list[Any]) -> dict[str, Any]:
    """Leaves as nested dicts of strings."""
    return nest(list(zip(skeleton.paths(), leaves, strict=True)))


def refuse_unsaid_layout(mesh: Mesh | None, rules: Rules | None, shardings: Any) -> None:
    """A mesh of several axes says nothing about which of them cut what."""
    if mesh is not None and len(mesh.axis_names) > 1 and not rules and shardings is None:
        raise ShardingError(
            f"the mesh has the axes {', '.join(map(str, mesh.axis_names))}: pass partition_rules= or shardings= to say "
            "how arrays are laid out on it"
        )


def checked_chunk_size(chunk_size: int | None) -> int | None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    return chunk_size


def _by_name(callback: Callback | None) -> Callable[[Any, StoredLeaf], Any] | None:
    """A callback on (array, dotted key) as the engine calls it."""
    return None if callback is None else lambda array, leaf: callback(array, ".".join(leaf.path))
