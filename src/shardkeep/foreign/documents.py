"""Documents of other programs in a checkpoint directory: JSON, read and checked, and the names of what is there."""

import json
from collections.abc import Collection

from shardkeep.errors import IntegrityError
from shardkeep.foreign.recognize import has_our_data
from shardkeep.model.document import no_duplicates
from shardkeep.model.manifest import MANIFEST
from shardkeep.model.values import Json, JsonObject
from shardkeep.stores.base import Store, children_inside

ORBAX = ("_CHECKPOINT_METADATA", "_METADATA")  # documents of Orbax: of a checkpoint, and of a tree in it
_FEW = 32  # directories: more are the checkpoints of a run, or arrays, and not parts of one checkpoint


def read_json(store: Store, name: str) -> JsonObject | None:
    """The object in a document; None if there is none. `IntegrityError` if it is damaged."""
    try:
        document = store.read(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = parse_json(store, name, document)
    if not isinstance(found, dict):
        raise IntegrityError(f"{store.locate(name)} does not contain a JSON object", file=store.locate(name))
    return found


def parse_json(store: Store, name: str, document: bytes) -> Json:
    """What a document of this name holds. `IntegrityError` if it is not JSON."""
    try:
        return json.loads(document, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        where = store.locate(name)
        raise IntegrityError(f"{where} is damaged: {error}", file=where) from error


def files_below(store: Store, directory: str, depth: int = 3) -> list[str]:
    """The names of the files in a directory, and of those in directories in it."""
    found: list[str] = []
    for name in (f"{directory}/{child}" for child in store.children(directory)):
        found += [name] if store.size(name) is not None else files_below(store, name, depth - 1) if depth else []
    return found


def names_below(store: Store, names: Collection[str]) -> list[str]:
    """The names in the directories of a place, such as `state/_METADATA`, if what is there could be parts of a step.

    A step has a number at the end of its name. Anything else is taken for a directory of checkpoints. Nothing is looked
    for where shardkeep has been at work.
    """
    ours = MANIFEST in names or store.control in names or has_our_data(names)
    if ours or not store.url.rstrip("/")[-1:].isdigit():
        return []
    directories = [name for name in names if "." not in name and not name[-1:].isdigit()]
    if len(directories) > _FEW:
        return []
    return [f"{name}/{below}" for name in directories for below in children_inside(store, name)]
