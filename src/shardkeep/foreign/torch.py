"""PyTorch's files (`.pt`, `.pth`, `.bin`, `.ckpt`), as `torch.save` writes them since version 1.6: zip archives.

`data.pkl` describes the tensors; the elements of each storage are an entry of their own, uncompressed and aligned. So
most tensors are pieces of the file, which are mapped and read like our own. Several files that Hugging Face names as
parts of one checkpoint are one tree.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import cast

from shardkeep.errors import CheckpointNotFoundError, IntegrityError, MissingDataError, ShardkeepError, damage_of
from shardkeep.foreign.standins import take_apart
from shardkeep.foreign.strided import STRIDED, StridedArray
from shardkeep.foreign.torcharchives import TorchArchive, entries_to_check, read_archive, refuse_other_forms
from shardkeep.foreign.torchpickles import Tensor
from shardkeep.foreign.windows import FileWindow, requests_of
from shardkeep.foreign.zips import STORED, EntryBytes, ZipEntry
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.digests import digest
from shardkeep.model.document import no_duplicates
from shardkeep.model.leaves import UNSHARDED, ForeignArray, Piece, StoredArray, StoredLeaf, StoredValue
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.naming import check_name
from shardkeep.model.tree import Path
from shardkeep.runtime.progress import Progress
from shardkeep.stores.base import Store

_ENDINGS = (".pt", ".pth", ".ckpt")
_BIN = re.compile(r"(.*pytorch_model|adapter_model|optimizer|scheduler|training_args|model|pytorch_lora).*\.bin")
_SHARD = re.compile(r"(?P<base>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<ending>\.(?:bin|pt|pth))")
_INDEX = re.compile(r"(?P<base>.+)(?P<ending>\.(?:bin|pt|pth))\.index\.json")
_ZERO = re.compile(r"((bf16|fp16)_)?zero_pp_rank_[0-9]+_mp_rank_[0-9]+_(optim|model)_states\.pt")
_START = 512  # bytes that tell which other form a file has
_FREE = 64 << 20  # bytes of arrays that a file of any size may describe
_BEST_RATIO = 1040  # bytes of arrays that a byte of a file may stand for, as in a compressed archive
_BATCH = 16 << 20  # bytes that one thread checks at once


class TorchReader:
    """Reads files of `torch.save`, and several that are one checkpoint; a `FileReader`."""

    name: str = "torch"
    kind: str = STRIDED
    main: Collection[str] = (
        "pytorch_model.bin.index.json",
        "pytorch_model.bin",
        "diffusion_pytorch_model.bin",
        "adapter_model.bin",
    )

    def among(self, names: Collection[str]) -> Sequence[str]:
        found: dict[str, None] = {}
        sets: set[tuple[str, str]] = set()
        for name in sorted(names):
            shard = _SHARD.fullmatch(name)
            if _INDEX.fullmatch(name):
                found[name] = None
            elif shard is not None:
                which = (shard["base"], shard["ending"])
                if f"{shard['base']}{shard['ending']}.index.json" not in names and which not in sets:
                    found[name] = None
                sets.add(which)
            elif _is_named_so(name):
                found[name] = None
        return [name for name in found if not name.startswith(".")]

    def detect(self, store: Store, name: str) -> Manifest | None:
        where = store.locate(name)
        if _ZERO.fullmatch(name):
            raise CheckpointNotFoundError(
                f"no readable checkpoint at {where}: it is a partition of DeepSpeed's ZeRO optimizer. Put the "
                "partitions together with DeepSpeed's zero_to_fp32.py; files named mp_rank_* can be loaded as they are"
            )
        index = _INDEX.fullmatch(name)
        shard = _SHARD.fullmatch(name)
        if index is not None:
            return _read_set(store, name, where, _shards_in(store, name))
        if shard is not None:
            listed = f"{shard['base']}{shard['ending']}.index.json"
            if store.size(listed) is not None:
                return self.detect(store, listed)
            count = int(shard["count"])
            names = [f"{shard['base']}-{i + 1:05d}-of-{count:05d}{shard['ending']}" for i in range(count)]
            return _read_set(store, name, where, dict.fromkeys(names, ()))
        return _read_one(store, name, where)

    def open(self, store: Store, leaf: StoredArray) -> StridedArray:
        return StridedArray(store, leaf)

    def checks(self, store: Store, tree: Tree) -> Sequence[Callable[[Progress], None]]:
        """One task for each few entries of its files: they compare the entries with their CRCs."""
        return [task for number in range(len(tree.files)) for task in _checks_of(store, tree, number)]


def _is_named_so(name: str) -> bool:
    """Whether a name is one that PyTorch's files usually have."""
    return name.endswith(_ENDINGS) or _BIN.fullmatch(name) is not None


def _open_archive(store: Store, name: str, number: int = 0) -> tuple[TorchArchive, DataFile] | None:
    """The archive in a file; None if it is of another program."""
    where = store.locate(name)
    with store.open(name) as file:
        try:
            archive = read_archive(file, where, number, requests_of(store))
            if archive is None and _is_named_so(name):
                refuse_other_forms(FileWindow(file).read(0, min(_START, file.size)), name, where)
        except (ValueError, EOFError, MemoryError) as error:
            if isinstance(error, IntegrityError):
                raise
            if not _is_named_so(name):
                return None  # any zip archive, which is nothing to us
            raise IntegrityError(f"{where} is not a complete file of torch.save: {error}", file=where) from error
        return None if archive is None else (archive, DataFile(name, file.size))


def _read_one(store: Store, name: str, where: str) -> Manifest | None:
    opened = _open_archive(store, name)
    if opened is None:
        return None
    archive, file = opened
    return _manifest(where, archive.value, archive.length, [(archive, file)])


def _shards_in(store: Store, index: str) -> dict[str, tuple[str, ...]]:
    """The shards that an index lists, each with the tensors that it says are there."""
    where = store.locate(index)
    try:
        document = json.loads(store.read(index), object_pairs_hook=no_duplicates)
        weights: Mapping[str, object] = document["weight_map"]
        shards: dict[str, list[str]] = {}
        for key, name in weights.items():
            shards.setdefault(check_name(name), []).append(key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, IntegrityError):
            raise
        raise IntegrityError(f"{where} is not an index of PyTorch files ({error!r:.200})", file=where) from error
    return {name: tuple(keys) for name, keys in sorted(shards.items())}


def _read_set(store: Store, name: str, where: str, shards: Mapping[str, Sequence[str]]) -> Manifest:
    """Several files, each with a dict of tensors, as one tree."""
    whole: dict[object, object] = {}
    opened: list[tuple[TorchArchive, DataFile]] = []
    for number, (shard, expected) in enumerate(shards.items()):
        place = store.locate(shard)
        try:
            found = _open_archive(store, shard, number)
        except FileNotFoundError as error:
            if isinstance(error, ShardkeepError):
                raise
            raise MissingDataError(f"{place} is missing; {where} needs it", file=place) from None
        if found is None or not isinstance(found[0].value, dict):
            raise IntegrityError(f"{place} does not hold a dict of tensors, as a part of {where} does", file=place)
        inside = cast("dict[object, object]", found[0].value)
        lost = [key for key in expected if key not in inside]
        if lost:
            raise IntegrityError(f"{where} says that {lost[0]!r} is in {shard}, but it is not", file=where)
        twice = whole.keys() & inside.keys()
        if twice:
            raise IntegrityError(f"{where}: two files contain tensor {next(iter(twice))!r:.80}", file=where)
        whole |= inside
        opened.append(found)
    return _manifest(where, whole, sum(archive.length for archive, _ in opened), opened)


def _manifest(where: str, value: object, length: int, opened: Sequence[tuple[TorchArchive, DataFile]]) -> Manifest:
    files = tuple(file for _, file in opened)
    taken = take_apart(value, length, where)
    leaves: list[StoredLeaf] = []
    for path, leaf in taken.leaves:
        if isinstance(leaf, Tensor):
            number = leaf.storage.archive
            leaves.append(_array(path, leaf, opened[number][0], number, files[number].name, where))
        else:
            leaves.append(StoredValue(path, leaf))
    described, there = sum(leaf.nbytes for leaf in leaves), sum(file.size for file in files)
    if described > _FREE + _BEST_RATIO * there:
        raise IntegrityError(f"{where}: {there:,} bytes do not match tensors of {described:,} bytes", file=where)
    identity = digest(json.dumps([archive.identity for archive, _ in opened]).encode())
    tree = Tree(identity, "foreign", taken.skeleton, tuple(leaves), files, {}, created="")
    return Manifest(where, identity, {"": tree})


def _array(path: Path, tensor: Tensor, archive: TorchArchive, number: int, file: str, where: str) -> StoredArray:
    """A tensor as a leaf: a piece of the file where its elements lie there in order, else one that is put in order."""
    assert tensor.dtype is not None
    spec = ArraySpec(tensor.shape, tensor.dtype)
    entry = archive.entry_of(tensor, where)
    place = archive.place_of(tensor, entry, file)
    if tensor.is_contiguous and not place.flags and entry.method == STORED:
        offset = entry.start + tensor.offset * tensor.dtype.itemsize
        return StoredArray(path, spec, (Piece(Region.whole(spec.shape), number, offset, spec.nbytes, None),), UNSHARDED)
    return StoredArray(path, spec, (), ForeignArray(place.encode(), TorchReader.kind))


def _checks_of(store: Store, tree: Tree, number: int) -> list[Callable[[Progress], None]]:
    """Tasks that compare the entries of a file with their CRCs."""
    name = tree.files[number].name
    try:
        with store.open(name) as file:
            entries = entries_to_check(FileWindow(file, requests_of(store)))
    except (ValueError, EOFError) as error:
        raise damage_of(error, None, store.locate(name)) from error
    batches: list[list[ZipEntry]] = []
    for entry in entries:
        if not batches or sum(each.size for each in batches[-1]) + entry.size > _BATCH:
            batches.append([])
        batches[-1].append(entry)
    owners = sorted((p.offset, leaf.key) for leaf in tree.arrays for p in leaf.pieces if p.file == number and p.length)
    return [partial(_check_entries, store, name, batch, owners) for batch in batches]


def _check_entries(
    store: Store, name: str, entries: Sequence[ZipEntry], owners: Sequence[tuple[int, str]], progress: Progress
) -> None:
    where = store.locate(name)
    with store.open(name) as file:
        for entry in entries:
            try:
                EntryBytes(file, entry).check()
            except (ValueError, EOFError) as error:
                end = entry.start + entry.stored
                leaf = next((key for offset, key in owners if entry.start <= offset < end), None)
                raise damage_of(error, leaf, where) from error
            progress(entry.stored)
