"""Files that Flax writes: with the Flax that is installed, and with older ones (in tests/fixtures/flax)."""

import struct
from pathlib import Path
from typing import Any

import flax
import flax.serialization
import flax.training.checkpoints
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from foreign.conformance import FileReaderTests, arrays, nested
from shardkeep.cli.main import main
from support import assert_same, mesh_of, pattern

FIXTURES = Path(__file__).parents[1] / "fixtures" / "flax"
PLAIN = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64")


class TestFlax(FileReaderTests):
    name = "flax"
    dtypes = (*PLAIN, "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4")

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        (path / "state.msgpack").write_bytes(flax.serialization.to_bytes(nested(arrays)))
        return path / "state.msgpack"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flax cuts arrays above 1 GiB; here above 64 bytes."""
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 64)


@pytest.mark.usefixtures("small_chunks")
class TestChunked(TestFlax):
    """Arrays in chunks, which end in the middle of rows."""

    def test_each_chunk_is_where_flax_put_it(self, tmp_path: Path) -> None:
        data = {"w": pattern("float32", (5, 7, 3)), "v": pattern("bfloat16", (1000,)), "small": np.ones(3, np.int8)}
        path = self.write(tmp_path, data)
        assert b"__msgpack_chunked_array__" in path.read_bytes()
        leaves = shardkeep.inspect(path).leaves
        assert [leaves[key].kind for key in ("w", "v", "small")] == ["flax", "flax", "jax"]
        assert_same(shardkeep.load(path, template=data), data)

    def test_a_place_that_is_none_is_refused(self, made: Path) -> None:
        """It may come from a manifest of ours that somebody changed."""
        for place in ("x", "state.msgpack", "state.msgpack@", "state.msgpack@1", "state.msgpack@99999999", "other@1"):
            leaf = _with_place(shardkeep.inspect(made).leaves["layers/0/w"], place)
            with pytest.raises(
                shardkeep.IntegrityError, match=r"leaf 'layers/0/w': .*(place|another|missing|MessagePack|needed)"
            ):
                _open(made, leaf)


def _with_place(leaf: Any, place: str) -> Any:
    from dataclasses import replace

    return replace(leaf, origin=replace(leaf.origin, directory=place))


def _open(path: Path, leaf: Any) -> Any:
    from shardkeep.foreign.registry import open_array
    from shardkeep.stores.local.store import LocalStore

    return open_array(LocalStore(str(path.parent)), leaf)


def test_what_is_no_array_is_a_plain_value_of_the_same_type(tmp_path: Path) -> None:
    tree = {
        "step": 7,
        "negative": -(2**40),
        "large": 2**63,
        "lr": 1e-3,
        "name": "grüße",
        "raw": b"\x00\xff",
        "flag": True,
        "nothing": None,
        "z": 1 + 2j,
        "scalar": np.float32(1.5),
        "half": ml_dtypes.bfloat16(0.5),
        "listed": [1, [2.5, "x"]],
        "empty": {},
    }
    path = tmp_path / "values.msgpack"
    path.write_bytes(flax.serialization.msgpack_serialize(tree))
    found = shardkeep.load(path)
    expected = flax.serialization.msgpack_restore(path.read_bytes())
    assert found == expected
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in expected.items()}
    assert shardkeep.verify(path).ok


def _state() -> Any:
    params = {"dense": {"kernel": jnp.asarray(pattern("float32", (8, 4))), "bias": jnp.zeros(4)}}
    layers = [jnp.ones(2), jnp.ones(3)]
    return {"params": params, "opt_state": optax.adam(1e-3).init(params), "layers": layers, "step": 5}


def test_a_train_state_is_loaded_into_the_template_that_it_was_saved_from(tmp_path: Path) -> None:
    """Flax writes tuples, lists and optax states as dicts with the keys "0", "1", ..., which a template undoes."""
    state = _state()
    path = tmp_path / "state.msgpack"
    path.write_bytes(flax.serialization.to_bytes(state))
    bare = shardkeep.load(path)
    assert set(bare["layers"]) == {"0", "1"}
    assert set(bare["opt_state"]) == {"0", "1"}
    assert_same(shardkeep.load(path, template=state), state)
    restored = flax.serialization.from_bytes(state, path.read_bytes())
    assert_same(jax.tree.map(np.asarray, shardkeep.load(path, template=state)), jax.tree.map(np.asarray, restored))


def test_one_array_and_one_value_are_trees_too(tmp_path: Path) -> None:
    for number, value in enumerate((np.arange(6).reshape(2, 3).astype(np.int32), 3.5)):
        path = tmp_path / f"{number}.msgpack"
        path.write_bytes(flax.serialization.msgpack_serialize(value))
        assert_same(shardkeep.load(path, template=value), value)


def _legacy(tmp_path: Path, steps: list[int], **arguments: Any) -> Path:
    flax.config.update("flax_use_orbax_checkpointing", False)
    for step in steps:
        state = {"params": {"w": np.full((4, 2), step, np.float32)}, "step": step}
        flax.training.checkpoints.save_checkpoint(tmp_path / "run", state, step, keep=9, **arguments)
    return tmp_path / "run"


class TestCheckpointsDirectory:
    """`flax.training.checkpoints` with its own format."""

    def test_its_files_are_listed_with_their_steps(self, tmp_path: Path, capsys: Any) -> None:
        run = _legacy(tmp_path, [9, 10, 100])
        assert [shardkeep.inspect(run / f"checkpoint_{step}").step for step in (9, 100)] == [9, 100]
        assert main(["ls", str(run)]) == 0
        printed = capsys.readouterr().out
        assert [line.split()[0] for line in printed.splitlines()[1:]] == [
            "checkpoint_9",
            "checkpoint_10",
            "checkpoint_100",
        ]
        assert printed.count("flax") == 3

    def test_a_run_begins_with_them_only_if_told_to(self, tmp_path: Path) -> None:
        """Never a new start, without a word, where there is something to go on from."""
        run = _legacy(tmp_path, [9, 100])
        for name in ("step_{}", "checkpoint_{}"):
            with (
                shardkeep.Run(run, name=name) as opened,
                pytest.raises(shardkeep.CheckpointExistsError, match=r"file .*checkpoint_100 .* pass init_from="),
            ):
                opened.resume({"step": 0})
        with shardkeep.Run(run) as opened:
            state, step = opened.resume({"step": 0}, init_from=run)
        assert (state["step"], step) == (100, 0)

    def test_latest_finds_the_newest_step_and_skips_what_is_unfinished(self, tmp_path: Path) -> None:
        run = _legacy(tmp_path, [9, 100])
        (run / "checkpoint_tmp").write_bytes(b"\x81")
        assert shardkeep.latest(run) == str(run / "checkpoint_100")
        assert shardkeep.load(run / "checkpoint_9")["step"] == 9
        (run / "checkpoint_101").write_bytes((run / "checkpoint_100").read_bytes()[:-1])
        assert shardkeep.latest(run) == str(run / "checkpoint_100")
        with pytest.raises(
            shardkeep.CheckpointNotFoundError, match=r"several checkpoints|the newest, .*checkpoint_100"
        ):
            shardkeep.load(run)

    def test_directories_with_such_names_are_not_taken_for_its_files(self, tmp_path: Path, capsys: Any) -> None:
        """Newer versions of Flax write Orbax's directories under the same names; here they are of ours."""
        run = _legacy(tmp_path, [7])
        shardkeep.save(run / "checkpoint_8", {"step": 8})
        assert main(["ls", str(run)]) == 0
        listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
        assert sorted(listed) == ["checkpoint_7", "checkpoint_8"]
        assert shardkeep.latest(run) == str(run / "checkpoint_8")

    def test_a_file_with_another_prefix_is_read_when_it_is_named(self, tmp_path: Path) -> None:
        run = _legacy(tmp_path, [7], prefix="model_")
        assert shardkeep.load(run / "model_7")["step"] == 7

    def test_arrays_that_are_elsewhere_are_not_taken_for_strings(self, tmp_path: Path) -> None:
        """As Flax writes them for arrays that several processes hold."""
        placeholder = {"w": "//GDAPlaceholder:w", "b": np.ones(2)}
        (tmp_path / "checkpoint_5").write_bytes(flax.serialization.msgpack_serialize(placeholder))
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="array 'w' was sharded over several processes"):
            shardkeep.load(tmp_path / "checkpoint_5")


def test_large_arrays_are_loaded_onto_a_mesh(tmp_path: Path) -> None:
    data = {"a": pattern("float32", (64, 1 << 14)), "b": pattern("float32", (64, 1 << 14), 2)}
    path = tmp_path / "large.msgpack"
    path.write_bytes(flax.serialization.to_bytes(data))
    sharding = NamedSharding(mesh_of(4, 2), PartitionSpec("a"))
    found = shardkeep.load(path, include="^b$", shardings=sharding)
    assert_same(np.asarray(found["b"]), data["b"])
    assert found["b"].sharding == sharding


def _packed(*parts: bytes) -> bytes:
    return b"".join(parts)


def _ext(kind: int, body: bytes) -> bytes:
    return struct.pack(">BIb", 0xC9, len(body), kind) + body


def _array(shape: bytes, dtype: bytes, data: bytes) -> bytes:
    return _ext(1, b"\x93" + shape + bytes([0xA0 + len(dtype)]) + dtype + struct.pack(">BI", 0xC6, len(data)) + data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends at byte 0"),
    "more than the file has": (b"\x81\xa1w\xdd\xff\xff\xff\xff", "declares 4,294,967,295 values"),
    "text that is longer than the file": (b"\x81\xa1w\xdb\xff\xff\xff\xff", "4,294,967,295 bytes are needed"),
    "nested too deeply": (b"\x91" * 5000 + b"\x00", "more than 100 levels"),
    "something after it": (b"\x81\xa1w\x01\x00", "end at byte 4, but it has 5 bytes"),
    "an unknown byte": (b"\x81\xa1w\xc1", "is not valid MessagePack"),
    "a timestamp": (b"\x81\xa1w\xd6\xff\x00\x00\x00\x00", "extension at byte 3 has type 255"),
    "a key that is a number": (b"\x81\x01\x01", "is not a string"),
    "a key twice": (b"\x82\xa1w\x01\xa1w\x02", "the key 'w' twice"),
    "text that is none": (b"\x81\xa1w\xa2\xff\xff", "codec can't decode"),
    "an array of objects": (b"\x81\xa1w" + _array(b"\x91\x01", b"object", bytes(8)), "dtype 'object'"),
    "an array of text": (b"\x81\xa1w" + _array(b"\x91\x01", b"str32", bytes(4)), "dtype 'str32'"),
    "an array that is too short": (b"\x81\xa1w" + _array(b"\x91\x02", b"int8", b"\x00"), r"int8\[2\] has 2"),
    "a shape below zero": (b"\x81\xa1w" + _array(b"\x92\xff\xff", b"int8", b"\x00"), "invalid shape"),
    "an enormous shape": (
        b"\x81\xa1w" + _array(b"\x92" + b"\xce\xff\xff\xff\xff" * 2, b"int8", b""),
        "invalid shape",
    ),
    "a shape of floats": (b"\x81\xa1w" + _array(b"\x91\xca\x00\x00\x00\x00", b"int8", b""), "no shape or no dtype"),
    "an array in an array": (b"\x81\xa1w" + _ext(1, b"\x93" + _ext(1, b"\x93")), "does not end before"),
    "an array longer than it says": (
        b"\x81\xa1w" + _ext(1, _array(b"\x91\x00", b"int8", b"")[6:] + b"\x00"),
        "does not have its declared length",
    ),
    "a complex number of three": (b"\x81\xa1w" + _ext(2, b"\x93" + b"\xcb" + bytes(8)), "needed|two parts"),
    "chunks that do not fill it": (
        b"\x81\xa1w\x83\xb9__msgpack_chunked_array__\xc3\xa5shape\x81\xa10\x05\xa6chunks\x81\xa10"
        + _array(b"\x91\x04", b"int8", b"abcd"),
        "do not cover its shape",
    ),
    "chunks without numbers": (
        b"\x81\xa1w\x83\xb9__msgpack_chunked_array__\xc3\xa5shape\x81\xa10\x05\xa6chunks\x81\xa11"
        + _array(b"\x91\x04", b"int8", b"abcd"),
        "has no chunks or no shape",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_flax_does_not_write_is_refused_and_named(what: str, tmp_path: Path) -> None:
    document, says = HOSTILE[what]
    path = tmp_path / "hostile.msgpack"
    path.write_bytes(document)
    with pytest.raises(
        shardkeep.IntegrityError, match=rf"hostile\.msgpack is not a complete Flax msgpack file: .*{says}"
    ):
        shardkeep.load(path)
    assert not shardkeep.exists(path)
    assert not shardkeep.verify(path).ok


def test_a_file_of_another_kind_with_another_name_is_not_taken_for_one(tmp_path: Path) -> None:
    for number, text in enumerate((b"", b"\x80", b"{}", b"\x85\xa3abc", b"\x89PNG\r\n")):
        (tmp_path / f"data{number}").write_bytes(text)
        if text == b"\x80":  # an empty dict
            assert shardkeep.load(tmp_path / f"data{number}") == {}
            continue
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="shardkeep cannot read this kind of file"):
            shardkeep.load(tmp_path / f"data{number}")


def test_a_folder_of_hugging_face_stands_for_its_flax_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(nested(arrays())))
    assert_same(shardkeep.load(tmp_path, include="^b$"), {"b": jnp.asarray(arrays()["b"])})


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*/*[!y]")), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_what_older_versions_of_flax_wrote_is_read_as_flax_reads_it(fixture: Path) -> None:
    expected = flax.serialization.msgpack_restore(fixture.read_bytes())
    like = jax.tree.map(lambda x: np.asarray(x) if hasattr(x, "shape") and x.shape else x, expected)
    assert_same(shardkeep.load(fixture, template=like), like)
    assert shardkeep.verify(fixture).ok
