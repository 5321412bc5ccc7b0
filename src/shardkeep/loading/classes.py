"""The warning about classes of a tree that cannot be rebuilt, and how to get them back."""

import logging
from collections.abc import Mapping

from shardkeep.model.nodes import Node, import_of

log = logging.getLogger("shardkeep")


def warn_classes(path: str, replaced: Mapping[str, Node]) -> None:
    """Log which classes `Skeleton.rebuild` replaces, and with what."""
    namedtuples = {name: node for name, node in replaced.items() if node.kind == "namedtuple"}
    others = {name: node for name, node in replaced.items() if name not in namedtuples}
    if others:
        log.warning(
            "%s: %s cannot be rebuilt and %s loaded as OpaqueNode: not imported, not registered with JAX, or with "
            "auxiliary data that was not saved. %s",
            path,
            ", ".join(others),
            "is" if len(others) == 1 else "are",
            _advice(others),
        )
    if namedtuples:
        one = len(namedtuples) == 1
        log.warning(
            "%s: %s %s not imported, or %s fields have changed, and %s loaded as %s with the saved fields. %s",
            path,
            ", ".join(namedtuples),
            "is" if one else "are",
            "its" if one else "their",
            "is" if one else "are",
            "a plain namedtuple" if one else "plain namedtuples",
            _advice(namedtuples),
        )


def _advice(replaced: Mapping[str, Node]) -> str:
    advice = f"Pass template= to get the {'class' if len(replaced) == 1 else 'classes'} back"
    modules = {module for node in replaced.values() if (module := import_of(node)) is not None}
    # The import of a module includes those of the packages around it.
    needed = sorted(m for m in modules if not any(other.startswith(f"{m}.") for other in modules))
    return f"{advice}, or import {', '.join(needed)} before loading" if needed else advice
