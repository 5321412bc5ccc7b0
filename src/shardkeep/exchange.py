"""Exchange files: one tree as plain safetensors under Hugging Face names, whole arrays under dotted keys.

`model.safetensors`, or above the shard size `model-00001-of-0000N.safetensors` and an index. What shardkeep needs
beyond that (structure, scalars, digests) is a manifest inside the header's metadata, or inside the index. One file
is committed by a rename (in a bucket: by one conditional put under its name); several by replacing the index. Where
both are there, the single file counts, unless it says that it was written over something else than the index.
"""

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardkeep.commit import Turn, recorded_names
from shardkeep.digests import block_count, check_seal, digest, seal
from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
    IncompleteCheckpointError,
    IntegrityError,
    KeyCollisionError,
    MissingDataError,
    PrefixError,
    TreeError,
)
from shardkeep.formats.foreign import tree_of_safetensors
from shardkeep.formats.safetensors import decode_header, group_by_size, header_length, pack, safe_text
from shardkeep.manifest import DataFile, Manifest, Tree, check_name, decode_manifest, encode_manifest, no_duplicates
from shardkeep.naming import SAFETENSORS, SAFETENSORS_INDEX, SHARD_END, base_of_shard, shard_filename
from shardkeep.planning import Draft, FilePlan, LeafPlan, PiecePlan, SavePlan, WrittenFile, plan_pieces
from shardkeep.stores.base import Store
from shardkeep.stores.places import exists, parent_and_name, sibling, store_at
from shardkeep.tree import Path

SUFFIX = SAFETENSORS
INDEX = SAFETENSORS_INDEX
_LOOKS = 3  # that must find nothing before nothing is said to be there
DEFAULT_SHARD_SIZE = 5_000_000_000
# Two marks wherever there is one, so that damage to either cannot make our file look like another program's.
_MARK, _SEAL, _SAVE = "shardkeep", "shardkeep_digest", "shardkeep_save"
_OVER, _NONCE = "shardkeep_over", "shardkeep_nonce"  # beside the marks, in a bucket
_SINGLE_LIMIT = 5 << 30  # what one request to a bucket can hold
_TRIES = 5
_BIG = 10**17  # stands for any offset or size while the room for the manifest is measured
_OF_DIRECTORY = re.compile(r"[0-9a-f]{32}-[0-9]{5}\.safetensors")  # data of a checkpoint directory
log = logging.getLogger("shardkeep")

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Exchange:
    """Where a tree lies in exchange files: the directory and the name without its ending."""

    store: Store
    base: str
    shard_size: int = DEFAULT_SHARD_SIZE

    @property
    def single(self) -> str:
        return self.base + SUFFIX

    @property
    def index(self) -> str:
        return self.base + INDEX

    @property
    def documents(self) -> tuple[str, str]:
        return (self.single, self.index)

    @property
    def companions(self) -> tuple[str, ...]:
        return ()

    @property
    def keeps_control(self) -> bool:
        return False

    @property
    def gathers(self) -> bool:
        return True

    @property
    def where(self) -> str:
        return self.store.locate(self.single)

    def describe(self) -> str:
        return f"exchange files of {self.shard_size:,} bytes"

    def read(self) -> Manifest:
        found = self.read_if_any()
        if found is not None:
            return found
        if self.store.children(self.store.control):
            raise IncompleteCheckpointError(f"{self.where}: a save to it never finished; save again")
        raise CheckpointNotFoundError(f"no checkpoint at {self.where}: there is nothing there")

    def read_if_any(self) -> Manifest | None:
        """What is there; files keep their names here, so a writer may replace one while it is being read."""
        nothing = 0
        while nothing < _LOOKS:
            before = [self.store.identity(name) for name in self.documents]
            try:
                if before[0] is not None:
                    single, over = _read_single(self)
                    # A put that came late may have made a file of one whose time was over: then the index counts.
                    late = over is not None and before[1] is not None and self.store.remote
                    return _read_index(self) if late and self._index_id() not in (None, over) else single
                if before[1] is not None and (found := _read_index(self)) is not None:
                    return found
                nothing += 1  # or one went and the other came between the two looks
            except (IntegrityError, FileNotFoundError):
                if before == [self.store.identity(name) for name in self.documents]:
                    raise
        return None

    def _index_document(self) -> bytes | None:
        try:
            return self.store.read(self.index)
        except FileNotFoundError:
            return None

    def _index_id(self) -> str | None:
        """The save that the index commits, if it is ours and commits any."""
        document = self._index_document()
        manifest = None if document is None else _decode_index(self, document)[1]
        return manifest.save_id if manifest is not None and manifest.trees else None

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse arrays that would have the same plain dotted name."""
        seen: set[str] = set()
        for name in (".".join(path) for path in paths):
            if not name.isascii() and safe_text(name) != name:
                raise TreeError(f"leaf {name!r} cannot be named in {self.where}: it is not valid Unicode")
            if name in seen or name == "__metadata__":
                raise KeyCollisionError(
                    f"two leaves would both be called {name!r} in {self.where}; rename one, "
                    "or save to a directory, which keeps them apart"
                )
            seen.add(name)

    def plan(
        self, leaves: Sequence[LeafPlan], draft: Draft, current: Manifest | None, at: str | None = None
    ) -> SavePlan:
        """The files to write; a single one leaves room in its header for a manifest known only when all is written."""
        if at is not None:  # the leader writes it all
            return SavePlan(draft.save_id, "safetensors", None, draft.skeleton, tuple(leaves), ())
        if current is not None and current.prefixes != [draft.prefix]:
            raise PrefixError(
                f"{self.where} holds the tree of prefix {current.prefixes[0]!r} and exchange files hold one tree; "
                f"save prefix {draft.prefix!r} under another name or to a directory"
            )
        self.check([leaf.path for leaf in leaves if leaf.spec is not None])
        whole = plan_pieces(leaves, lambda spec, region: [region], math.inf)
        pieces = [replace(piece, name=".".join(leaves[piece.leaf].path)) for piece in whole]
        groups: list[list[PiecePlan]] = group_by_size([p.nbytes for p in pieces], pieces, self.shard_size) or [[]]
        plan = SavePlan(draft.save_id, "safetensors", None, draft.skeleton, tuple(leaves), ())
        if len(groups) == 1:
            aside = f"{self.store.control}/{draft.save_id}.tmp"
            notes = {"format": "pt"} | ({_OVER: self._index_id() or ""} if self.store.remote else {})
            file = pack(aside, leaves, groups[0], notes)
            room = len(json.dumps(_longest(plan, file, draft).decode())) + 200
            file = pack(aside, leaves, groups[0], notes, room)
            if not self.store.remote or (file.size or 0) <= _SINGLE_LIMIT:
                return replace(plan, files=(file,))
        if self.store.remote and self.store.size(self.single) is not None:
            # It would have to be removed, and a request to remove it could come late and remove another.
            raise CheckpointExistsError(
                f"{self.where} is a single file and this tree needs several, which in a bucket cannot take its place: "
                "delete it first (shardkeep.delete), save under another name, or pass a larger max_shard_size "
                f"(a single file has up to {_SINGLE_LIMIT:,} bytes). Nothing was written"
            )
        mark = {"format": "pt", _MARK: "1", _SAVE: draft.save_id}
        names = self._shard_names(len(groups), draft.save_id)
        return replace(plan, files=tuple(pack(n, leaves, g, mark) for n, g in zip(names, groups, strict=True)))

    def _shard_names(self, count: int, save_id: str) -> list[str]:
        """Hugging Face's names, or where one of them is in use, and always in a bucket, names with the save's id."""
        names = [shard_filename(self.base, i + 1, count) for i in range(count)]
        if not self.store.remote:
            running = self.store.children(self.store.saves)
            live = {name for other in running for name in recorded_names(self.store, other)}
            if not self.store.is_taken(names) and not live & set(names):
                return names
        return [shard_filename(f"{self.base}-{save_id}", i + 1, count) for i in range(count)]

    def finish(self, turn: Turn, tree: Tree) -> Tree:
        """Fill in the header of a single file, now that its manifest is known; the tree gets its final name."""
        if not self._is_single(turn):
            return tree
        (file,) = turn.plan.files
        tree = replace(tree, files=(DataFile(self.single, tree.files[0].size, len(file.header)),))
        if not self.store.remote:  # an object was put with it
            self.store.write_into(file.name, 0, self._header(turn, tree))
            self.store.sync([file.name])
        return tree

    def complete(self, turn: Turn, file: FilePlan, written: WrittenFile) -> bytes:
        """The header of a single file, from its digests, where it cannot be filled in later."""
        if not self._is_single(turn):
            return file.header
        tree = turn.plan.tree([written], turn.draft)
        return self._header(turn, replace(tree, files=(DataFile(self.single, written.size, len(file.header)),)))

    def _is_single(self, turn: Turn) -> bool:
        return turn.plan.files[0].name == f"{self.store.control}/{turn.plan.save_id}.tmp"

    def _header(self, turn: Turn, tree: Tree) -> bytes:
        plan = turn.plan.files[0]
        manifest = encode_manifest(Manifest(self.where, tree.save_id, {turn.draft.prefix: tree})).decode()
        header = json.loads(plan.header[8:])
        notes = {k: v for k, v in header.pop("__metadata__").items() if k in ("dtypes", _OVER)}
        metadata = {"format": "pt", _SEAL: "0" * 32, _MARK: manifest, **notes}
        text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
        assert len(text) <= len(plan.header) - 8, "the manifest outgrew the room left for it"
        return seal(plan.header[:8] + text.ljust(len(plan.header) - 8))

    def put(self, turn: Turn, tree: Tree, current: Manifest | None) -> str:
        if self._is_single(turn) and self.store.remote:
            self._put_object(turn, tree)
            return self.single
        if self._is_single(turn):
            self.store.rename(turn.plan.files[0].name, self.single)
            return self.single
        self.store.replace(self.index, _encode_index(turn.draft.prefix, tree, turn.plan.files))
        if not self.store.remote:
            self.store.remove([self.single])  # until now the single file counted
            self.store.sync_directory("")
        return self.index

    def _put_object(self, turn: Turn, tree: Tree) -> None:
        """Commit a single file in a bucket. An index beside it is replaced by one that names the file."""
        (file,) = turn.plan.files
        over = json.loads(file.header[8:])["__metadata__"][_OVER] or None
        if set(self.store.children(self.store.saves)) - {turn.plan.save_id}:
            self._fence_index()  # that of another save may be on its way
        self.store.rename(file.name, self.single)
        weights = {"weight_map": {piece.name: self.single for piece in file.pieces}}
        index = json.dumps({"metadata": {"total_size": tree.nbytes}, **weights}).encode()
        for _ in range(_TRIES):
            there = self._index_document()
            committed = None if there is None else _decode_index(self, there)[1]
            if committed is not None and committed.trees and committed.save_id != over:
                raise ConflictError(
                    f"another save to {self.where} was committed at the same moment, as several files; theirs is in "
                    "place and is what is loaded, this one was not committed"
                )
            if there in (None, index):
                return
            try:
                return self.store.replace(self.index, index)
            except ConflictError:
                continue
            except OSError as error:  # the single file counts all the same
                log.warning("shardkeep: %s is saved, but the index beside it is out of date (%s)", self.where, error)
                return

    def fence(self) -> Manifest | None:
        """Put the index again, or one without trees. A single file needs no fence: it comes with all its data."""
        self._fence_index()
        return self.read_if_any()

    def _fence_index(self) -> None:
        document = self._index_document()
        nonce = os.urandom(16).hex()
        if document is None:
            manifest = encode_manifest(Manifest("", nonce, {}), nonce).decode()
            index: dict[str, Any] = {"metadata": {_SEAL: "", "total_size": 0, _MARK: manifest}, "weight_map": {}}
        else:
            index = _decode_index(self, document)[0]
        ours = _is_ours(index["metadata"])
        index["metadata"] |= {_NONCE: nonce} | ({_SEAL: "0" * 32} if ours else {})
        text = json.dumps(index, separators=(",", ":")).encode()
        self.store.replace(self.index, seal(text) if ours else text)


def exchange_at(place: str, shard_size: int = DEFAULT_SHARD_SIZE) -> Exchange:
    """The exchange files that `place` names: the file, its index, any shard, or the common start of their names."""
    directory, name = parent_and_name(place)
    if name.endswith(INDEX):
        base = name[: -len(INDEX)]
    elif name.endswith(SUFFIX):
        base = name[: -len(SUFFIX)]
        common = base_of_shard(name)
        if common != base and exists(sibling(place, f"{directory}/{common}{INDEX}")):
            base = common
    else:
        base = name
    return Exchange(store_at(directory, control=f".{base}{SUFFIX}.shardkeep", confined=False), base, shard_size)


def exchange_in(directory: str, names: Sequence[str]) -> Exchange | None:
    """The exchange files in a folder, as Hugging Face arranges them; None if there are none."""
    for ending in (INDEX, SUFFIX):
        bases = [n[: -len(ending)] for n in names if n.endswith(ending) and not n.startswith(".")]
        if ending == SUFFIX:
            bases = [b for b in bases if not SHARD_END.search(b)]
        if "model" in bases or len(bases) == 1:
            return exchange_at(sibling(directory, f"{directory}/{'model' if 'model' in bases else bases[0]}{ending}"))
        if bases:
            listed = ", ".join(b + ending for b in bases)
            raise CheckpointNotFoundError(f"{directory} holds several safetensors files; name one of {listed}")
    return None


def exchange_bases(inside: Sequence[str]) -> list[str]:
    """The exchange files among the names in a directory, each without its ending; shards with their index are one.

    >>> exchange_bases(["a.safetensors", "m-00001-of-00002.safetensors", "m.safetensors.index.json", "x.txt"])
    ['a', 'm']
    """
    bases: dict[str, None] = {}
    for name in inside:
        if name.endswith((SUFFIX, INDEX)) and not name.startswith(".") and not _OF_DIRECTORY.fullmatch(name):
            whole = base_of_shard(name)
            # Shards without their index are single files to everyone.
            bases[whole if name.endswith(INDEX) or whole + INDEX in inside else name.removesuffix(SUFFIX)] = None
    return list(bases)


def parse_size(size: int | str) -> int:
    """Bytes, from a number or a text like "5GB" or "400KB".

    >>> parse_size("400KB")
    400000
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get((match[2] or "B").upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"not a size: {size!r}; write a number of bytes, or for example '5GB' or '512MiB'")
        size = int(float(match[1]) * unit)
    if size <= 0:
        raise ValueError(f"max_shard_size must be positive, not {size}")
    return size


def _read_single(exchange: Exchange) -> tuple[Manifest, str | None]:
    """What a single file holds; and for one in a bucket, which save's index it took the place of, if any ("")."""
    name, where = exchange.single, exchange.where
    start, size = _read_header(exchange.store, name)
    metadata, tensors, data_start = decode_header(start, size, where)
    if not _is_ours(metadata):
        file = DataFile(name, size, data_start, digest(start))
        return Manifest(where, digest(start), {"": tree_of_safetensors([file], [(metadata, tensors)], where)}), None
    if _SAVE in metadata:
        raise IncompleteCheckpointError(f"{where} is one of several files whose index is missing, or their manifest")
    check_seal(start, where)
    manifest = decode_manifest(_text(metadata.get(_MARK)), where, where)
    for prefix, tree in manifest.trees.items():
        if len(manifest.trees) == 1 and len(tree.files) == 1:
            # The file may have been renamed: its manifest speaks of the file it is in.
            files = (replace(tree.files[0], name=name),)
            return replace(manifest, trees={prefix: replace(tree, files=files)}), metadata.get(_OVER)
    raise IntegrityError(f"{where}: its manifest speaks of other files")


def _text(manifest: Any) -> bytes:
    """A manifest found as a string, which in a hostile file is anything; surrogates are left for the seal to notice."""
    return str(manifest).encode(errors="surrogatepass")


def _is_ours(metadata: Mapping[str, Any]) -> bool:
    return any(name in metadata for name in (_MARK, _SEAL, _SAVE))


def _read_index(exchange: Exchange) -> Manifest | None:
    """What an index commits; None for one that says that nothing is committed."""
    where = exchange.store.locate(exchange.index)
    index, manifest = _decode_index(exchange, exchange.store.read(exchange.index))
    weights: dict[str, str] = index["weight_map"]
    if manifest is None:
        return _read_foreign_shards(exchange, weights, where)
    used = {file.name for tree in manifest.trees.values() for file in tree.files}
    if used != set(weights.values()) or len(manifest.trees) > 1:
        raise IntegrityError(f"{where}: its manifest speaks of other files")
    for name in sorted(used):
        if _shard_header(exchange, name, where)[0].get(_SAVE) != manifest.save_id:
            raise IntegrityError(f"{exchange.store.locate(name)} belongs to another save than {where}")
    return manifest if manifest.trees else None


def _decode_index(exchange: Exchange, document: bytes) -> tuple[dict[str, Any], Manifest | None]:
    """An index, checked, and the manifest in it if it is ours."""
    where = exchange.store.locate(exchange.index)
    try:
        index = json.loads(document, object_pairs_hook=no_duplicates)
        index["metadata"] = index.get("metadata") or {}
        for name in index["weight_map"].values():
            check_name(name)
        ours = _is_ours(index["metadata"])
        if not isinstance(index["metadata"], dict):
            raise TypeError("its metadata is no object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{where} is not a safetensors index ({error})") from error
    if not ours:
        return index, None
    check_seal(document, where)
    return index, decode_manifest(_text(index["metadata"].get(_MARK)), where, where)


def _read_foreign_shards(exchange: Exchange, weights: Mapping[str, str], where: str) -> Manifest:
    files: list[DataFile] = []
    headers: list[tuple[dict[str, str], dict[str, Any]]] = []
    for name in sorted(set(weights.values())):
        metadata, tensors, file = _shard_header(exchange, name, where)
        if _is_ours(metadata):
            raise IntegrityError(f"{where} is damaged: {file.name} was written by shardkeep, the index does not say so")
        lost = [key for key, place in weights.items() if place == name and key not in tensors]
        if lost:
            raise IntegrityError(f"{where} has {lost[0]!r} in {name}, which does not hold it")
        files.append(file)
        headers.append((metadata, tensors))
    tree = tree_of_safetensors(files, headers, where)
    return Manifest(exchange.where, tree.save_id, {"": tree})


def _shard_header(exchange: Exchange, name: str, where: str) -> tuple[dict[str, str], dict[str, Any], DataFile]:
    try:
        start, size = _read_header(exchange.store, name)
    except FileNotFoundError:
        raise MissingDataError(f"{exchange.store.locate(name)} is missing; {where} names it") from None
    metadata, tensors, data_start = decode_header(start, size, exchange.store.locate(name))
    return metadata, tensors, DataFile(name, size, data_start, digest(start))


def _read_header(store: Store, name: str) -> tuple[bytes, int]:
    with store.open(name) as file:
        start = np.empty(min(8, file.size), np.uint8)
        file.read_into(0, start)
        length = header_length(start.tobytes(), file.size, store.locate(name))
        whole = np.empty(8 + length, np.uint8)
        file.read_into(0, whole)
        return whole.tobytes(), file.size


def _longest(plan: SavePlan, file: FilePlan, draft: Draft) -> bytes:
    """The manifest as long as it can become: every number and digest at full length."""
    wide = replace(file, pieces=tuple(replace(p, offset=_BIG) for p in file.pieces), header=b"")
    written = WrittenFile(_BIG, "0" * 32, tuple(("0" * 32,) * block_count(p.nbytes) for p in file.pieces))
    tree = replace(plan, files=(wide,)).tree([written], draft)
    return encode_manifest(Manifest("", plan.save_id, {draft.prefix: tree}))


def _encode_index(prefix: str, tree: Tree, files: Sequence[FilePlan]) -> bytes:
    manifest = encode_manifest(Manifest("", tree.save_id, {prefix: tree})).decode()
    index = {
        "metadata": {_SEAL: "0" * 32, "total_size": tree.nbytes, _MARK: manifest},
        "weight_map": {piece.name: file.name for file in files for piece in file.pieces},
    }
    return seal(json.dumps(index, separators=(",", ":")).encode())
