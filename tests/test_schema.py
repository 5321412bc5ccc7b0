"""The JSON Schema of the manifest: what shardkeep writes is valid, and what is not valid is refused."""

import copy
import importlib.resources
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from dtypes import EXTENDED, SIX_BITS, TIMES, dtype_of
from shardkeep.model.digests import BLOCK, seal
from shardkeep.model.document import decode_manifest
from support import FORMATS, Dense, Keyed, Point, Unkeyed, mesh_of, save_as

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
SCHEMA = json.loads((importlib.resources.files("shardkeep") / "manifest.schema.json").read_text())
EXAMPLES = int(os.environ.get("SHARDKEEP_EXAMPLES", "150"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def _document(file: Path) -> Any:
    """The manifest in a file; None if it has none."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        text = header["__metadata__"].get("shardkeep")
        return None if text in (None, "1") else json.loads(text)
    found = json.loads(content)
    text = found["metadata"].get("shardkeep") if file.name.endswith(".index.json") else None
    return found if "shardkeep" in found else text and json.loads(text)


def _documents(path: Path) -> Iterator[Any]:
    for ending in ("manifest.json", "*.index.json", "*.safetensors"):
        yield from filter(None, map(_document, sorted(path.rglob(ending))))


def _problems(document: Any) -> list[str]:
    return [f"{error.json_path}: {error.message:.200}" for error in VALIDATOR.iter_errors(document)]


def test_it_is_a_schema_and_part_of_the_package() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "manifest.schema.json" in project["tool"]["setuptools"]["package-data"]["shardkeep"]


@pytest.mark.parametrize(("version", "count"), [(1, 26), (2, 33)])
def test_every_golden_manifest_is_valid(version: int, count: int) -> None:
    documents = list(_documents(GOLDEN / f"v{version}"))
    assert {document["shardkeep"] for document in documents} == {version}
    assert len(documents) == count
    assert [problem for document in documents for problem in _problems(document)] == []


def _tree() -> dict[Any, Any]:
    """A leaf of every kind, in a container of every kind."""
    split = NamedSharding(mesh_of(2, 4), PartitionSpec(("a", "b"), None))
    dtypes = [*EXTENDED, *SIX_BITS, *TIMES, "complex128", "uint64", "datetime64[25s]"]
    return {
        "arrays": {name: np.zeros(2, dtype_of(name)) for name in dtypes},
        "split": jax.device_put(jnp.zeros((1024, 512)), split),
        "uneven": jax.device_put(jnp.zeros((8, 6)), NamedSharding(mesh_of(2), PartitionSpec("a"))),
        "key": jax.random.key(1),
        "swapped": np.arange(3, dtype=">f8"),
        "values": [1, -(2**70), 0.1, -1e300, float("nan"), float("-inf"), "é\ud800", b"\0", 1j, True, np.int8(3), None],
        "data": shardkeep.PerProcess({"offset": np.arange(4)}),
        "nodes": (Point(1, [2]), Dense(np.ones(1), 2), Keyed(1, 2), Unkeyed([1], ("aux", {1: 2.5})), Unkeyed([1], len)),
        1: {None: 1, 2.5: 2, b"k": 3, ("t", 1): {"\udc00": 4}, 1j: 5},
        "none": np.zeros((0, 3)),
    }


METADATA = {"loss": float("nan"), "long": 2**3000, "$shardkeep": {"a": [None, 1.5]}, "text": "\ud800"}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_manifest_that_is_written_is_valid(kind: str, tmp_path: Path) -> None:
    save_as(kind, tmp_path / "run", _tree(), metadata=METADATA, step=3)
    (document,) = _documents(tmp_path)
    assert _problems(document) == []


def test_a_manifest_of_several_trees_is_valid(tmp_path: Path) -> None:
    trees = {"ema.slow": {"w": np.ones(3)}, "iterators": shardkeep.PerProcess(3)}
    shardkeep.save(tmp_path, {"w": np.ones(2)}, trees=trees, format="zarr")
    shardkeep.save(tmp_path, {"w": np.zeros(2)}, format="zarr", compression="zstd", overwrite=True)  # is published
    (document,) = _documents(tmp_path)
    assert set(document["trees"]) == {"", "ema.slow", "iterators"}
    assert document["trees"][""]["published"] is True
    assert _problems(document) == []


def test_a_manifest_with_a_tree_of_another_program_is_valid(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "fixtures" / "eformer" / "ts_validation_checksums" / "ckpt", tmp_path / "run")
    shardkeep.save(tmp_path / "run", {"w": np.ones(2)}, prefix="ours")
    (document,) = _documents(tmp_path)
    assert {tree["format"] for tree in document["trees"].values()} == {"foreign", "safetensors"}
    assert _problems(document) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run"
    value = {"w": jax.device_put(jnp.zeros((1024, 512)), NamedSharding(mesh_of(2), PartitionSpec("a"))), "step": 7}
    key = {"key": jax.random.key(1), "data": shardkeep.PerProcess(1), 1: Keyed(1.5, (2, b"x"))}
    shardkeep.save(path, {**value, **key, "more": np.arange(3, dtype=">i4")}, step=1, metadata={"a": 1})
    return path


def _leaf(name: str) -> Callable[[Any], Any]:
    return lambda body: next(leaf for leaf in body["trees"][""]["leaves"] if leaf["key"] == name)


def _tree_of(body: Any) -> Any:
    return body["trees"][""]


def _custom(body: Any) -> Any:
    return next(node for key, node in _tree_of(body)["structure"]["dict"] if key == {"int": "0x1"})


def _file(body: Any) -> Any:
    return _tree_of(body)["files"][0]


def _table(body: Any) -> Any:
    return _tree_of(body)["tables"][0]


REMOVED = object()
# Where, which field, and what it is replaced by: each alone makes the manifest invalid.
INVALID: list[tuple[Callable[[Any], Any], Any, Any]] = [
    *[(lambda body: body, field, REMOVED) for field in ("algorithm", "block", "save", "trees")],
    *[(lambda body: body, "shardkeep", value) for value in (0, "2", None, 1.5, True)],
    *[(lambda body: body, "algorithm", value) for value in ("sha256", None)],
    *[(lambda body: body, "block", value) for value in (BLOCK * 2, str(BLOCK))],
    *[(lambda body: body, "save", value) for value in ("0" * 31, "0" * 33, "G" * 32, "A" * 32, 5, None)],
    *[(lambda body: body, "trees", value) for value in ([], None, {"": 5}, {"": []})],
    *[
        (lambda body: body["trees"], prefix, {})
        for prefix in ("a..b", ".a", "a.", "~a", "a/b", "a\0", "a\x7f", "x" * 501)
    ],
    *[
        (_tree_of, field, REMOVED)
        for field in (
            *("save", "format", "compression", "created", "indexed", "metadata", "structure", "files", "tables"),
            "leaves",
        )
    ],
    (_tree_of, "save", "0"),
    *[(_tree_of, "format", value) for value in ("zarr", None, 5, "")],
    *[(_tree_of, "compression", value) for value in ("gzip", "", False, 0)],
    *[(_tree_of, "created", value) for value in (5, None)],
    *[(_tree_of, "indexed", value) for value in (1, None, "true")],
    *[(_tree_of, "published", value) for value in (1, None, "x")],
    *[(_tree_of, "step", value) for value in (-1, 2**63, "1", None, True)],
    *[(_tree_of, "source", value) for value in ("", "A", " a", "a" * 41, 5, None)],
    *[(_tree_of, "metadata", value) for value in ([], None, "x", 1)],
    *[
        (_tree_of, "structure", value)
        for value in (
            *(1, -1, "x", [], {}, True, {"x": 1}, {"list": {}}, {"list": ""}, {"list": [[]]}, {"dict": [0]}),
            *({"odict": {}}, {"dict": [["a"]]}, {"dict": [["a", 0, 0]]}, {"dict": [[1, 0]]}, {"dict": [[["a"], 0]]}),
            *({"tuple": None}, {"namedtuple": "a:B"}, {"custom": 5, "children": []}, {"custom": "a:B", "children": {}}),
        )
    ],
    *[(_custom, "children", value) for value in (REMOVED, [["left"]], [[None, 0], ["right", 0]], "ab")],
    *[(_custom, "custom", value) for value in (5, None)],
    *[(_custom, "registered", value) for value in (5, None, {"int": "0x1"})],
    *[(_custom, "fields", value) for value in (5, "ab", [5])],
    *[
        (_custom, "aux", value)
        for value in (
            *(5, 1.5, {}, {"int": 5}, {"int": "ff"}, {"int": "0xg"}, {"int": "-"}, {"float": "x"}, {"float": 1.5}),
            *({"float": "nan:00"}, {"complex": ["1.0"]}, {"complex": "11"}, {"bytes": "!"}, {"text": "a"}),
            *({"dict": {}}, {"dict": ["ab"]}, {"dict": [["a"]]}, {"numpy": ["object", "00"]}, {"tuple": ""}),
            *({"numpy": ["float32"]}, {"numpy": ["int8", "0"]}, {"set": []}, {"int": "0x1", "float": "1.0"}, [5]),
        )
    ],
    *[(_tree_of, "files", value) for value in ({}, "", None, 5)],
    *[(_tree_of, "files", [value]) for value in ([], {}, "abcd", ["x", 1, 1])],
    *[(_file, 0, value) for value in ("", "..", "../x", "/x", "a//b", "a/.", "a\\b", "a\0", "x" * 4001, None, 5)],
    *[(_file, 1, value) for value in (-1, "1", None, 1.5)],
    *[(_file, 2, value) for value in (-1, "1", None, 1.5)],
    *[(_file, 3, value) for value in ("0", 5, "Z" * 32, "0" * 33)],
    *[(_tree_of, "tables", value) for value in ({}, "", None, [5], [{}], [{"data": 5}], [{"file": -1}])],
    *[(_table, "file", value) for value in (0, None)],
    *[(_table, "base", value) for value in (-1, "0", None)],
    *[(_table, "digests", value) for value in (0, None, "false")],
    *[(_table, "data", value) for value in ("", "AAAA", "!", "c2twaWVjZTIC" + "A" * 64, "c2twaWVjZTE" + "A" * 65)],
    *[(_tree_of, "patterns", value) for value in (5, {}, [0], [[-1]], [["0"]], [None])],
    *[(_tree_of, "leaves", value) for value in ({}, None, 5, [5])],
    *[(_leaf("w"), field, REMOVED) for field in ("key", "kind", "dtype", "shape")],
    *[(_leaf("w"), "key", value) for value in (5, None, ["w"], {"int": "0x1"}, {"text": "!"})],
    *[(_leaf("w"), "kind", value) for value in ("other", None, 5)],
    *[(_leaf("w"), "dtype", value) for value in ("object", "float31", "U5", "", None, 5, "datetime64", "<f4")],
    *[(_leaf("w"), "shape", value) for value in (5, None, "", {}, [-1], ["1"], [1.5], [True], [1] * 65)],
    *[(_leaf("w"), "grid", value) for value in (5, None, [0, 1], ["1", 1], [-1, 1], [[], 1], [[1], 1], [[0, 0], 1])],
    *[(_leaf("w"), "pattern", value) for value in (-1, "0", None)],
    *[(_leaf("w"), "sharding", value) for value in (5, [], {"spec": 5}, {"spec": [5]}, {"spec": [[None]]})],
    *[(_leaf("w"), "sharding", {"mesh": value}) for value in ([], {"a": "1"}, {"a": None}, {"a": 1.5})],
    *[(_leaf("more"), "order", value) for value in ("|", "", None, "=")],
    *[(_leaf("key"), "impl", value) for value in (REMOVED, 5, None)],
    *[(_leaf("data"), "lengths", value) for value in (REMOVED, [], [0], [-1], ["1"], 5, None)],
    *[(_leaf("data"), "dtype", "int8"), (_leaf("data"), "shape", [64])],
    *[(_leaf("step"), "value", value) for value in (REMOVED, 7, None, [], {"tuple": []}, {"dict": []}, {"int": "7"})],
    *[(_leaf("more"), "kind", "zarr"), (_leaf("more"), "kind", "value")],
]  # fmt: skip


def _sealed(body: Any) -> bytes:
    return seal(json.dumps({**body, "digest": "0" * 32}, separators=(",", ":")).encode())


def _name(value: object) -> str | None:
    """The name of a parameter, without addresses: every worker of the tests has to find the same names."""
    return None if callable(value) else "removed" if value is REMOVED else repr(value)[:40]


@pytest.mark.parametrize(("holder", "field", "value"), INVALID, ids=_name)
def test_what_is_not_valid_is_refused(
    holder: Callable[[Any], Any], field: Any, value: Any, saved: Path, tmp_path: Path
) -> None:
    body = json.loads((saved / "manifest.json").read_bytes())
    assert _problems(body) == []
    if value is REMOVED:
        del holder(body)[field]
    else:
        holder(body)[field] = value
    assert _problems(body) != []
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / "manifest.json").write_bytes(_sealed(body))
    with pytest.raises(shardkeep.ShardkeepError, match="manifest|file name|outside the checkpoint"):
        shardkeep.load(tmp_path / "run", per_process="all")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("file", value) for value in (REMOVED, -1, "0", None)],
        *[("offset", value) for value in (REMOVED, -1, "0", None)],
        *[("digests", value) for value in (REMOVED, ["0"], "x", 5, {})],
        *[("start", value) for value in (5, [-1, 0], ["0", 0], {})],
        *[("shape", value) for value in (REMOVED, 5, None, [-1, 0], {})],
        *[("stored", value) for value in (0, -1, "1")],
    ],
)
def test_what_is_not_valid_in_version_1_is_refused(field: str, value: Any) -> None:
    body = json.loads((GOLDEN / "v1" / "safetensors" / "manifest.json").read_bytes())
    assert _problems(body) == []
    piece = _leaf("sharded")(body)["pieces"][0]
    if value is REMOVED:
        del piece[field]
    else:
        piece[field] = value
    assert _problems(body) != []
    with pytest.raises(shardkeep.IntegrityError, match="malformed"):
        decode_manifest(_sealed(body), "run", "run/manifest.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("names", value) for value in (REMOVED, None, 5, "", "x", "*-*", "x" * 255 + "*")],
        *[("names", value) for value in ("/*", "../*", "a//*", "*/.", "a\\*", "a\0*")],
        *[("first", value) for value in (REMOVED, None, -1, "0", 0.5, True, 2**32, 10**4000)],
        *[("sizes", value) for value in (REMOVED, None, 5, "", {}, [], ["4160"] * 10, [4160.5] * 10, [-1] * 10)],
        *[("header_lengths", value) for value in (REMOVED, None, -1, "4096", 0.5, True, {}, [], ["0"] * 10, [-1] * 10)],
        *[("header_digests", value) for value in (REMOVED, None, 5, "", [], "AAAA", "0" * 33, "!" * 216, "A" * 217)],
    ],
    ids=_name,
)
def test_what_is_not_valid_in_a_series_is_refused(field: str, value: Any) -> None:
    body = json.loads((GOLDEN / "v2" / "series" / "manifest.json").read_bytes())
    assert _problems(body) == []
    series = _file(body)
    if value is REMOVED:
        del series[field]
    else:
        series[field] = value
    assert _problems(body) != []
    with pytest.raises(shardkeep.IntegrityError, match="malformed|file name|outside the checkpoint"):
        decode_manifest(_sealed(body), "run", "run/manifest.json")


def test_fields_that_are_not_known_are_ignored(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    body = json.loads((saved / "manifest.json").read_bytes())
    for holder in (body, _tree_of(body), _table(body), _custom(body), *_tree_of(body)["leaves"]):
        holder["something new"] = [1.5]
    assert _problems(body) == []
    (tmp_path / "run" / "manifest.json").write_bytes(_sealed(body))
    assert shardkeep.load(tmp_path / "run")["step"] == 7


def _places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, value in body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ():
        yield from _places(value, (*path, key))


def _others(value: Any) -> list[Any]:
    """What may stand in the place of a value, most of it wrongly."""
    found: list[Any] = [None, True, -1, 0, 3, 2**64, 0.5, "", "a", "..", "value", "int4", [], {}, [0], ["a"]]
    if isinstance(value, str):
        found += [value + "0", value[:-1], value.upper(), f" {value}"]
    if isinstance(value, list):
        found += [value * 2, value[:-1], [*value, None], value[::-1]]
    return [*found, [value], {"a": value}, {"list": []}, {"tuple": [value]}, {"text": value}]


GOLDEN_BODIES = [
    json.loads((GOLDEN / version / name / "manifest.json").read_bytes())
    for version, names in (
        ("v1", ["zstd", "safetensors", "auxiliary/zarr", "per process/one/zarr"]),
        ("v2", ["zstd", "safetensors", "auxiliary/zarr", "per process/one/zarr", "tables/two/zarr", "series"]),
    )
    for name in names
]


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_what_shardkeep_accepts_is_valid(data: st.DataObject) -> None:
    """With any value replaced or removed. Not in tables: they are decoded when they are needed."""
    body = copy.deepcopy(data.draw(st.sampled_from(GOLDEN_BODIES)))
    places = [place for place in _places(body["trees"]) if place and place[-1] != "data"]
    *above, last = data.draw(st.sampled_from(places))
    holder = body["trees"]
    for key in above:
        holder = holder[key]
    if data.draw(st.integers(0, 9)) == 0:
        del holder[last]
    else:
        holder[last] = data.draw(st.sampled_from(_others(holder[last])))
    try:
        decode_manifest(_sealed(body), "run", "run/manifest.json", lambda _: b"")
    except shardkeep.ShardkeepError:
        return
    assert _problems(body) == []
