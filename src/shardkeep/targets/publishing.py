"""What other programs find in a local checkpoint directory: clean names, zarr groups and their own index.

They look for an array under its key, as in `model/layers/0/w`. Only the first tree of a prefix is stored under such
clean names. Later trees are stored in a directory named after the save, and published: after the commit, every file
gets its clean name as a second name, by a hard link. The manifest already says so. Clean names therefore always have an
owner, and the next save or clean-up completes a publication that was interrupted. An index is removed before the first
name changes and written after the last one, so that it never lists parts of two trees.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from shardkeep.errors import IntegrityError
from shardkeep.foreign.base import CompanionIndex, Companions
from shardkeep.foreign.registry import COMPANIONS
from shardkeep.layouts.zarr import ZARRAY, ZGROUP, ZGROUP_BYTES, groups_above
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.naming import folded
from shardkeep.runtime.priority import priority
from shardkeep.stores.base import EditableStore, Store, children_inside, is_editable

log = logging.getLogger("shardkeep")

_TURN = 64  # links between two pauses for the training loop


def names_of(tree: Tree) -> set[str]:
    """All names that belong to a tree in a local directory: files, clean names, and the groups above its arrays."""
    return tree.names | _groups(tree)


def _groups(tree: Tree) -> set[str]:
    """The groups above the arrays of a tree, as other programs see them; none if they are files of the tree itself."""
    if tree.format != "zarr":
        return set()
    seen = tree.clean_names or tree.names
    return set() if any(_is_group(name) for name in seen) else groups_above(seen)


def _is_group(name: str) -> bool:
    return name.endswith(ZGROUP) and name.removesuffix(ZGROUP)[-1:] in ("", "/")


def find_obstacle(store: Store, names: Iterable[str], own: Collection[str], others: Collection[str]) -> str | None:
    """The first name that cannot be used because something else has it; None if all names can be used.

    Args:
        store: Where the names are.
        names: The names wanted.
        own: Names of the tree that is replaced: they may be in use.
        others: Names of other trees and of running saves, whether they exist yet or not.
    """
    wanted = [name for name in names if name not in own]
    known = folded(others)
    taken = known | parents(known)
    forms = {name: folded([name]) for name in wanted}
    shared = next((name for name in wanted if forms[name] & taken or known & parents(forms[name])), None)
    if shared is not None:
        return shared
    if not store.is_taken(wanted):
        return None
    return next((name for name in wanted if store.is_taken([name]) and not _is_replaced(store, name, own)), None)


def _is_replaced(store: Store, name: str, own: Collection[str]) -> bool:
    """Whether a name is free once `own` is removed: taken by one of these files, or by a directory of only these."""

    def is_ours(name: str) -> bool:
        inside = children_inside(store, name)
        return name in own or (bool(inside) and all(is_ours(f"{name}/{child}") for child in inside))

    return is_ours(name) or any(parent in own for parent in parents([name]))


def parents(names: Iterable[str]) -> set[str]:
    """The directories that files of these names need.

    >>> sorted(parents(["a/b/c"]))
    ['a', 'a/b']
    """
    found: set[str] = set()
    for name in names:
        while name := name.rpartition("/")[0]:
            if name in found:
                break
            found.add(name)
    return found


def retire(store: Store, names: Collection[str], before: Manifest | None, after: Manifest) -> bool:
    """Remove names that are no longer needed, and publish the trees of a manifest. Call it with the lock held.

    A failure to publish is only logged, because shardkeep itself does not read these names.

    Args:
        store: The local directory of the checkpoint.
        names: The names to remove.
        before: The manifest that was replaced, or `after` itself to complete a publication that was interrupted.
        after: The manifest that is committed.

    Returns:
        Whether all of it was done.
    """
    names = {name for name in names if not any(name in companions.names for companions in COMPANIONS)}
    listings = [(companions, companions.read_index(store)) for companions in COMPANIONS]
    known = _published(before, [listing for _, listing in listings])
    todo = [tree for p, tree in after.trees.items() if known.get(p) != tree.save_id]
    changed = parents([*names, *(clean for tree in todo for clean in tree.clean_names)])
    is_listed = [_lists(listing, changed) for _, listing in listings]
    outdated: list[str] = []
    documents: list[tuple[str, bytes | None]] = []
    for (companions, listing), lists in zip(listings, is_listed, strict=True):
        new = companions.documents(after)
        documents += new.items()
        if lists or (listing is not None and listing.save_id is not None and new[companions.index] is None):
            outdated += [name for name, document in new.items() if name == companions.index or document is None]
    if outdated:
        store.remove(outdated)
        store.sync_directory("")
    remove(store, names)
    if not todo and not any(is_listed):
        return True
    assert is_editable(store), "only there are trees published"
    try:
        _publish(store, todo, after)
        for name, document in documents:
            if document is not None:
                store.replace(name, document)
    except (OSError, IntegrityError) as error:
        log.warning(
            "%s is saved, but %s and the names it lists are not up to date (%s). The next save to it, or "
            "`shardkeep clean`, will try again",
            store.url,
            indexes(),
            error,
        )
        return False
    return True


def _published(before: Manifest | None, listings: Sequence[CompanionIndex | None]) -> dict[str, str]:
    """By prefix, the save whose tree has its clean names already, as far as every index shows it.

    An index that another program wrote says nothing about our trees: only the tree saved now is linked then.
    """
    if before is None:
        return {}
    current = (listing is not None and listing.save_id in (None, before.save_id) for listing in listings)
    return {p: tree.save_id for p, tree in before.trees.items()} if all(current) else {}


def _lists(listing: CompanionIndex | None, directories: Collection[str]) -> bool:
    """Whether an index lists, or may list, an array in one of these directories."""
    return listing is not None and (listing.arrays is None or not listing.arrays.isdisjoint(directories))


def programs() -> str:
    """The programs that read what is published, for messages."""
    return _named(lambda companions: companions.program)


def indexes() -> str:
    """The names of the documents that list it, for messages."""
    return _named(lambda companions: companions.index)


def _named(name: Callable[[Companions], str]) -> str:
    return " and ".join(map(name, COMPANIONS))


def remove(store: Store, names: Iterable[str]) -> None:
    """Remove names of ours. A `.zgroup` written by another program stays."""
    wanted = set(names)
    others = {name for name in wanted if _is_group(name) and not _is_our_group(store, name)}
    store.remove(sorted(wanted - others))


def _is_our_group(store: Store, name: str) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError, IntegrityError):
        return store.read(name) in (ZGROUP_BYTES, b"")  # a power cut can leave a copy empty
    return False


def _publish(store: EditableStore, trees: Sequence[Tree], manifest: Manifest) -> None:
    """Give these trees their clean names, durably, and make the groups above them."""
    links = [pair for tree in trees for pair in tree.clean_names.items()]
    try:
        for number, (clean, name) in enumerate(links):
            if number % _TURN == 0:
                priority.yield_to_training()
            store.link(name, clean)
    except OSError:
        with suppress(OSError):  # copies would only take up space
            store.remove([clean for clean, _ in links])
        raise
    arrays = {name for tree in manifest.trees.values() for name in tree.names if name.endswith(ZARRAY)}
    groups = {name for tree in trees for name in _groups(tree)}
    made = _make_groups(store, [name for name in groups if name.removesuffix(ZGROUP) + ZARRAY not in arrays])
    if links:  # after a power cut, the index must not list names that were lost
        store.sync([*(clean for clean, _ in links), *made])


def _make_groups(store: EditableStore, names: Iterable[str]) -> list[str]:
    """Make the groups that are missing, as links to a single file, and return their names."""
    made: list[str] = []
    for name in sorted(names, key=len):
        if size := store.size(name):
            continue
        if made:
            store.link(made[0], name)
        else:
            if size is not None:
                store.remove([name])
            store.write_new(name, len(ZGROUP_BYTES), [memoryview(ZGROUP_BYTES)])
            store.sync([name])  # else a power cut could leave it empty
        made.append(name)
        if len(made) % _TURN == 0:
            priority.yield_to_training()
    return made
