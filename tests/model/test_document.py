"""The document of a manifest: how it is sealed, and that one made by an enemy gives an error and nothing else."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from faults.piecetables import changed, put_rows, rows_of
from faults.spawner import Spawner
from shardkeep.model.digests import check_seal, seal
from shardkeep.model.document import decode_manifest, encode_manifest
from shardkeep.model.naming import check_name
from support import Keyed, Point, mesh_of

EXAMPLES = int(os.environ.get("SHARDKEEP_EXAMPLES", "150"))


def _tree() -> Any:
    """No registered dataclass: made wrongly, one crashes the process. They are tried in processes of their own."""
    spread = NamedSharding(mesh_of(2, 4), PartitionSpec("a", "b"))
    return {
        "spread": jax.device_put(jnp.arange(1 << 19, dtype=jnp.float32).reshape(512, 1024), spread),
        "point": Point(np.ones(3), [1, 2.5, "x", b"y", 1j, True]),
        "keyed": Keyed(np.int8(3), ()),
        "key": jax.random.split(jax.random.key(1), 3),
        "swapped": np.arange(4, dtype=">i4"),
        "time": np.array(["2020-01-01"], "M8[ns]"),
        1: {None: np.zeros((0, 5))},
    }


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes]]:
    """Checkpoints whose manifests are to be changed, and those manifests."""
    found = {}
    for name, arguments in {"safetensors": {}, "zstd": {"format": "zarr", "compression": "zstd"}}.items():
        path = tmp_path_factory.mktemp(name) / "run"
        shardkeep.save(path, _tree(), metadata={"a": [1, None]}, **arguments)  # type: ignore[arg-type]
        found[name] = (path, (path / "manifest.json").read_bytes())
    series = tmp_path_factory.mktemp("series") / "run"  # one record for several files
    shutil.copytree(Path(__file__).parents[1] / "golden" / "v2" / "series", series)
    return {**found, "series": (series, (series / "manifest.json").read_bytes())}


@pytest.fixture
def restored(documents: dict[str, tuple[Path, bytes]]) -> Iterator[None]:
    yield
    for path, document in documents.values():
        (path / "manifest.json").write_bytes(document)


def _sealed(body: Any) -> bytes:
    return seal(json.dumps({**body, "digest": "0" * 32}, separators=(",", ":")).encode())


def _try_everything(path: Path) -> None:
    """Only shardkeep's own errors, whatever is done with the checkpoint."""
    for action in (
        lambda: str(shardkeep.inspect(path)),
        lambda: shardkeep.load(path),
        lambda: shardkeep.load(path, mmap=False, mesh=mesh_of(2, 4)),
        lambda: str(shardkeep.verify(path)),
        lambda: shardkeep.exists(path),
        lambda: shardkeep.inspect(path).leaves and shardkeep.inspect(path).metadata,
    ):
        try:
            action()
        except shardkeep.ShardkeepError:
            pass


def _places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        yield from _places(value, (*path, key))


NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "a", "\0", "..", "../x", "/etc/passwd", "a/../../b", "x" * 5000, "\ud800",
    "jax", "value", "prng", "numpy", "zstd", "int4", "float64", "object", "datetime64[99999999999999999999s]",
    "datetime64[", "U5", "threefry2x32", "0" * 32, ">", "|",
    [], {}, [[]], [0], [-1], [1, 2, 3], [2**40] * 3, ["a"], {"a": 1}, {"list": []}, {"dict": [[{"int": "zz"}, 0]]},
    {"custom": "builtins:dict", "children": [], "aux": None}, {"namedtuple": "os:system", "children": [["x", 0]]},
    {"custom": "os:system", "children": [["x", 0]], "aux": "id"}, {"numpy": ["float64", "00"]}, {"float": "nan:"},
    {"bytes": "!"}, {"complex": []}, {"tuple": 5}, {"int": "0x" + "f" * 3000}, {"spec": 5},
    {"spec": [["q"]], "mesh": []}, {"spec": [{"a": 1}]},
]  # fmt: skip


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_changed_manifest_gives_only_our_errors(
    documents: dict[str, tuple[Path, bytes]], restored: None, data: st.DataObject
) -> None:
    """Any value in any place replaced, removed or doubled, with the seal made right again."""
    path, document = documents[data.draw(st.sampled_from(sorted(documents)))]
    body = json.loads(document)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(_places(body["trees"]))[1:]))
        holder = body["trees"]
        for key in place[:-1]:
            holder = holder[key]
        what = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "double", "rename"]))
        if what == "replace":
            holder[place[-1]] = copy.deepcopy(data.draw(st.sampled_from(NASTY)))
        elif what == "double" and isinstance(holder, list):
            holder.insert(place[-1], copy.deepcopy(holder[place[-1]]))
        elif what == "rename" and isinstance(holder, dict):
            holder[str(data.draw(st.sampled_from(["x", "", "start", "stored", "order"])))] = holder.pop(place[-1])
        else:
            del holder[place[-1]]
        if not body["trees"]:
            break
    try:
        text = _sealed(body)
    except (UnicodeEncodeError, ValueError):
        return
    (path / "manifest.json").write_bytes(text)
    _try_everything(path)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_every_place_bears_every_nasty_value(
    documents: dict[str, tuple[Path, bytes]], restored: None, data: st.DataObject
) -> None:
    """The places that matter most, each with any value: kinds, dtypes, shapes, pieces, structure, layout."""
    path, document = documents["safetensors"]
    body = json.loads(document)
    tree = body["trees"][""]
    number = data.draw(st.integers(0, len(tree["leaves"]) - 1))
    leaf = tree["leaves"][number]
    field = data.draw(
        st.sampled_from([*leaf, "sharding", "order", "impl", "grid", "structure", "files", "tables", "patterns"])
    )
    value = copy.deepcopy(data.draw(st.sampled_from(NASTY)))
    if field in tree:
        tree[field] = value
    elif field == "tables" and data.draw(st.booleans()):
        tree["tables"][0][data.draw(st.sampled_from(["data", "file", "base", "digests"]))] = value
    else:
        leaf[field] = value
    (path / "manifest.json").write_bytes(_sealed(body))
    _try_everything(path)


@pytest.mark.parametrize(
    "structure",
    [
        {},
        [],
        "",
        "x",
        5,
        {"list": [{}]},
        {"list": [[]]},
        {"dict": [[]]},
        {"tuple": [""]},
        {"odict": {}},
        [0],
        {"x": 1},
        True,
    ],
)
def test_a_malformed_structure_is_an_error_of_ours(
    documents: dict[str, tuple[Path, bytes]], restored: None, structure: Any
) -> None:
    path, document = documents["safetensors"]
    body = json.loads(document)
    body["trees"][""]["structure"] = structure
    (path / "manifest.json").write_bytes(_sealed(body))
    with pytest.raises(shardkeep.IntegrityError, match="malformed"):
        shardkeep.load(path)


CHANGED = [
    {"kernel": 0, "name": 1},
    {"kernel": 0, "bias": 0, "scale": 0, "name": 1},
    {"bias": 0, "kernel": 0, "name": 1},
    {"weight": 0, "bias": 0, "name": 1},
    {"kernel": 0, "bias": 0},
    {"kernel": 0, "bias": 0, "name": 0},
    {"kernel": 0, "bias": 1, "name": 1},
    {"kernel": 0, "bias": 0, "name": 1, "more": 1},
]


@pytest.mark.parametrize("fields", CHANGED, ids=lambda fields: ",".join(fields))
def test_a_dataclass_that_has_changed_since_gets_no_wrong_fields(
    tmp_path: Path, spawner: Spawner, fields: dict[str, int]
) -> None:
    """Fields added, removed, renamed, reordered, made static: a stand-in or an error; no crash, no swapped arrays."""
    path = str(tmp_path / "run")
    assert spawner.run("save_layer", path=path).ok
    outcome = spawner.run("load_layer", path=path, fields=fields)
    assert not outcome.signal, "it crashed"
    if outcome.error:
        assert "ShardkeepError" in outcome.bases, outcome
        return
    kind, kernel, bias = outcome.value
    assert (kernel, bias) == ([2], [3])
    assert kind == ("Layer" if list(fields) == ["bias", "kernel", "name"] else "OpaqueNode")


def test_a_dataclass_that_is_the_same_is_rebuilt(tmp_path: Path, spawner: Spawner) -> None:
    path = str(tmp_path / "run")
    assert spawner.run("save_layer", path=path).ok
    outcome = spawner.run("load_layer", path=path, fields={"kernel": 0, "bias": 0, "name": 1})
    assert outcome.value == ["Layer", [2], [3]]


@pytest.mark.parametrize("depth", [50, 900, 100_000])
@pytest.mark.parametrize("where", ["structure", "metadata", "value"])
def test_deep_nesting_ends_in_an_error_of_ours(
    documents: dict[str, tuple[Path, bytes]], restored: None, depth: int, where: str
) -> None:
    path, document = documents["safetensors"]
    body = json.loads(document)
    tree = body["trees"][""]
    if where == "structure":
        tree["structure"] = "HERE"
        deep = '{"list":[' * depth + "0" + "]}" * depth
    elif where == "metadata":
        tree["metadata"] = {"x": "HERE"}
        deep = "[" * depth + "]" * depth
    else:
        tree["leaves"][1] = {**tree["leaves"][1], "kind": "value", "value": "HERE"}
        deep = '{"tuple":[' * depth + "1" + "]}" * depth
    text = json.dumps({**body, "digest": "0" * 32}, separators=(",", ":")).replace('"HERE"', deep)
    (path / "manifest.json").write_bytes(seal(text.encode()))
    _try_everything(path)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "a//b",
        "./a",
        "a/.",
        "",
        "a\0b",
        "a\\b",
        5,
        None,
        ["a"],
        "x" * 5000,
        "..",
        "\ud800",
    ],
)
def test_a_file_name_cannot_leave_the_checkpoint(
    documents: dict[str, tuple[Path, bytes]], restored: None, name: Any
) -> None:
    with pytest.raises(shardkeep.IntegrityError, match="file name"):
        check_name(name)
    path, document = documents["safetensors"]
    body = json.loads(document)
    body["trees"][""]["files"][0][0] = name
    (path / "manifest.json").write_bytes(_sealed(body))
    with pytest.raises(shardkeep.IntegrityError, match="file name"):
        shardkeep.load(path)


def test_a_manifest_that_names_a_link_to_outside_is_refused(tmp_path: Path) -> None:
    """The name is inside, the file is not."""
    outside = tmp_path / "outside"
    path = tmp_path / "run"
    shardkeep.save(path, {"w": np.ones(100)}, format="zarr")
    (path / "w" / "0").rename(outside)
    (path / "w" / "0").symlink_to(outside)
    with pytest.raises(shardkeep.IntegrityError, match="link"):
        shardkeep.load(path)
    (path / "w" / "0").unlink()
    (path / "w" / "1").write_bytes(outside.read_bytes())
    (path / "w" / "0").symlink_to("1")
    assert shardkeep.load(path)["w"].sum() == 100
    linked = tmp_path / "linked"
    linked.symlink_to(path)
    assert shardkeep.load(linked)["w"].sum() == 100


@pytest.mark.parametrize("kind", ["directory", "loop", "nowhere", "fifo", "device"])
@pytest.mark.parametrize("name", ["manifest.json", "data"])
def test_what_is_no_plain_file_is_an_error_of_ours(tmp_path: Path, spawner: Spawner, kind: str, name: str) -> None:
    """A load must not wait for someone to write into a pipe, nor read from a device."""
    path = tmp_path / "run"
    shardkeep.save(path, {"w": np.ones(100)})
    file = path / name if name == "manifest.json" else next(path.glob("*.safetensors"))
    file.unlink()
    if kind == "directory":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to({"loop": file.name, "nowhere": "nowhere", "device": "/dev/zero"}[kind])
    outcome = spawner.start("load", path=str(path), kind="plain", number=0).wait(8)
    assert "ShardkeepError" in outcome.bases, outcome
    checked = spawner.start("check", path=str(path)).wait(8)
    assert checked.value == [False, False]


def test_an_endless_manifest_is_refused_without_reading_it(tmp_path: Path, spawner: Spawner) -> None:
    """A sparse file of a terabyte costs an enemy nothing."""
    path = tmp_path / "run"
    shardkeep.save(path, {"w": np.ones(100)})
    os.truncate(path / "manifest.json", 1 << 40)
    outcome = spawner.start("load_within", path=str(path), gigabytes=6).wait(8)
    assert "IntegrityError" in outcome.bases, outcome
    assert spawner.start("check", path=str(path)).wait(8).value == [False, False]


@pytest.mark.parametrize("elements", [2**36, 2**44, 2**60])
def test_a_declared_size_allocates_nothing_by_itself(tmp_path: Path, spawner: Spawner, elements: int) -> None:
    """A compressed piece may claim any length: memory is bounded, and the error is ours."""
    path = tmp_path / "run"
    shardkeep.save(path, {"w": np.ones(100, np.uint8)}, format="zarr", compression="zstd")
    body = json.loads((path / "manifest.json").read_bytes())
    leaf = body["trees"][""]["leaves"][0]
    tree = body["trees"][""]
    put_rows(tree, [changed(rows_of(tree)[0], digests=["0" * 32] * (elements >> 22 if elements <= 2**36 else 0))])
    leaf["shape"] = [elements]
    tree["tables"][0]["digests"] = elements <= 2**36
    (path / "manifest.json").write_bytes(_sealed(body))
    outcome = spawner.start("load_within", path=str(path), gigabytes=6).wait(10)
    assert "ShardkeepError" in outcome.bases, outcome
    assert spawner.start("check", path=str(path)).wait(10).value == [True, False]


def test_duplicate_keys_and_numbers_that_are_none_do_no_harm(
    documents: dict[str, tuple[Path, bytes]], restored: None
) -> None:
    path, document = documents["safetensors"]
    text = document.decode()
    at = text.index('"digest":"') + 10
    text = text[:at] + "0" * 32 + text[at + 32 :]
    for old, new in {
        '"trees":': '"trees":{},"trees":',
        '"shape":[': '"shape":[NaN,',
        '"offset":': '"offset":1e999,"offset":-',
        '"files":[[': '"files":[],"files":[[',
        '"size":': '"size":' + "9" * 5000,
        '"metadata":{': '"metadata":{"x":Infinity,',
    }.items():
        (path / "manifest.json").write_bytes(seal(text.replace(old, new, 1).encode()))
        _try_everything(path)


def test_a_newer_version_says_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "run"
    shardkeep.save(path, {"w": np.ones(3)})
    body = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps({"shardkeep": 3, "something": "else"}))
    for action in (shardkeep.load, shardkeep.inspect, shardkeep.verify):
        with pytest.raises(shardkeep.NewerFormatError, match=r"format version 3; .* upgrade"):
            action(path)
    assert shardkeep.exists(path)
    with pytest.raises(shardkeep.NewerFormatError, match="upgrade"):
        shardkeep.save(path, {"w": np.ones(3)}, overwrite=True)
    with pytest.raises(shardkeep.NewerFormatError, match="upgrade"):
        shardkeep.delete(path)
    assert json.loads((path / "manifest.json").read_text())["something"] == "else"
    for version in (0, -1, "2", 1.5, None, [2]):
        (path / "manifest.json").write_bytes(_sealed({**body, "shardkeep": version}))
        with pytest.raises(shardkeep.IntegrityError, match=r"manifest\.json"):
            shardkeep.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"shardkeep":1}',
        b'{"shardkeep":1,"digest":"' + b"0" * 32 + b'"}',
        b"{" * 200_000,
    ],
)
def test_a_damaged_manifest_is_named_and_kept_by_the_save_that_replaces_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run"
    shardkeep.save(path, {"w": np.ones(3)})
    files = sorted(p.name for p in path.iterdir())
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(shardkeep.IntegrityError, match=r"manifest\.json"):
        shardkeep.load(path)
    assert not shardkeep.verify(path).ok
    assert not shardkeep.exists(path)
    shardkeep.save(path, {"w": np.zeros(3)})
    (aside,) = path.glob("manifest.json.damaged-*")
    assert aside.read_bytes() == content
    assert {p.name for p in path.iterdir()} >= set(files)
    assert not shardkeep.load(path)["w"].any()


def test_a_manifest_is_what_it_was_when_decoded_and_encoded_again(documents: dict[str, tuple[Path, bytes]]) -> None:
    for path, document in documents.values():
        check_seal(document, "x")
        manifest = decode_manifest(document, str(path), "x")
        assert encode_manifest(manifest) == document


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, [1], 2**63])
def test_a_bad_step_in_a_manifest_is_damage(tmp_path: Path, step: Any) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, step=1)
    document = tmp_path / "run" / "manifest.json"
    body = json.loads(document.read_bytes())
    body["trees"][""]["step"] = step
    document.write_bytes(_sealed(body))
    with pytest.raises(shardkeep.IntegrityError, match=r"manifest\.json is malformed"):
        shardkeep.load(tmp_path / "run")
    assert not shardkeep.exists(tmp_path / "run")
