"""Safetensors files of other programs: hostile headers and indexes give errors that name the file."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep

EXAMPLES = int(os.environ.get("SHARDKEEP_EXAMPLES", "150"))


NASTY: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**53, 2**63, 10**30, 0.5, "", "F32", "F4", "F6_E2M3", "I64", "BOOL", "x", [], {},
    [0], [0, 0], [-1, 4], [4, 0], [0, 2**62], [2**40] * 3, [1.5, 2], ["a"], [0] * 70, {"a": 1}, [[]],
]  # fmt: skip


def _write_safetensors(path: Path, header: Any, data: bytes = b"\0" * 64, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_changed_safetensors_header_gives_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "dtypes": "{}"},
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b.c": {"dtype": "U8", "shape": [32], "data_offsets": [32, 64]},
    }
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(list(header)))
        value = data.draw(st.sampled_from(NASTY))
        if isinstance(header[name], dict) and header[name] and data.draw(st.booleans()):
            header[name][data.draw(st.sampled_from([*header[name], "shardkeep", "digest", "save", "dtypes"]))] = value
        elif data.draw(st.booleans()):
            header[data.draw(st.sampled_from(["", "a.", "b", "\0", "__metadata__", "x/../y", "a"]))] = header[name]
        else:
            header[name] = value
    _write_safetensors(path, header, length=data.draw(st.sampled_from([None, None, None, 0, 7, 2**63, 2**40])))
    for action in (shardkeep.load, shardkeep.inspect, shardkeep.verify, shardkeep.exists):
        try:
            action(path)
        except shardkeep.ShardkeepError:
            pass


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"a":1}',
        b'{"a":{}}',
        b'{"a":{"dtype":"F32"}}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"__metadata__":5}',
    ],
)
def test_a_broken_safetensors_header_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    _write_safetensors(path, header)
    with pytest.raises(shardkeep.IntegrityError, match=r"x\.safetensors"):
        shardkeep.load(path)
    assert not shardkeep.verify(path).ok
    assert not shardkeep.exists(path)


@pytest.mark.parametrize(
    "dtypes",
    [
        '{"a": "object"}',
        '{"a": "float64"}',
        '{"a": 5}',
        "[]",
        "{",
        '{"a": "datetime64[9999999999999999999s]"}',
        "[" * 99_999,
    ],
)
def test_a_note_of_a_dtype_that_does_not_fit_is_an_error_or_ignored(tmp_path: Path, dtypes: str) -> None:
    path = tmp_path / "x.safetensors"
    header = {"__metadata__": {"dtypes": dtypes}, "a": {"dtype": "U8", "shape": [4, 16], "data_offsets": [0, 64]}}
    _write_safetensors(path, header)
    try:
        loaded = shardkeep.load(path)
    except shardkeep.ShardkeepError as error:
        assert "x.safetensors" in str(error)  # noqa: PT017  (either is right)
    else:
        assert np.asarray(loaded["a"]).nbytes == 64


INDEXES: list[Any] = [
    b"", b"{}", b"[]", b"null", b"[" * 100_000, {"weight_map": 5}, {"weight_map": {"a": 5}},
    {"weight_map": {"a": "../x.safetensors"}}, {"weight_map": {"a": "/etc/passwd"}},
    {"weight_map": {"a": "gone.safetensors"}}, {"weight_map": {"a": "m.safetensors.index.json"}},
    {"weight_map": {"a": ""}}, {"weight_map": {"a": None}}, {"metadata": 5, "weight_map": {"a": "s.safetensors"}},
    {"metadata": {"shardkeep": 5}, "weight_map": {}}, {"metadata": {"shardkeep": "{}"}, "weight_map": {}},
    {"weight_map": {"a": "."}},
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=lambda index: str(index)[:60])
def test_a_hostile_index_gives_only_our_errors(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    for name in (path, tmp_path / "m.safetensors", tmp_path):
        with pytest.raises(shardkeep.ShardkeepError, match=str(tmp_path)):
            shardkeep.load(name)
        assert not shardkeep.exists(name)


def test_a_foreign_file_of_every_plain_dtype_loads(tmp_path: Path) -> None:
    tensors = {name: np.ones((2, 3), name) for name in ("float32", "int8", "uint16", "bool", "float16")}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", metadata={"who": "someone else"})
    loaded = shardkeep.load(tmp_path / "x.safetensors")
    assert {name: jnp.asarray(array).dtype.name for name, array in loaded.items()} == {name: name for name in tensors}
    assert shardkeep.verify(tmp_path / "x.safetensors").unchecked == 5
