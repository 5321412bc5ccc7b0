"""The registry: its readers pass one suite, and so does a reader that is no part of the package."""

import io
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import shardkeep
from foreign.conformance import DirectoryReaderTests, FileReaderTests, ReaderTests
from foreign.lines import LinesReader, encode_lines
from shardkeep.errors import IntegrityError
from shardkeep.foreign import registry
from shardkeep.layouts.zarr import zarr_dtype
from shardkeep.model.arrays import Array, ArraySpec, Region
from shardkeep.model.digests import digest
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.tree import flatten, nest
from shardkeep.stores.base import Store
from support import assert_same

PLAIN = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64")


class TestSafetensors(ReaderTests):
    name = "safetensors"
    dtypes = (*(name for name in PLAIN if name != "complex64"), "bfloat16", "float8_e4m3fn")

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        safetensors.numpy.save_file(arrays, path / "weights.safetensors")
        return path / "weights.safetensors"

    def data_files(self, path: Path) -> list[Path]:
        return [path]

    documents = data_files

    def point_outside(self, path: Path, outside: Path) -> None:
        path.rename(outside.with_name("other"))
        outside.with_name("other").replace(outside)
        path.symlink_to(outside)

    def test_nothing_outside_is_read(self, made: Path, tmp_path: Path) -> None:
        pytest.skip("a single file may be a link to anywhere, as in a Hugging Face cache")


class TestEformer(DirectoryReaderTests):
    name = "eformer"
    dtypes = (*PLAIN, "bfloat16", "int4", "float8_e4m3fn")

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        for key, array in arrays.items():
            self._write_array(path / key.replace(".", "/"), array)
        listed = [{"path": key.replace(".", "/")} for key in arrays]
        (path / "tensorstore_index.json").write_text(json.dumps({"format": "tensorstore", "arrays": listed}))
        return path

    def _write_array(self, path: Path, array: np.ndarray) -> None:
        path.mkdir(parents=True)
        # Two rows of chunks where there is more than one axis, so that regions need some of them only.
        chunks = [max(n // 2, 1) if axis == 0 and array.ndim > 1 else max(n, 1) for axis, n in enumerate(array.shape)]
        described = {"zarr_format": 2, "shape": array.shape, "chunks": chunks, "dtype": zarr_dtype(array.dtype)}
        described |= {"order": "C", "compressor": None, "fill_value": None, "filters": None}
        (path / ".zarray").write_text(json.dumps(described))
        rows = chunks[0] if array.ndim else 1
        for number, start in enumerate(range(0, len(array), rows) if array.ndim else [0]):
            part = array[start : start + rows] if array.ndim else array
            whole = np.zeros(chunks, array.dtype)
            whole[tuple(slice(0, n) for n in part.shape)] = part
            if array.size:
                name = ".".join([str(number), *["0"] * (array.ndim - 1)])
                (path / name).write_bytes(whole.tobytes())

    def data_files(self, path: Path) -> list[Path]:
        return [f for f in sorted(path.rglob("*")) if f.is_file() and f.name.replace(".", "").isdecimal()]

    def documents(self, path: Path) -> list[Path]:
        return [path / "tensorstore_index.json", path / "layers" / "0" / "w" / ".zarray"]

    def point_outside(self, path: Path, outside: Path) -> None:
        listed = [{"path": "../" * 2 + outside.name}]
        (path / "tensorstore_index.json").write_text(json.dumps({"format": "tensorstore", "arrays": listed}))


class TestZarrWithoutIndex(TestEformer):
    name = "zarr"

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        super().write(path, arrays)
        (path / "tensorstore_index.json").unlink()
        return path

    def documents(self, path: Path) -> list[Path]:
        return super().documents(path)[1:]

    def point_outside(self, path: Path, outside: Path) -> None:
        chunk = path / "layers" / "0" / "w" / "0.0"
        outside.write_bytes(chunk.read_bytes())
        chunk.unlink()
        chunk.symlink_to(outside)

    def test_it_is_listed_by_its_name(self, made: Path, capsys: Any) -> None:
        pytest.skip("it is listed as unindexed: see tests/cli/test_listing.py")

    def test_a_tree_of_ours_beside_it_leaves_it_as_it_is(self, made: Path) -> None:
        with pytest.raises(shardkeep.CheckpointExistsError, match="could no longer be loaded after this save"):
            shardkeep.save(made, {"x": np.arange(3)}, prefix="ours")

    def test_overwriting_it_removes_its_files(self, made: Path) -> None:
        pytest.skip("nothing lists its files, so they stay")


class NpyArray:
    """An array in a `.one` file: a `.npy` file with another name."""

    def __init__(self, store: Store, leaf: StoredArray) -> None:
        assert isinstance(leaf.origin, ForeignArray)
        self._store, self._leaf, self._file = store, leaf, leaf.origin.directory

    @property
    def chunks(self) -> tuple[int, ...]:
        return tuple(max(n, 1) for n in self._leaf.shape)

    def read(self, region: Region) -> Array:
        return self._load()[region.slices].copy()

    def check(self) -> None:
        self._load()

    def find_damage(self, sizes: Mapping[str, int]) -> str | None:
        try:
            self.check()
        except IntegrityError as error:
            return str(error)
        return None

    def _load(self) -> Array:
        try:
            found = np.load(io.BytesIO(self._store.read(self._file)), allow_pickle=False)
        except (ValueError, EOFError, FileNotFoundError) as error:
            where = self._store.locate(self._file)
            raise IntegrityError(f"leaf {self._leaf.key!r}: {where} is damaged: {error}") from error
        if ArraySpec(found.shape, found.dtype) != self._leaf.spec:
            raise IntegrityError(f"leaf {self._leaf.key!r} is another array than before")
        return found


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array)


class NpyReader:
    """Directories of `.one` files: what a contributor writes to read one more kind of checkpoint."""

    name: str = "one"
    kind: str = "one"

    def recognizes(self, names: Collection[str]) -> bool:
        return any(name.endswith(".one") for name in names)

    def detect(self, store: Store, names: Collection[str]) -> Manifest | None:
        files = sorted(name for name in names if name.endswith(".one"))
        if not files:
            return None
        skeleton, found = flatten(nest([((name.removesuffix(".one"),), name) for name in files]))
        leaves = tuple(
            StoredArray(leaf.path, self._describe(store, leaf.value), (), ForeignArray(leaf.value, self.kind))
            for leaf in found
        )
        sizes = tuple(DataFile(name, store.size(name) or 0) for name in files)
        identity = digest(repr([(file.name, file.size) for file in sizes]).encode())
        return Manifest(store.url, identity, {"": Tree(identity, "foreign", skeleton, leaves, sizes, {}, created="")})

    def open(self, store: Store, leaf: StoredArray) -> NpyArray:
        return NpyArray(store, leaf)

    def _describe(self, store: Store, name: str) -> ArraySpec:
        try:
            file = io.BytesIO(store.read(name))
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        except (ValueError, EOFError) as error:
            raise IntegrityError(f"{store.locate(name)} is damaged: {error}") from error
        return ArraySpec(shape, dtype)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "READERS", [*registry.READERS, NpyReader()])
    monkeypatch.setattr(registry, "FILE_READERS", [*registry.FILE_READERS, LinesReader()])


@pytest.mark.usefixtures("registered")
class TestFileFromOutsideThePackage(FileReaderTests):
    name = "lines"
    dtypes = (*PLAIN, "bfloat16", "float8_e4m3fn")

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        (path / "w.lines").write_bytes(encode_lines(arrays))
        return path / "w.lines"

    def test_a_usual_name_stands_for_the_folder(self, made: Path) -> None:
        (made.parent / "model.lines").write_bytes(made.read_bytes())
        (made.parent / "logs").mkdir()
        assert_same(shardkeep.load(made.parent), shardkeep.load(made))


@pytest.mark.usefixtures("registered")
class TestFromOutsideThePackage(DirectoryReaderTests):
    name = "one"
    dtypes = PLAIN

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        for key, array in arrays.items():
            _save(path / f"{key}.one", array)
        return path

    def data_files(self, path: Path) -> list[Path]:
        return sorted(path.glob("*.one"))

    def documents(self, path: Path) -> list[Path]:
        return [path / "b.one"]

    def point_outside(self, path: Path, outside: Path) -> None:
        os.link(path / "b.one", outside.with_name("other"))
        (path / "b.one").unlink()
        (path / "b.one").symlink_to(outside.with_name("other"))

    def test_damage_is_an_error_that_names_the_file_or_the_leaf(self, made: Path) -> None:
        file = made / "b.one"
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'b': .*b\.one is damaged"):
            shardkeep.load(made)
        assert not shardkeep.exists(made)
        (problem,) = shardkeep.verify(made).problems
        assert problem.leaf == "b"

    def test_latest_finds_it_among_others(self, made: Path) -> None:
        shardkeep.save(made.parent / "old", {"x": 1}, step=1)
        os.utime(made / "b.one")
        assert shardkeep.latest(made.parent) == str(made)


def test_an_array_that_no_reader_reads_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint looks to a program that does not have the reader that another one had."""
    _save(tmp_path / "w.one", np.arange(3))
    with monkeypatch.context() as patched:
        patched.setattr(registry, "READERS", [NpyReader()])
        shardkeep.save(tmp_path, {"x": 1}, prefix="ours")
    assert shardkeep.load(tmp_path, prefix="ours") == {"x": 1}
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w' is an array of another program, of the kind 'one'"):
        shardkeep.load(tmp_path, prefix="")
    assert not shardkeep.verify(tmp_path).ok


def test_the_first_reader_that_finds_something_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "w.one", np.arange(3))
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint at"):
        shardkeep.inspect(tmp_path)
    monkeypatch.setattr(registry, "READERS", [*registry.READERS, NpyReader(), NpyReader()])
    assert list(shardkeep.inspect(tmp_path).leaves) == ["w"]
