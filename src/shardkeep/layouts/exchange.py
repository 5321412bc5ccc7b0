"""The layout of exchange files: complete arrays under dotted keys, as other programs expect them in safetensors files.

A tree up to the shard size is a single file, whose header also holds the manifest. So it leaves space there, because
the digests in the manifest are known only when all is written. A larger tree is several files, and an index says which.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardkeep.errors import KeyCollisionError, TreeError
from shardkeep.layouts.assembly import assemble, part_of
from shardkeep.layouts.codecs import RAW, Codec
from shardkeep.layouts.plan import Draft, FilePlan, PiecePlan, StagedLeaf, TreePlan, WrittenFile, arrays_of
from shardkeep.layouts.safetensors import group_by_size, pack, safe_text
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.digests import block_count, seal
from shardkeep.model.document import encode_manifest
from shardkeep.model.manifest import Manifest
from shardkeep.model.naming import shard_filename
from shardkeep.model.tree import Path
from shardkeep.processes.operation import LEADER

# Always two marks, so that damage to one of them cannot make our file look like another program's.
MARK, SEAL, SAVE = "shardkeep", "shardkeep_digest", "shardkeep_save"
OVER = "shardkeep_over"  # in addition, in a bucket
SINGLE_END = ".tmp"  # what the name of a single file ends in until it is committed
DEFAULT_SHARD_SIZE = 5_000_000_000  # bytes: the default of Hugging Face
_SPARE = 200  # bytes of a header beside the manifest and the tensors
_BIG = 10**17  # stands for any size while the space for the manifest is measured


@dataclass(frozen=True)
class ExchangeLayout:
    """A single file, or several of at most `shard_size` bytes of arrays each.

    Args:
        shard_size: The most bytes of arrays in one file.
        single_limit: The size limit of a single file with all it contains; None without one.
        where: The path of the files, for messages.
    """

    shard_size: int = DEFAULT_SHARD_SIZE
    single_limit: int | None = None
    where: str = ""
    name: str = "safetensors"
    codec: Codec = RAW
    whole: float = math.inf
    gathers: bool = True

    def describe(self) -> str:
        return f"exchange files of {self.shard_size:,} bytes"

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse arrays that would have the same dotted name."""
        seen: set[str] = set()
        for name in (".".join(path) for path in paths):
            if not name.isascii() and safe_text(name) != name:
                raise TreeError(f"the name of leaf {name!r} cannot be stored in {self.where}: it is not valid Unicode")
            if name in seen or name == "__metadata__":
                raise KeyCollisionError(
                    f"two leaves would both be called {name!r} in {self.where}; rename one of them, "
                    "or save to a directory, where their names stay distinct"
                )
            seen.add(name)

    def split(self, spec: ArraySpec, region: Region) -> list[Region]:
        return [region]

    def lay_out(self, leaves: Sequence[StagedLeaf], pieces: Sequence[PiecePlan], draft: Draft) -> list[FilePlan]:
        arrays = arrays_of(leaves)
        self.check([array.path for array in arrays])
        named = [(piece, ".".join(arrays[piece.array].path)) for piece in pieces]
        groups: list[list[tuple[PiecePlan, str]]]
        groups = group_by_size([piece.nbytes for piece in pieces], named, self.shard_size) or [[]]
        if len(groups) == 1:
            notes = {"format": "pt"}
            file = pack(SINGLE_END, arrays, groups[0], notes)
            room = len(json.dumps(self._longest(file, leaves, draft).decode())) + _SPARE
            if self.single_limit is not None:
                room += len(json.dumps({OVER: "0" * 32}))
            file = pack(SINGLE_END, arrays, groups[0], notes, room)
            if self.single_limit is None or (file.size or 0) <= self.single_limit:
                return [file]
        mark = {"format": "pt", MARK: "1", SAVE: draft.save_id}
        return [pack(shard_filename("", i + 1, len(groups)), arrays, group, mark) for i, group in enumerate(groups)]

    def claimed(self, leaves: Sequence[StagedLeaf]) -> list[str]:
        return []

    def _longest(self, file: FilePlan, leaves: Sequence[StagedLeaf], draft: Draft) -> bytes:
        """The longest possible manifest: every number at full length. What is in the table has a fixed width."""
        written = WrittenFile(_BIG, "0" * 32, tuple(("0" * 32,) * block_count(p.nbytes) for p in file.pieces))
        aside = f".{os.path.basename(self.where)}.shardkeep/{draft.save_id}{SINGLE_END}"  # longer than the final name
        return _manifest_of(TreePlan.of(draft, self, leaves, [file.named(aside)]), written)

    def complete(self, plan: TreePlan, file: FilePlan, written: WrittenFile) -> bytes:
        """The header of a single file with its manifest in it, made from its digests."""
        header = json.loads(file.header[8:])
        notes = {name: text for name, text in header.pop("__metadata__").items() if name == "dtypes"}
        manifest = _manifest_of(plan, written).decode()
        metadata = {"format": "pt", SEAL: "0" * 32, MARK: manifest, **plan.notes, **notes}
        text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
        assert len(text) <= len(file.header) - 8, "the manifest does not fit into the header"
        return seal(file.header[:8] + text.ljust(len(file.header) - 8))


def _manifest_of(plan: TreePlan, written: WrittenFile) -> bytes:
    tree = assemble(plan, {LEADER: part_of(plan, [written])})
    return encode_manifest(Manifest("", plan.draft.save_id, {plan.draft.prefix: tree}))
