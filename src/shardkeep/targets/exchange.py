"""Exchange files: one tree as plain safetensors files with Hugging Face names, complete arrays under dotted keys.

That is `model.safetensors`, or above the shard size `model-00001-of-0000N.safetensors` and an index. What shardkeep
needs in addition (structure, scalars, digests) is a manifest in the header's metadata, or in the index. A single file
is committed by a rename (in a bucket: by one conditional put), several by replacing the index. Where both exist, the
single file is what is committed, unless its header says that it was written over something other than the index.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
    IncompleteCheckpointError,
    IntegrityError,
    PrefixError,
)
from shardkeep.foreign.recognize import has_our_data
from shardkeep.layouts.exchange import DEFAULT_SHARD_SIZE, MARK, OVER, SEAL, SINGLE_END, ExchangeLayout
from shardkeep.layouts.plan import FilePlan, SavePlan, TreePlan
from shardkeep.model.digests import seal
from shardkeep.model.document import encode_manifest
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.naming import SAFETENSORS, SAFETENSORS_INDEX, SHARD_END, base_of_shard
from shardkeep.stores.location import Location, exists, store_at
from shardkeep.targets.running import explain_unfinished, recorded_names
from shardkeep.targets.shards import (
    ExchangeFiles,
    committed_by_index,
    decode_index,
    is_ours,
    read_header,
    read_index,
    read_single,
)

SUFFIX = SAFETENSORS
INDEX_SUFFIX = SAFETENSORS_INDEX
_LOOKS = 3  # how often nothing must be found before it counts as nothing
_NONCE = "shardkeep_nonce"  # in addition to the marks, in a bucket
_SINGLE_LIMIT = 5 << 30  # the largest upload in one request
_TRIES = 5  # how often a document that others replace at the same time is put again
_START = 4096  # bytes in which a mark shows whose file it is
log = logging.getLogger("shardkeep")

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Exchange(ExchangeFiles):
    """A tree in exchange files, as the target of a save or a load."""

    shard_size: int = DEFAULT_SHARD_SIZE

    @property
    def layout(self) -> ExchangeLayout:
        return ExchangeLayout(self.shard_size, None if self.store.traits.editable else _SINGLE_LIMIT, self.where)

    @property
    def companions(self) -> tuple[str, ...]:
        return ()

    @property
    def keeps_control(self) -> bool:
        return False

    def read(self) -> Manifest:
        found = self.read_if_any()
        if found is not None:
            return found
        if self.store.children(self.store.control):
            text = explain_unfinished(self.store, self.where)
            found = self.read_if_any()  # a save may have been committed meanwhile
            if found is None:
                raise IncompleteCheckpointError(text)
            return found
        raise CheckpointNotFoundError(f"no checkpoint at {self.where}: there is nothing there")

    def read_if_any(self) -> Manifest | None:
        return self._read(read_index)

    def _read(self, reading: Callable[[ExchangeFiles], Manifest | None]) -> Manifest | None:
        """What is committed. Files keep their names here, so a writer may replace one while it is being read."""
        nothing = 0
        while nothing < _LOOKS:
            before = [self.store.identity(name) for name in self.documents]
            try:
                if before[0] is not None:
                    single, over = read_single(self)
                    # The file may come from a put that arrived after its save was given up: then the index counts.
                    late = over is not None and before[1] is not None and self.store.traits.late_requests
                    return reading(self) if late and self._index_id() not in (None, over) else single
                if before[1] is not None and (found := reading(self)) is not None:
                    return found
                nothing += 1  # unless one was removed and the other created between the two looks
            except (IntegrityError, FileNotFoundError):
                if before == [self.store.identity(name) for name in self.documents]:
                    raise
        return None

    def read_to_replace(self, overwrite: bool) -> Manifest | None:
        try:
            return self._read(committed_by_index)
        except IntegrityError as error:
            if not overwrite and not all(map(self._is_checkpoint, self.documents)):
                raise CheckpointExistsError(
                    f"{error}. It may be another program's; pass overwrite=True to replace it. Nothing was written"
                ) from error
            log.warning("%s. This save replaces it", error)
            return None

    def read_again(self) -> Manifest | None:
        try:
            return self._read(committed_by_index)
        except IntegrityError:
            return None

    read_own = read_again

    def _is_checkpoint(self, name: str) -> bool:
        """Whether a damaged document is recognizably one, by our mark or by its header; or empty, or not there."""
        if not self.store.size(name):
            return True
        with self.store.open(name) as file:
            start = np.empty(min(_START, file.size), np.uint8)
            file.read_into(0, start)
        if MARK.encode() in start.tobytes():
            return True
        try:
            text = self.store.read(name) if name == self.index else read_header(self.store, name)[0][8:]
            return isinstance(json.loads(text), dict)
        except (IntegrityError, ValueError, RecursionError):
            return False

    def refuse_foreign(self, prefixes: Collection[str], overwrite: bool) -> None:
        """Do nothing: `read_to_replace` refuses what may be another program's."""

    def foreign_document(self, inside: Collection[str]) -> str | None:
        return None  # other programs' safetensors files can be read, and are replaced only with `overwrite`

    def _index_document(self) -> bytes | None:
        try:
            return self.store.read(self.index)
        except FileNotFoundError:
            return None

    def _index_id(self) -> str | None:
        """The id of the save that the index commits, if it is ours and commits one."""
        document = self._index_document()
        manifest = None if document is None else decode_index(self, document)[1]
        return manifest.save_id if manifest is not None and manifest.trees else None

    def reserve(self, plan: SavePlan, current: Manifest | None) -> SavePlan:
        """Names next to others: in the control directory for a single file; for several, Hugging Face's names.

        If one of those is in use, and always in a bucket, the names contain the save's id.
        """
        (tree,) = plan.trees
        prefix = tree.draft.prefix
        if current is not None and current.prefixes != [prefix]:
            raise PrefixError(
                f"{self.where} holds the tree with prefix {current.prefixes[0]!r}, but exchange files hold only one "
                f"tree; save prefix {prefix!r} to another path, or to a directory"
            )
        if tree.names == [SINGLE_END]:
            notes = {OVER: self._index_id() or ""} if self.store.traits.late_requests else {}
            aside = tree.named(f"{self.store.control}/{plan.save_id}")
            return replace(plan, trees=(replace(aside, document=self.single, notes=notes),))
        if self.store.traits.late_requests and self.store.size(self.single) is not None:
            # It would have to be removed, and the request to remove it could arrive late and remove a newer one.
            raise CheckpointExistsError(
                f"{self.where} is a single file, which several files cannot replace in a bucket: delete it first "
                "(shardkeep.delete), save to another path, or pass a larger max_shard_size (a single file has at most "
                f"{_SINGLE_LIMIT:,} bytes). Nothing was written"
            )
        clean = tree.named(self.base)
        is_free = not self.store.traits.late_requests and not self._is_in_use(clean.names)
        return replace(plan, trees=(clean if is_free else tree.named(f"{self.base}-{plan.save_id}"),))

    def _is_in_use(self, names: Sequence[str]) -> bool:
        running = self.store.children(self.store.saves)
        live = {name for other in running for name in recorded_names(self.store, other)}
        return self.store.is_taken(names) or bool(live & set(names))

    def names_of(self, tree: Tree) -> set[str]:
        return tree.names

    def adopt(self, trees: Mapping[str, Tree], current: Manifest | None) -> Mapping[str, Tree]:
        return trees

    def retire(self, names: Collection[str], before: Manifest | None, after: Manifest | None) -> bool:
        if names:
            self.store.remove(names)
        return True

    def put(self, plan: SavePlan, manifest: Manifest, current: Manifest | None) -> str:
        (planned,) = plan.trees
        tree = manifest.trees[prefix := planned.draft.prefix]
        if planned.document and self.store.traits.late_requests:
            self._put_object(planned, tree)
            return self.single
        if planned.document:
            self.store.rename(planned.names[0], self.single)
            return self.single
        self.store.replace(self.index, _encode_index(prefix, tree, planned.files))
        if not self.store.traits.late_requests:
            self.store.remove([self.single])  # until now it was what is committed
            self.store.sync_directory("")
        return self.index

    def _put_object(self, plan: TreePlan, tree: Tree) -> None:
        """Commit a single file in a bucket. An existing index is replaced by one that names the file."""
        (file,) = plan.files
        over = plan.notes[OVER] or None
        if set(self.store.children(self.store.saves)) - {plan.draft.save_id}:
            self._fence_index()  # the index of another save may be on its way
        self.store.rename(file.name, self.single)
        weights = {"weight_map": {piece.name: self.single for piece in file.pieces}}
        index = json.dumps({"metadata": {"total_size": tree.nbytes}, **weights}).encode()
        for _ in range(_TRIES):
            there = self._index_document()
            committed = None if there is None else decode_index(self, there)[1]
            if committed is not None and committed.trees and committed.save_id != over:
                raise ConflictError(
                    f"another save to {self.where} was committed at the same time, as several files. The other one is "
                    "in place and is what `load` reads; this one was not committed"
                )
            if there in (None, index):
                return
            try:
                return self.store.replace(self.index, index)
            except ConflictError:
                continue
            except OSError as error:  # the single file is committed nevertheless
                log.warning("%s is saved, but the index next to it is out of date (%s)", self.where, error)
                return

    def fence(self) -> Manifest | None:
        """Put the index again, or one without trees. A single file needs no fence: it contains all its data."""
        self._fence_index()
        return self.read_again()

    def _fence_index(self) -> None:
        document = self._index_document()
        nonce = os.urandom(16).hex()
        if document is None:
            manifest = encode_manifest(Manifest("", nonce, {}), nonce).decode()
            index: dict[str, Any] = {"metadata": {SEAL: "", "total_size": 0, MARK: manifest}, "weight_map": {}}
        else:
            index = decode_index(self, document)[0]
        ours = is_ours(index["metadata"])
        index["metadata"] |= {_NONCE: nonce} | ({SEAL: "0" * 32} if ours else {})
        text = json.dumps(index, separators=(",", ":")).encode()
        self.store.replace(self.index, seal(text) if ours else text)


def exchange_at(place: Location, shard_size: int = DEFAULT_SHARD_SIZE) -> Exchange:
    """The exchange files that `place` names: the file, the index, any shard, or what their names have in common."""
    name = place.name
    if name.endswith(INDEX_SUFFIX):
        base = name[: -len(INDEX_SUFFIX)]
    elif name.endswith(SUFFIX):
        base = name[: -len(SUFFIX)]
        common = base_of_shard(name)
        if common != base and exists(place.with_name(common + INDEX_SUFFIX)):
            base = common
    else:
        base = name
    return Exchange(store_at(place.parent, control=f".{base}{SUFFIX}.shardkeep", confined=False), base, shard_size)


def exchange_in(directory: Location, names: Sequence[str]) -> Exchange | None:
    """The exchange files in a directory, named as Hugging Face does; None if there are none."""
    for ending in (INDEX_SUFFIX, SUFFIX):
        bases = [n[: -len(ending)] for n in names if n.endswith(ending) and not n.startswith(".")]
        if ending == SUFFIX:
            bases = [b for b in bases if not SHARD_END.search(b)]
        if "model" in bases or len(bases) == 1:
            return exchange_at(directory / f"{'model' if 'model' in bases else bases[0]}{ending}")
        if bases:
            listed = ", ".join(b + ending for b in bases)
            raise CheckpointNotFoundError(
                f"{directory} holds several safetensors files; pass the path of one of them: {listed}"
            )
    return None


def exchange_bases(inside: Sequence[str]) -> list[str]:
    """The names of the exchange files in a directory, without their ending; shards and their index are one.

    >>> exchange_bases(["a.safetensors", "m-00001-of-00002.safetensors", "m.safetensors.index.json", "x.txt"])
    ['a', 'm']
    """
    bases: dict[str, None] = {}
    for name in inside:
        if name.endswith((SUFFIX, INDEX_SUFFIX)) and not name.startswith(".") and not has_our_data([name]):
            whole = base_of_shard(name)
            # Shards without their index count as single files.
            bases[
                whole if name.endswith(INDEX_SUFFIX) or whole + INDEX_SUFFIX in inside else name.removesuffix(SUFFIX)
            ] = None
    return list(bases)


def parse_size(size: int | str) -> int:
    """A number of bytes, from a number or a string such as "5GB" or "400KB".

    >>> parse_size("400KB")
    400000
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get((match[2] or "B").upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"not a size: {size!r}; pass a number of bytes, or a string such as '5GB' or '512MiB'")
        size = int(float(match[1]) * unit)
    if size <= 0:
        raise ValueError(f"max_shard_size must be positive, not {size}")
    return size


def _encode_index(prefix: str, tree: Tree, files: Sequence[FilePlan]) -> bytes:
    manifest = encode_manifest(Manifest("", tree.save_id, {prefix: tree})).decode()
    index = {
        "metadata": {SEAL: "0" * 32, "total_size": tree.nbytes, MARK: manifest},
        "weight_map": {piece.name: file.name for file in files for piece in file.pieces},
    }
    return seal(json.dumps(index, separators=(",", ":")).encode())
