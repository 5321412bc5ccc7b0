"""Reading: beside writers, from disks that fail, from files that lie, and never more than is needed."""

import errno
import json
import mmap
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zstandard
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from faults.piecetables import changed, put_rows, rows_of
from faults.spawner import Fault, Spawner
from faults.states import make
from shardkeep.loading.plan import Fetch
from shardkeep.loading.read import needed_blocks
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.digests import BLOCK, digest, seal
from shardkeep.model.leaves import UNSHARDED, Piece, StoredArray
from shardkeep.stores.local.mapping import LocalMappedFile
from support import FORMATS, assert_same, mesh_of, save_as

WRITERS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "safetensors": ("run", [{}]),
    "tensorstore": ("run", [{"format": "zarr"}]),
    "either format": ("run", [{}, {"format": "zarr"}, {"format": "zarr", "compression": "zstd"}]),
    "exchange": ("model.safetensors", [{}]),
    "shards": ("model.safetensors", [{"max_shard_size": 400}]),
    "one and several": ("model.safetensors", [{}, {"max_shard_size": 400}]),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_load_beside_a_writer_is_one_committed_state(
    tmp_path: Path, spawner: Spawner, writer: str, verify: bool
) -> None:
    """Two readers load in a loop while sixty states replace each other: never a mix, never an error."""
    name, variants = WRITERS[writer]
    path = str(tmp_path / name)
    shardkeep.save(path, make("plain", 0), **variants[0])
    readers = [
        spawner.start("load_until", path=path, kind="plain", last=60, verify=verify, mmap=mmap)
        for mmap in (True, False)
    ]
    writing = spawner.start("save_in_turn", path=path, kind="plain", first=1, count=60, variants=variants)
    written = writing.wait()
    outcomes = [reader.wait() for reader in readers]
    assert written.ok, written
    for outcome in outcomes:
        assert outcome.ok, outcome
        assert outcome.value["states"] > 2


def test_large_arrays_beside_a_writer_are_one_committed_state(tmp_path: Path, spawner: Spawner) -> None:
    """Mapped in parts, by several threads, each replaced meanwhile."""
    path = str(tmp_path / "run")
    shardkeep.save(path, make("wide", 0))
    readers = [spawner.start("load_until", path=path, kind="wide", last=25, mmap=mmap) for mmap in (True, False)]
    writing = spawner.start("save_often", path=path, kind="wide", first=1, count=25)
    outcomes = [writing.wait(), *(reader.wait() for reader in readers)]
    for outcome in outcomes:
        assert outcome.ok, outcome


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange"])
def test_mapped_arrays_stay_what_they_were_when_the_checkpoint_goes(tmp_path: Path, kind: str) -> None:
    """Overwritten, deleted, or its directory removed: what was loaded is not touched."""
    ending, arguments = FORMATS[kind]
    path = tmp_path / ("run" + ending)
    spread = NamedSharding(mesh_of(8), PartitionSpec("a"))
    array = jnp.arange(1 << 20, dtype=jnp.float32).reshape(1024, 1024)
    shardkeep.save(path, {"w": array, "s": jax.device_put(array + 1, spread)}, **arguments)
    expected = np.array(array)
    loaded = [shardkeep.load(path), shardkeep.load(path, mesh=mesh_of(8))]
    for number in range(3):
        shardkeep.save(path, {"w": array * number, "s": array - number}, overwrite=True, **arguments)
    loaded.append(shardkeep.load(path))
    shardkeep.delete(path)
    for other in range(3):
        shardkeep.save(path, {"w": array * 0 - other}, overwrite=True, **arguments)
    for tree in loaded[:2]:
        assert np.array_equal(np.asarray(tree["w"]), expected)
        assert np.array_equal(np.asarray(tree["s"]), expected + 1)
    assert np.array_equal(np.asarray(loaded[2]["w"]), expected * 2)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_disk_that_cannot_be_read_is_named(tmp_path: Path, spawner: Spawner, kind: str) -> None:
    """EIO at the k-th read: an error of ours that says what and where, or a load that is right all the same."""
    path = save_as(kind, tmp_path / "run", make("plain", 1))
    counted = spawner.run("load", Fault(str(tmp_path), calls="read"), path=str(path), kind="plain", number=1)
    assert counted.ok, counted
    assert counted.calls > 0
    for at in range(1, counted.calls + 1):
        fault = Fault(str(tmp_path), "fail", at, errno.EIO, calls="read")
        outcome = spawner.run("load", fault, path=str(path), kind="plain", number=1)
        if not outcome.ok:
            assert "ShardkeepError" in outcome.bases, (at, outcome)
            assert "Input/output error" in outcome.message
            assert str(tmp_path) in outcome.message


@pytest.mark.parametrize("action", ["open", "read"])
def test_a_process_out_of_descriptors_says_so(tmp_path: Path, spawner: Spawner, action: str) -> None:
    """EMFILE is no damage and no absence."""
    path = save_as("tensorstore", tmp_path / "run", make("plain", 1))
    for at in (1, 2, 4):
        fault = Fault(str(tmp_path), "fail", at, errno.EMFILE, again=True, calls=action)
        outcome = spawner.run("load", fault, path=str(path), kind="plain", number=1)
        assert "ShardkeepError" in outcome.bases, outcome
        assert "IntegrityError" not in outcome.bases
        assert "CheckpointNotFoundError" not in outcome.bases
        assert "Too many open files" in outcome.message


def test_verify_reports_what_cannot_be_read(tmp_path: Path, spawner: Spawner) -> None:
    path = save_as("safetensors", tmp_path / "run", make("plain", 1))
    outcomes = [
        spawner.run("check", Fault(str(tmp_path), "fail", at, calls="read"), path=str(path)) for at in range(3, 9)
    ]
    assert all(outcome.ok or "ShardkeepError" in outcome.bases for outcome in outcomes), outcomes
    assert any(outcome.ok and outcome.value == [True, False] for outcome in outcomes)


def _with_chunk(path: Path, data: bytes, length: int, change: dict[str, Any] | None = None) -> None:
    """Put other bytes in the place of the only compressed chunk, and make the manifest agree with them."""
    (path / "w" / "0").write_bytes(data)
    body = json.loads((path / "manifest.json").read_bytes())
    tree = body["trees"][""]
    for file in tree["files"]:
        if file[0] == "w/0":
            file[1:] = [len(data), len(data), digest(data)]
    put_rows(tree, [changed(rows_of(tree)[0], stored=len(data), **(change or {}))])
    text = json.dumps({**body, "digest": "0" * 32}, separators=(",", ":"))
    (path / "manifest.json").write_bytes(seal(text.encode()))
    assert tree["leaves"][0]["shape"] == [length]


class TestCompressed:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        shardkeep.save(tmp_path / "run", {"w": np.ones(1000, np.uint8)}, format="zarr", compression="zstd")
        return tmp_path / "run"

    def test_a_bomb_goes_no_further_than_the_declared_size(self, path: Path, spawner: Spawner) -> None:
        """Four GiB of zeros in 130 kB."""
        compressor = zstandard.ZstdCompressor(level=1).compressobj()
        bomb = b"".join(compressor.compress(bytes(64 << 20)) for _ in range(64)) + compressor.flush()
        assert len(bomb) < 1 << 20
        _with_chunk(path, bomb, 1000)
        outcome = spawner.start("load_within", path=str(path), gigabytes=4).wait(20)
        assert "IntegrityError" in outcome.bases, outcome
        assert "does not decompress to 1,000 bytes" in outcome.message
        assert not shardkeep.verify(path).ok

    @pytest.mark.parametrize("size", [0, 999, 1001])
    def test_other_than_the_declared_size_is_damage(self, path: Path, size: int) -> None:
        _with_chunk(path, zstandard.compress(b"\1" * size), 1000)
        with pytest.raises(shardkeep.IntegrityError, match=r"does not decompress to 1,000 bytes|leaf 'w'"):
            shardkeep.load(path)
        with pytest.raises(shardkeep.IntegrityError, match=r"does not decompress to 1,000 bytes|leaf 'w'"):
            shardkeep.load(path, verify=False)

    def test_two_frames_or_rubbish_at_the_end_change_nothing_that_is_loaded(self, path: Path) -> None:
        good = zstandard.compress(b"\1" * 1000)
        for data in (good + good, good + b"rubbish", zstandard.compress(b"\1" * 500) * 2, b"", b"x", good[:-1]):
            _with_chunk(path, data, 1000)
            try:
                loaded = shardkeep.load(path)
            except shardkeep.IntegrityError as error:
                assert str(path) in str(error)  # noqa: PT017  (either is right)
            else:
                assert_same(loaded, {"w": np.ones(1000, np.uint8)})

    def test_every_bit_of_a_compressed_chunk_is_covered(self, path: Path) -> None:
        """Also those that a decoder ignores: what is stored is what was saved, or verify says so."""
        chunk = path / "w" / "0"
        original = chunk.read_bytes()
        unseen = []
        for at in range(len(original)):
            for bit in range(8):
                chunk.write_bytes(original[:at] + bytes([original[at] ^ (1 << bit)]) + original[at + 1 :])
                if shardkeep.verify(path).ok:
                    unseen.append((at, bit))
        chunk.write_bytes(original)
        assert unseen == []

    def test_the_error_names_the_leaf(self, path: Path) -> None:
        _with_chunk(path, b"rubbish", 1000)
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w'"):
            shardkeep.load(path)

    def test_a_huge_window_is_refused(self, path: Path) -> None:
        """A frame may ask its reader for gigabytes of window."""
        parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
        data = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        packed = data.compress(b"\1" * 1000) + data.flush()
        _with_chunk(path, packed, 1000)
        try:
            loaded = shardkeep.load(path)["w"]
        except shardkeep.IntegrityError as error:
            assert "w/0" in str(error)  # noqa: PT017  (either is right)
        else:
            assert (loaded == 1).all()


class TestHostilePieces:
    """Numbers in a manifest that are each possible but together are not."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        shardkeep.save(tmp_path / "run", {"w": np.arange(1000, dtype=np.uint8), "v": np.arange(10.0)})
        return tmp_path / "run"

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("stored", 3),
            ("stored", 500),
            ("offset", 0),
            ("offset", 2**62),
            ("offset", 2**64 - 1),
            ("file", 1),
            ("file", 2**32 - 1),
            ("digests", []),
            ("digests", ["0" * 32] * 2),
            ("digests", ["0" * 32]),
            ("cell", 1),
            ("cell", 2**32 - 1),
            ("leaf", 2),
        ],
    )
    def test_give_an_error_of_ours(self, path: Path, field: str, value: Any) -> None:
        body = json.loads((path / "manifest.json").read_bytes())
        tree = body["trees"][""]
        number = next(i for i, leaf in enumerate(tree["leaves"]) if leaf["key"] == "w")
        put_rows(tree, [changed(row, **{field: value}) if row.leaf == number else row for row in rows_of(tree)])
        text = json.dumps({**body, "digest": "0" * 32}, separators=(",", ":"))
        (path / "manifest.json").write_bytes(seal(text.encode()))
        for mapping in (True, False):
            with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w'|malformed"):
                shardkeep.load(path, mmap=mapping)
        assert not shardkeep.verify(path).ok


class TestMapping:
    def test_what_can_be_used_in_place_is_mapped_and_read_otherwise(self, tmp_path: Path) -> None:
        array = jnp.arange(1 << 20, dtype=jnp.float32)
        shardkeep.save(tmp_path / "run", {"w": array})
        mapped, read = shardkeep.load(tmp_path / "run")["w"], shardkeep.load(tmp_path / "run", mmap=False)["w"]
        assert np.array_equal(np.asarray(mapped), np.asarray(read))
        assert _is_mapped(mapped, tmp_path)
        assert not _is_mapped(read, tmp_path)

    def test_numpy_leaves_are_the_callers_own(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "run", {"w": np.ones(1 << 20), "small": np.ones(3)})
        tree = shardkeep.load(tmp_path / "run")
        for array in tree.values():
            assert array.flags.writeable
            array[:] = 5
        assert shardkeep.verify(tmp_path / "run").ok
        assert shardkeep.load(tmp_path / "run")["w"][0] == 1

    def test_neighbours_are_brought_in_together(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tree = {f"w{number}": jnp.full((64, 64), number, jnp.float32) for number in range(200)}
        shardkeep.save(tmp_path / "run", tree)
        spans: list[tuple[int, int]] = []
        bring_in = LocalMappedFile.bring_in
        monkeypatch.setattr(LocalMappedFile, "bring_in", lambda *a: spans.append(a[1:]) or bring_in(*a))
        assert_same(shardkeep.load(tmp_path / "run", template=tree), tree)
        assert spans == [(0, 200 * 64 * 64 * 4)]
        some = {name: tree[name] for name in ("w7", "w8", "w9", "w100")}
        spans.clear()
        assert_same(shardkeep.load(tmp_path / "run", template=some), some)
        assert sorted(end - start for start, end in spans) == [16 << 10, 48 << 10]

    def test_a_file_cut_short_under_a_mapping_load_is_an_error(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "run", {"w": jnp.ones(1 << 20)})
        (data,) = (tmp_path / "run").glob("*.safetensors")
        os.truncate(data, data.stat().st_size - mmap.PAGESIZE)
        for mapping in (True, False):
            with pytest.raises(
                shardkeep.IntegrityError, match=r"leaf 'w': .* is truncated: it has [\d,]+ of [\d,]+ bytes"
            ):
                shardkeep.load(tmp_path / "run", mmap=mapping)


def _is_mapped(array: Any, directory: Path) -> bool:
    """Whether an array's memory is a file below the directory."""
    address = array.unsafe_buffer_pointer()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            return name.startswith(str(directory))
    return False


@pytest.mark.parametrize("kind", FORMATS)
def test_reading_a_part_gives_that_part_of_the_whole(tmp_path: Path, kind: str) -> None:
    """Each way to cut an array that was saved in another cut."""
    array = np.random.default_rng(1).standard_normal((256, 24, 512)).astype(np.float32)  # several chunks
    saved = jax.device_put(array, NamedSharding(mesh_of(2, 4), PartitionSpec("b", None, "a")))
    path = save_as(kind, tmp_path / "run", {"w": saved})
    for spec in (
        PartitionSpec(),
        PartitionSpec("a", "b"),
        PartitionSpec(None, ("a", "b")),
        PartitionSpec(("b", "a"), None),
    ):
        for mapping in (True, False):
            loaded = shardkeep.load(
                path,
                shardings={"w": NamedSharding(mesh_of(2, 4), spec)},
                mmap=mapping,
            )["w"]
            assert loaded.sharding.spec == spec
            assert np.array_equal(np.asarray(loaded), array)


def test_a_part_reads_only_its_blocks(tmp_path: Path) -> None:
    """Damage outside of what is asked for goes unnoticed because it is not read."""
    shardkeep.save(tmp_path / "run", {"a": np.arange(1 << 20), "b": np.arange(1 << 20)}, format="zarr")
    (tmp_path / "run" / "b" / "0").unlink()
    assert_same(shardkeep.load(tmp_path / "run", include="^a$"), {"a": np.arange(1 << 20)})


def test_the_digest_is_that_of_the_raw_bytes(tmp_path: Path) -> None:
    """As docs/format.md says, so that another program can check."""
    array = np.arange(3 << 20, dtype=np.float32)
    shardkeep.save(tmp_path / "run", {"w": array})
    raw = array.tobytes()
    block = 4 << 20
    expected = tuple(digest(raw[i : i + block]) for i in range(0, len(raw), block))
    assert shardkeep.inspect(tmp_path / "run").leaves["w"].pieces[0].digests == expected


def test_only_the_blocks_that_hold_what_is_wanted_are_needed() -> None:
    rows = 3 * BLOCK // 4096  # of 4 KiB each, three blocks in all
    whole = Region.whole((rows, 1024))
    leaf = StoredArray(("w",), ArraySpec(whole.shape, np.dtype("f4")), (), UNSHARDED)
    piece = Piece(whole, 0, 0, 3 * BLOCK, ("", "", ""))
    top, middle, last = (Region((i * rows // 3, 0), (rows // 3, 1024)) for i in range(3))
    columns = Region((0, 0), (rows, 512)), Region((0, 512), (rows, 512))
    needed = {
        (whole,): [(0, 3)],
        (top, middle, last): [(0, 3)],
        columns: [(0, 3)],
        columns[:1]: [(0, 3)],
        (last, top): [(0, 1), (2, 3)],
        (middle, middle): [(1, 2)],  # on two devices
        (top, top, top): [(0, 1)],
    }
    for targets, expected in needed.items():
        assert needed_blocks(Fetch(0, piece, tuple(enumerate(targets))), leaf) == expected
