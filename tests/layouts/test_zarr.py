"""Files of the tensorstore format: zarr arrays that TensorStore and zarr-python read, shards in their chunks."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from dtypes import EXTENDED, NO_ZARR_NAME, NUMPY, SIX_BITS, TIMES, WIDE, dtype_of
from shardkeep.layouts.codecs import CODECS
from shardkeep.layouts.plan import Draft, FilePlan, PiecePlan, StagedArray, plan_save
from shardkeep.layouts.zarr import ZarrLayout
from shardkeep.model.arrays import ArraySpec, Region, cut, is_partition, split_counts
from shardkeep.model.leaves import UNSHARDED
from shardkeep.model.shares import Shares, Writers
from shardkeep.model.tree import Skeleton
from shardkeep.stores.local.mapping import Pages
from support import assert_same, bits, mesh_of, pattern

P = PartitionSpec
KNOWN_TO_TENSORSTORE = [*NUMPY, *(name for name in EXTENDED if name not in NO_ZARR_NAME)]
AS_BITS = [*NO_ZARR_NAME, *SIX_BITS, *TIMES]
DRAFT = Draft("0" * 32, "", Skeleton(None), {}, "")
COMPRESSIONS = pytest.mark.parametrize("compression", [None, "zstd"])


def _open(directory: Path) -> np.ndarray:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory}/"}}
    return np.asarray(tensorstore.open(spec, read=True).result().read().result())


def _zarray(directory: Path) -> dict[str, Any]:
    return json.loads((directory / ".zarray").read_text())


def _save(path: Path, tree: Any, compression: str | None, **more: Any) -> None:
    shardkeep.save(path, tree, format="zarr", compression=compression, **more)


@COMPRESSIONS
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_tensorstore_reads_every_dtype_it_knows_under_its_own_name(compression: Any, make: Any, tmp_path: Path) -> None:
    names = [n for n in KNOWN_TO_TENSORSTORE if make is np.asarray or n not in WIDE]
    tree = {
        name: {str(len(shape)): make(pattern(dtype_of(name), shape)) for shape in [(), (7,), (3, 5)]} for name in names
    }
    _save(tmp_path / "c", tree, compression)
    for name, arrays in tree.items():
        for rank, array in arrays.items():
            found = _open(tmp_path / "c" / name / rank)
            assert found.dtype == dtype_of(name), name
            assert found.shape == array.shape
            # TensorStore brings the bits of 4- and 2-bit integers into its own form.
            if name in ("int4", "int2"):
                assert (found.astype(int) == np.asarray(array).astype(int)).all()
            else:
                assert bits(found) == bits(array), name


@COMPRESSIONS
def test_dtypes_tensorstore_lacks_are_stored_as_their_bits(compression: Any, tmp_path: Path) -> None:
    tree = {name: pattern(dtype_of(name), (3, 5)) for name in AS_BITS}
    _save(tmp_path / "c", tree, compression)
    leaves = shardkeep.inspect(tmp_path / "c").leaves
    for (name, array), directory in zip(tree.items(), _directories(tmp_path / "c"), strict=True):
        found = _open(tmp_path / "c" / directory)
        assert found.dtype == np.dtype(f"u{array.dtype.itemsize}")
        assert bits(found) == bits(array)
        assert leaves[name].dtype == name
    assert_same(shardkeep.load(tmp_path / "c"), tree)


def _directories(path: Path) -> list[str]:
    """Where each leaf lies, in order, as the manifest says."""
    files = [file.name for file in shardkeep.inspect(path).tree().files]
    return [name[: -len("/.zarray")] for name in files if name.endswith("/.zarray")]


@COMPRESSIONS
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_zarr_python_reads_the_dtypes_it_knows(compression: Any, make: Any, tmp_path: Path) -> None:
    names = [n for n in NUMPY if make is np.asarray or n not in WIDE]
    tree = {name: make(pattern(dtype_of(name), (4, 6))) for name in names}
    _save(tmp_path / "c", tree, compression)
    for name, array in tree.items():
        opened = zarr.open_array(str(tmp_path / "c" / name), mode="r", zarr_format=2)
        assert opened.dtype == array.dtype
        assert bits(opened[...]) == bits(array)


@pytest.mark.parametrize(
    ("spec", "stacked"),
    [
        (P(), (2048, 1032)),
        (P("a"), (2048, 1032)),
        (P(None, "b"), (2048, 258)),
        (P("a", "b"), (2048, 258)),
        (P(("a", "b")), (2048, 1032)),
        (P("b", "a"), (2048, 516)),
    ],
)
@COMPRESSIONS
def test_a_chunk_is_a_shard_or_several_in_a_row_and_all_readers_put_them_together(
    compression: Any, spec: PartitionSpec, stacked: tuple[int, ...], tmp_path: Path
) -> None:
    """A compressed chunk is one: a shard is read without the others."""
    host = pattern("float32", (2048, 1032))
    array = jax.device_put(host, NamedSharding(mesh_of(2, 4), spec))
    _save(tmp_path / "c", {"w": array}, compression)
    expected = array.sharding.shard_shape(host.shape) if compression else stacked
    assert _zarray(tmp_path / "c" / "w")["chunks"] == list(expected)
    shards = math.prod(host.shape) // math.prod(array.sharding.shard_shape(host.shape))
    assert len(shardkeep.inspect(tmp_path / "c").leaves["w"].pieces) == shards
    assert bits(_open(tmp_path / "c" / "w")) == bits(host)
    assert bits(zarr.open_array(str(tmp_path / "c" / "w"), mode="r", zarr_format=2)[...]) == bits(host)
    loaded = shardkeep.load(tmp_path / "c", template={"w": array})["w"]
    assert loaded.sharding == array.sharding
    assert bits(loaded) == bits(host)


def test_an_uncompressed_chunk_is_exactly_the_bytes_of_its_region(tmp_path: Path) -> None:
    host = pattern("bfloat16", (4096, 1032))
    _save(tmp_path / "c", {"w": jax.device_put(host, NamedSharding(mesh_of(2, 4), P("a", "b")))}, None)
    for j in range(4):
        assert (tmp_path / "c" / "w" / f"0.{j}").read_bytes() == host[:, j * 258 : (j + 1) * 258].tobytes()


@pytest.mark.parametrize(
    ("shape", "shard", "expected"),
    [
        ((64, 4, 1 << 18), (1, 4, 1 << 17), (16, 4, 1 << 17)),  # 16 of 1 MiB each
        ((60, 4, 1 << 18), (1, 4, 1 << 17), (15, 4, 1 << 17)),  # 16 do not go into 60
        (
            (4, 8, 1 << 18),
            (1, 2, 1 << 18),
            (4, 8, 1 << 18),
        ),  # along both axes, since the shard has one row of the first
        ((4, 8, 1 << 18), (2, 2, 1 << 18), (4, 2, 1 << 18)),  # only along the first
        ((2, 40 << 20), (1, 40 << 20), (1, 40 << 20)),  # large enough alone
        ((1 << 22,), (1 << 20,), (1 << 22,)),
    ],
)
def test_how_many_shards_make_a_chunk(shape: Any, shard: Any, expected: Any) -> None:
    spec = ArraySpec(shape, np.dtype("u2"))
    counts = [n // k for n, k in zip(shape, shard, strict=True)]
    regions = cut(Region.whole(shape), counts)
    pieces = [PiecePlan(0, region, region.size * 2, ((i, region),)) for i, region in enumerate(regions)]
    leaf = StagedArray(("w",), spec, UNSHARDED, tuple(regions))
    description, *files = ZarrLayout().lay_out([leaf], pieces, DRAFT)
    assert tuple(json.loads(description.header)["chunks"]) == expected
    assert sum(file.size or 0 for file in files) == spec.nbytes
    assert {piece.region for file in files for piece in file.pieces} == {*regions}


def shared(shape: tuple[int, ...], counts: tuple[int, ...], writers: list[int], process: int) -> list[FilePlan]:
    """The files of one of several processes, for one array of bytes: each holds what it writes."""
    shares = Shares(shape, counts, Writers(np.array(writers)))
    spec = ArraySpec(shape, np.dtype("u1"))
    leaf = StagedArray(("w",), spec, UNSHARDED, shares.of(process), shares=shares)
    (tree,) = plan_save(ZarrLayout(), [leaf], [replace(DRAFT, process=process, processes=max(writers) + 1)]).trees
    return list(tree.files)


def test_an_empty_array_of_several_processes_is_written_by_one() -> None:
    (description,) = shared((0, 8), (1, 1), [1], 1)
    assert json.loads(description.header)["chunks"] == [1, 8]
    assert len(description.pieces) == 1
    assert shared((0, 8), (1, 1), [1], 0) == []


@pytest.mark.parametrize(
    ("writers", "expected"),
    [([0, 0, 1, 1, 2, 2, 3, 3], 2), ([0, 1, 2, 3] * 2, 1), ([0] * 8, 8), ([0] * 7 + [1], 1), ([1, 0, 0, 1] * 2, 1)],
)
def test_each_process_plans_its_own_chunks(writers: list[int], expected: int) -> None:
    """Without a look at those of the others. Together they are all; one process describes the array."""
    names: list[str] = []
    placed: list[Region] = []
    for process in range(max(writers) + 1):
        files = shared((8, 1 << 20), (8, 1), writers, process)
        names += [file.name for file in files]
        placed += [piece.region for file in files for piece in file.pieces]
        for file in files:
            if file.name.endswith(".zarray"):
                assert json.loads(file.header)["chunks"] == [expected, 1 << 20]
                assert process == writers[0]
            for piece in file.pieces:
                assert writers[piece.region.start[0]] == process
    assert sorted(names) == sorted(["w/.zarray", *(f"w/{i}.0" for i in range(8 // expected))])
    assert sorted(region.start for region in placed) == [(i, 0) for i in range(8)]


@COMPRESSIONS
@pytest.mark.parametrize("shape", [(1024, 1024), (1016, 1000), (8,), (0, 8)])
def test_an_array_of_up_to_two_mebibytes_is_one_chunk(compression: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    """However it is spread: eight files would take longer to make than it takes to put them together."""
    host = pattern("bfloat16", shape)
    spread = jax.device_put(host, NamedSharding(mesh_of(2, 4), P("a", "b") if len(shape) == 2 else P(("a", "b"))))
    _save(tmp_path / "c", {"w": spread}, compression)
    assert _zarray(tmp_path / "c" / "w")["chunks"] == [max(n, 1) for n in shape]
    assert bits(_open(tmp_path / "c" / "w")) == bits(host)
    loaded = shardkeep.load(tmp_path / "c", template={"w": spread})["w"]
    assert loaded.sharding == spread.sharding
    assert bits(loaded) == bits(host)


def test_the_shards_of_a_larger_array_can_be_mapped(tmp_path: Path) -> None:
    """They are not put together, whatever lies in one chunk."""
    host = pattern("bfloat16", (1032, 1024))
    spread = jax.device_put(host, NamedSharding(mesh_of(2, 4), P("a", "b")))
    _save(tmp_path / "c", {"w": spread}, None)
    assert _zarray(tmp_path / "c" / "w")["chunks"] == [1032, 256]
    assert len(list((tmp_path / "c" / "w").iterdir())) == 5
    report = shardkeep.verify(tmp_path / "c")
    assert report.ok
    before = len(Pages.addresses)
    loaded = shardkeep.load(tmp_path / "c", template={"w": spread})["w"]
    assert bits(loaded) == bits(host)
    assert len(Pages.addresses) > before


def test_no_chunk_is_larger_than_asked(tmp_path: Path) -> None:
    assert ZarrLayout(most=1 << 18).whole == 1 << 18
    assert ZarrLayout(most=1 << 30).whole == ZarrLayout().whole == 2 << 20


def test_a_scalar_and_an_empty_array_are_zarr_arrays(tmp_path: Path) -> None:
    _save(tmp_path / "c", {"s": np.array(3, np.float32), "e": np.zeros((3, 0, 2))}, None)
    assert _open(tmp_path / "c" / "s") == 3
    assert (tmp_path / "c" / "s" / "0").read_bytes() == np.float32(3).tobytes()
    assert _open(tmp_path / "c" / "e").shape == (3, 0, 2)
    assert zarr.open_array(str(tmp_path / "c" / "e"), mode="r", zarr_format=2).shape == (3, 0, 2)


def test_the_description_is_plain_zarr_v2(tmp_path: Path) -> None:
    _save(tmp_path / "c", {"w": jnp.ones((2, 3))}, "zstd")
    description = _zarray(tmp_path / "c" / "w")
    assert description == {
        "zarr_format": 2,
        "shape": [2, 3],
        "chunks": [2, 3],
        "dtype": "<f4",
        "compressor": {"id": "zstd", "level": 1},
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }


@COMPRESSIONS
def test_a_prefix_and_nested_keys_are_directories(compression: Any, tmp_path: Path) -> None:
    _save(tmp_path / "c", {"layers": [{"w": np.arange(3)}]}, compression, prefix="model.ema")
    assert _open(tmp_path / "c" / "model" / "ema" / "layers" / "0" / "w").tolist() == [0, 1, 2]


@COMPRESSIONS
def test_an_overwritten_tree_is_still_readable_where_the_manifest_says(compression: Any, tmp_path: Path) -> None:
    for number in range(3):
        _save(tmp_path / "c", {"w": np.full(4, number)}, compression, overwrite=True)
        (directory,) = _directories(tmp_path / "c")
        assert _open(tmp_path / "c" / directory).tolist() == [number] * 4
        assert _open(tmp_path / "c" / "w").tolist() == [number] * 4, "and under its clean name"
        assert len(list((tmp_path / "c").glob("~*"))) == (number > 0), "the replaced tree is gone"


def test_compression_makes_files_smaller(tmp_path: Path) -> None:
    tree = {"w": np.zeros(1 << 20, np.float32)}
    sizes = {}
    for compression in (None, "zstd"):
        _save(tmp_path / str(compression), tree, compression)
        sizes[compression] = (tmp_path / str(compression) / "w" / "0").stat().st_size
    assert sizes[None] == 4 << 20
    assert sizes["zstd"] < 4096


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4000))
def test_a_split_cuts_axes_into_equal_parts(shape: list[int], itemsize: int, limit: int) -> None:
    counts = split_counts(shape, itemsize, limit)
    assert all(n % k == 0 for n, k in zip(shape, counts, strict=True))
    if math.prod(shape) * itemsize <= limit:
        assert counts == [1] * len(shape)
    if max(shape) <= 40 and itemsize <= limit:  # axes this short are always cut far enough
        assert math.prod(n // k for n, k in zip(shape, counts, strict=True)) * itemsize <= limit


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("shape", [(1 << 16, 1 << 13), (3, 1 << 30), (7, 11, 1 << 22), (1 << 29,), (1, 1, 1 << 29)])
def test_large_shards_are_split_evenly_below_the_limit(compression: Any, shape: tuple[int, ...]) -> None:
    spec = ArraySpec(shape, np.dtype("f4"))
    parts = ZarrLayout(CODECS[compression]).split(spec, Region.whole(shape))
    assert is_partition(shape, parts)
    assert len({part.shape for part in parts}) == 1
    assert all(part.size * 4 <= (64 << 20 if compression else 256 << 20) for part in parts)


def test_a_shard_split_in_chunks_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit lowered, so that a test need not write hundreds of megabytes."""
    monkeypatch.setattr("shardkeep.layouts.zarr._RAW_LIMIT", 1 << 18)
    monkeypatch.setattr("shardkeep.layouts.zarr._COMPRESSED_LIMIT", 1 << 17)
    host = pattern("float32", (768, 1000))
    tree = {"w": jax.device_put(host, NamedSharding(mesh_of(2, 4), P("a", "b"))), "whole": jnp.asarray(host), "n": host}
    for compression in (None, "zstd"):
        path = tmp_path / str(compression)
        _save(path, tree, compression)
        assert_same(shardkeep.load(path), tree)
        for name in tree:
            assert len(shardkeep.inspect(path).leaves[name].pieces) > 8
            assert bits(_open(path / name)) == bits(host)
        loaded = shardkeep.load(path, mesh=mesh_of(8), shardings=P(None, "a"), mmap=False)
        assert bits(loaded["w"]) == bits(host)
