"""Descriptions of zarr arrays, version 2 and 3: grids of chunks, their names, their indexes, and impossible ones."""

import json
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.foreign.crc32c import crc32c
from shardkeep.foreign.grids import Grid, Shards, parse_grid
from shardkeep.model.arrays import ArraySpec, Region

V2: dict[str, Any] = {
    "zarr_format": 2, "shape": [4, 6], "chunks": [2, 3], "dtype": "<f4", "compressor": None, "fill_value": None,
    "filters": None, "order": "C",
}  # fmt: skip
SHARDING: dict[str, Any] = {
    "name": "sharding_indexed",
    "configuration": {
        "chunk_shape": [1, 3],
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    },
}
V3: dict[str, Any] = {
    "zarr_format": 3, "node_type": "array", "shape": [4, 6], "data_type": "bfloat16", "fill_value": 0.0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
    "chunk_key_encoding": {"name": "default"}, "codecs": [SHARDING],
}  # fmt: skip


def parse(document: dict[str, Any], **changes: Any) -> Grid:
    name = ".zarray" if document["zarr_format"] == 2 else "zarr.json"
    return parse_grid(name, json.dumps(document | changes).encode(), "x")


def test_both_versions() -> None:
    two, three = parse(V2), parse(V3)
    assert (two.spec, two.chunks, two.compressor, two.is_plain) == (
        ArraySpec((4, 6), np.dtype("f4")),
        (2, 3),
        None,
        True,
    )
    assert two.chunk_names(Region.whole((4, 6))) == ["0.0", "0.1", "1.0", "1.1"]
    assert (three.spec.dtype.name, three.compressor, three.stored_shape) == ("bfloat16", "zstd", (1, 3))
    assert three.chunk_names(Region.whole((4, 6))) == ["c/0/0", "c/0/1", "c/1/0", "c/1/1"]
    assert [region.start for region in three.stored_regions((2, 3))] == [(2, 3), (3, 3)]


def test_names_tell_where_a_chunk_starts() -> None:
    for grid in (parse(V2), parse(V2, dimension_separator="/"), parse(V3)):
        for name, start in grid.each_chunk(Region.whole((4, 6))):
            assert grid.start_of(name) == start
        for name in ("", "zarr.json", ".zarray", "0", "c", "0.0.0", "00.0", "-1.0", "c/0", "c/00/0", "\u0660.0"):
            assert grid.start_of(name) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"order": "F"}, {"dtype": ">f4"}, {"filters": [{"id": "delta"}]},
    ],
)  # fmt: skip
def test_what_is_not_plain_is_said(changes: dict[str, Any]) -> None:
    assert not parse(V2, **changes).is_plain
    assert not parse(V3, codecs=[{"name": "transpose"}, {"name": "bytes"}]).is_plain
    assert not parse(V3, codecs=[{"name": "bytes", "configuration": {"endian": "big"}}]).is_plain


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (None, "<f4", None),
        (0, "<f4", None),
        (1.5, "<f4", np.float32(1.5).tobytes()),
        ("NaN", "<f4", np.float32("nan").tobytes()),
        ("0x7fc00001", "<f4", (0x7FC00001).to_bytes(4, "little")),
        ([1.0, "NaN"], "<c8", np.complex64(complex(1, float("nan"))).tobytes()),
        (True, "|b1", b"\1"),
    ],
)
def test_fill_values(value: Any, dtype: str, expected: bytes | None) -> None:
    assert parse(V2, fill_value=value, dtype=dtype).filler("x") == expected


@pytest.mark.parametrize("value", ["abc", "0x00", [1], {}, "0xzz"])
def test_an_unknown_fill_value_is_refused_when_it_is_needed(value: Any) -> None:
    grid = parse(V2, fill_value=value)
    with pytest.raises(shardkeep.IntegrityError, match="x has the fill value .* which is not supported"):
        grid.filler("x")


IMPOSSIBLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (V2, {"shape": [-1, 6]}), (V2, {"shape": [4]}), (V2, {"chunks": [0, 3]}), (V2, {"chunks": [2, 2**62]}),
    (V2, {"shape": [2**62, 2**62]}), (V2, {"dtype": "O"}), (V2, {"dimension_separator": "-"}), (V2, {"shape": None}),
    (V3, {"zarr_format": 4}), (V3, {"node_type": "group"}), (V3, {"data_type": "string"}),
    (V3, {"chunk_grid": {"name": "rectangular"}}), (V3, {"chunk_key_encoding": {"name": "other"}}),
    (V3, {"storage_transformers": [1]}), (V3, {"codecs": [SHARDING, {"name": "zstd"}]}),
    (V3, {"codecs": [SHARDING | {"configuration": SHARDING["configuration"] | {"chunk_shape": [2, 2]}}]}),
    (V3, {"codecs": [SHARDING | {"configuration": SHARDING["configuration"] | {"index_location": "middle"}}]}),
    (V3, {"codecs": [SHARDING | {"configuration": SHARDING["configuration"] | {"index_codecs": []}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("document", "changes"), IMPOSSIBLE)
def test_an_impossible_array_is_refused(document: dict[str, Any], changes: dict[str, Any]) -> None:
    name = ".zarray" if document is V2 else "zarr.json"
    with pytest.raises(shardkeep.IntegrityError, match="x (is not a valid|does not describe a valid)"):
        parse_grid(name, json.dumps(document | changes).encode(), "x")


def test_an_index_is_checked() -> None:
    shards = Shards((1, 3), at_end=True, checked=True)
    raw = np.array([0, 10, 2**64 - 1, 2**64 - 1], "<u8").tobytes()
    index = raw + crc32c(raw).to_bytes(4, "little")
    assert shards.index_bytes((2, 3)) == len(index) == 36
    assert shards.decode_index(index, 46, "x") == [(0, 10), None]
    with pytest.raises(shardkeep.IntegrityError, match="does not match its CRC-32C"):
        shards.decode_index(b"\1" + index[1:], 46, "x")
    with pytest.raises(shardkeep.IntegrityError, match="outside its chunk"):
        shards.decode_index(index, 9, "x")
