"""What holds of every Layout: shards are split without loss, and every piece gets one place that nothing else has."""

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkeep.layouts.codecs import CODECS, ZSTD
from shardkeep.layouts.plan import Draft, FilePlan, Layout, PiecePlan, StagedArray, plan_pieces, plan_save
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.layouts.zarr import ZarrLayout
from shardkeep.model.arrays import ArraySpec, Region, dtype_from_name, is_partition
from shardkeep.model.leaves import UNSHARDED
from shardkeep.model.naming import check_name
from shardkeep.model.tree import Skeleton

SAVE_ID = "0123456789abcdef" * 2
DRAFT = Draft(SAVE_ID, "", Skeleton(None), {}, "")
NAMES = st.sampled_from(["w", "W", "0", "0.0", ".zarray", "a/b", "..", "", "é", "\ud800", "x" * 300]) | st.text(
    max_size=4
)
# (extent, shards along it): some are large enough to be split further, and no data is made of them.
SIDES = st.sampled_from([(0, 1), (1, 1), (3, 1), (8, 4), (512, 8), (1 << 13, 2)])
DTYPES = st.sampled_from(["bool", "int4", "bfloat16", "float32", "complex128", "datetime64[s]"]).map(dtype_from_name)


@st.composite
def arrays(draw: Any) -> tuple[ArraySpec, tuple[Region, ...]]:
    """An array and the grid of shards a process holds of it."""
    sides = draw(st.lists(SIDES, max_size=3).filter(lambda sides: math.prod(n for n, _ in sides) <= 1 << 27))
    shape, counts = tuple(n for n, _ in sides), tuple(k for _, k in sides)
    step = tuple(n // k for n, k in sides)
    starts = [tuple(i * n for i, n in zip(index, step, strict=True)) for index in np.ndindex(*counts)]
    return ArraySpec(shape, draw(DTYPES)), tuple(Region(start, step) for start in starts)


@st.composite
def trees(draw: Any) -> list[StagedArray]:
    """Arrays of one tree: none lies below another."""
    paths: list[tuple[str, ...]] = draw(st.lists(st.lists(NAMES, min_size=1, max_size=3).map(tuple), max_size=5))
    kept = [p for i, p in enumerate(paths) if not any(p[: len(q)] == q or q[: len(p)] == p for q in paths[:i])]
    leaves, first = [], 0
    for path in kept:
        spec, held = draw(arrays())
        leaves.append(StagedArray(path, spec, UNSHARDED, held, first))
        first += len(held)
    return leaves


FORMATS: dict[str, Callable[[], Layout]] = {
    "safetensors": SafetensorsLayout,
    "tensorstore": ZarrLayout,
    "zstd": lambda: ZarrLayout(ZSTD),
}
few = settings(max_examples=40)
every_format = pytest.mark.parametrize("format", [make() for make in FORMATS.values()], ids=FORMATS)


def laid_out(format: Layout, leaves: list[StagedArray], directory: str = "m") -> tuple[list[PiecePlan], list[FilePlan]]:
    pieces = plan_pieces(leaves, format.split, format.whole)
    files = plan_save(format, leaves, [DRAFT]).trees[0].named(f"{directory}/" if directory else "").files
    return pieces, list(files)


def _array(name: str, *shape: int) -> StagedArray:
    return StagedArray((name,), ArraySpec(shape, np.dtype("f4")), UNSHARDED, (Region.whole(shape),))


@every_format
@few
@given(array=arrays())
def test_a_shard_is_split_without_loss(format: Layout, array: tuple[ArraySpec, tuple[Region, ...]]) -> None:
    spec, held = array
    for shard in held[:2]:
        parts = format.split(spec, shard)
        assert is_partition(shard.shape, [part.within(shard) for part in parts])
        assert len({part.shape for part in parts}) == 1


@every_format
@few
@given(leaves=trees())
def test_every_piece_is_placed_once(format: Layout, leaves: list[StagedArray]) -> None:
    pieces, files = laid_out(format, leaves)
    placed = [piece for file in files for piece in file.pieces]
    assert len(placed) == len(pieces)
    assert {_what(piece) for piece in placed} == {_what(piece) for piece in pieces}


def _what(piece: PiecePlan) -> Any:
    """A piece, wherever it is placed."""
    return piece.array, piece.region, piece.nbytes, piece.sources


@every_format
@few
@given(leaves=trees())
def test_header_and_pieces_fill_a_file_and_do_not_overlap(format: Layout, leaves: list[StagedArray]) -> None:
    for file in laid_out(format, leaves)[1]:
        end = len(file.header)
        for piece in sorted(file.pieces, key=lambda p: (p.offset, p.nbytes)):
            assert piece.offset == end
            end += piece.nbytes
        if file.size is None:  # compression decides: then the piece is all there is
            assert (len(file.pieces), file.header, format.codec.name) == (1, b"", "zstd")
        else:
            assert file.size == end


@every_format
@few
@example(leaves=[_array("w"), _array("W"), _array("é"), _array("e\u0301")], directory="")
@given(leaves=trees(), directory=st.sampled_from(["", "m", "m/n", f"~{SAVE_ID}"]))
def test_files_lie_below_the_directory_under_names_of_their_own(
    format: Layout, leaves: list[StagedArray], directory: str
) -> None:
    names = [file.name for file in laid_out(format, leaves, directory)[1]]
    for name in names:
        assert check_name(name).startswith(f"{directory}/" if directory else "")
        assert all(len(part.encode()) < 250 for part in name.split("/"))
    assert len({name.casefold() for name in names}) == len(names)
    parents = {name[:i] for name in names for i, c in enumerate(name) if c == "/"}
    assert not parents & set(names)


@every_format
@few
@given(leaves=trees())
def test_the_same_tree_is_laid_out_the_same(format: Layout, leaves: list[StagedArray]) -> None:
    assert laid_out(format, leaves) == laid_out(format, leaves)


@every_format
def test_without_arrays_there_is_no_file(format: Layout) -> None:
    assert laid_out(format, []) == ([], [])


@every_format
def test_an_empty_array_has_a_place_too(format: Layout) -> None:
    _, (file,) = laid_out(format, [_array("e", 3, 0)])
    (piece,) = file.pieces
    assert (piece.nbytes, piece.offset) == (0, file.size)


@few
@given(trees())
def test_every_safetensors_file_carries_the_save_in_its_name(leaves: list[StagedArray]) -> None:
    """So no two saves ever share a name, and none needs a claim."""
    assert all(SAVE_ID in file.name for file in laid_out(SafetensorsLayout(), leaves)[1])


@few
@given(trees())
def test_every_piece_in_a_safetensors_file_has_a_tensor_of_its_own(leaves: list[StagedArray]) -> None:
    for file in laid_out(SafetensorsLayout(), leaves)[1]:
        tensors = json.loads(file.header[8:], object_pairs_hook=lambda pairs: pairs)
        names = [name for name, _ in tensors if name != "__metadata__"]
        assert sorted(names) == sorted(piece.name for piece in file.pieces)
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("compression", [None, "zstd"])
@few
@given(leaves=trees())
def test_every_zarr_array_has_a_description_and_chunks_in_which_pieces_lie_in_order(
    compression: str | None, leaves: list[StagedArray]
) -> None:
    """What other programs take for one array is also each of its pieces, one after another."""
    _, files = laid_out(ZarrLayout(CODECS[compression]), leaves)
    found = [list(group) for _, group in itertools.groupby(files, key=lambda file: file.name.rpartition("/")[0])]
    assert len(found) == len(leaves)
    for description, *chunks in found:
        assert description.name.endswith("/.zarray")
        declared = json.loads(description.header)
        extents, places = declared["chunks"], np.arange(math.prod(declared["shape"])).reshape(declared["shape"])
        for chunk in chunks:
            index = [int(i) for i in chunk.name.rpartition("/")[2].split(".")] if extents else []
            inside = places[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, extents, strict=True))]
            assert list(inside.shape) == extents
            assert inside.ravel().tolist() == [
                place for piece in chunk.pieces for place in places[piece.region.slices].ravel().tolist()
            ]
            assert compression is None or len(chunk.pieces) == 1
