"""What sizes show: a checkpoint with missing or truncated files does not exist, is skipped, and can be replaced."""

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import shardkeep
from faults.states import make, same
from shardkeep.cli.main import main
from shardkeep.eformer.manager import AsyncCheckpointManager
from shardkeep.model.digests import seal
from support import FORMATS, save_as

EFORMER = Path(__file__).parents[1] / "fixtures" / "eformer"


def data_files(path: Path) -> list[Path]:
    """The files with arrays of a checkpoint."""
    room = path.parent if path.suffix else path
    documents = {"manifest.json", "tensorstore_index.json", "checkpoint_metadata.json", ".zarray"}
    files = [p for p in sorted(room.rglob("*")) if p.is_file() and ".shardkeep" not in str(p)]
    return [p for p in files if p.name not in documents and not p.name.endswith("index.json")]


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def lengthen(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 1)


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "truncated": cut,
    "longer": lengthen,
    "a directory": replace_by_directory,
    "a loop": link_to_itself,
}
SINGLE = ("missing", "a directory", "a loop")  # then nothing is left of a single exchange file


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", FORMATS)
class TestEveryFormat:
    def test_a_damaged_checkpoint_does_not_exist_and_is_skipped(
        self, kind: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As `ls` says; and neither says so of a whole one."""
        good = save_as(kind, tmp_path / "run" / "step_1", make("plain", 1))
        path = save_as(kind, tmp_path / "other" / "step_2", make("plain", 2))
        assert shardkeep.exists(path)
        DAMAGES[damage](data_files(path)[-1])
        for name in os.listdir(tmp_path / "other"):
            shutil.move(tmp_path / "other" / name, tmp_path / "run" / name)
        moved = tmp_path / "run" / path.name
        assert not shardkeep.exists(moved)
        assert shardkeep.exists(good)
        with caplog.at_level(logging.WARNING):
            assert shardkeep.latest(tmp_path / "run") == str(good)
        if not (kind == "exchange" and damage in SINGLE):
            assert f"skipping {moved}" in caplog.text

    def test_it_is_replaced_without_overwrite(
        self, kind: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A resumed run comes to this step again. A complete one stays refused."""
        arguments = FORMATS[kind][1]
        path = save_as(kind, tmp_path / "run", make("plain", 1))
        with pytest.raises(shardkeep.CheckpointExistsError, match="already holds a checkpoint; pass overwrite=True"):
            shardkeep.save(path, make("plain", 2), **arguments)
        if damage in ("a directory", "a loop"):
            pytest.skip("what stands in the way is for the user to remove")
        for save in (shardkeep.save, lambda *a, **k: shardkeep.save_async(*a, **k).wait()):
            DAMAGES[damage](data_files(path)[-1])
            caplog.clear()
            save(path, make("plain", 2), **arguments)
            if not (kind == "exchange" and damage in SINGLE):
                assert "his save replaces it" in caplog.text
            assert same(shardkeep.load(path), make("plain", 2))
            assert shardkeep.verify(path).ok
            assert shardkeep.exists(path)


def test_one_stat_per_file_and_no_byte_of_data_is_read(tmp_path: Path) -> None:
    """Contents are for `verify`: with a flipped byte, it still exists."""
    shardkeep.save(tmp_path / "run", {"w": np.ones(1000)})
    (file,) = (tmp_path / "run").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert shardkeep.exists(tmp_path / "run")
    assert shardkeep.latest(tmp_path) == str(tmp_path / "run")
    assert not shardkeep.verify(tmp_path / "run").ok
    with pytest.raises(shardkeep.CheckpointExistsError, match="already holds"):
        shardkeep.save(tmp_path / "run", {"w": np.ones(1000)})


@pytest.mark.parametrize("format", ["safetensors", "zarr"])
def test_prefixes_are_replaced_each_by_itself(format: Any, tmp_path: Path) -> None:
    """`exists` speaks of all of them; a save only looks at its own."""
    for prefix in ("model", "opt"):
        shardkeep.save(tmp_path / "run", {"w": jnp.ones(3)}, prefix=prefix, format=format)
    damaged = next(file for file in data_files(tmp_path / "run") if file.parent.parts[-1] in ("opt", "w"))
    tree = next(p for p in ("model", "opt") if p in damaged.relative_to(tmp_path / "run").parts)
    other = {"model": "opt", "opt": "model"}[tree]
    damaged.unlink()
    assert not shardkeep.exists(tmp_path / "run")
    assert shardkeep.latest(tmp_path) is None
    with pytest.raises(shardkeep.CheckpointExistsError, match=f"already holds a tree with prefix '{other}'"):
        shardkeep.save(tmp_path / "run", {"w": jnp.zeros(3)}, prefix=other, format=format)
    shardkeep.save(tmp_path / "run", {"w": jnp.zeros(3)}, prefix=tree, format=format)
    assert shardkeep.exists(tmp_path / "run")
    assert shardkeep.load(tmp_path / "run", prefix=tree)["w"].sum() == 0
    assert shardkeep.load(tmp_path / "run", prefix=other)["w"].sum() == 3


class TestOtherPrograms:
    """As far as sizes are known."""

    @pytest.mark.parametrize("damage", ["missing", "truncated"])
    def test_chunks_of_eformer(self, damage: str, tmp_path: Path) -> None:
        shutil.copytree(EFORMER / "ts_plain" / "ckpt", tmp_path / "run")
        assert shardkeep.exists(tmp_path / "run")
        assert shardkeep.latest(tmp_path) == str(tmp_path / "run")
        zarray = next(p for p in (tmp_path / "run").rglob(".zarray") if json.loads(p.read_text())["shape"])
        compressed = json.loads(zarray.read_text())["compressor"] is not None
        chunk = next(p for p in sorted(zarray.parent.iterdir()) if p.name != ".zarray")
        DAMAGES[damage](chunk)
        assert shardkeep.exists(tmp_path / "run") is (compressed and damage == "truncated")
        if damage == "missing":
            assert shardkeep.latest(tmp_path) is None
            with pytest.raises(FileNotFoundError, match="chunk"):
                shardkeep.load(tmp_path / "run")

    def test_a_description_that_claims_more_chunks_than_any_disk_holds(self, tmp_path: Path) -> None:
        shutil.copytree(EFORMER / "ts_plain" / "ckpt", tmp_path / "run")
        zarray = next(p for p in (tmp_path / "run").rglob(".zarray") if json.loads(p.read_text())["shape"])
        described = json.loads(zarray.read_text())
        described["shape"] = [2**40] * len(described["shape"])
        described["chunks"] = [1] * len(described["shape"])
        zarray.write_text(json.dumps(described))
        assert not shardkeep.exists(tmp_path / "run")
        assert main(["ls", str(tmp_path)]) == 0

    def test_chunks_that_a_manifest_of_ours_took_over(self, tmp_path: Path) -> None:
        shutil.copytree(EFORMER / "ts_plain" / "ckpt", tmp_path / "run")
        shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, prefix="ours")
        assert shardkeep.exists(tmp_path / "run")
        zarray = next(p for p in (tmp_path / "run").rglob(".zarray") if json.loads(p.read_text())["shape"])
        cut(next(p for p in sorted(zarray.parent.iterdir()) if p.name != ".zarray"))
        assert not shardkeep.exists(tmp_path / "run")

    @pytest.mark.parametrize("damage", ["truncated", "longer"])
    def test_safetensors_files(self, damage: str, tmp_path: Path) -> None:
        file = tmp_path / "run" / "model.safetensors"
        file.parent.mkdir()
        safetensors.numpy.save_file({"w": np.ones(30)}, file)
        assert shardkeep.exists(file)
        DAMAGES[damage](file)
        assert not shardkeep.exists(file)
        assert shardkeep.latest(tmp_path) is None
        shardkeep.save(file, {"w": np.ones(3)})
        assert shardkeep.exists(file)

    def test_what_is_not_recognised_is_replaced_only_with_overwrite(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"not a safetensors file at all")
        for save in (shardkeep.save, lambda *a: shardkeep.save_async(*a).wait()):
            with pytest.raises(shardkeep.CheckpointExistsError, match="may be another program's; pass overwrite=True"):
                save(file, {"w": np.ones(3)})
        assert file.read_bytes() == b"not a safetensors file at all"
        shardkeep.save(file, {"w": np.ones(3)}, overwrite=True)
        assert shardkeep.load(file)["w"].shape == (3,)


class TestDocuments:
    """What says what is committed."""

    @pytest.mark.parametrize("overwrite", [True, False])
    @pytest.mark.parametrize("damage", ["cut", "flipped", "zeros", "empty"])
    def test_a_damaged_manifest_is_replaced_and_kept_aside(
        self, damage: str, overwrite: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A run that falls back to an older step can save the damaged one again."""
        path = tmp_path / "run"
        for prefix in ("a", "b"):
            shardkeep.save(path, {"w": np.ones(3)}, prefix=prefix)
        document = path / "manifest.json"
        text = document.read_bytes()
        flipped = text[:-20] + bytes([text[-20] ^ 1]) + text[-19:]
        changed = {"cut": text[:200], "zeros": bytes(len(text)), "empty": b"", "flipped": flipped}[damage]
        data = {file: file.read_bytes() for file in path.rglob("*.safetensors")}
        for save in (shardkeep.save, lambda *a, **k: shardkeep.save_async(*a, **k).wait()):
            document.write_bytes(changed)
            assert not shardkeep.exists(path)
            caplog.clear()
            save(path, {"w": np.zeros(3)}, prefix="a", overwrite=overwrite)
            assert "This save replaces it; the damaged one is kept as" in caplog.text
            assert shardkeep.inspect(path).prefixes == ["a"]
            assert not shardkeep.load(path)["w"].any()
            (aside,) = path.glob("manifest.json.damaged-*")
            assert aside.read_bytes() == changed
            assert {file: file.read_bytes() for file in data} == data, "files that it may name stay"
        shardkeep.save(path, {"w": np.ones(3)}, prefix="a", overwrite=True)
        assert aside.exists()

    @pytest.mark.parametrize("size", [None, 400])
    @pytest.mark.parametrize("overwrite", [True, False])
    def test_damaged_exchange_files_are_replaced(
        self, overwrite: bool, size: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """There is no other tree in them."""
        path = tmp_path / "model.safetensors"
        tree = {"w": np.ones(30), "b": np.ones(40)}
        document = path if size is None else tmp_path / "model.safetensors.index.json"
        for left in (0, 100, 300):
            shardkeep.save(path, tree, max_shard_size=size, overwrite=True)
            os.truncate(document, left)
            assert not shardkeep.exists(path)
            caplog.clear()
            shardkeep.save(path, tree, max_shard_size=size, overwrite=overwrite)
            assert "This save replaces it" in caplog.text
            assert shardkeep.verify(path).ok

    def test_a_manifest_of_a_later_version_is_not_damaged(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path, {"w": np.ones(3)})
        document = tmp_path / "manifest.json"
        document.write_text(document.read_text().replace('"shardkeep":2', '"shardkeep":9'))
        assert shardkeep.exists(tmp_path)
        for overwrite in (True, False):
            with pytest.raises(shardkeep.NewerFormatError, match="format version 9"):
                shardkeep.save(tmp_path, {"w": np.ones(3)}, overwrite=overwrite)

    @pytest.mark.parametrize(
        ("old", "new", "named"),
        [
            (b'"format":"safetensors"', b'"format":"packed"', "format 'packed', which is unknown"),
            (b'"compression":null', b'"compression":"lz9"', "format 'safetensors' with compression 'lz9'"),
        ],
    )
    def test_nor_is_one_with_a_layout_or_a_compression_that_is_not_known(
        self, old: bytes, new: bytes, named: str, tmp_path: Path
    ) -> None:
        """A later version may have more of them. What it saved must survive a save by this one."""
        shardkeep.save(tmp_path, {"w": np.ones(3)})
        document = tmp_path / "manifest.json"
        text = document.read_bytes().replace(old, new)
        at = text.index(b'"digest":"') + 10
        document.write_bytes(seal(text[:at] + b"0" * 32 + text[at + 32 :]))
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for prefix in (None, "other"):
            for overwrite in (True, False):
                with pytest.raises(shardkeep.NewerFormatError, match=named):
                    shardkeep.save(tmp_path, {"w": np.ones(3)}, prefix=prefix, overwrite=overwrite)
        for call in (shardkeep.load, shardkeep.inspect, shardkeep.verify, shardkeep.delete):
            with pytest.raises(shardkeep.NewerFormatError, match=rf"manifest.json has a tree in the {named}.* upgrade"):
                call(tmp_path)
        assert shardkeep.exists(tmp_path)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_manager_replaces_a_damaged_one_as_any_other(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    manager.save({"w": jnp.ones(3)}, tmp_path / "run")
    data_files(tmp_path / "run")[0].unlink()
    manager.save({"w": jnp.zeros(3)}, tmp_path / "run")
    assert manager.load(tmp_path / "run", None)[0]["w"].sum() == 0


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "shards"])
def test_one_that_is_being_replaced_always_exists(kind: str, tmp_path: Path) -> None:
    """Its files go when the next one is committed: that is not damage."""
    arguments = FORMATS[kind][1]
    path = save_as(kind, tmp_path / "run" / "step_1", make("fewer", 0))
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            shardkeep.save(path, make("fewer", number), overwrite=True, **arguments)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(150):
            assert shardkeep.exists(path)
            assert shardkeep.latest(tmp_path / "run") is not None
    finally:
        stop.set()
        writer.join()
