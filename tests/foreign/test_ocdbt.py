"""OCDBT databases: every value as TensorStore reads it, in trees of any height, and refused where a bit is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore

import shardkeep
from shardkeep.foreign.crc32c import crc32c
from shardkeep.foreign.ocdbt import MANIFEST, FileSpan, read_database, read_value
from shardkeep.stores.local.store import LocalStore


def write(path: Path, values: dict[str, bytes], **config: Any) -> None:
    spec = {"driver": "ocdbt", "base": f"file://{path}/", "config": {"max_inline_value_bytes": 20, **config}}
    database = tensorstore.KvStore.open(spec).result()
    with tensorstore.Transaction() as transaction:
        for key, value in values.items():
            database.with_transaction(transaction)[key] = value


def read(path: Path) -> dict[str, bytes]:
    store = LocalStore(str(path))
    return {key: read_value(store, value) for key, value in read_database(store, "").values.items()}


def some(count: int) -> dict[str, bytes]:
    rng = np.random.default_rng(2)
    return {f"layers.{i}.w/{i % 7}.0": rng.bytes(int(rng.integers(0, 60))) for i in range(count)}


CONFIGS: dict[str, dict[str, Any]] = {
    "zstd": {"compression": {"id": "zstd", "level": 1}},
    "not compressed": {"compression": None},
    "many levels": {"max_decoded_node_bytes": 300},
    "all values in nodes": {"max_inline_value_bytes": 1000},
    "no values in nodes": {"max_inline_value_bytes": 0},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("count", [1, 400])
def test_values_are_those_that_were_written(config: str, count: int, tmp_path: Path) -> None:
    values = some(count)
    write(tmp_path, values, **CONFIGS[config])
    assert read(tmp_path) == values
    found = read_database(LocalStore(str(tmp_path)), "").values
    kinds = {type(found[key]) for key, value in values.items() if value}
    if "nodes" in config:
        assert kinds == {bytes if config.startswith("all") else FileSpan}


def test_the_newest_version_is_read(tmp_path: Path) -> None:
    values = some(50)
    write(tmp_path, values)
    for number in range(40):
        write(tmp_path, {"layers.0.w/0.0": bytes([number]), f"more.{number}": b"x"})
    assert read(tmp_path) == values | {"layers.0.w/0.0": bytes([39])} | {f"more.{n}": b"x" for n in range(40)}


def test_an_empty_database_has_no_values(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"1"})
    database = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    database.delete_range(tensorstore.KvStore.KeyRange()).result()
    assert read(tmp_path) == {}


def test_numbered_manifests_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"1"}, manifest_kind="numbered")
    write(tmp_path, {"b": b"2" * 100})
    assert read(tmp_path) == {"a": b"1", "b": b"2" * 100}


def test_every_wrong_bit_of_a_manifest_or_node_is_seen(tmp_path: Path) -> None:
    write(tmp_path, some(5), max_inline_value_bytes=1000)
    (node,) = read_database(LocalStore(str(tmp_path)), "").files - {MANIFEST}
    before_manifest = (tmp_path / MANIFEST).read_bytes()
    for name in (MANIFEST, node):
        before = (tmp_path / name).read_bytes()
        for at in range(0, len(before), 3):
            (tmp_path / name).write_bytes(before[:at] + bytes([before[at] ^ 1 << at % 8]) + before[at + 1 :])
            with pytest.raises(shardkeep.IntegrityError, match="is damaged|is truncated"):
                read(tmp_path)
        (tmp_path / name).write_bytes(before)
    assert (tmp_path / MANIFEST).read_bytes() == before_manifest
    assert len(read(tmp_path)) == 5


@pytest.mark.parametrize("path", ["../../outside", "/etc/passwd", "a//b", "d/../../x"])
def test_a_file_outside_is_refused(path: str, tmp_path: Path) -> None:
    """A manifest that is right in itself, but names a file elsewhere."""
    write(tmp_path / "made", {"a": b"1" * 100}, compression=None)
    data = (tmp_path / "made" / MANIFEST).read_bytes()
    (name,) = [f"d/{each.name}" for each in (tmp_path / "made" / "d").iterdir() if f"d/{each.name}".encode() in data]
    at = data.index(name.encode())
    # The lengths of two paths, the first of which is empty, and of their base paths precede the name.
    assert data[at - 4 : at] == bytes([0, len(name), 0, 0])
    new = data[: at - 3] + bytes([len(path), 0, 0]) + path.encode() + data[at + len(name) : -4]
    new = new[:4] + (len(new) + 4).to_bytes(8, "little") + new[12:]
    (tmp_path / "made" / MANIFEST).write_bytes(new + crc32c(new).to_bytes(4, "little"))
    with pytest.raises(shardkeep.IntegrityError, match="outside the checkpoint|not a file name|is truncated"):
        read(tmp_path / "made")


def test_a_node_that_decompresses_to_more_than_it_can_is_refused(tmp_path: Path) -> None:
    import zstandard

    body = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    data = bytes.fromhex("0cdb3a2a") + (14 + len(body) + 4).to_bytes(8, "little") + b"\0\1" + body
    (tmp_path / MANIFEST).write_bytes(data + crc32c(data).to_bytes(4, "little"))
    with pytest.raises(shardkeep.IntegrityError, match="cannot be decompressed, or is larger than"):
        read(tmp_path)
