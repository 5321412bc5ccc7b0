"""Exchange files being read: what a single file or an index commits, ours or another program's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardkeep.errors import IncompleteCheckpointError, IntegrityError, MissingDataError
from shardkeep.foreign.safetensors import tree_of_safetensors
from shardkeep.layouts.exchange import MARK, OVER, SAVE, SEAL
from shardkeep.layouts.safetensors import TensorEntry, decode_header, header_length
from shardkeep.model.digests import check_seal, digest
from shardkeep.model.document import decode_manifest, no_duplicates
from shardkeep.model.manifest import DataFile, Manifest
from shardkeep.model.naming import SAFETENSORS, SAFETENSORS_INDEX, check_name
from shardkeep.stores.base import Store


@dataclass(frozen=True)
class ExchangeFiles:
    """Files with a common name: their directory, and the name without its ending."""

    store: Store
    base: str

    @property
    def single(self) -> str:
        return self.base + SAFETENSORS

    @property
    def index(self) -> str:
        return self.base + SAFETENSORS_INDEX

    @property
    def documents(self) -> tuple[str, str]:
        return (self.single, self.index)

    @property
    def where(self) -> str:
        return self.store.locate(self.single)


def read_single(exchange: ExchangeFiles) -> tuple[Manifest, str | None]:
    """What a single file holds, and for one in a bucket the id of the save whose index it replaced ("" for none)."""
    name, where = exchange.single, exchange.where
    start, size = read_header(exchange.store, name)
    metadata, tensors, data_start = decode_header(start, size, where)
    if not is_ours(metadata):
        file = DataFile(name, size, data_start, digest(start))
        return Manifest(where, digest(start), {"": tree_of_safetensors([file], [(metadata, tensors)], where)}), None
    if SAVE in metadata:
        raise IncompleteCheckpointError(f"{where} is one of several files, whose index or manifest is missing")
    check_seal(start, where)
    manifest = decode_manifest(_text(metadata.get(MARK)), where, where)
    for prefix, tree in manifest.trees.items():
        if len(manifest.trees) == 1 and len(tree.files) == 1:
            # The file may have been renamed: the manifest always describes the file that it is in.
            files = (replace(tree.files[0], name=name),)
            return replace(manifest, trees={prefix: replace(tree, files=files)}), metadata.get(OVER)
    raise IntegrityError(f"{where} is damaged: its manifest lists different files", file=where)


def _text(manifest: object) -> bytes:
    """The bytes of a manifest in a header, which in a hostile file may be anything. The seal detects surrogates."""
    return str(manifest).encode(errors="surrogatepass")


def is_ours(metadata: Mapping[str, object]) -> bool:
    return any(name in metadata for name in (MARK, SEAL, SAVE))


def read_index(exchange: ExchangeFiles) -> Manifest | None:
    """What an index commits, its shards checked; None for an index that says that nothing is committed."""
    where = exchange.store.locate(exchange.index)
    manifest = committed_by_index(exchange)
    if manifest is not None and all(tree.format != "foreign" for tree in manifest.trees.values()):
        for name in sorted({file.name for tree in manifest.trees.values() for file in tree.files}):
            if _shard_header(exchange, name, where)[0].get(SAVE) != manifest.save_id:
                raise IntegrityError(f"{exchange.store.locate(name)} belongs to a different save than {where}")
    return manifest


def committed_by_index(exchange: ExchangeFiles) -> Manifest | None:
    """The same, but our own shards are not looked at: they may be damaged."""
    where = exchange.store.locate(exchange.index)
    index, manifest = decode_index(exchange, exchange.store.read(exchange.index))
    weights: dict[str, str] = index["weight_map"]
    if manifest is None:
        return _read_foreign_shards(exchange, weights, where)
    used = {file.name for tree in manifest.trees.values() for file in tree.files}
    if used != set(weights.values()) or len(manifest.trees) > 1:
        raise IntegrityError(f"{where} is damaged: its manifest lists different files", file=where)
    return manifest if manifest.trees else None


def decode_index(exchange: ExchangeFiles, document: bytes) -> tuple[dict[str, Any], Manifest | None]:
    """An index, checked, and the manifest in it if the index is ours."""
    where = exchange.store.locate(exchange.index)
    try:
        index = json.loads(document, object_pairs_hook=no_duplicates)
        index["metadata"] = index.get("metadata") or {}
        for name in index["weight_map"].values():
            check_name(name)
        ours = is_ours(index["metadata"])
        if not isinstance(index["metadata"], dict):
            raise TypeError("its metadata is not an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{where} is not a safetensors index ({error})", file=where) from error
    if not ours:
        return index, None
    check_seal(document, where)
    return index, decode_manifest(_text(index["metadata"].get(MARK)), where, where)


def _read_foreign_shards(exchange: ExchangeFiles, weights: Mapping[str, str], where: str) -> Manifest:
    files: list[DataFile] = []
    headers: list[tuple[dict[str, str], dict[str, TensorEntry]]] = []
    for name in sorted(set(weights.values())):
        metadata, tensors, file = _shard_header(exchange, name, where)
        if is_ours(metadata):
            raise IntegrityError(
                f"{where} is damaged: {file.name} was written by shardkeep, but the index was not", file=where
            )
        lost = [key for key, place in weights.items() if place == name and key not in tensors]
        if lost:
            raise IntegrityError(f"{where} says that {lost[0]!r} is in {name}, but it is not", file=where)
        files.append(file)
        headers.append((metadata, tensors))
    tree = tree_of_safetensors(files, headers, where)
    return Manifest(exchange.where, tree.save_id, {"": tree})


def _shard_header(
    exchange: ExchangeFiles, name: str, where: str
) -> tuple[dict[str, str], dict[str, TensorEntry], DataFile]:
    try:
        start, size = read_header(exchange.store, name)
    except FileNotFoundError:
        raise MissingDataError(f"{exchange.store.locate(name)} is missing; {where} names it") from None
    metadata, tensors, data_start = decode_header(start, size, exchange.store.locate(name))
    return metadata, tensors, DataFile(name, size, data_start, digest(start))


def read_header(store: Store, name: str) -> tuple[bytes, int]:
    with store.open(name) as file:
        start = np.empty(min(8, file.size), np.uint8)
        file.read_into(0, start)
        length = header_length(start.tobytes(), file.size, store.locate(name))
        whole = np.empty(8 + length, np.uint8)
        file.read_into(0, whole)
        return whole.tobytes(), file.size
