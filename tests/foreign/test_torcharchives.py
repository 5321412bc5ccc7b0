"""One archive: its entries below their root, its notes, and what of it is refused."""

from pathlib import Path

import numpy as np
import pytest

import shardkeep
from foreign.torchfiles import Pickle, encode_torch, zipped
from shardkeep.foreign.torcharchives import TorchArchive, entries_to_check, read_archive
from shardkeep.foreign.torchpickles import tensor_of
from shardkeep.foreign.windows import FilePart, FileWindow
from shardkeep.stores.local.store import LocalStore

PICKLE = Pickle().dumps({"a": 1})


def read(path: Path, document: bytes) -> TorchArchive | None:
    (path / "x.pt").write_bytes(document)
    with LocalStore(str(path)).open("x.pt") as file:
        return read_archive(file, "x.pt")


def test_entries_have_names_without_the_root(tmp_path: Path) -> None:
    found = read(tmp_path, encode_torch({"w": np.arange(3)}, root="any name"))
    assert found is not None
    assert {"data.pkl", "data/0", "version", "byteorder"} <= found.entries.keys()
    assert not found.swapped


def test_part_of_a_file_can_be_an_archive(tmp_path: Path) -> None:
    document = encode_torch(np.arange(3))
    (tmp_path / "x").write_bytes(b"before" + document + b"after")
    with LocalStore(str(tmp_path)).open("x") as file:
        found = read_archive(FilePart(file, 6, len(document)), "x")
        with pytest.raises(ValueError, match="bytes are needed"):
            FilePart(file, 12, len(document))
    assert found is not None
    tensor = tensor_of(found.value, "x")
    assert tensor is not None
    assert found.entry_of(tensor, "x").size == 24


@pytest.mark.parametrize(
    "document", [b"", b"PK", b"hello", zipped({"other": b""}, "x"), zipped({"y/data.pkl": PICKLE}, "x")]
)
def test_other_files_are_nothing_to_it(document: bytes, tmp_path: Path) -> None:
    assert read(tmp_path, document) is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"data.pkl": PICKLE, "byteorder": b"middle"}, "its byte order is neither little nor big"),
        ({"data.pkl": PICKLE, "byteorder": bytes(10_000)}, "is too long"),
        ({"data.pkl": PICKLE, ".data/serialization_id": bytes(10_000)}, "is too long"),
    ],
)
def test_notes_that_cannot_be_are_refused(entries: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, zipped(entries, "x"))


@pytest.mark.parametrize("name", ["constants.pkl", "code/__torch__.py"])
def test_programs_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="it is a TorchScript program"):
        read(tmp_path, zipped({"data.pkl": PICKLE, name: b""}, "x"))


def test_archives_of_other_tensors_have_another_identity(tmp_path: Path) -> None:
    documents = [encode_torch({"w": np.arange(n)}) for n in (3, 3, 4)]
    identities = [found.identity for document in documents if (found := read(tmp_path, document)) is not None]
    assert identities[0] == identities[1] != identities[2]


def test_without_crcs_there_is_nothing_to_check(tmp_path: Path) -> None:
    fixtures = Path(__file__).parents[1] / "fixtures" / "torch"
    store = LocalStore(str(fixtures))
    with store.open("no_crcs.pt") as file:
        assert entries_to_check(FileWindow(file)) == []
    with store.open("views.pt") as file:
        assert len(entries_to_check(FileWindow(file))) > 10
