"""Files of the safetensors format: laid out for mapping, readable by the safetensors package, headers checked."""

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from dtypes import EXTENDED, NUMPY, SIX_BITS, TIMES, dtype_of
from shardkeep.errors import IntegrityError
from shardkeep.layouts.safetensors import TO_CODE, decode_header, encode_header, group_by_size, header_length
from support import assert_same, bits, mesh_of, pattern, save_as

P = PartitionSpec
DTYPES = [*NUMPY, *EXTENDED, *SIX_BITS, *TIMES]


def _raw(file: Path) -> dict[str, dict[str, Any]]:
    """What the package itself finds in a file: name → dtype, shape, data."""
    return dict(safetensors.deserialize(file.read_bytes()))


def _header(file: Path) -> tuple[dict[str, Any], int]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """Arrays of every dtype and some shapes, as a directory and as an exchange file."""
    tree = {
        f"{name} {shape}": pattern(dtype_of(name), shape, seed)
        for seed, name in enumerate(DTYPES)
        for shape in [(), (0, 3), (5,), (2, 32), (3, 7)]
    }
    place = tmp_path_factory.mktemp("everything")
    return save_as("safetensors", place / "c", tree), save_as("exchange", place / "c", tree), tree


@pytest.mark.parametrize("which", [0, 1])
def test_the_package_reads_every_byte_of_everydtype_of(everything: Any, which: int) -> None:
    (file,) = _files(everything[which])
    found, tree = _raw(file), everything[2]
    assert set(found) == set(tree)
    for name, array in tree.items():
        entry = found[name]
        assert bytes(entry["data"]) == array.tobytes(), name
        code = TO_CODE.get(array.dtype.name)
        assert entry["dtype"] == (code or "U8"), name
        expected = list(array.shape)
        if code is None and array.dtype.itemsize > 1:
            expected.append(array.dtype.itemsize)
        assert list(entry["shape"]) == expected, name


@pytest.mark.parametrize("which", [0, 1])
def test_the_packages_numpy_reader_gives_equal_arrays(everything: Any, which: int) -> None:
    (file,) = _files(everything[which])
    readable = {"bool", "float16", "float32", "float64"} | {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
    count = 0
    with safetensors.safe_open(file, framework="numpy") as handle:
        for name, array in everything[2].items():
            if array.dtype.name in readable:
                tensor = handle.get_tensor(name)
                assert tensor.dtype == array.dtype
                assert tensor.shape == array.shape
                assert bits(tensor) == bits(array)
                count += 1
    assert count == len(readable) * 5


@pytest.mark.parametrize("kind", ["safetensors", "exchange"])
def test_the_packages_flax_reader_gives_equal_arrays(kind: str, tmp_path: Path) -> None:
    tree = {"w": jnp.asarray(pattern("bfloat16", (4, 8))), "b": jnp.arange(3), "layer.0": jnp.ones((2, 0))}
    (file,) = _files(save_as(kind, tmp_path / "c", tree))
    found = safetensors.flax.load_file(file)
    names = {"w": "w", "b": "b", "layer.0": "layer.0" if kind == "exchange" else "layer\\.0"}
    for name, array in tree.items():
        assert found[names[name]].dtype == array.dtype
        assert bits(found[names[name]]) == bits(array)


def test_dtypes_the_format_lacks_are_noted_in_the_header(everything: Any) -> None:
    for path in everything[:2]:
        (file,) = _files(path)
        notes = json.loads(_header(file)[0]["__metadata__"]["dtypes"])
        assert notes == {k: a.dtype.name for k, a in everything[2].items() if a.dtype.name not in TO_CODE}


@pytest.mark.parametrize("which", [0, 1])
def test_data_starts_on_a_page_and_whole_cache_lines_on_64(everything: Any, which: int) -> None:
    (file,) = _files(everything[which])
    header, start = _header(file)
    assert start % 4096 == 0
    ragged = False
    for name, entry in sorted(
        ((k, v) for k, v in header.items() if k != "__metadata__"), key=lambda item: item[1]["data_offsets"]
    ):
        begin, end = entry["data_offsets"]
        if (end - begin) % 64 == 0:
            assert (start + begin) % 64 == 0, name
            assert not ragged or begin == end, f"{name} stands behind a piece of odd length"
        else:
            ragged = True
    assert ragged


@settings(max_examples=25)
@given(st.lists(st.integers(0, 300), max_size=12))
def test_pieces_of_any_length_are_aligned_where_they_can_be(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    tree = {str(i): np.zeros(n, np.uint8) for i, n in enumerate(sizes)}
    for kind in ("safetensors", "exchange"):
        path = save_as(kind, tmp_path_factory.mktemp("any") / "c", tree)
        for file in _files(path):
            header, start = _header(file)
            entries = [v["data_offsets"] for k, v in header.items() if k != "__metadata__"]
            assert start % 4096 == 0
            assert all((start + a) % 64 == 0 for a, b in entries if (b - a) % 64 == 0 and b > a)
            assert set(_raw(file)) == set(tree)


def test_the_manifest_says_where_each_piece_lies(everything: Any) -> None:
    """Another program can find the bytes by the manifest alone."""
    path, _, tree = everything
    for name, leaf in shardkeep.inspect(path).leaves.items():
        (piece,) = leaf.pieces
        (file,) = shardkeep.inspect(path).tree().files
        data = (path / file.name).read_bytes()[piece.offset : piece.offset + piece.length]
        assert data == tree[name].tobytes()


def test_shards_carry_their_region_in_the_name(tmp_path: Path) -> None:
    host = pattern("float32", (512, 1024))
    tree = {"a.b": jax.device_put(host, NamedSharding(mesh_of(2, 4), P("a", "b"))), "c": jnp.ones(2)}
    shardkeep.save(tmp_path / "c", tree)
    (file,) = _files(tmp_path / "c")
    found = _raw(file)
    assert len(found) == 9
    for name, entry in found.items():
        if name != "c":
            start = name.index("\\[")
            assert name[:start] == "a\\.b"
            rows, columns = ([int(n) for n in part.split(":")] for part in name[start + 2 : -1].split(","))
            assert bytes(entry["data"]) == host[slice(*rows), slice(*columns)].tobytes()


AWKWARD = [
    "",
    "\\",
    "..",
    "/",
    "__metadata__",
    "a.b",
    "\0",
    "\n",
    "é",
    "😀",
    "\udc80",
    "\ud83d\ude00",
    "k" * 1000,
    '"',
    "a\\[0:2]",
]


@pytest.mark.parametrize("key", AWKWARD)
def test_the_package_reads_a_file_whatever_the_keys_are(key: str, tmp_path: Path) -> None:
    array = np.arange(5, dtype=np.float32)
    shardkeep.save(tmp_path / "c", {key: array, "other": np.ones(2)})
    (file,) = _files(tmp_path / "c")
    found = _raw(file)
    assert len(found) == 2
    assert array.tobytes() in [bytes(entry["data"]) for entry in found.values()]
    with safetensors.safe_open(file, framework="numpy") as handle:
        assert handle.get_tensor("other").tolist() == [1, 1]


def test_two_keys_that_look_alike_in_json_have_two_tensors(tmp_path: Path) -> None:
    """A pair of surrogates and the character they stand for are different keys."""
    tree = {"\ud83d\ude00": np.zeros(2), "😀": np.ones(2)}
    shardkeep.save(tmp_path / "c", tree)
    (file,) = _files(tmp_path / "c")
    assert len(_raw(file)) == 2
    loaded = shardkeep.load(tmp_path / "c")
    assert [loaded[k].tolist() for k in tree] == [[0, 0], [1, 1]]


def test_an_empty_tree_has_no_file_and_a_tree_of_values_neither(tmp_path: Path) -> None:
    for number, tree in enumerate(({}, {"step": 1}, None)):
        shardkeep.save(tmp_path / str(number), tree)
        assert _files(tmp_path / str(number)) == []
        assert shardkeep.load(tmp_path / str(number)) == tree


def test_a_checkpoint_of_many_leaves_is_a_few_files(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {str(i): np.full(3, i) for i in range(2000)})
    assert len([p for p in (tmp_path / "c").rglob("*") if p.is_file()]) <= 4


def test_headers_stay_within_the_limit_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long keys make long headers: rather more files than one that no reader of the format accepts."""
    monkeypatch.setattr("shardkeep.layouts.safetensors.HEADER_LIMIT", 20_000)
    tree = {f"{i:04}" + "k" * 200: np.full(2, i) for i in range(300)}
    shardkeep.save(tmp_path / "c", tree)
    assert_same(shardkeep.load(tmp_path / "c"), tree)
    assert all(_header(file)[1] <= 8 + 20_000 for file in _files(tmp_path / "c"))


def test_files_honour_the_umask(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.ones(2)})
    (file,) = _files(tmp_path / "c")
    (tmp_path / "plain").write_bytes(b"")
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "c" / "manifest.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(1, 25))
def test_groups_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    groups = group_by_size(sizes, list(enumerate(sizes)), limit)
    assert [item for group in groups for item in group] == list(enumerate(sizes))
    assert all(groups)
    assert all(len(group) == 1 or sum(size for _, size in group) <= limit for group in groups)


_ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def _document(header: Any, data: int = 24) -> tuple[bytes, int]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + data


def entries_of(tensors: Mapping[str, object]) -> list[str]:
    return [json.dumps({name: entry})[1:-1] for name, entry in tensors.items()]


def test_a_header_goes_out_and_comes_in() -> None:
    tensors = {"w": _ENTRY, "": {"dtype": "U8", "shape": [0], "data_offsets": [24, 24]}}
    start = encode_header({"format": "pt", "é": "\ud800"}, entries_of(tensors), room=5000)
    assert len(start) % 4096 == 0
    metadata, found, begin = decode_header(start, len(start) + 24, "x")
    assert (metadata, found, begin) == ({"format": "pt", "é": "\ud800"}, tensors, len(start))


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"", 0),
        (b"not json", 0),
        (b"[]", 0),
        (b"3", 0),
        (b'{"a":1}', 0),
        (b'{"a":[]}', 0),
        (b'{"a":{}}', 0),
        (b'{"w":%s,"w":%s}' % ((json.dumps(_ENTRY).encode(),) * 2), 24),
        (b"{" + b'"a":{' * 100_000, 0),
        ({"w": {**_ENTRY, "dtype": "F33"}}, 24),
        ({"w": {**_ENTRY, "dtype": ["F32"]}}, 24),
        ({"w": {**_ENTRY, "shape": [2, 4]}}, 24),
        ({"w": {**_ENTRY, "shape": [-2, -3]}}, 24),
        ({"w": {**_ENTRY, "shape": [2.0, 3]}}, 24),
        ({"w": {**_ENTRY, "shape": [True, 6]}}, 24),
        ({"w": {**_ENTRY, "shape": "23"}}, 24),
        ({"w": {**_ENTRY, "shape": [2**64, 3, 2**64]}}, 24),
        ({"w": {**_ENTRY, "shape": [1] * 100 + [6]}}, 24),
        ({"w": {**_ENTRY, "shape": [0, 2**63 - 1], "data_offsets": [0, 0]}}, 0),
        ({"w": {**_ENTRY, "data_offsets": [24, 0]}}, 24),
        ({"w": {**_ENTRY, "data_offsets": [0]}}, 24),
        ({"w": {**_ENTRY, "data_offsets": [0, 24, 48]}}, 24),
        ({"w": {**_ENTRY, "data_offsets": [-4, 20]}}, 24),
        ({"w": {**_ENTRY, "data_offsets": None}}, 24),
        ({"w": {**_ENTRY, "data_offsets": [8, 32]}}, 32),
        ({"w": _ENTRY, "v": {**_ENTRY, "data_offsets": [12, 36]}}, 36),
        ({"w": _ENTRY, "v": {**_ENTRY, "data_offsets": [32, 56]}}, 56),
        ({"w": _ENTRY, "v": _ENTRY}, 24),
        ({"w": _ENTRY}, 23),
        ({"w": _ENTRY}, 25),
        ({"__metadata__": {"a": 1}, "w": _ENTRY}, 24),
        ({"__metadata__": "x", "w": _ENTRY}, 24),
        ({"__metadata__": None, "w": _ENTRY}, 24),
    ],
)
def test_a_malformed_header_is_an_integrity_error(header: Any, size: int) -> None:
    document, total = _document(header, size)
    with pytest.raises(IntegrityError, match="here"):
        decode_header(document, total, "here")


@pytest.mark.parametrize("start", [b"", b"\0" * 7, struct.pack("<Q", 2**63), struct.pack("<Q", 100), b"\xff" * 8])
def test_a_length_beyond_the_file_is_refused_before_anything_is_read(start: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"not a safetensors file|too short"):
        header_length(start, 50, "here")


def test_a_header_above_the_limit_of_the_format_is_refused() -> None:
    with pytest.raises(IntegrityError, match="not a safetensors file"):
        header_length(struct.pack("<Q", 100_000_001), 10**12, "here")


_V = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
_GOOD = encode_header({"format": "pt"}, entries_of({"w": _ENTRY, "v": _V}))
_TEXT = len(_GOOD.rstrip())


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, _TEXT - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_header_changed_anywhere_is_read_or_an_integrity_error(changes: list[tuple[int, int]]) -> None:
    document = bytearray(_GOOD)
    for at, value in changes:
        document[at] = value
    with suppress(IntegrityError):
        decode_header(bytes(document), len(_GOOD) + 32, "here")
