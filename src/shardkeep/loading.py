"""Loading: read the manifest → choose leaves and shardings → plan → read and check → place on devices → rebuild."""

import logging
import os
import re
from typing import Any, Literal

from jax.sharding import Mesh

from shardkeep.arrays import parse_dtype
from shardkeep.choosing import Request, choose
from shardkeep.errors import CheckpointNotFoundError, IntegrityError, ProcessError, ShardkeepError, an, storage_error
from shardkeep.manifest import Manifest, Tree
from shardkeep.opening import open_checkpoint
from shardkeep.placing import read_leaves
from shardkeep.processes import LEADER, Operation, announced, join
from shardkeep.sharding import Rules
from shardkeep.stores.base import Store
from shardkeep.stores.local import CONTROL
from shardkeep.together import compare
from shardkeep.tree import Skeleton
from shardkeep.workers import collector

log = logging.getLogger("shardkeep")

_TRIES = 100  # how often a load starts over because writers keep replacing the checkpoint under it


def load(
    path: object,
    *,
    template: Any = None,
    prefix: str | None = None,
    include: str | re.Pattern[str] | None = None,
    mesh: Mesh | None = None,
    partition_rules: Rules | None = None,
    shardings: Any = None,
    dtype: Any = None,
    verify: bool = True,
    mapped: Literal["auto", False] = "auto",
    read_once: bool = False,
    progress: bool = False,
) -> Any:
    """Load a checkpoint as the tree that was saved, on any number of devices, every byte checked.

    Without `template`, `mesh` or `shardings`, JAX arrays come back on the default device. A `template` (arrays or
    `jax.ShapeDtypeStruct`s) gives structure, dtypes and shardings, and may name part of the tree: the rest is not read.
    With a `mesh`, `partition_rules` ((regex, PartitionSpec), first match on the `/`-joined key) or `shardings` say how
    arrays are laid out; with neither, they keep the layout they were saved with as far as the mesh has those axes.
    `include` (a regex on `/`-joined keys) loads only some leaves. `dtype` casts arrays of its own kind.

    On a local disk arrays are mapped from the file where that needs no copy (`mapped=False` reads them instead): then
    the file must not be changed in place while they live; replacing or deleting the checkpoint is safe.

    Of several JAX processes each reads the bytes its own devices need. With `read_once` the first reads everything and
    sends it to the others over the network, which pays when many processes share slow storage. `progress` shows a bar.

    >>> import jax.numpy as jnp, shardkeep
    >>> _ = shardkeep.save(tmp / "state", {"layers": [{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}], "step": 7})
    >>> shardkeep.load(tmp / "state", include="layers/1")
    {'layers': [None, {'w': Array([0., 0., 0.], dtype=float32)}]}
    """
    with announced(f"loading {path}"):
        if mapped not in ("auto", False):
            raise ValueError(f"mapped must be 'auto' or False, not {mapped!r}")
        request = Request(
            template=template,
            prefix=prefix,
            include=_pattern(include),
            mesh=mesh,
            rules=partition_rules,
            shardings=shardings,
            dtype=None if dtype is None else parse_dtype(dtype),
            verify=verify,
            mapped=mapped == "auto",
            read_once=read_once,
            verbose=progress,
        )
        skeleton, leaves, _ = load_request(path, request)
    return skeleton.rebuild(leaves)


def _pattern(include: Any) -> re.Pattern[str] | None:
    if include is None or isinstance(include, re.Pattern):
        return include
    if not isinstance(include, str):
        raise TypeError(f"include must be a regex (str or re.Pattern), not {an(type(include).__name__)}")
    return re.compile(include)


def load_request(path: object, request: Request) -> tuple[Skeleton, list[Any], Tree]:
    """The structure asked for, its leaves, and the saved tree. Starts over if a writer replaced it meanwhile."""
    with join(f"loading {path}") as operation:
        if operation.size > 1:
            asked = (f"prefix {request.prefix!r}", f"include {request.include}", f"read_once {request.read_once}")
            compare(operation, [f"path {path}", *asked])
        manifest = None
        for _ in range(_TRIES):
            store, manifest = _open_same(path, operation)
            loaded = None if manifest is None else _try_load(path, store, manifest, request, operation)
            everyone = operation.gather(loaded is not None)
            if operation.share(all(everyone)) and loaded is not None:
                return loaded
        # The leader may have seen one checkpoint all the time, and another process another one.
        seen = operation.gather(manifest.save_id if manifest is not None else None)
        different = next((i for i, found in enumerate(seen) if found != seen[LEADER]), None)
        if operation.leads and different is not None:
            raise ProcessError(
                f"loading {path}: processes {LEADER} and {different} do not see the same checkpoint. "
                "All processes must load from the same shared directory or bucket"
            )
        operation.share()
        raise IntegrityError(
            f"{path} was replaced {_TRIES} times while it was being loaded; try again when writers rest"
        )


def _open_same(path: object, operation: Operation) -> tuple[Store, Manifest | None]:
    """The checkpoint that the leader sees; no manifest if here, by now, another one is there."""
    if operation.leads:
        store, manifest = open_checkpoint(path)
        operation.share(manifest.save_id)
        return store, manifest
    expected = operation.share()
    try:
        store, manifest = open_checkpoint(path)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{error}. Process {LEADER} sees one: all processes must load from the same shared directory or bucket"
        ) from error
    return store, manifest if manifest.save_id == expected else None


def _try_load(
    path: object, store: Store, manifest: Manifest, request: Request, operation: Operation
) -> tuple[Skeleton, list[Any], Tree] | None:
    """What was asked for, or nothing if the checkpoint was replaced meanwhile."""
    try:
        loaded = _load(store, manifest, request, operation)
        # In a directory a name is never written twice. Exchange files keep theirs: was it one state all along?
        if os.path.basename(store.control) == CONTROL or open_checkpoint(path)[1].save_id == manifest.save_id:
            return loaded
    except (IntegrityError, FileNotFoundError):
        # Names are never written twice: if the manifest is still the same, the damage is real.
        # (Where one process reads for all, the others wait for its data: there is no starting over.)
        if open_checkpoint(path)[1].save_id == manifest.save_id or (request.read_once and operation.size > 1):
            raise
    except OSError as error:
        if isinstance(error, ShardkeepError):
            raise
        raise storage_error(error, f"loading {path}", "Nothing was loaded") from error
    return None


@collector.paused()
def _load(store: Store, manifest: Manifest, request: Request, operation: Operation) -> tuple[Skeleton, list[Any], Tree]:
    tree = manifest.tree(request.prefix)
    prefix = next((name for name, candidate in manifest.trees.items() if candidate is tree), request.prefix or "")
    choice = choose(tree, prefix, request)
    values = iter(read_leaves(store, tree, [w for w in choice.wanted if w is not None], request, operation))
    leaves = [choice.kept[i] if w is None else next(values) for i, w in enumerate(choice.wanted)]
    stand_ins = choice.skeleton.stand_ins()
    if stand_ins:
        log.warning(
            "shardkeep: %s: stand-ins take the place of %s, which are not imported and registered with JAX here, or "
            "whose fixed part is not plain data; pass template= to have them back",
            manifest.path,
            ", ".join(stand_ins),
        )
    return choice.skeleton, leaves, tree
