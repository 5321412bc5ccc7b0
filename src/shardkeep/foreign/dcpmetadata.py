"""What `.metadata` of `torch.distributed.checkpoint` says: which parts each tensor has, and where each part is.

It is a pickle of dataclasses, decoded without running anything. The parts of a tensor must fill it exactly once.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from shardkeep.errors import IntegrityError
from shardkeep.foreign.pickles import PickledObject
from shardkeep.foreign.torchpickles import as_counts, decode_torch, dtype_named
from shardkeep.model.arrays import ArraySpec, DType, Region, is_partition, is_possible
from shardkeep.model.digests import digest
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.naming import check_name

MODULE = "torch.distributed.checkpoint"
_MOST_PARTS = 4000  # of a tensor, if they are not the cells of a grid: each is compared with each
_DEEPEST = 60  # keys that lead to a value
_SEVERAL = "transform_descriptors"  # says that the bytes of a part were changed on their way, for example compressed

T = TypeVar("T")


@fast_dataclass
class FileRange:
    """Some bytes of a file of the checkpoint."""

    file: str
    offset: int
    length: int


@fast_dataclass
class DcpTensor:
    """A tensor: its shape and dtype (None for one that no array here can have), and where each of its regions is."""

    shape: tuple[int, ...]
    dtype: DType | None
    type_name: str
    parts: tuple[tuple[Region, FileRange], ...]

    @property
    def spec(self) -> ArraySpec:
        assert self.dtype is not None
        return ArraySpec(self.shape, self.dtype)


@fast_dataclass
class DcpMetadata:
    """What a checkpoint holds.

    Attributes:
        tensors: Its tensors by name, in order.
        values: Where its other values are, by name.
        paths: The keys that lead to each tensor and value in the tree: strings for dicts, numbers for lists.
        identity: A digest that tells it from other checkpoints.
        length: The length of the document.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, FileRange]
    paths: Mapping[str, tuple[str | int, ...]]
    identity: str
    length: int

    @property
    def spans(self) -> list[FileRange]:
        """Everything that is in files."""
        parts = [span for tensor in self.tensors.values() for _, span in tensor.parts]
        return [*parts, *self.values.values()]


def decode_metadata(document: bytes, where: str) -> DcpMetadata:
    """The content of a `.metadata` file. `IntegrityError` if it is damaged, or says what cannot be."""
    root = decode_torch(document, where)
    try:
        fields = _fields(root, "Metadata")
        places = _places(_as_dict(fields["storage_data"]))
        tensors: dict[str, DcpTensor] = {}
        values: dict[str, FileRange] = {}
        for name, described in _as_dict(fields["state_dict_metadata"]).items():
            if not isinstance(name, str) or not isinstance(described, PickledObject):
                raise TypeError("an entry has no name")
            if described.name == "BytesStorageMetadata":
                values[name] = places[name, None]
            else:
                tensors[name] = _tensor(name, _fields(described, "TensorStorageMetadata"), places)
        told = fields.get("planner_data")
        paths = {name: _path(name, told) for name in (*tensors, *values)}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, IntegrityError):
            raise
        what = "does not describe a checkpoint of torch.distributed.checkpoint"
        raise IntegrityError(f"{where} {what}: {error!r:.200}", file=where) from error
    return DcpMetadata(tensors, values, paths, digest(document), len(document))


def _as(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def _as_dict(value: object) -> Mapping[object, object]:
    return cast("dict[object, object]", _as(dict, value))


def _fields(value: object, name: str) -> Mapping[str, object]:
    """The fields of a dataclass of torch's."""
    if not isinstance(value, PickledObject) or value.name != name or not value.module.startswith(MODULE):
        raise TypeError(f"{name} is missing")
    return cast("Mapping[str, object]", _as_dict(cast(object, value.state)))


def _places(stored: Mapping[object, object]) -> dict[tuple[str, tuple[int, ...] | None], FileRange]:
    """Where each part is, by the name and the offsets of the part."""
    found: dict[tuple[str, tuple[int, ...] | None], FileRange] = {}
    for index, described in stored.items():
        key, place = _fields(index, "MetadataIndex"), _fields(described, "_StorageInfo")
        if place.get(_SEVERAL):
            raise ValueError("its parts are compressed or encrypted, which is not supported")
        start = key.get("offset")
        offset, length = as_counts((place["offset"], place["length"]))
        span = FileRange(check_name(place["relative_path"]), offset, length)
        found[_as(str, key["fqn"]), None if start is None else as_counts(start)] = span
    return found


def _tensor(
    name: str, described: Mapping[str, object], places: Mapping[tuple[str, tuple[int, ...] | None], FileRange]
) -> DcpTensor:
    shape = as_counts(described["size"])
    properties: object = _as(PickledObject, described["properties"]).state
    if isinstance(properties, dict):
        kind = _as_dict(cast(object, properties))["dtype"]
    else:
        kind = cast("Sequence[object]", properties)[0]
    type_name = str(getattr(kind, "name", ""))
    dtype = dtype_named(type_name)
    if not is_possible(shape, 1 if dtype is None else dtype.itemsize):
        raise ValueError(f"the shape {shape!r:.80} is not valid")
    parts: list[tuple[Region, FileRange]] = []
    for chunk in cast("list[object]", _as(list, described["chunks"])):
        fields = _fields(chunk, "ChunkStorageMetadata")
        region = Region(as_counts(fields["offsets"]), as_counts(fields["sizes"]))
        if region.size == 0 and 0 not in shape:
            continue  # of a process that has nothing of the tensor
        parts.append((region, places[name, region.start]))
    if 0 not in shape and not _fill(shape, [region for region, _ in parts]):
        raise ValueError(f"the parts of {name!r:.80} do not cover it exactly once")
    return DcpTensor(shape, dtype, type_name, tuple(parts) if 0 not in shape else ())


def _fill(shape: tuple[int, ...], regions: Sequence[Region]) -> bool:
    """Whether the regions fill an array of a shape exactly once."""
    if any(len(region.start) != len(shape) or len(region.shape) != len(shape) for region in regions):
        return False
    if is_partition(shape, regions):
        return True
    whole = Region.whole(shape)
    if len(regions) > _MOST_PARTS or sum(region.size for region in regions) != whole.size:
        return False
    if any(region.intersect(whole) != region for region in regions):
        return False
    return all(a.intersect(b) is None for a, b in itertools.combinations(regions, 2))


def _path(name: str, told: object) -> tuple[str | int, ...]:
    """The keys that lead to a value, if the checkpoint says so; otherwise its name."""
    path = cast("dict[object, object]", told).get(name) if isinstance(told, dict) else None
    if path is None:
        return (name,)
    keys = cast("tuple[object, ...]", _as(tuple, path))
    if not 0 < len(keys) <= _DEEPEST or not all(type(key) is str or (type(key) is int and key >= 0) for key in keys):
        raise TypeError("a path in the tree does not consist of names and numbers")
    return cast("tuple[str | int, ...]", keys)
