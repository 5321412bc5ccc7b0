"""Checkpoints of `torch.distributed.checkpoint`: a directory with `.metadata` and files such as `__0_0.distcp`.

Each part of a tensor is a file of `torch.save` by itself, somewhere in one of those files. Parts are looked into when
they are read. Other values are such files too, and are decoded as far as that runs nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from shardkeep.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    IntegrityError,
    MissingDataError,
    damage_of,
)
from shardkeep.foreign.dcpmetadata import MODULE, DcpMetadata, DcpTensor, FileRange, decode_metadata
from shardkeep.foreign.standins import Placed, take_apart
from shardkeep.foreign.strided import STRIDED, read_strided, with_flags
from shardkeep.foreign.torcharchives import TorchArchive, read_archive
from shardkeep.foreign.torchpickles import StandIn, Tensor, tensor_of
from shardkeep.foreign.windows import FilePart, opened
from shardkeep.foreign.zips import EntryBytes, ZipEntry
from shardkeep.model.arrays import Array, ArraySpec, Region
from shardkeep.model.digests import digest
from shardkeep.model.leaves import ForeignArray, StoredArray, StoredLeaf, StoredValue
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.tree import Path
from shardkeep.runtime.crew import run_tasks
from shardkeep.stores.base import Store

METADATA = ".metadata"
_DATA = ".distcp"
_MOST_KNOWN = 4  # descriptions that are kept: a load opens one array after the other
_LARGEST_VALUE = 1 << 20  # bytes of a value that is no tensor and is looked into
_MOST_VALUES = 20_000  # values that are looked into
_known: dict[str, DcpMetadata] = {}  # by digest


class DcpReader:
    """Reads checkpoints of `torch.distributed.checkpoint`; a `ForeignReader`."""

    name: str = "torch-dcp"
    kind: str = "torch-dcp"

    def recognizes(self, names: Collection[str]) -> bool:
        return any(name.endswith(_DATA) for name in names)

    def detect(self, store: Store, names: Collection[str]) -> Manifest | None:
        if not self.recognizes(names):
            if METADATA in names and MODULE.encode() in store.read(METADATA):
                where = store.url.rstrip("/")
                raise MissingDataError(f"{where} has {METADATA} of {MODULE}, but none of its files *{_DATA}")
            return None
        if METADATA not in names:
            raise IncompleteCheckpointError(
                f"{store.url} has files of {MODULE}, but not {METADATA}, which is written last: "
                "the save that wrote them never finished, or the file was lost"
            )
        return _manifest(store, _read_metadata(store))

    def open(self, store: Store, leaf: StoredArray) -> "DcpArray":
        return DcpArray(store, leaf)


class _FoundTensor(Placed):
    """A tensor of the checkpoint, by its number."""

    def __init__(self, number: int, tensor: DcpTensor) -> None:
        self.number, self.tensor = number, tensor


def _read_metadata(store: Store) -> DcpMetadata:
    document = store.read(METADATA)
    identity = digest(document)
    found = _known.get(identity)
    if found is None:
        found = decode_metadata(document, store.locate(METADATA))
        for old in list(_known)[: max(len(_known) - _MOST_KNOWN + 1, 0)]:
            _known.pop(old, None)
        _known[identity] = found
    return found


def _manifest(store: Store, described: DcpMetadata) -> Manifest:
    where = store.locate(METADATA)
    values, archives = _read_values(store, described)
    items: list[tuple[tuple[str | int, ...], object]] = []
    for number, (name, tensor) in enumerate(described.tensors.items()):
        if tensor.dtype is None:
            about = StandIn()
            about.state = {"dtype": f"torch.{tensor.type_name}", "shape": tensor.shape}
            items.append((described.paths[name], about))
        else:
            items.append((described.paths[name], _FoundTensor(number, tensor)))
    items += [(described.paths[name], values[name]) for name in described.values]
    length = described.length + sum(archive.length for archive in archives if archive is not None)
    taken = take_apart(_nested(items, where), length, where)
    leaves: list[StoredLeaf] = []
    for path, leaf in taken.leaves:
        if isinstance(leaf, _FoundTensor):
            place = ForeignArray(f"{METADATA}@{described.identity}@{leaf.number}", DcpReader.kind)
            leaves.append(StoredArray(path, leaf.tensor.spec, (), place))
        elif isinstance(leaf, Tensor):
            span = list(described.values.values())[leaf.storage.archive]
            leaves.append(_inside_a_value(path, leaf, archives[leaf.storage.archive], span, where))
        else:
            leaves.append(StoredValue(path, leaf))
    files = (DataFile(METADATA, described.length), *_files(store, described))
    tree = Tree(described.identity, "foreign", taken.skeleton, tuple(leaves), files, {}, created="")
    return Manifest(store.url, described.identity, {"": tree})


def _inside_a_value(
    path: Path, tensor: Tensor, archive: TorchArchive | None, span: FileRange, where: str
) -> StoredArray:
    """A tensor in a value that is none, such as a list of states."""
    assert archive is not None
    assert tensor.dtype is not None
    place = archive.place_of(tensor, archive.entry_of(tensor, where), span.file)
    inside = replace(place, start=place.start + span.offset)
    return StoredArray(path, ArraySpec(tensor.shape, tensor.dtype), (), ForeignArray(inside.encode(), STRIDED))


def _files(store: Store, described: DcpMetadata) -> list[DataFile]:
    """The data files. One that is missing or too short has the size that it should have at least."""
    least: dict[str, int] = {}
    for span in described.spans:
        least[span.file] = max(least.get(span.file, 0), span.offset + span.length)
    sizes = store.sizes(least)
    return [DataFile(name, max(sizes[name] or 0, least[name])) for name in sorted(least)]


class _Level(dict[str | int, object]):
    """A dict or a list of the tree, by key."""


def _nested(items: Sequence[tuple[tuple[str | int, ...], object]], where: str) -> object:
    """Dicts and lists with values at these paths: where the keys are numbers, they are those of the items of a list."""
    root = _Level()
    for path, value in items:
        inside = root
        for key in path[:-1]:
            found = inside.setdefault(key, _Level())
            if not isinstance(found, _Level):
                raise IntegrityError(f"{where}: two values have the same key in the tree", file=where)
            inside = found
        if path[-1] in inside:
            raise IntegrityError(f"{where}: two values have the same key in the tree", file=where)
        inside[path[-1]] = value
    return _with_lists(root)


def _with_lists(level: _Level) -> object:
    below = {key: _with_lists(value) if isinstance(value, _Level) else value for key, value in level.items()}
    return [below[i] for i in range(len(below))] if below and below.keys() == set(range(len(below))) else below


def _read_values(store: Store, described: DcpMetadata) -> tuple[dict[str, object], list[TorchArchive | None]]:
    """What is not a tensor, decoded, or a stand-in; and the archive of each value, as far as it was looked into."""
    names = list(described.values)
    found: dict[str, object] = {}
    archives: list[TorchArchive | None] = [None] * len(names)

    def read(number: int, name: str) -> None:
        span = described.values[name]
        archive = None
        if span.length <= _LARGEST_VALUE and number < _MOST_VALUES:
            with suppress(CheckpointNotFoundError), opened(store, span.file, name) as file:
                archive = read_archive(FilePart(file, span.offset, span.length), store.locate(span.file), number)
        archives[number] = archive
        found[name] = _unread(span) if archive is None else archive.value

    tasks = [partial(read, number, name) for number, name in enumerate(names)]
    if store.traits.costly_requests:
        run_tasks(tasks, store.traits.concurrency)
    else:
        for task in tasks:
            task()
    return found, archives


def _unread(span: FileRange) -> StandIn:
    """What stands for a value that was not looked into."""
    about = StandIn()
    about.state = {"file": span.file, "offset": span.offset, "length": span.length}
    return about


class DcpArray:
    """Reads a tensor from its parts; an `ArrayReader`."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        """Find its parts. `IntegrityError` if the checkpoint does not describe it, or no longer."""
        assert isinstance(leaf.origin, ForeignArray)
        self._store, self._leaf = store, leaf
        where = store.locate(METADATA)
        try:
            _, identity, number = leaf.origin.directory.split("@")
            described = _known.get(identity) or _read_metadata(store)
            if described.identity != identity:
                raise ValueError("it was replaced meanwhile")
            self._tensor = list(described.tensors.values())[int(number)]
        except FileNotFoundError:
            raise MissingDataError(f"{where} is missing", leaf=leaf.key, file=where) from None
        except (ValueError, IndexError) as error:
            raise damage_of(error, leaf.key, where) from error
        if self._tensor.dtype is None or self._tensor.spec != leaf.spec:
            raise IntegrityError("it is no longer described as the same array", leaf=leaf.key, file=where)

    @property
    def chunks(self) -> tuple[int, ...]:
        parts = self._tensor.parts
        return tuple(max(extent, 1) for extent in (parts[0][0].shape if parts else self._leaf.spec.shape))

    def read(self, region: Region) -> Array:
        spec = self._leaf.spec
        found: Array | None = None
        for whole, span in self._tensor.parts:
            common = whole.intersect(region)
            if common is None:
                continue
            part = self._read_part(whole, span, common.within(whole))
            if common == region:
                return part
            if found is None:
                found = np.empty(region.shape, spec.dtype)
            found[common.within(region).slices] = part
        return np.empty(region.shape, spec.dtype) if found is None else found

    def check(self) -> None:
        for whole, span in self._tensor.parts:
            with opened(self._store, span.file, self._leaf.key) as file:
                part = FilePart(file, span.offset, span.length)
                _, _, entry = self._open_part(part, whole, span)
                EntryBytes(part, entry).check()

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        for _, span in self._tensor.parts:
            if span.offset + span.length > sizes.get(span.file, 0):
                return f"leaf {self._leaf.key!r}: {self._store.locate(span.file)} is missing or truncated"
        return None

    def _read_part(self, whole: Region, span: FileRange, region: Region) -> Array:
        """A region of one part."""
        with opened(self._store, span.file, self._leaf.key) as file:
            part = FilePart(file, span.offset, span.length)
            archive, tensor, entry = self._open_part(part, whole, span)
            place = archive.place_of(tensor, entry, span.file)
            found = read_strided(EntryBytes(part, entry), self._leaf.spec.dtype, tensor.offset, tensor.strides, region)
            return with_flags(found, place.flags)

    def _open_part(self, part: FilePart, whole: Region, span: FileRange) -> tuple[TorchArchive, Tensor, ZipEntry]:
        """The archive of a part, its tensor, and the entry with the elements. `ValueError` if it is another tensor."""
        where = self._store.locate(span.file)
        archive = read_archive(part, where)
        tensor = None if archive is None else tensor_of(archive.value, where)
        if archive is None or tensor is None:
            raise ValueError(f"there is no tensor at byte {span.offset:,}")
        if tensor.shape != whole.shape or tensor.dtype != self._leaf.spec.dtype:
            found = f"{tensor.dtype or tensor.type_name}{list(tensor.shape)}"
            raise ValueError(f"the tensor at byte {span.offset:,} is {found}, but {METADATA} describes another one")
        return archive, tensor, archive.entry_of(tensor, where)
