"""Arrays in key-value stores: what becomes pieces of files, what is read chunk by chunk, and what cannot be true."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from foreign.test_orbax import Layout, describe
from shardkeep.foreign.chunked import ArrayFiles, Cabinet, ChunkedReader, Chunks, describe_array, plain_scalar
from shardkeep.foreign.ocdbt import FileSpan
from shardkeep.model.arrays import Region
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.stores.local.store import LocalStore
from support import assert_same, pattern

DATA = pattern("float32", (6, 8))


def described(path: Path, layout: Layout, array: np.ndarray = DATA, chunks: tuple[int, ...] = (2, 4)) -> Any:
    layout.write(path, "a.w", array, chunks[: array.ndim])
    store = LocalStore(str(path))
    files = ArrayFiles()
    leaf = describe_array(Chunks(Cabinet.at(store, ""), "a.w"), ("a", "w"), files, "some kind")
    return store, leaf, files


PIECES = {
    "database": (Layout("zarr", True), 9 - 3, "zstd"),
    "database, not compressed": (Layout("zarr", True, compressed=False), 6, None),
    "directory": (Layout("zarr", False), 6, "zstd"),
    "shards": (Layout("zarr3", True), 6, "zstd"),
    "shards of inner chunks": (Layout("zarr3", True, inner=lambda _: (1, 4)), 12, "zstd"),
}


@pytest.mark.parametrize("name", PIECES)
def test_chunks_in_files_are_pieces(name: str, tmp_path: Path) -> None:
    layout, count, codec = PIECES[name]
    _, leaf, files = described(tmp_path, layout)
    assert len(leaf.pieces) == count
    assert all(piece.digests is None for piece in leaf.pieces)
    assert {piece.stored is not None for piece in leaf.pieces} == {codec is not None}
    listed = files.listed(LocalStore(str(tmp_path)), [])
    for piece in leaf.pieces:
        assert piece.offset + (piece.stored or piece.length) <= listed[piece.file].size


@pytest.mark.parametrize(
    ("layout", "chunks"),
    [(Layout("zarr", True, inline=1000), (2, 4)), (Layout("zarr", True), (4, 3)), (Layout("zarr3", False), (4, 8))],
    ids=["values in nodes", "beyond the edge", "beyond the edge, in shards"],
)
def test_others_are_read_region_by_region(layout: Layout, chunks: tuple[int, int], tmp_path: Path) -> None:
    store, leaf, _ = described(tmp_path, layout, chunks=chunks)
    assert leaf.pieces == ()
    assert leaf.origin.kind == "some kind"
    reader = ChunkedReader(store, leaf, lambda _: True)
    assert reader.chunks == chunks
    for region in (Region((0, 0), (6, 8)), Region((3, 2), (2, 5)), Region((5, 7), (1, 1)), Region((2, 2), (0, 3))):
        assert_same(reader.read(region), DATA[region.slices].copy())
    reader.check()
    assert reader.find_damage({}) is None


def test_only_the_chunks_of_a_region_are_read(tmp_path: Path) -> None:
    store, leaf, _ = described(tmp_path, Layout("zarr", False), chunks=(4, 4))
    for name in ("1.0", "1.1"):
        (tmp_path / "a.w" / name).write_bytes(b"damaged")
    reader = ChunkedReader(store, leaf, lambda _: True)
    assert_same(reader.read(Region((0, 0), (4, 8))), DATA[:4].copy())
    with pytest.raises(shardkeep.IntegrityError, match="leaf 'a/w'"):
        reader.read(Region((3, 0), (2, 2)))
    with pytest.raises(shardkeep.IntegrityError, match="leaf 'a/w'"):
        reader.check()


def test_scalars_are_numbers(tmp_path: Path) -> None:
    for number, value in enumerate((7, 2.5, True, np.float32(1.5), np.int8(-3))):
        array = np.asarray(value)
        Layout("zarr", True, inline=100).write(tmp_path, f"s{number}", array)
        found = plain_scalar(Chunks(Cabinet.at(LocalStore(str(tmp_path)), ""), f"s{number}"))
        assert (type(found), found) == (type(value), value)
    Layout("zarr", True, inline=100).write(tmp_path, "w", DATA)
    assert plain_scalar(Chunks(Cabinet.at(LocalStore(str(tmp_path)), ""), "w")) is None


def test_an_array_that_claims_more_than_its_file_can_hold_is_refused(tmp_path: Path) -> None:
    """Before anything is allocated for it."""
    layout = Layout("zarr", False)
    layout.write(tmp_path, "w", np.zeros(4, np.float32))
    describe(tmp_path, ["w"], "zarr", False)
    name = tmp_path / "w" / ".zarray"
    for shape in ([2**40], [2**59]):
        name.write_text(json.dumps(json.loads(name.read_text()) | {"shape": shape, "chunks": shape}))
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w'.*(is damaged: a chunk of|cannot be read)"):
            shardkeep.load(tmp_path)
        assert not shardkeep.verify(tmp_path).ok


def test_a_grid_of_more_chunks_than_there_are_is_not_walked(tmp_path: Path) -> None:
    for database in (True, False):
        path = tmp_path / str(database)
        path.mkdir()
        Layout("zarr", database, inline=1000).write(path, "w", np.zeros(4, np.float32))
        store = LocalStore(str(path))
        chunks = Chunks(Cabinet.at(store, ""), "w")
        grid = chunks.grid
        huge = type(grid)(type(grid.spec)((2**50,), grid.spec.dtype), (1,), None, ".")
        chunks.grid = huge
        assert list(chunks.values(Region.whole((2**50,)))) == [(0,)]
        assert chunks.pieces(ArrayFiles()) is None


def test_names_of_arrays_in_a_database_are_one_part_of_a_place(tmp_path: Path) -> None:
    Layout("zarr", True).write(tmp_path, "w", DATA)
    cabinet = Cabinet.at(LocalStore(str(tmp_path)), "")
    places = {name: cabinet.place_of(name) for name in ("a.b", "a/b", "..", "", "50%", "a\\b")}
    assert all("/" not in place and "\\" not in place for place in places.values())
    assert len(set(places.values())) == len(places)
    assert cabinet.arrays() == ["w"]
    assert cabinet.names_in("w") == [".zarray", "0.0"]


def test_files_are_as_long_as_what_is_in_them_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    files = ArrayFiles()
    assert [files.number(FileSpan(name, 5, n)) for name, n in (("a", 3), ("b", 7), ("a", 4))] == [0, 1, 0]
    assert [(f.name, f.size) for f in files.listed(LocalStore(str(tmp_path)), ["c", "a"])] == [
        ("a", 10),
        ("b", 12),
        ("c", 0),
    ]


def test_another_array_than_the_described_one_is_refused(tmp_path: Path) -> None:
    store, leaf, _ = described(tmp_path, Layout("zarr", False))
    other = StoredArray(leaf.path, type(leaf.spec)((3, 3), leaf.spec.dtype), (), ForeignArray("a.w", "some kind"))
    with pytest.raises(shardkeep.IntegrityError, match=r"describes float32\[6, 8\], but the manifest says"):
        ChunkedReader(store, other, lambda _: True).read(Region((0, 0), (1, 1)))
