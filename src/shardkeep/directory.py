"""The checkpoint directory: any number of trees under their prefixes, one manifest."""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardkeep.commit import Turn, recorded_names
from shardkeep.errors import CheckpointNotFoundError, ConflictError, IncompleteCheckpointError, IntegrityError
from shardkeep.formats.base import Format
from shardkeep.formats.eformer import INDEX, METADATA, index_documents, read_eformer
from shardkeep.formats.safetensors import SafetensorsFormat
from shardkeep.manifest import MANIFEST, Manifest, Tree, decode_manifest, encode_manifest
from shardkeep.naming import hashed, prefix_directory
from shardkeep.planning import Draft, FilePlan, LeafPlan, SavePlan, WrittenFile, plan_pieces
from shardkeep.stores.base import Store
from shardkeep.tree import Path
from shardkeep.workers import collector

log = logging.getLogger("shardkeep")


@dataclass(frozen=True)
class Directory:
    """A directory that holds a checkpoint; new trees are written in `format`."""

    store: Store
    format: Format = field(default_factory=SafetensorsFormat)
    documents: Sequence[str] = (MANIFEST,)
    companions: Sequence[str] = (INDEX, METADATA)
    keeps_control: bool = True
    gathers: bool = False

    @property
    def where(self) -> str:
        return self.store.url

    def describe(self) -> str:
        return f"{self.format.name}, compression {self.format.compression}"

    def read_if_any(self) -> Manifest | None:
        """What is committed. A manifest without trees says that nothing is, and stands for one that is not there."""
        found = None
        try:
            found = decode_manifest(self.store.read(MANIFEST), self.where, self.store.locate(MANIFEST))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except IsADirectoryError:
            raise IntegrityError(f"{self.store.locate(MANIFEST)} is a directory") from None
        if found is not None and found.trees:
            return found
        inside = self.store.children("")
        # Arrays without an index may be what a dead save of ours left: they are looked for only elsewhere.
        ours = found is not None or self.store.control in inside
        return None if not inside or (ours and INDEX not in inside) else read_eformer(self.store, search=not ours)

    def read(self) -> Manifest:
        manifest = self.read_if_any()
        if manifest is not None:
            return manifest
        inside = self.store.children("")
        if self.store.size(MANIFEST) is not None and not self.store.children(self.store.saves):
            raise CheckpointNotFoundError(
                f"no checkpoint at {self.where}: its manifest says that nothing was ever committed there"
            )
        if self.store.control in inside:
            raise IncompleteCheckpointError(
                f"{self.where} holds no committed checkpoint: a save into it never finished, or a delete was cut "
                "short. Save again with the same path, or remove the directory"
            )
        detail = "the directory holds something else" if inside else "there is nothing there"
        raise CheckpointNotFoundError(f"no checkpoint at {self.where}: {detail}")

    def check(self, paths: Sequence[Path]) -> None:
        """Any names will do."""

    @collector.paused()
    def plan(
        self, leaves: Sequence[LeafPlan], draft: Draft, current: Manifest | None, at: str | None = None
    ) -> SavePlan:
        """Clean names for whoever claims the prefix first, names with the save's id for everyone after."""
        pieces = plan_pieces(leaves, self.format.split, self.format.whole)
        clean = prefix_directory(draft.prefix) if draft.prefix else ""
        own = f"{clean}~{draft.save_id}"
        for directory in (clean, own) if at is None else (at,):
            files = tuple(self.format.lay_out(leaves, pieces, directory, draft.save_id))
            plan = SavePlan(
                draft.save_id,
                self.format.name,
                self.format.compression,
                draft.skeleton,
                tuple(leaves),
                files,
                directory,
            )
            names = [file.name for file in files]
            if directory in (own, at) or all(draft.save_id in name for name in names):
                return plan
            if self._claims(draft.prefix, clean, names):
                return plan
        raise AssertionError("a directory of its own is always free")

    def _claims(self, prefix: str, directory: str, names: Sequence[str]) -> bool:
        """Whether the clean names of a prefix are this save's from now on."""
        claims = f"{self.store.control}/claims"
        name = f"{claims}/{hashed(prefix)}"
        if not self.store.remote:
            return self._is_free(names) and self.store.claim(name)
        # In a bucket a request to remove a name may come late, so no name is ever used again: neither one that is in
        # use now and will be removed, nor one that belonged to a tree of another prefix.
        start = f"{directory}/" if directory else ""
        claim = _Claim(directory, frozenset(name.removeprefix(start).partition("/")[0] for name in names))
        document = claim.encode()
        try:
            self.store.write_new(name, len(document), [memoryview(document)])
        except ConflictError:
            return False
        others = [f"{claims}/{other}" for other in self.store.children(claims) if other != hashed(prefix)]
        return self._is_free(names) and not any(claim.meets(_Claim.decode(self.store.read(o))) for o in others)

    def _is_free(self, names: Sequence[str]) -> bool:
        """Whether no file there, and no save at work, has any of the names."""
        running = self.store.children(self.store.saves)
        live = [name for save_id in running for name in recorded_names(self.store, save_id)]
        return not self.store.is_taken(names) and not _overlap(names, live)

    def complete(self, turn: Turn, file: FilePlan, written: WrittenFile) -> bytes:
        return file.header

    def finish(self, turn: Turn, tree: Tree) -> Tree:
        return tree

    def fence(self) -> Manifest | None:
        nonce = os.urandom(16).hex()
        try:
            found = decode_manifest(self.store.read(MANIFEST), self.where, self.store.locate(MANIFEST))
        except FileNotFoundError:
            found = Manifest(self.where, nonce, {})
        self.store.replace(MANIFEST, encode_manifest(found, nonce))
        return found if found.trees else self.read_if_any()

    def put(self, turn: Turn, tree: Tree, current: Manifest | None) -> str:
        manifest = Manifest(self.where, tree.save_id, {**(current.trees if current else {}), turn.draft.prefix: tree})
        # An index is there only if a tree eFormer could read is, or was until now.
        replaced_index = current is not None and any(old.format != "safetensors" for old in current.trees.values())
        told = any(saved.format != "safetensors" for saved in manifest.trees.values()) or replaced_index
        if told and self.store.remote:  # they are replaced on condition that nobody does so after this
            for name in self.companions:
                self.store.identity(name)
        self.store.replace(MANIFEST, encode_manifest(manifest))
        if told:
            self._tell_eformer(manifest, turn.draft.prefix)
        return MANIFEST

    def _tell_eformer(self, manifest: Manifest, prefix: str) -> None:
        """Keep the files that eFormer reads true. We never read them ourselves, so failing here undoes nothing."""
        try:
            # In a bucket a late request to remove an index could remove a newer one: it is emptied instead.
            for name, document in index_documents(manifest, prefix, empty=self.store.remote).items():
                if document is not None:
                    self.store.replace(name, document)
                elif self.store.size(name) is not None:
                    self.store.remove([name])
        except OSError as error:
            log.warning("shardkeep: %s is saved, but the index for eFormer is not up to date (%s)", self.where, error)


@dataclass(frozen=True)
class _Claim:
    """Who may use clean names in a bucket: the directory of a prefix, and the names directly below it."""

    directory: str
    below: frozenset[str]

    def encode(self) -> bytes:
        nonce = os.urandom(16).hex()  # which tells it from any other claim to the same names
        return json.dumps({"nonce": nonce, "directory": self.directory, "below": sorted(self.below)}).encode()

    @classmethod
    def decode(cls, document: bytes) -> "_Claim | None":
        try:
            told = json.loads(document)
            return cls(str(told["directory"]), frozenset(map(str, told["below"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def meets(self, other: "_Claim | None") -> bool:
        """Whether names of both could be the same: one directory lies in the other, below a name used there.

        >>> _Claim("", frozenset({"model"})).meets(_Claim("model", frozenset({"w"})))
        True
        >>> _Claim("", frozenset({"layers"})).meets(_Claim("model", frozenset({"w"})))
        False
        """
        if other is None:  # nobody can tell
            return True
        outer, inner = sorted((self, other), key=lambda claim: len(claim.directory))
        start = f"{outer.directory}/" if outer.directory else ""
        return inner.directory.startswith(start) and inner.directory[len(start) :].partition("/")[0] in outer.below


def _overlap(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether a name is used twice, or as a file by one and as a directory by the other."""
    ours, theirs = set(names), set(others)
    return bool(ours & (theirs | _parents(theirs)) or theirs & _parents(ours))


def _parents(names: Iterable[str]) -> set[str]:
    return {name[:i] for name in names for i, c in enumerate(name) if c == "/"}
