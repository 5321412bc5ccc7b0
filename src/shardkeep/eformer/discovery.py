"""Finding checkpoints of a Checkpointer by their `metadata.json`, and loading them."""

import logging
from urllib.parse import quote

from jax.sharding import Mesh

from shardkeep.eformer.loader import Callback, Loaded
from shardkeep.eformer.manager import AsyncCheckpointManager, locate
from shardkeep.errors import CheckpointNotFoundError, IntegrityError, PrefixError, an
from shardkeep.foreign.rundirs import newest_of, read_metadata, run_directories
from shardkeep.loading.shardings import Rules
from shardkeep.model.values import JsonObject
from shardkeep.processes.operation import join
from shardkeep.stores.location import Location, any_path_text, location, name_path

log = logging.getLogger("shardkeep")


def find_latest_checkpoint(base_path: object) -> str | None:
    """The newest checkpoint in a directory, or the directory itself; None if there is none.

    Checkpoints are compared by the timestamps, then the steps, in their `metadata.json`. Those whose metadata cannot be
    read come last, and those that are being removed are skipped. The checkpoints themselves are not opened.

    Args:
        base_path: The directory, or its `gs://`, `s3://` or `file://` URL.

    Returns:
        The path, or a URL of the same scheme.

    >>> import jax.numpy as jnp
    >>> from shardkeep.serialization import Checkpointer
    >>> for step in (9, 10):
    ...     _ = Checkpointer(tmp / "run", None, []).save_pytree({"w": jnp.ones(3)}, "model", step=step)
    >>> find_latest_checkpoint(tmp / "run") == str(tmp / "run" / "run-10")
    True
    >>> print(find_latest_checkpoint(tmp / "elsewhere"))
    None
    """
    text = any_path_text(base_path, "find_latest_checkpoint(base_path)")
    newest = newest_of(run_directories(location(text)))
    if newest is None:
        return None
    return f"file://{quote(newest.path)}" if text.startswith("file:") else newest.path


def read_checkpoint_metadata(checkpoint_path: object) -> JsonObject:
    """The `metadata.json` of a checkpoint: its `step`, `timestamp` and `is_temporary`.

    Args:
        checkpoint_path: The directory of the checkpoint, or its URL.

    Raises:
        FileNotFoundError: There is no `metadata.json`.
        ValueError: It is not a JSON object.

    >>> import jax.numpy as jnp
    >>> from shardkeep.serialization import Checkpointer
    >>> path = Checkpointer(tmp / "run", None, []).save_pytree({"w": jnp.ones(3)}, "model", step=9, temporary=True)
    >>> metadata = read_checkpoint_metadata(path)
    >>> metadata["step"], metadata["is_temporary"]
    (9, True)
    """
    return read_metadata(location(any_path_text(checkpoint_path, "read_checkpoint_metadata(checkpoint_path)")))


class RunLoader:
    """Loads checkpoints from a directory of checkpoints: the loading methods of a Checkpointer."""

    def __init__(self, base_path: object, manager: AsyncCheckpointManager | None) -> None:
        if manager is not None and not isinstance(manager, AsyncCheckpointManager):
            raise TypeError(f"manager must be an AsyncCheckpointManager, not {an(type(manager).__name__)}")
        self.base_path = any_path_text(base_path, "Checkpointer(base_path, save_interval, step_policies)")
        self._manager = AsyncCheckpointManager() if manager is None else manager

    def load_checkpoint(
        self,
        mesh: Mesh | None,
        *,
        path: object = None,
        discover_latest: bool = True,
        shardings: object = None,
        partition_rules: Rules | None = None,
        dtype: object = None,
        prefix: str | None = None,
        structured: bool = False,
        template: object = None,
        strict_shapes: bool = True,
    ) -> Loaded:
        """Load a checkpoint, after waiting for pending saves.

        Args:
            mesh: The mesh to place arrays on. None: the default device. A mesh with several axes needs
                `partition_rules` or `shardings`, unless the load is structured.
            path: The checkpoint, or the directory to look in. None: `base_path`.
            discover_latest: Whether to load the newest checkpoint in that directory, as `find_latest_checkpoint` finds
                it. If False, the directory itself is the checkpoint.
            shardings: A PyTree, or a dict with dotted keys, of shardings, `PartitionSpec`s or functions.
            partition_rules: Pairs of a regular expression and a `PartitionSpec`; the first match wins.
            dtype: The dtype to cast arrays of the same kind to.
            prefix: The tree to load, if the directory has several.
            structured: Whether to load the tree in its own structure, instead of nested dicts with string keys. Needs
                a prefix.
            template: A PyTree of arrays or `jax.ShapeDtypeStruct`s whose structure, float dtypes and shardings the
                result has.
            strict_shapes: Whether a leaf that does not match the template is an error.

        Returns:
            The tree, and its metadata: that of `AsyncCheckpointManager.load` (or `load_pytree`, with a structure or a
            template), with further entries from `metadata.json`, such as `step` and `is_temporary`.

        Raises:
            FileNotFoundError: There is no checkpoint.
        """
        if structured:
            require_prefix(prefix, "structured=True")
        return self.load_pytree(
            mesh,
            prefix=prefix,
            path=path,
            discover_latest=discover_latest,
            shardings=shardings,
            partition_rules=partition_rules,
            dtype=dtype,
            load_treedef=structured,
            template=template,
            strict_shapes=strict_shapes,
        )

    def load_pytree(
        self,
        mesh: Mesh | None,
        *,
        prefix: str | None,
        path: object = None,
        discover_latest: bool = False,
        discover_raise: bool = True,
        shardings: object = None,
        partition_rules: Rules | None = None,
        dtype: object = None,
        load_treedef: bool = True,
        template: object = None,
        strict_shapes: bool = True,
        callback: Callback | None = None,
        chunk_size: int | None = None,
    ) -> Loaded:
        """Load the tree of a prefix, after waiting for pending saves.

        Args:
            mesh: The mesh to place arrays on. None: the default device.
            prefix: The tree to load.
            path: The checkpoint, or the directory to look in. None: `base_path`.
            discover_latest: Whether to load from the newest checkpoint in that directory. If False, the directory
                itself is the checkpoint.
            discover_raise: Whether it is an error if no checkpoint is discovered. If False, the directory itself is
                loaded then.
            shardings: See `load_checkpoint`.
            partition_rules: See `load_checkpoint`.
            dtype: The dtype to cast arrays of its kind to.
            load_treedef: Whether to load the tree in its own structure. If False, and without a template, the result is
                nested dicts with string keys.
            template: See `load_checkpoint`.
            strict_shapes: See `load_checkpoint`.
            callback: Called as `callback(array, key)` for each array, with its dotted key; its result is returned.
            chunk_size: The most arrays to read at once. None: no limit but the memory budget.

        Returns:
            The tree, and its metadata as in `load_checkpoint`.

        Raises:
            FileNotFoundError: There is no checkpoint.
        """
        root, described = self._found(path, discover_latest, must_find=discover_raise)
        if load_treedef or template is not None:
            tree, metadata = self._manager.load_pytree(
                root,
                mesh,
                prefix=prefix,
                shardings=shardings,
                partition_rules=partition_rules,
                dtype=dtype,
                template=template,
                strict_shapes=strict_shapes,
                callback=callback,
                chunk_size=chunk_size,
            )
        else:
            tree, metadata = self._manager.load(
                root,
                mesh,
                shardings=shardings,
                callback=callback,
                partition_rules=partition_rules,
                dtype=dtype,
                prefix=prefix,
                chunk_size=chunk_size,
            )
        return tree, {**described, **metadata}

    def _found(self, path: object, discover: bool, must_find: bool) -> tuple[str, JsonObject]:
        """The checkpoint to load, and its `metadata.json`. Process 0 looks."""
        root = path or self.base_path
        with join(f"loading {name_path(root)}") as operation:
            place = locate(self._manager, root)
            self._manager.wait_until_finished()
            found = operation.share(_look(place, discover, must_find) if operation.leads else None)
        return found[0], found[1]


def _look(place: Location, discover: bool, must_find: bool) -> tuple[str, JsonObject]:
    """The checkpoint to load, and its `metadata.json`: the newest in a directory, or the directory itself."""
    if discover:
        newest = newest_of(run_directories(place))
        if newest is None and must_find:
            raise CheckpointNotFoundError(f"no checkpoint found under {place}: no directory in it has a metadata.json")
        place = place if newest is None else newest.place
    try:
        return str(place), read_metadata(place)
    except FileNotFoundError:
        return str(place), {}
    except IntegrityError as error:
        log.warning("loading %s without its step: %s", place, error)
        return str(place), {}


def require_prefix(prefix: object, what: str) -> None:
    if not prefix or not isinstance(prefix, str):
        raise PrefixError(f"{what} needs a prefix that is a non-empty string, not {prefix!r}")
