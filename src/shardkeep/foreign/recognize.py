"""Telling our own files from those of other programs, and naming the programs. Pure functions of names and bytes."""

import re
from collections.abc import Iterable

_DATA_FILE = re.compile(r"[0-9a-f]{32}-(([0-9]{5,}-)?[0-9]{5}\.safetensors|[0-9]+-[0-9]{5}\.pieces)")
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
_ORBAX_ROOT = "metadata/_ROOT_METADATA"


def has_our_data(names: Iterable[str]) -> bool:
    """Whether one of the names in a directory is that of a data file that only shardkeep writes."""
    return any(_DATA_FILE.fullmatch(name) for name in names)


def are_our_data(names: Iterable[str]) -> bool:
    """Whether all names in a directory are those of data files that only shardkeep writes."""
    return all(_DATA_FILE.fullmatch(name) for name in names)


def name_foreign(names: Iterable[str]) -> str | None:
    """What another library's checkpoint that is not read is called, from the names in its directory; None if unknown.

    Args:
        names: The names in the directory; those one level below do not matter. For a single file, its name.

    >>> name_foreign(["model.eqx"])
    'an Equinox checkpoint (.eqx)'
    >>> name_foreign(["notes.txt"])
    """
    return _other({name for name in names if "/" not in name})


def name_incomplete(names: Iterable[str]) -> str | None:
    """What is in a directory whose checkpoints can be read, but none is complete; None if the names do not tell.

    Args:
        names: The names in the directory, and those one level below.

    >>> name_incomplete(["10.orbax-checkpoint-tmp-1731800000"])
    'only unfinished Orbax checkpoints'
    """
    found = set(names)
    if any(_ORBAX_TEMPORARY in name.partition("/")[0] for name in found):
        return "only unfinished Orbax checkpoints"
    return "no complete step of its Orbax CheckpointManager" if _ORBAX_ROOT in found else None


def _other(here: set[str]) -> str | None:
    if any(name.endswith(".eqx") for name in here):
        return "an Equinox checkpoint (.eqx)"
    return None
