"""Safetensors files of other programs, described as a Tree so that the usual load path reads them.

They have no digests.
"""

import json
from collections.abc import Mapping, Sequence

from shardkeep.errors import IntegrityError
from shardkeep.layouts.safetensors import TensorEntry, element_type
from shardkeep.model.arrays import ArraySpec, DType, Region, dtype_from_name
from shardkeep.model.digests import digest
from shardkeep.model.leaves import UNSHARDED, Piece, StoredArray
from shardkeep.model.manifest import DataFile, Tree
from shardkeep.model.tree import Path, flatten, nest
from shardkeep.model.values import Json

_PACKED = {"F4": "float4_e2m1fn"}


def tree_of_safetensors(
    files: Sequence[DataFile], headers: Sequence[tuple[Mapping[str, str], Mapping[str, TensorEntry]]], where: str
) -> Tree:
    """One Tree of all tensors in some safetensors files; dots in their names start subtrees."""
    found: dict[str, tuple[int, TensorEntry]] = {}
    notes: dict[str, str] = {}
    for number, (metadata, tensors) in enumerate(headers):
        notes |= _dtype_notes(metadata)
        for name, entry in tensors.items():
            if name in found:
                raise IntegrityError(f"{where}: two files contain tensor {name!r}", file=where)
            found[name] = (number, entry)
    skeleton, leaves = flatten(nest([((name,), name) for name in found]))
    stored = tuple(_leaf(leaf.path, leaf.value, *found[leaf.value], files, notes, where) for leaf in leaves)
    metadata = dict(headers[0][0]) if headers else {}
    identity = digest(json.dumps([[f.name, f.size, f.header_digest] for f in files]).encode())
    return Tree(identity, "foreign", skeleton, stored, tuple(files), metadata, created="", source="safetensors")


def _leaf(
    path: Path,
    name: str,
    number: int,
    entry: TensorEntry,
    files: Sequence[DataFile],
    notes: dict[str, str],
    where: str,
) -> StoredArray:
    dtype = element_type(entry["dtype"])
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    offset = files[number].header_length + start
    if dtype is None:
        if entry["dtype"] not in _PACKED:
            raise IntegrityError(
                f"{where}: tensor {name!r} has the packed dtype {entry['dtype']}, which is not supported"
            )
        spec = ArraySpec(shape, dtype_from_name(_PACKED[entry["dtype"]]))
        piece = Piece(Region.whole(shape), number, offset, spec.nbytes, None, stored=end - start)
        return StoredArray(path, spec, (piece,), UNSHARDED)
    if name in notes:
        dtype = _noted(notes[name], name, where)
        shape = shape if dtype.itemsize == 1 else shape[:-1]
    spec = ArraySpec(shape, dtype)
    if spec.nbytes != end - start:
        raise IntegrityError(f"{where}: the size of tensor {name!r} does not match the dtype noted for it", file=where)
    piece = Piece(Region.whole(shape), number, offset, spec.nbytes, None)
    return StoredArray(path, spec, (piece,), UNSHARDED)


def _noted(noted: str, name: str, where: str) -> DType:
    try:
        return dtype_from_name(noted)
    except ValueError as error:
        raise IntegrityError(f"{where}: tensor {name!r}: {error}", file=where) from error


def _dtype_notes(metadata: Mapping[str, str]) -> dict[str, str]:
    """The dtypes of tensors that are stored under another one because safetensors has no name for theirs."""
    try:
        notes: Json = json.loads(metadata.get("dtypes", "{}"))
    except (ValueError, RecursionError):
        return {}
    return {k: v for k, v in notes.items() if isinstance(v, str)} if isinstance(notes, dict) else {}
