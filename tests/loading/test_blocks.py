"""The one reader of stored bytes: what is wrong is a typed error that says which leaf, file and bytes it is about."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep.errors import IntegrityError, MissingDataError
from shardkeep.loading.blocks import BlockReader, parts_of
from shardkeep.model.arrays import Region
from shardkeep.model.digests import BLOCK
from shardkeep.model.leaves import Piece, StoredArray
from shardkeep.stores.local.store import LocalStore
from support import FORMATS, pattern, save_as

FIXTURE = Path(__file__).parents[1] / "fixtures" / "eformer" / "pytree_sharded_2x4" / "ckpt"
SIZE = 100_000


def _convert(path: Path) -> None:
    from shardkeep.converting.blocks import open_at, read_region, regions_of

    opened = open_at(str(path))
    for tree in opened.manifest.trees.values():
        for leaf in tree.arrays:
            for region in regions_of(opened, leaf):
                read_region(opened.source(tree), leaf, region, lambda _: None)


READERS: dict[str, Callable[[Path], object]] = {"load": shardkeep.load, "convert": _convert}


def _saved(tmp_path: Path, kind: str = "safetensors") -> tuple[Path, Path, Piece]:
    """A checkpoint, the file of its leaf `a/w`, and the piece in it."""
    path = save_as(kind, tmp_path / "c", {"a": {"w": pattern("uint8", (SIZE,))}})
    tree = shardkeep.inspect(path).tree()
    (leaf,) = tree.arrays
    (piece,) = leaf.pieces
    root = path if path.is_dir() else path.parent
    return path, root / tree.files[piece.file].name, piece


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_flipped_bit_is_located(kind: str, reader: str, tmp_path: Path) -> None:
    path, file, piece = _saved(tmp_path, kind)
    data = bytearray(file.read_bytes())
    data[piece.offset + 50] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        READERS[reader](path)
    length = piece.length if piece.stored is None else piece.stored
    assert (caught.value.leaf, caught.value.file) == ("a/w", str(file))
    assert caught.value.span == (piece.offset, piece.offset + length)
    assert str(caught.value).startswith(f"leaf 'a/w': {file} is damaged")
    (problem,) = [problem for problem in shardkeep.verify(path).problems if problem.leaf is not None]
    assert (problem.leaf, problem.file, problem.message) == ("a/w", str(file), str(caught.value))


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_and_a_truncated_file_are_named(reader: str, tmp_path: Path) -> None:
    path, file, _ = _saved(tmp_path)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    with pytest.raises(IntegrityError, match="is truncated: it has") as caught:
        READERS[reader](path)
    assert (caught.value.leaf, caught.value.file, caught.value.span) == ("a/w", str(file), None)
    file.unlink()
    with pytest.raises(MissingDataError, match=f"leaf 'a/w': {file} is missing") as missing:
        READERS[reader](path)
    assert (missing.value.leaf, missing.value.file, missing.value.span) == ("a/w", str(file), None)
    (problem,) = shardkeep.verify(path).problems
    assert (problem.leaf, problem.file, problem.message) == ("a/w", str(file), str(missing.value))


@pytest.mark.parametrize("reader", READERS)
def test_a_chunk_of_another_program_is_named(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    shutil.copytree(FIXTURE, path)
    leaf = next(leaf for leaf in shardkeep.inspect(path).tree().arrays if leaf.nbytes)
    directory = next(p.parent for p in sorted(path.rglob(".zarray")) if str(p.parent).endswith("/".join(leaf.path)))
    chunk = next(p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != ".zarray")
    chunk.unlink()
    with pytest.raises(MissingDataError) as caught:
        READERS[reader](path)
    assert (caught.value.leaf, caught.value.file) == (leaf.key, str(chunk))
    (problem,) = shardkeep.verify(path).problems
    assert (problem.leaf, problem.message) == (leaf.key, str(caught.value))


def test_a_manifest_that_is_damaged_is_the_file_of_its_error(tmp_path: Path) -> None:
    path, _, _ = _saved(tmp_path)
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"safetensors", b"safetensorz", 1))
    with pytest.raises(IntegrityError, match="does not match its own digest") as caught:
        shardkeep.load(path)
    assert (caught.value.leaf, caught.value.file, caught.value.span) == (None, str(manifest), None)


def test_a_large_piece_is_read_in_parts_and_an_encoded_one_as_a_whole() -> None:
    length = 9 * BLOCK + 5
    region = Region((0,), (length,))
    piece = Piece(region, 0, 0, length, None)
    assert parts_of(piece) == [(0, 4), (4, 8), (8, 10)]
    assert parts_of(piece, [(3, 9)]) == [(3, 7), (7, 9)]
    assert parts_of(Piece(region, 0, 0, length, None, stored=7), [(3, 9)]) == [(0, 10)]


def test_digests_are_compared_only_if_that_is_asked_for(tmp_path: Path) -> None:
    path, file, piece = _saved(tmp_path)
    data = bytearray(file.read_bytes())
    data[piece.offset] ^= 1
    file.write_bytes(data)
    tree = shardkeep.inspect(path).tree()
    files, leaf = tree.files, tree.leaves[0]
    assert isinstance(leaf, StoredArray)
    memory = np.empty(piece.length, np.uint8)
    BlockReader(LocalStore(str(path)), files, verify=False).read(leaf, piece, (0, 1), memory)
    assert memory[0] == data[piece.offset]
    with pytest.raises(IntegrityError, match="the data does not match its digest"):
        BlockReader(LocalStore(str(path)), files).read(leaf, piece, (0, 1), memory)
