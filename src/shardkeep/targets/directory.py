"""The checkpoint directory: any number of trees, each under its prefix, and one manifest."""

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
    IncompleteCheckpointError,
    IntegrityError,
)
from shardkeep.foreign.recognize import are_our_data, has_our_data, name_foreign, name_incomplete
from shardkeep.foreign.registry import COMPANIONS, detect, is_recognized
from shardkeep.layouts.plan import Layout, SavePlan, TreePlan
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.model.digests import digest
from shardkeep.model.document import decode_manifest, encode_manifest, is_foreign_manifest
from shardkeep.model.manifest import MANIFEST, Manifest, Tree
from shardkeep.model.naming import folded, hashed, own_directory, prefix_directory
from shardkeep.runtime.collector import collector
from shardkeep.stores.base import Store, children_inside
from shardkeep.targets import publishing
from shardkeep.targets.base import name_tree
from shardkeep.targets.publishing import parents
from shardkeep.targets.recorded import read_table
from shardkeep.targets.running import explain_unfinished, recorded_names

log = logging.getLogger("shardkeep")

_warned: set[str] = set()  # what has been warned about once
_MOST_LOOKED_INTO = 5  # directories, to name another library's checkpoint


@dataclass(frozen=True)
class Directory:
    """A directory that holds a checkpoint. New trees are laid out by `layout`."""

    store: Store
    layout: Layout = field(default_factory=SafetensorsLayout)
    documents: Sequence[str] = (MANIFEST,)
    companions: Sequence[str] = tuple(name for companions in COMPANIONS for name in companions.names)
    keeps_control: bool = True

    @property
    def where(self) -> str:
        return self.store.url

    def read_if_any(self) -> Manifest | None:
        """What is committed. A manifest without trees says that nothing is, and stands for one that is not there."""
        found = self.read_manifest()
        if found is not None and found.trees:
            return found
        inside = self.store.children("")
        others = [name for name in inside if name not in (MANIFEST, self.store.control)]
        return detect(self.store, inside) if others and not are_our_data(others) else None

    read_again = read_if_any

    def read_own(self) -> Manifest | None:
        found = self.read_manifest()
        return found if found is not None and found.trees else None

    def read_manifest(self) -> Manifest | None:
        """What our own manifest says, whatever else is there; None if there is none, or it is another program's."""
        try:
            document = self.store.read(MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            raise IntegrityError(f"{self.store.locate(MANIFEST)} is a directory") from None
        if is_foreign_manifest(document) and not self._is_ours(self.store.children("")):
            return None
        with collector.paused():
            read = partial(read_table, self.store)
            return decode_manifest(document, self.where, self.store.locate(MANIFEST), read)

    def _is_ours(self, inside: Collection[str]) -> bool:
        """Whether the names show that shardkeep was at work, even if the manifest does not."""
        return self.store.control in inside or has_our_data(inside)

    def refuse_foreign(self, prefixes: Collection[str], overwrite: bool) -> None:
        inside = self.store.children("")
        if not inside:
            return
        foreign = self.foreign_document(inside)
        if foreign is not None:
            raise CheckpointExistsError(
                f"{foreign} was not written by shardkeep, and a save to {self.where} would replace it; save to another "
                "directory. Nothing was written"
            )
        # Without an index, another program's arrays are found only if nothing of ours is there.
        ours = not {self.store.control, MANIFEST}.isdisjoint(inside)
        if ours or (overwrite and "" in prefixes) or is_recognized(inside):
            return
        with suppress(CheckpointNotFoundError):
            if self.read_if_any() is not None:
                raise CheckpointExistsError(
                    f"{self.where} contains zarr arrays of another program without an index, which could no longer be "
                    "loaded after this save; save to another directory, or pass overwrite=True and no prefix to "
                    "replace them"
                )

    def foreign_document(self, inside: Collection[str]) -> str | None:
        if MANIFEST not in inside or self._is_ours(inside):
            return None
        return self.store.locate(MANIFEST) if is_foreign_manifest(self.store.read(MANIFEST)) else None

    def read_to_replace(self, overwrite: bool) -> Manifest | None:
        """A damaged manifest is set aside: nothing in the directory can be loaded by it, but a person may need it."""
        try:
            return self.read_if_any()
        except IncompleteCheckpointError:
            raise
        except IntegrityError as error:
            document = self.store.read(MANIFEST) if self.store.size(MANIFEST) is not None else b""
            aside = f"{MANIFEST}.damaged-{digest(document)[:8]}"
            log.warning("%s. This save replaces it; the damaged one is kept as %s", error, self.store.locate(aside))
            self.store.replace(aside, document)
            nonce = os.urandom(16).hex()
            self.store.replace(MANIFEST, encode_manifest(Manifest(self.where, nonce, {}), nonce))
            return None

    def read(self) -> Manifest:
        manifest = self.read_if_any()
        if manifest is not None:
            return manifest
        inside = self.store.children("")
        if self.store.control in inside:
            text = explain_unfinished(self.store, self.where)
            manifest = self.read_if_any()  # a save may have been committed meanwhile
            if manifest is not None:
                return manifest
            if self.store.size(MANIFEST) is None or self.store.children(self.store.saves):
                raise IncompleteCheckpointError(text)
        if (foreign := self.foreign_document(inside)) is not None:
            raise CheckpointNotFoundError(f"no checkpoint at {self.where}: {foreign} was not written by shardkeep")
        if MANIFEST in inside:
            raise CheckpointNotFoundError(
                f"no checkpoint at {self.where}: its manifest says that nothing has been committed there"
            )
        raise CheckpointNotFoundError(f"no checkpoint at {self.where}: {self._describe(inside)}")

    def _describe(self, inside: Sequence[str]) -> str:
        """What is in the directory, if it is not a checkpoint that can be read."""
        if not inside:
            return "there is nothing there"
        deeper = [
            f"{name}/{below}" for name in inside[:_MOST_LOOKED_INTO] for below in children_inside(self.store, name)
        ]
        incomplete = name_incomplete([*inside, *deeper])
        if incomplete is not None:
            return f"the directory holds {incomplete}"
        named = name_foreign([*inside, *deeper])
        if named is None:
            return "the directory holds something else"
        return f"the directory holds {named}, which this version of shardkeep cannot read"

    def names_of(self, tree: Tree) -> set[str]:
        if tree.format != "zarr":
            return {file.name for file in tree.files}
        return publishing.names_of(tree) if self.store.traits.editable else tree.names

    def reserve(self, plan: SavePlan, current: Manifest | None) -> SavePlan:
        """Clean names for the first save that claims a prefix, names with the save's id for all others."""
        trees: list[TreePlan] = []
        for tree in plan.trees:
            prefix = tree.draft.prefix
            clean = tree.named(f"{prefix_directory(prefix)}/") if prefix else tree
            reserved = [name for other in trees for name in other.names]
            if all(plan.save_id in file.name for file in tree.files) or self._claims(clean, current, reserved):
                trees.append(clean)
            else:
                own = tree.named(f"{own_directory(prefix, plan.save_id)}/")
                if _overlap(own.names, reserved):  # prefixes that differ only by case
                    own = tree.named(f"{own_directory(prefix, plan.save_id)}-{len(trees)}/")
                trees.append(own)
        return replace(plan, trees=tuple(trees))

    def _claims(self, plan: TreePlan, current: Manifest | None, reserved: Sequence[str]) -> bool:
        """Claim the clean names of a prefix for this save, permanently; False if they are claimed or in use.

        `reserved` are the names of other trees of the same save.
        """
        names, start, prefix = plan.names, plan.start, plan.draft.prefix
        claims = f"{self.store.control}/claims"
        name = f"{claims}/{hashed(prefix)}"
        if not self.store.traits.late_requests:
            return self._is_free(names, current, reserved) and self.store.claim(name)
        # In a bucket a delete request may arrive late, so no name is ever reused: neither one that is in use now and
        # will be deleted, nor one that belonged to a tree of another prefix.
        below = frozenset(name.removeprefix(start).partition("/")[0] for name in names)
        claim = _NameClaim(start.removesuffix("/"), below)
        document = claim.encode()
        try:
            self.store.write_new(name, len(document), [memoryview(document)])
        except ConflictError:
            return False
        others = [f"{claims}/{other}" for other in self.store.children(claims) if other != hashed(prefix)]
        if not self._is_free(names, current, reserved):
            return False
        return not any(claim.meets(_NameClaim.decode(self.store.read(other))) for other in others)

    def _is_free(self, names: Sequence[str], current: Manifest | None, reserved: Sequence[str]) -> bool:
        """Whether no existing file, no tree and no save, this one included, has any of the names."""
        owned = [name for tree in current.trees.values() for name in tree.clean_names] if current else []
        return not self.store.is_taken(names) and not _overlap(names, [*self._recorded(), *owned, *reserved])

    def _recorded(self, but: str = "") -> list[str]:
        """The names that saves have recorded, except for the one with this id."""
        running = [save for save in self.store.children(self.store.saves) if not but or save.partition(".")[0] != but]
        return [name for save in running for name in recorded_names(self.store, save)]

    def fence(self) -> Manifest | None:
        nonce = os.urandom(16).hex()
        try:
            found = decode_manifest(self.store.read(MANIFEST), self.where, self.store.locate(MANIFEST))
        except FileNotFoundError:
            found = Manifest(self.where, nonce, {})
        self.store.replace(MANIFEST, encode_manifest(found, nonce))
        return found if found.trees else self.read_if_any()

    def adopt(self, trees: Mapping[str, Tree], current: Manifest | None) -> Mapping[str, Tree]:
        adopted = dict(trees)
        for prefix in trees:
            adopted[prefix] = self._adopt(prefix, adopted, current)
        return adopted

    def _adopt(self, prefix: str, new: Mapping[str, Tree], current: Manifest | None) -> Tree:
        """Publish a tree under the clean names of its prefix if they are free, or belong to the tree it replaces."""
        tree = new[prefix]
        if tree.format != "zarr" or not tree.indexed or not tree.files:
            return tree
        if not tree.files[0].name.startswith(own_directory(prefix, tree.save_id) + "/"):
            return tree
        name = name_tree(self.where, prefix)
        if self.store.traits.late_requests:
            _warn_once(
                "a bucket",
                "%s will not see the new tree at %s. In a bucket the names of an overwritten tree are never "
                "reused, so %s leaves the new one out. Save each step to its own path to have it listed",
                publishing.programs(),
                name,
                publishing.indexes(),
            )
            return tree
        there: Mapping[str, Tree] = current.trees if current else {}
        replaced = there.get(prefix)
        published = replace(tree, published=True)
        others = self._recorded(but=tree.save_id)
        for trees in (there, new):
            others += [used for other, each in trees.items() if other != prefix for used in each.names]
        own = set[str]() if replaced is None else self.names_of(replaced)
        obstacle = publishing.find_obstacle(self.store, published.clean_names, own, others)
        if obstacle is None:
            return published
        _warn_once(
            name,
            "%s will not see the new tree at %s, and %s leaves it out: it needs the name %s, which is in use for "
            "something else. Save to another directory or under another prefix to have it listed",
            publishing.programs(),
            name,
            publishing.indexes(),
            self.store.locate(obstacle),
        )
        return tree

    def put(self, plan: SavePlan, manifest: Manifest, current: Manifest | None) -> str:
        # There is an index only if other programs can read one of the trees, or could until now.
        had_index = current is not None and any(old.format != "safetensors" for old in current.trees.values())
        has_index = any(saved.format != "safetensors" for saved in manifest.trees.values()) or had_index
        if has_index and self.store.traits.late_requests:
            # Note their versions: they are replaced only if nobody else does so now.
            for name in self.companions:
                self.store.identity(name)
        with collector.paused():
            document = encode_manifest(manifest)
        self.store.replace(MANIFEST, document)
        if has_index and self.store.traits.late_requests:
            self._update_companions(manifest)
        return MANIFEST

    def _update_companions(self, manifest: Manifest) -> None:
        """Write what other programs read in a bucket. Errors are only logged: shardkeep itself never reads it."""
        try:
            # A late request to delete the index could hit a newer one, so an empty index is written instead.
            for companions in COMPANIONS:
                for name, document in companions.documents(manifest, empty=True).items():
                    assert document is not None
                    self.store.replace(name, document)
        except OSError as error:
            log.warning("%s is saved, but %s is not up to date (%s)", self.where, publishing.indexes(), error)

    def retire(self, names: Collection[str], before: Manifest | None, after: Manifest | None) -> bool:
        if self.store.traits.editable and after is not None:
            # Other programs find, or found, something of a manifest that is ours.
            inside = self.store.children("")
            is_for_others = any(tree.format != "safetensors" for tree in after.trees.values())
            if MANIFEST in inside and (is_for_others or any(companions.index in inside for companions in COMPANIONS)):
                return publishing.retire(self.store, names, before, after)
        if names:
            publishing.remove(self.store, names) if self.store.traits.editable else self.store.remove(names)
        return True


def _warn_once(what: str, message: str, *arguments: object) -> None:
    """Log a warning the first time this process meets it."""
    if what not in _warned:
        _warned.add(what)
        log.warning(message, *arguments)


@dataclass(frozen=True)
class _NameClaim:
    """A claim on clean names in a bucket: the directory of a prefix, and the names directly below it."""

    directory: str
    below: frozenset[str]

    def encode(self) -> bytes:
        nonce = os.urandom(16).hex()  # distinguishes it from any other claim to the same names
        return json.dumps({"nonce": nonce, "directory": self.directory, "below": sorted(self.below)}).encode()

    @classmethod
    def decode(cls, document: bytes) -> "_NameClaim | None":
        try:
            told = json.loads(document)
            return cls(str(told["directory"]), frozenset(map(str, told["below"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def meets(self, other: "_NameClaim | None") -> bool:
        """Whether two claims could share a name: one directory is inside the other, below a name used there.

        >>> _NameClaim("", frozenset({"model"})).meets(_NameClaim("model", frozenset({"w"})))
        True
        >>> _NameClaim("", frozenset({"layers"})).meets(_NameClaim("model", frozenset({"w"})))
        False
        """
        if other is None:  # unknown
            return True
        outer, inner = sorted((self, other), key=lambda claim: len(claim.directory))
        start = f"{outer.directory}/" if outer.directory else ""
        return inner.directory.startswith(start) and inner.directory[len(start) :].partition("/")[0] in outer.below


def _overlap(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether two sets of names share one, or one needs as a directory what is a file of the other."""
    ours, theirs = folded(names), folded(others)
    return bool(ours & (theirs | parents(theirs)) or theirs & parents(ours))
