"""The checkpoint directory: any number of trees under their prefixes, one manifest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardkeep.commit import Turn, recorded_names, saves
from shardkeep.errors import CheckpointNotFoundError, IncompleteCheckpointError, IntegrityError
from shardkeep.formats.base import Format
from shardkeep.formats.safetensors import SafetensorsFormat
from shardkeep.manifest import MANIFEST, Manifest, Tree, decode_manifest, encode_manifest, with_tree
from shardkeep.naming import hashed, prefix_directory
from shardkeep.planning import Draft, LeafPlan, SavePlan, plan_pieces
from shardkeep.stores.base import Store


@dataclass(frozen=True)
class Directory:
    """A directory that holds a checkpoint; new trees are written in `format`."""

    store: Store
    format: Format = field(default_factory=SafetensorsFormat)
    documents = (MANIFEST,)
    keeps_control = True

    @property
    def where(self) -> str:
        return self.store.url

    def read_if_any(self) -> Manifest | None:
        try:
            document = self.store.read(MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            raise IntegrityError(f"{self.store.locate(MANIFEST)} is a directory") from None
        return decode_manifest(document, self.where, self.store.locate(MANIFEST))

    def read(self) -> Manifest:
        manifest = self.read_if_any()
        if manifest is not None:
            return manifest
        inside = self.store.list("")
        if self.store.control in inside:
            raise IncompleteCheckpointError(
                f"{self.where} holds no committed checkpoint: a save into it never finished, or a delete was cut "
                "short. Save again with the same path, or remove the directory"
            )
        detail = "the directory holds something else" if inside else "there is nothing there"
        raise CheckpointNotFoundError(f"no checkpoint at {self.where}: {detail}")

    def plan(self, leaves: Sequence[LeafPlan], draft: Draft, current: Manifest | None) -> SavePlan:
        """Clean names for whoever claims the prefix first, names with the save's id for everyone after."""
        pieces = plan_pieces(leaves, self.format.split)

        def plan_in(directory: str) -> SavePlan:
            files = tuple(self.format.lay_out(leaves, pieces, directory, draft.save_id))
            return SavePlan(
                draft.save_id, self.format.name, self.format.compression, draft.skeleton, tuple(leaves), files
            )

        directory = prefix_directory(draft.prefix)
        plan = plan_in(directory)
        if all(draft.save_id in name for name in plan.names):
            return plan
        live = [name for save_id in self.store.list(saves(self.store)) for name in recorded_names(self.store, save_id)]
        claim = f"{self.store.control}/claims/{hashed(draft.prefix)}"
        if not self.store.is_taken(plan.names) and not _overlap(plan.names, live) and self.store.claim(claim):
            return plan
        return plan_in(f"{directory}~{draft.save_id}")

    def finish(self, turn: Turn, tree: Tree) -> Tree:
        return tree

    def put(self, turn: Turn, tree: Tree, current: Manifest | None) -> str:
        manifest = with_tree(current or Manifest(self.where, tree.save_id, {}), turn.prefix, tree)
        self.store.replace(MANIFEST, encode_manifest(manifest))
        return MANIFEST


def _overlap(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether a name is used twice, or as a file by one and as a directory by the other."""
    ours, theirs = set(names), set(others)
    return bool(ours & (theirs | _parents(theirs)) or theirs & _parents(ours))


def _parents(names: Iterable[str]) -> set[str]:
    return {name[:i] for name in names for i, c in enumerate(name) if c == "/"}
