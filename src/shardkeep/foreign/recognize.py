"""Telling our own files from those of other programs, and naming the programs. Pure functions of names and bytes."""

import re
from collections.abc import Iterable

_DATA_FILE = re.compile(r"[0-9a-f]{32}-[0-9]{5}\.safetensors")
_ORBAX = {"_CHECKPOINT_METADATA", "_METADATA"}
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"


def has_our_data(names: Iterable[str]) -> bool:
    """Whether one of the names in a directory is that of a data file that only shardkeep writes."""
    return any(_DATA_FILE.fullmatch(name) for name in names)


def are_our_data(names: Iterable[str]) -> bool:
    """Whether all names in a directory are those of data files that only shardkeep writes."""
    return all(_DATA_FILE.fullmatch(name) for name in names)


def name_foreign(names: Iterable[str], directory: str = "") -> str | None:
    """What another library's checkpoint is called, from the names in its directory; None if they do not tell.

    Args:
        names: The names in the directory; also those one level below (`100/_METADATA`), which show a directory of
            checkpoints. For a single file, its name.
        directory: The name of the directory.

    >>> name_foreign(["pytreedef.json", "array_store"])
    'a checkpoint of jax.experimental.array_serialization.pytree_serialization'
    >>> name_foreign(["notes.txt"])
    """
    found = set(names)
    here = {name for name in found if "/" not in name}
    return _orbax(found, here, directory) or _jax(here) or _other(here)


def _orbax(found: set[str], here: set[str], directory: str) -> str | None:
    if _ORBAX_TEMPORARY in directory:
        return "an unfinished Orbax checkpoint"
    if "orbax.checkpoint" in here:
        return "an Orbax checkpoint (v1)"
    if here & _ORBAX or "manifest.ocdbt" in here:
        return "an Orbax checkpoint"
    below = {name.partition("/")[2] for name in found}
    if below & {*_ORBAX, "_ROOT_METADATA"}:
        return "the checkpoints of an Orbax CheckpointManager"
    if any(_ORBAX_TEMPORARY in name.partition("/")[0] for name in found):
        return "an unfinished Orbax checkpoint"
    return None


def _jax(here: set[str]) -> str | None:
    if "pytreedef.json" in here and here & {"array_store", "archive.zip"}:
        return "a checkpoint of jax.experimental.array_serialization.pytree_serialization"
    return None


def _other(here: set[str]) -> str | None:
    if any(name.endswith(".eqx") for name in here):
        return "an Equinox checkpoint (.eqx)"
    return None
