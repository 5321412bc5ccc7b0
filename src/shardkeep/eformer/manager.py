"""AsyncCheckpointManager: eFormer's documented manager on shardkeep's one save path and one load path."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardkeep.catalog import new_target
from shardkeep.eformer.gathering import apply_gather_functions, move_tree
from shardkeep.eformer.loader import CheckpointLoader
from shardkeep.eformer.metadata import checksums_of_parts, describe_arrays
from shardkeep.errors import CallbackError, PrefixError
from shardkeep.model.metadata import check_metadata
from shardkeep.model.naming import dotted_names
from shardkeep.model.tree import flatten
from shardkeep.processes.operation import Operation, join
from shardkeep.saving.pending import BackgroundSave, PendingSave
from shardkeep.saving.save import SaveRequest, run_save, start_save
from shardkeep.stores.location import Location, any_path_text, name_path
from shardkeep.targets.base import Target

if TYPE_CHECKING:  # it imports TensorStore, which only this one property needs
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

log = logging.getLogger("shardkeep")


class AsyncCheckpointManager(CheckpointLoader):
    """Saves and loads trees with the API that eFormer documents.

    Every argument is also an attribute; setting it affects later calls. Use the manager as a context manager, or call
    `close`, to wait for pending saves.

    Args:
        enable: False turns saving off: saves write nothing and log one line. None or True: on.
        float_dtype: The dtype that floats are cast to when a save gathers (`do_all_gather=True`) and does not specify a
            dtype.
        verbose: Whether to show progress bars and log a summary of each save and load.
        gcs_bucket: The Google Cloud Storage bucket that relative paths refer to.
        gcs_credentials_path: A service-account file for that bucket.
        enable_validation: Whether saves record a SHA-256 of each array, and loads check it.
        enable_compression: Whether arrays in the TensorStore format are compressed with zstd.
        use_tensorstore: Whether to save in the TensorStore format, one zarr array for each leaf. False saves
            safetensors: plain files for a path that ends in `.safetensors`, a checkpoint directory for any other.

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
        float_dtype: object = jnp.bfloat16,
        verbose: bool = False,
        gcs_bucket: str | None = None,
        gcs_credentials_path: str | None = None,
        enable_validation: bool = False,
        enable_compression: bool = False,
        use_tensorstore: bool = True,
    ) -> None:
        super().__init__(verbose, gcs_bucket, gcs_credentials_path, enable_validation)
        self.enable = enable
        self.float_dtype = float_dtype
        self.enable_compression = enable_compression
        self.use_tensorstore = use_tensorstore
        self._global_manager: GlobalAsyncCheckpointManager | None = None
        self._pending: list[BackgroundSave] = []
        self._lock = threading.RLock()

    def save(
        self,
        tree: Any,
        path: object,
        mesh: Mesh | None = None,
        gather_fns: bool | Mapping[str, Any] | None = None,
        float_dtype: object = None,
        metadata: Mapping[str, object] | None = None,
        callback: Callable[[str], None] | None = None,
        prefix: str | None = None,
        do_all_gather: bool = False,
        cpu_offload: bool = False,
    ) -> str:
        """Save a tree and return its path once the checkpoint is committed. An older tree there is replaced.

        Args:
            tree: The PyTree to save.
            path: Where to save it.
            mesh: The mesh on which arrays are gathered. None gathers on the CPU, with a warning.
            gather_fns: What to apply to leaves before saving: True takes every array to the host; a dict, nested or
                with dotted keys, has a function for each key. None or False changes nothing.
            float_dtype: The dtype to cast floats to. None keeps them, unless `do_all_gather` is set.
            metadata: A dict to store with the tree; see `shardkeep.save` for what it may contain.
            callback: Called with the path after the commit, on process 0. The callbacks of one manager start in the
                order in which its saves were called. If it raises, this raises `CallbackError`; the save is committed.
            prefix: The name of this tree, if several trees share one directory.
            do_all_gather: Whether to gather arrays before saving, and to cast floats to the manager's `float_dtype`.
            cpu_offload: Whether to move arrays to host memory one by one before writing.

        Returns:
            The path.
        """
        if self._is_off(path, call := "save(tree, path)"):
            return any_path_text(path)
        with join(f"saving to {name_path(path)}") as operation:
            path = any_path_text(path, call)
            prepared = self._prepared(tree, mesh, gather_fns, float_dtype, do_all_gather, cpu_offload)
            request = self._request(prepared, path, metadata, callback, prefix)
            self._tell("saved", run_save(request, operation))
        return path

    save_tree = save
    """The same as `save`."""

    def save_async(
        self,
        tree: Any,
        path: object,
        mesh: Mesh | None = None,
        gather_fns: bool | Mapping[str, Any] | None = None,
        float_dtype: object = None,
        metadata: Mapping[str, object] | None = None,
        callback: Callable[[str], None] | None = None,
        prefix: str | None = None,
        do_all_gather: bool = False,
        cpu_offload: bool = False,
    ) -> PendingSave:
        """Like `save`, but return after the snapshot and write in the background.

        Args:
            tree: The PyTree to save.
            path: Where to save it.
            mesh: See `save`.
            gather_fns: See `save`.
            float_dtype: See `save`.
            metadata: See `save`.
            callback: Called with the path after the commit, on process 0. The callbacks of one manager start in the
                order in which its saves were called. If it raises, `wait` raises `CallbackError`; the save is
                committed.
            prefix: See `save`.
            do_all_gather: See `save`.
            cpu_offload: See `save`.

        Returns:
            A `PendingSave`. Its `wait`, or `wait_until_finished`, raises the error if the save failed.
        """
        if self._is_off(path, call := "save_async(tree, path)"):
            return PendingSave(BackgroundSave.nothing(any_path_text(path)))
        with join(f"saving to {name_path(path)}") as operation:
            path = any_path_text(path, call)
            prepared = self._prepared(tree, mesh, gather_fns, float_dtype, do_all_gather, cpu_offload)
            return self._follow(self._request(prepared, path, metadata, callback, prefix), operation)

    def save_pytree(
        self,
        pytree: Any,
        path: object,
        mesh: Mesh | None = None,
        *,
        prefix: str,
        do_all_gather: bool = False,
        cpu_offload: bool = True,
        dtype: object = None,
        extras: Mapping[str, object] | None = None,
        write_index: bool = True,
    ) -> str:
        """Save a tree with its exact structure to a directory, its data below `<path>/<prefix>/`.

        Args:
            pytree: The PyTree to save.
            path: The directory.
            mesh: See `save`.
            prefix: The name of this tree in the directory; must not be empty.
            do_all_gather: See `save`.
            cpu_offload: See `save`.
            dtype: The dtype to cast floats to. None keeps them, unless `do_all_gather` is set.
            extras: A dict to store with the tree; `load_pytree` returns it.
            write_index: Whether eFormer may find the tree, through `tensorstore_index.json`.

        Returns:
            The path.
        """
        if self._is_off(path, call := "save_pytree(pytree, path)"):
            return any_path_text(path)
        with join(f"saving to {name_path(path)}") as operation:
            path = any_path_text(path, call)
            if not isinstance(prefix, str) or not prefix:
                raise PrefixError(f"save_pytree needs a prefix that is a non-empty string, not {prefix!r}")
            prepared = self._prepared(pytree, mesh, None, dtype, do_all_gather, cpu_offload)
            request = self._request(prepared, path, extras, None, prefix, directory=True, indexed=write_index)
            self._tell("saved", run_save(request, operation))
        return path

    @property
    def global_manager(self) -> "GlobalAsyncCheckpointManager":
        """A JAX `GlobalAsyncCheckpointManager`; the same object every time."""
        from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

        with self._lock:
            if self._global_manager is None:
                self._global_manager = GlobalAsyncCheckpointManager()
        return self._global_manager

    def wait_until_finished(self) -> None:
        """Wait for every pending save, then raise the first failure.

        The error of a failed save takes precedence over an exception in a callback. Inside a commit callback, it waits
        for commits only.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        failures: list[Exception] = []
        unsettled: list[BackgroundSave] = []
        for save in pending:
            try:
                report = save.wait()
            except Exception as error:  # noqa: BLE001  (the first is raised below, the others were logged)
                failures.append(error)
                continue
            if save.is_settled:
                self._tell("saved", report)
            else:  # this is a callback: what others raise is for the next wait outside
                unsettled.append(save)
        with self._lock:
            self._pending = unsettled + self._pending
        if self._global_manager is not None:
            self._global_manager.wait_until_finished()
        if failures:
            raise min(failures, key=lambda error: isinstance(error, CallbackError))

    check_for_errors = wait_until_finished
    """The same as `wait_until_finished`."""

    def close(self) -> None:
        """Wait for pending saves and raise the first failure, like `wait_until_finished`."""
        self.wait_until_finished()

    def __enter__(self) -> "AsyncCheckpointManager":
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as error:
            if raised is None:
                raise
            # The exception that ended the block must not be hidden.
            log.error("after the %s that ended the block, a pending save failed too: %s", raised.__name__, error)

    def _follow(self, request: SaveRequest, operation: Operation) -> PendingSave:
        save = start_save(replace(request, order=self), operation)
        with self._lock:
            settled = [earlier for earlier in self._pending if earlier.is_settled]
            self._pending = [earlier for earlier in self._pending if earlier not in settled] + [save]
        for earlier in settled:
            self._tell("saved", earlier.report)
        return PendingSave(save)

    def _is_off(self, path: object, call: str) -> bool:
        if self.enable is not False:
            return False
        log.warning("saving is disabled (enable=False): nothing was written to %s", any_path_text(path, call))
        return True

    def _target(self, path: object, directory: bool) -> Target:
        format = "zarr" if self.use_tensorstore else "safetensors"
        compression = "zstd" if self.use_tensorstore and self.enable_compression else None
        return new_target(self._located(path), format, compression, None, directory or self.use_tensorstore)

    def _prepared(
        self, tree: Any, mesh: Mesh | None, gather_fns: Any, float_dtype: object, do_all_gather: bool, cpu_offload: bool
    ) -> Any:
        """The tree as it will be stored: gathered, cast and moved to the host as requested."""
        if mesh is None:
            log.warning("no mesh was passed: arrays keep their sharding, or are gathered on the CPU on request")
        tree = apply_gather_functions(tree, gather_fns, mismatch_allowed=True, verbose=self.verbose)
        dtype = float_dtype if float_dtype is not None else self.float_dtype if do_all_gather else None
        return move_tree(tree, dtype, mesh, do_all_gather, cpu_offload)

    def _request(
        self,
        tree: Any,
        path: Any,
        metadata: Mapping[str, object] | None,
        callback: Callable[[str], None] | None,
        prefix: str | None,
        directory: bool = False,
        indexed: bool = True,
    ) -> SaveRequest:
        leaves = [leaf for leaf in flatten(tree)[1] if isinstance(leaf.value, jax.Array | np.ndarray)]
        names = dotted_names([leaf.path for leaf in leaves])
        arrays = {name: leaf.value for name, leaf in zip(names, leaves, strict=True)}
        described = describe_arrays(arrays, check_metadata(metadata), self.enable_validation)
        when = {"timestamp": described.pop("timestamp")}
        return SaveRequest(
            target=self._target(path, directory),
            tree=tree,
            prefix=prefix,
            metadata=described,
            late=lambda: when,  # that of the leader: the clocks of processes differ
            checksums=checksums_of_parts(arrays) if self.enable_validation else {},
            overwrite=True,
            indexed=indexed,
            on_commit=None if callback is None else lambda: callback(path),
            order=self,
            verbose=self.verbose,
        )


def request_save(
    manager: AsyncCheckpointManager,
    tree: object,
    path: str,
    prefix: str | None,
    dtype: object,
    metadata: Mapping[str, object],
    step: int | None,
    indexed: bool = True,
) -> SaveRequest:
    """A save to a directory as the manager would make it, of arrays with the sharding that they have."""
    prepared = move_tree(tree, dtype, None, gather=False, cpu_offload=False)
    request = manager._request(prepared, path, metadata, None, prefix, directory=True, indexed=indexed)  # pyright: ignore[reportPrivateUsage]
    return replace(request, step=step)


def locate(manager: AsyncCheckpointManager, path: object) -> Location:
    """The place that a path means to the manager, with its bucket and credentials."""
    return manager._located(path)  # pyright: ignore[reportPrivateUsage]


def follow_save(manager: AsyncCheckpointManager, request: SaveRequest, operation: Operation) -> PendingSave:
    """Start a save that the manager's `wait_until_finished` covers, with its callback in the order of the manager's."""
    return manager._follow(request, operation)  # pyright: ignore[reportPrivateUsage]  (not a method for users)
