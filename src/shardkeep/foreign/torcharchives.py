"""One archive that `torch.save` wrote: which entries it has, what its pickle says, and where tensors are in it."""

from collections.abc import Mapping

import numpy as np

from shardkeep.errors import CheckpointNotFoundError, IntegrityError, MissingDataError
from shardkeep.foreign.strided import SWAPPED, StridedPlace
from shardkeep.foreign.torchpickles import Tensor, decode_torch, nbytes_of
from shardkeep.foreign.windows import ByteFile, FileWindow
from shardkeep.foreign.zips import STORED, EntryBytes, ZipDirectory, ZipEntry, read_directory
from shardkeep.model.digests import digest
from shardkeep.model.fastclass import fast_dataclass

_PICKLE = "data.pkl"
_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # the pickled magic number of files before version 1.6
_TAR = (257, b"ustar")  # where a tar archive says that it is one: files of version 0.1
_LONGEST_NOTE = 4096  # bytes of an entry that says something about the archive
_ORDERS = {b"little": False, b"big": True}
_AGAIN = "load it with torch and save it again: torch.save(torch.load(path, weights_only=True), new_path)"


@fast_dataclass
class TorchArchive:
    """What an archive holds.

    Attributes:
        entries: Its entries by name, without the name of the archive that all of them begin with.
        swapped: Whether the bytes of its elements are in the other order.
        value: What the pickle gives, decoded.
        length: The length of the pickle.
        identity: A digest that tells it from other archives.
    """

    entries: Mapping[str, ZipEntry]
    swapped: bool
    value: object
    length: int
    identity: str

    def entry_of(self, tensor: Tensor, where: str) -> ZipEntry:
        """The entry with the elements of a tensor. `IntegrityError` if there is none of the right size."""
        expected, name = nbytes_of(tensor.storage), f"data/{tensor.storage.key}"
        found = self.entries.get(name)
        if found is None and expected == 0:
            return ZipEntry(name, STORED, None, 0, 0, 0)
        if found is None:
            raise MissingDataError(f"{where} lacks the entry {name[:80]!r}, which holds a tensor", file=where)
        if found.size != expected:
            what = f"the entry {name[:80]!r} has {found.size:,} bytes, and its tensors need {expected:,}"
            raise IntegrityError(f"{where} is damaged: {what}", file=where)
        return found

    def place_of(self, tensor: Tensor, entry: ZipEntry, file: str) -> StridedPlace:
        """Where the elements of a tensor are, for a reader of strided arrays."""
        swapped = self.swapped and tensor.dtype is not None and tensor.dtype.itemsize > 1
        stored = None if entry.method == STORED else entry.stored
        flags = tensor.flags + (SWAPPED if swapped else "")
        return StridedPlace(file, entry.start, entry.size, stored, tensor.offset, tensor.strides, flags)


def read_archive(file: ByteFile, where: str, number: int = 0, requests: int | None = None) -> TorchArchive | None:
    """The archive in a file; None if it is no zip archive, or one of another program.

    Args:
        file: The file.
        where: Its name, for errors.
        number: The number of the archive, if it is one of several.
        requests: How many requests are made at the same time, if the file is in a bucket.

    Raises:
        CheckpointNotFoundError: It is something else that torch writes, which cannot be read.
        ValueError: It is a zip archive, but a damaged one.
    """
    window = FileWindow(file, requests)
    if window.read(0, min(len(_ZIP), window.size)) != _ZIP:
        return None
    directory = read_directory(window)
    roots = [entry.name[: -len(_PICKLE)] for entry in directory.entries if entry.name.endswith(f"/{_PICKLE}")]
    roots = [root for root in roots if root.count("/") == 1]
    if not roots:
        return None
    (root,) = roots if len(roots) == 1 else ("",)
    if not root:
        raise ValueError("it has several pickles of tensors")
    entries = _entries(directory, root)
    if "constants.pkl" in entries or any(name.startswith("code/") for name in entries):
        raise CheckpointNotFoundError(
            f"no readable checkpoint at {where}: it is a TorchScript program, which torch.jit.save wrote. Load "
            "it with torch.jit.load and save its weights: torch.save(module.state_dict(), path)"
        )
    pickled = _bytes_of(window, entries[_PICKLE])
    order = entries.get("byteorder")
    swapped = False if order is None else _ORDERS.get(_note(window, order))
    if swapped is None:
        raise ValueError("its byte order is neither little nor big")
    written = entries.get(".data/serialization_id")
    told = b"" if written is None else _note(window, written)
    identity = digest(directory.identity.encode() + pickled + told)
    return TorchArchive(entries, swapped, decode_torch(pickled, where, number), len(pickled), identity)


def entries_to_check(window: FileWindow) -> list[ZipEntry]:
    """The entries of an archive that have a CRC: all of them, unless torch was told not to compute any."""
    directory = read_directory(window)
    return [] if _has_no_crcs(directory) else list(directory.entries)


def refuse_other_forms(start: bytes, name: str, where: str) -> None:
    """`CheckpointNotFoundError` for a file that torch writes in a form that is not read.

    Args:
        start: The first 512 bytes, or all there are.
        name: The name of the file.
        where: Where it is, for the message.
    """
    if start.startswith(_LEGACY):
        what = "it is in the format that torch wrote before version 1.6, which is not a zip archive"
    elif start[_TAR[0] : _TAR[0] + len(_TAR[1])] == _TAR[1]:
        what = "it is a tar archive: the format of torch 0.1, or not of torch"
    elif start[:1] == b"\x80":
        what = "it is a pickle, but not in an archive that torch.save wrote"
    else:
        raise CheckpointNotFoundError(
            f"no checkpoint at {where}: {name} has the name of a PyTorch file, but is not a zip archive with tensors, "
            "as torch.save writes since version 1.6"
        )
    raise CheckpointNotFoundError(f"no readable checkpoint at {where}: {what}; {_AGAIN}")


def _entries(directory: ZipDirectory, root: str) -> dict[str, ZipEntry]:
    """The entries by name below the root. Without CRCs in the archive, they have none."""
    entries = [entry for entry in directory.entries if entry.name.startswith(root)]
    if _has_no_crcs(directory):
        entries = [ZipEntry(e.name, e.method, None, e.size, e.stored, e.start) for e in entries]
    return {entry.name[len(root) :]: entry for entry in entries}


def _has_no_crcs(directory: ZipDirectory) -> bool:
    """Whether torch was told not to compute them: then all of them are 0."""
    return not any(entry.crc for entry in directory.entries)


def _bytes_of(window: FileWindow, entry: ZipEntry) -> bytes:
    """All of an entry, which is small."""
    memory = np.empty(entry.size, np.uint8)
    source = EntryBytes(window, entry)
    source.read_into(0, memory)
    return memory.tobytes()


def _note(window: FileWindow, entry: ZipEntry) -> bytes:
    if entry.size > _LONGEST_NOTE:
        raise ValueError(f"the entry {entry.name[:80]!r} is too long")
    return _bytes_of(window, entry)
