"""The user's metadata: what it becomes, what is refused, and that it comes back from strict JSON as it was."""

import collections
import datetime
import enum
import json
import math
import os
import pathlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.model.metadata import TAG, check_metadata, decode_metadata, encode_metadata, untagged
from shardkeep.serialization import AsyncCheckpointManager
from support import FORMATS, assert_same, mesh_of, save_as

MESH = mesh_of(8)
NAN, INF = math.nan, math.inf


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, np.float32(2))


class Name(enum.StrEnum):
    ADAM = "adam"


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Pair(NamedTuple):
    x: Any
    y: Any


class Text(str):
    def __str__(self) -> str:
        return "another"


OBVIOUS: list[tuple[str, Any, Any]] = [
    ("float32", np.float32(0.1), float(np.float32(0.1))),
    ("float64", np.float64(0.1), 0.1),
    ("float16", np.float16(1.5), 1.5),
    ("longdouble", np.longdouble(1.5), 1.5),
    ("bfloat16", ml_dtypes.bfloat16(1.5), 1.5),
    ("float8", ml_dtypes.float8_e4m3fn(2), 2.0),
    ("int4", ml_dtypes.int4(-3), -3),
    ("int64", np.int64(2**62 + 1), 2**62 + 1),
    ("uint64", np.uint64(2**64 - 1), 2**64 - 1),
    ("bool_", np.bool_(True), True),
    ("str_", np.str_("x"), "x"),
    ("datetime64", np.datetime64("2026-01-02T03:04"), "2026-01-02T03:04"),
    ("0-d", np.array(7, np.int8), 7),
    ("0-d text", np.array("x"), "x"),
    ("0-d NaN", np.array(NAN, np.float16), NAN),
    ("jax float", jnp.float32(0.1), float(np.float32(0.1))),
    ("jax NaN", jnp.float32(NAN), NAN),
    ("jax bfloat16", jnp.bfloat16(1.5), 1.5),
    ("jax int", jnp.int32(-5), -5),
    ("jax bool", jnp.array(False), False),
    ("replicated", jax.device_put(3.0, jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())), 3.0),
    ("tuple", (1, (2, ())), [1, [2, []]]),
    ("namedtuple", Pair(1, Pair(2, None)), [1, [2, None]]),
    ("path", pathlib.PurePosixPath("a/b"), "a/b"),
    ("enum", Color.RED, "red"),
    ("enum of a tuple", Color.PAIR, [1, 2.0]),
    ("StrEnum", Name.ADAM, "adam"),
    ("IntFlag", Bits.A | Bits.B, 3),
    ("datetime", datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), "2026-01-02T03:00:00+00:00"),
    ("date", datetime.date(2026, 1, 2), "2026-01-02"),
    ("time", datetime.time(3, 4), "03:04:00"),
    ("mapping", collections.OrderedDict(a=collections.Counter("x")), {"a": {"x": 1}}),
    ("keys", {1: "a", None: "b", 1.5: "c", np.int32(2): "d", Name.ADAM: "e", pathlib.PurePosixPath("p"): "f"},
     {"1": "a", "None": "b", "1.5": "c", "2": "d", "adam": "e", "p": "f"}),
    ("a bool as key", {True: 1}, {"True": 1}),
    ("str subclass", Text("x"), "x"),
    ("NaN", NAN, NAN),
    ("infinities", [INF, -INF], [INF, -INF]),
    ("minus zero", [-0.0, np.float32(-0.0)], [-0.0, -0.0]),
    ("smallest", 5e-324, 5e-324),
    ("long", [10**30, -(10**5000), 2**2000, 2**2001], [10**30, -(10**5000), 2**2000, 2**2001]),
    ("bools and ints", [True, 1, False, 0, 1.0], [True, 1, False, 0, 1.0]),
    ("surrogates", "\ud83d\ude00", "\ud83d\ude00"),
    ("undecodable path", pathlib.PurePosixPath(os.fsdecode(b"\xff")), "\udcff"),
    ("like a tag", {TAG: {"float": "nan"}}, {TAG: {"float": "nan"}}),
    ("like a tag of a tag", {TAG: {"dict": [[TAG, NAN]]}}, {TAG: {"dict": [[TAG, NAN]]}}),
    ("a tag among others", {TAG: 1, "x": {TAG: [INF]}}, {TAG: 1, "x": {TAG: [INF]}}),
    ("empty", [{}, [], "", None], [{}, [], "", None]),
]  # fmt: skip
obvious = pytest.mark.parametrize(("given", "expected"), [case[1:] for case in OBVIOUS], ids=[c[0] for c in OBVIOUS])


def refuse_constant(token: str) -> Any:
    raise AssertionError(f"{token} is not JSON")


def strict(text: str | bytes) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


@obvious
def test_what_has_an_obvious_form_takes_it(given: Any, expected: Any) -> None:
    assert_same(check_metadata({"x": given}), {"x": expected})


@obvious
def test_it_comes_back_from_strict_json_as_it_was(given: Any, expected: Any) -> None:
    text = json.dumps(encode_metadata(check_metadata({"x": given, "y": [given]})), allow_nan=False)
    assert_same(decode_metadata(strict(text)), {"x": expected, "y": [expected]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"a": [{"b": object()}]},
            r"metadata\['a'\]\[0\]\['b'\] is an object, which has no obvious JSON form; convert",
        ),
        ({"a": np.ones(1)}, r"is an ndarray, .*; save it as a leaf of the tree, or convert it with \.tolist\(\)"),
        ({"a": jnp.ones(1)}, r"is an ArrayImpl, .*; save it as a leaf"),
        ({"a": jax.make_mesh((1,), ("x",))}, r"is a Mesh, .*; convert it to a string, a number"),
        ({"a": {1}}, r"is a set, .*; convert it to a list"),
        ({"a": b"x"}, r"is bytes, .*; decode it"),
        ({"a": 1j}, "is a complex"),
        ({"a": np.complex64(1)}, "is a complex64"),
        ({"a": datetime.timedelta(1)}, r"is a timedelta, .*total_seconds"),
        ({"a": np.array(None)}, "is an ndarray"),
        ({"a": np.ma.masked}, "is a MaskedConstant"),
        ({"a": jax.ShapeDtypeStruct((), "float32")}, "is a ShapeDtypeStruct"),
        ({"a": jax.random.key(0)}, "is a PRNGKeyArray without a readable value"),
        ({"a": {1: 2, "1": 3}}, r"metadata\['a'\] has two keys that become '1'"),
        ({(1, 2): 3}, r"metadata has the key \(1, 2\); use strings"),
        ({Color.PAIR: 3}, "metadata has the key <Color.PAIR"),
        ({b"x": 3}, "metadata has the key b'x'"),
        ({"\udc00": 3}, "of valid Unicode"),
        ({10**5000: 3}, "the key an integer of"),
    ],
)
def test_what_has_none_is_refused_and_named(given: Any, message: str) -> None:
    with pytest.raises(shardkeep.MetadataError, match=message):
        check_metadata(given)


def test_a_deleted_or_traced_array_is_named() -> None:
    array = jnp.float32(1)
    array.delete()
    with pytest.raises(shardkeep.MetadataError, match=r"metadata\['a'\] .* deleted"):
        check_metadata({"a": array})
    with pytest.raises(shardkeep.MetadataError, match=r"metadata\['a'\] is a .*Tracer"):
        jax.jit(lambda x: check_metadata({"a": x}))(1.0)


def test_nesting_has_a_limit_that_writing_and_reading_keep_to() -> None:
    deep: Any = NAN
    for _ in range(99):
        deep = {TAG: deep}
    metadata = check_metadata({"x": deep})
    assert_same(decode_metadata(strict(json.dumps(encode_metadata(metadata)))), metadata)
    with pytest.raises(shardkeep.MetadataError, match="contains itself, or is nested more than 100 levels deep"):
        check_metadata({"x": [[deep]]})


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([TAG, "float", "dict", "x", ""]), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([TAG, "a", "b"]), JSONS, max_size=2))
def test_any_metadata_comes_back(metadata: dict[str, Any]) -> None:
    checked = check_metadata(metadata)
    assert repr(checked) == repr(metadata)
    text = json.dumps(encode_metadata(checked), allow_nan=False)
    assert_same(decode_metadata(strict(text)), checked)
    assert isinstance(strict(text), dict)
    strict(json.dumps(untagged(checked), allow_nan=False))


@pytest.mark.parametrize("data", [{TAG: {"of a later version": 1}}, {TAG: "x"}, {TAG: None}, {TAG: {"int": "x"}}])
def test_a_tag_that_is_not_known_is_left_as_it_is(data: Any) -> None:
    assert decode_metadata({"x": data}) == {"x": data}


def every_json(path: Path) -> list[str]:
    """The names of all JSON documents of a checkpoint, each read strictly, those inside safetensors headers too."""
    found = []
    for file in sorted(path.rglob("*") if path.is_dir() else [path]):
        if file.suffix == ".safetensors":
            raw = file.read_bytes()
            header = strict(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            marked = header.get("__metadata__", {}).get("shardkeep", "1")
            strict(marked)
        elif file.suffix == ".json" or file.name.startswith(".z"):
            strict(file.read_bytes())
        else:
            continue
        found.append(file.name)
    return found


MESSY = {"loss": np.float32("nan"), "best": [INF, -INF], "step": jnp.int32(3), "tag": {TAG: {"float": "nan"}}}
CLEAN = {"loss": NAN, "best": [INF, -INF], "step": 3, "tag": {TAG: {"float": "nan"}}}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_save_takes_it_and_inspect_gives_it_back(kind: str, tmp_path: Path) -> None:
    path = save_as(kind, tmp_path / "run", {"w": np.ones(3)}, metadata=MESSY)
    assert_same(dict(shardkeep.inspect(path).metadata), CLEAN)
    assert every_json(path)


@pytest.mark.parametrize("tensorstore", [True, False])
@pytest.mark.parametrize("how", ["save", "save_async", "save_pytree"])
def test_the_manager_takes_it_and_gives_it_back(how: str, tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    path, tree = tmp_path / "run", {"w": jnp.ones(3)}
    if how == "save_pytree":
        manager.save_pytree(tree, path, MESH, prefix="m", extras=MESSY)
        assert_same(manager.load_pytree(path, None, prefix="m")[1], CLEAN)
    elif how == "save":
        manager.save(tree, path, MESH, metadata=MESSY)
    else:
        manager.save_async(tree, path, MESH, metadata=MESSY).wait()
    assert_same(manager.load(path, None)[1]["custom_metadata"], CLEAN)
    documents = every_json(path)
    if tensorstore:
        assert "checkpoint_metadata.json" in documents
        text = (path / "checkpoint_metadata.json").read_text()
        custom = json.loads(text)["custom_metadata"]  # as eFormer reads it
        assert (custom["loss"], custom["best"], custom["step"]) == ("nan", ["inf", "-inf"], 3)
        assert math.isnan(float(custom["loss"]))


def test_nan_that_eformer_wrote_is_not_written_on(tmp_path: Path) -> None:
    """A directory of eFormer's with a bare NaN in its metadata: what we write beside it is strict."""
    manager = AsyncCheckpointManager()
    manager.save({"w": jnp.ones(3)}, tmp_path, MESH, prefix="a", metadata={"x": 1})
    for name in ("manifest.json", ".shardkeep"):
        place = tmp_path / name
        if place.is_file():
            place.unlink()
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    del index["shardkeep"]
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    theirs = json.loads((tmp_path / "checkpoint_metadata.json").read_text())
    theirs["custom_metadata"] = {"loss": NAN}
    (tmp_path / "checkpoint_metadata.json").write_text(json.dumps(theirs))
    for place in sorted((tmp_path / ".shardkeep").rglob("*"), reverse=True):
        place.rmdir() if place.is_dir() else place.unlink()
    (tmp_path / ".shardkeep").rmdir()
    manager.save({"v": jnp.ones(3)}, tmp_path, MESH, prefix="b")
    assert_same(manager.load(tmp_path, None, prefix="a")[1]["custom_metadata"], {"loss": NAN})
    assert "manifest.json" in every_json(tmp_path)


def test_a_reader_that_does_not_know_the_tag_sees_an_object(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, metadata={"loss": NAN})
    manifest = strict((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["shardkeep"] == 2
    assert manifest["trees"][""]["metadata"] == {"loss": {"$shardkeep": {"float": "nan"}}}


def test_metadata_of_a_root_that_looks_like_a_tag_comes_back(tmp_path: Path) -> None:
    for metadata in ({TAG: {"float": "nan"}}, {TAG: 3}, {TAG: {"dict": []}}):
        shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, metadata=metadata, overwrite=True)
        assert_same(dict(shardkeep.inspect(tmp_path / "run").metadata), metadata)


def test_the_documented_loop_survives_a_loss_that_is_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/guides/training-loops.md, with a learning rate that makes the loss NaN."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "training-loops.md").read_text()
    shown, loop = page.split("## A complete loop")[:2]
    blocks = [block.partition("```")[0] for part in (shown, loop) for block in part.split("```python\n")[1:]][:3]
    code = "".join(blocks).replace("optax.adamw(1e-3)", "optax.sgd(1e30)")
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "training-loops.md", "exec"), names)
    names["train"](tmp_path / "run", steps=20)
    last = shardkeep.Run(tmp_path / "run").latest()
    assert last is not None
    assert last.path == str(tmp_path / "run" / "step_20")
    assert math.isnan(last.metrics["loss"])
    names["train"](tmp_path / "run", steps=30)  # and it goes on from there
    assert shardkeep.exists(tmp_path / "run" / "step_30")
