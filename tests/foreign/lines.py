"""A kind of checkpoint that is one file: what a contributor writes to read one more."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from shardkeep.errors import IntegrityError
from shardkeep.model.arrays import ArraySpec, Region, dtype_from_name
from shardkeep.model.digests import digest
from shardkeep.model.leaves import UNSHARDED, Piece, StoredArray
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.tree import flatten, nest
from shardkeep.stores.base import Store


def encode_lines(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A file of this kind."""
    described: dict[str, Any] = {}
    at = 4096
    for key, array in arrays.items():
        described[key] = [array.dtype.name, array.shape, at]
        at += array.nbytes
    start = b"lines " + json.dumps(described).encode() + b"\n"
    return start.ljust(4096) + b"".join(array.tobytes() for array in arrays.values())


class LinesReader:
    """Files with a line of JSON before the bytes of arrays; a `FileReader`."""

    name: str = "lines"
    kind: str = "lines"
    main: Collection[str] = ("model.lines",)

    def among(self, names: Collection[str]) -> Sequence[str]:
        return [name for name in names if name.endswith(".lines")]

    def detect(self, store: Store, name: str) -> Manifest | None:
        document = store.read(name)
        if not document.startswith(b"lines "):
            return None
        where = store.locate(name)
        try:
            described = json.loads(document[: document.index(b"\n")].removeprefix(b"lines "))
            skeleton, found = flatten(nest([((key,), key) for key in described]))
        except ValueError as error:
            raise IntegrityError(f"{where} is damaged: {error}", file=where) from error
        leaves: list[StoredArray] = []
        for leaf in found:
            dtype, shape, offset = described[leaf.value]
            spec = ArraySpec(tuple(shape), dtype_from_name(dtype))
            if offset + spec.nbytes > len(document):
                raise IntegrityError(f"{where} is truncated", file=where)
            piece = Piece(Region.whole(spec.shape), 0, offset, spec.nbytes, None)
            leaves.append(StoredArray(leaf.path, spec, (piece,), UNSHARDED))
        identity = digest(document)
        files = (DataFile(name, len(document)),)
        return Manifest(where, identity, {"": Tree(identity, "foreign", skeleton, tuple(leaves), files, {}, "")})

    def open(self, store: Store, leaf: StoredArray) -> Any:
        raise AssertionError
