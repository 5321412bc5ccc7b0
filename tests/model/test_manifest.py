"""The manifest: what it says, how it is sealed, and that one made by an enemy gives an error and nothing else."""

import copy
import json
import os
from collections.abc import Iterator, Mapping
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
from faults.spawner import Spawner
from shardkeep.model.digests import check_seal, seal
from shardkeep.model.document import check_name, decode_manifest, encode_manifest
from shardkeep.model.leaves import StoredArray, StoredValue
from shardkeep.model.manifest import check_prefix
from support import Keyed, Point, assert_same, mesh_of

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
    return found


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
    field = data.draw(st.sampled_from([*leaf, "sharding", "order", "impl", "structure", "files", "metadata"]))
    value = copy.deepcopy(data.draw(st.sampled_from(NASTY)))
    if field in tree:
        tree[field] = value
    elif field == "pieces" and leaf["pieces"] and data.draw(st.booleans()):
        piece = data.draw(st.sampled_from(leaf["pieces"]))
        piece[data.draw(st.sampled_from(["file", "offset", "digests", "start", "shape", "stored"]))] = value
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
    leaf["shape"] = [elements]
    (piece,) = leaf["pieces"]
    piece["digests"] = None if elements > 2**36 else ["0" * 32] * (elements >> 22)
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
    (path / "manifest.json").write_text(json.dumps({"shardkeep": 2, "something": "else"}))
    for action in (shardkeep.load, shardkeep.inspect, shardkeep.verify):
        with pytest.raises(shardkeep.NewerFormatError, match=r"format version 2; .* upgrade"):
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


def test_a_manifest_tells_what_is_there(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones((2, 3), np.float32), "n": 5}, metadata={"step": 1})
    manifest = shardkeep.inspect(tmp_path / "run")
    assert manifest.prefixes == [""]
    assert manifest.nbytes == 24
    assert manifest.leaves["w"].dtype == "float32"
    assert manifest.leaves["n"].shape is None
    assert manifest.metadata == {"step": 1}
    assert "float32[2, 3]" in str(manifest)
    shardkeep.save(tmp_path / "run", {"v": np.ones(3)}, prefix="ema")
    manifest = shardkeep.inspect(tmp_path / "run")
    assert set(manifest.leaves) == {"w", "n", "ema/v"}
    assert manifest.tree("ema").nbytes == 24
    with pytest.raises(shardkeep.PrefixError, match="'ema'"):
        manifest.tree("other")


@pytest.mark.parametrize("step", [0, 7, 2**63 - 1, np.int32(7), np.uint64(7), np.array(7), jnp.int32(7)])
@pytest.mark.parametrize("name", ["run", "run.safetensors"])
def test_a_step_is_recorded_and_comes_back_as_an_int(tmp_path: Path, name: str, step: Any) -> None:
    shardkeep.save(tmp_path / name, {"w": np.ones(3)}, step=step)
    manifest = shardkeep.inspect(tmp_path / name)
    assert (manifest.step, manifest.tree().step) == (int(step), int(step))
    assert type(manifest.step) is int


def test_a_checkpoint_without_a_step_has_none(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)})
    assert shardkeep.inspect(tmp_path / "run").step is None
    assert b'"step"' not in (tmp_path / "run" / "manifest.json").read_bytes()
    golden = [path.parent for path in (Path(__file__).parents[1] / "golden" / "v1").rglob("manifest.json")]
    steps = {shardkeep.inspect(path).step for path in golden if "metadata" not in path.parts and shardkeep.exists(path)}
    assert steps == {None}


def test_the_step_of_several_trees_is_that_of_the_one_a_load_gives_or_the_highest(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, prefix="a", step=5)
    assert shardkeep.inspect(tmp_path / "run").step == 5
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, prefix="b", step=9)
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, prefix="c")
    assert shardkeep.inspect(tmp_path / "run").step == 9
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, step=7)
    assert shardkeep.inspect(tmp_path / "run").step == 7


@pytest.mark.parametrize(
    ("step", "kind", "why"),
    [
        (-1, ValueError, "must be from 0"),
        (2**63, ValueError, "must be from 0"),
        (True, TypeError, "must be an integer, not True"),
        (np.True_, TypeError, "must be an integer"),
        (jnp.array(True), TypeError, "must be an integer"),
        (1.0, TypeError, "must be an integer, not a float"),
        (jnp.float32(1), TypeError, "must be an integer"),
        ("1", TypeError, "must be an integer, not a str"),
        (np.arange(3), TypeError, "must be an integer"),
    ],
)
def test_what_is_no_step_is_refused_before_anything_is_written(
    tmp_path: Path, step: Any, kind: type[Exception], why: str
) -> None:
    for save in (shardkeep.save, shardkeep.save_async):
        with pytest.raises(kind, match=why):
            save(tmp_path / "run", {"w": np.ones(3)}, step=step)
    assert not (tmp_path / "run").exists()


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


def test_which_tree_no_prefix_means(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"a": 1}, prefix="x")
    assert shardkeep.load(tmp_path / "run") == {"a": 1}
    shardkeep.save(tmp_path / "run", {"a": 2}, prefix="y")
    with pytest.raises(shardkeep.PrefixError, match="'x', 'y'"):
        shardkeep.load(tmp_path / "run")
    shardkeep.save(tmp_path / "run", {"a": 3})
    assert shardkeep.load(tmp_path / "run") == {"a": 3}


@pytest.mark.parametrize(("prefix", "recorded"), [("a", "a"), ("a/b", "a.b"), ("a.b", "a.b"), ("", ""), ("ä ö", "ä ö")])
def test_a_prefix_nests_with_dots_or_slashes(prefix: str, recorded: str) -> None:
    assert check_prefix(prefix) == recorded


@pytest.mark.parametrize(
    "metadata", [{"x": float("nan")}, {"x": float("inf")}, {"x": 10**400}, {"ü\n": "\u2028", "": [{}, [], None, True]}]
)
def test_metadata_comes_back_as_it_was_or_is_refused(tmp_path: Path, metadata: dict[str, Any]) -> None:
    try:
        shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, metadata=metadata)
    except shardkeep.MetadataError as error:
        assert "metadata" in str(error)  # noqa: PT017  (either is right, half is not)
        return
    assert_same(dict(shardkeep.inspect(tmp_path / "run").metadata), metadata)

    def refuse(token: str) -> Any:
        raise AssertionError(f"{token} is not JSON: other programs cannot read this manifest")

    json.loads((tmp_path / "run" / "manifest.json").read_text(), parse_constant=refuse)


class TestWhatIsShown:
    """What `inspect` returns is printed in about 20 lines, and shows users what they need."""

    def test_twenty_thousand_leaves_take_twenty_lines(self, tmp_path: Path) -> None:
        tree = {f"layer_{i:05d}": {"w": np.zeros((2, 3), np.float32)} for i in range(20_000)}
        shardkeep.save(tmp_path / "run", tree, metadata={"step": 1})
        many = shardkeep.inspect(tmp_path / "run")
        for text in (repr(many), str(many)):
            assert len(text) < 2000
            assert len(text.splitlines()) <= 20
            assert f"{many.path}: 20,000 leaves, 480,000 bytes" in text
            assert "layer_00000/w: float32[2, 3], 24 bytes in 1 piece" in text
            assert "… and 19,985 more leaves" in text
        for text in (repr(many.tree()), str(many.tree())):
            assert len(text) < 2000
            assert "19,985 more" in text

    def test_a_small_one_shows_all(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "run", {"w": np.ones((2, 3), np.float32), "n": 5})
        tree = shardkeep.inspect(tmp_path / "run").tree()
        assert repr(shardkeep.inspect(tmp_path / "run")).splitlines() == [
            f"<Manifest {tmp_path / 'run'}: 2 leaves, 24 bytes>",
            f"  (no prefix): safetensors, 2 leaves, 24 bytes, saved {tree.created}",
            "    w: float32[2, 3], 24 bytes in 1 piece",
            "    n: 5",
        ]
        assert repr(tree).splitlines()[0] == f"<Tree: safetensors, 2 leaves, 24 bytes, saved {tree.created}>"
        assert [repr(leaf) for leaf in tree.leaves] == [
            "<StoredLeaf w: float32[2, 3], 24 bytes in 1 piece>",
            "<StoredLeaf n: 5>",
        ]

    def test_many_trees_and_long_or_odd_names_and_values_are_bounded_too(self, tmp_path: Path) -> None:
        tree = {f"{'k' * 300}\n{i}": "v" * 10_000 if i % 2 else 10**5000 for i in range(40)}
        for number in range(9):
            shardkeep.save(tmp_path / "run", tree, prefix=f"{'p' * 100}{number}")
        text = repr(shardkeep.inspect(tmp_path / "run"))
        assert len(text) < 2000
        assert len(text.splitlines()) <= 25
        assert "… and 5 more trees" in text
        assert "\\n" in text
        assert "an integer of" in text

    def test_bytes_are_not_written_out(self) -> None:
        assert repr(StoredValue(("b",), b"x" * (1 << 24))) == "<StoredLeaf b: b'xxxxxxxxxxxxx…xxxxxxxxxxxxx'>"

    def test_these_attributes_are_public(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "run", {"w": np.ones(3)})
        manifest = shardkeep.inspect(tmp_path / "run")
        tree = manifest.tree()
        assert _public(manifest) == [
            "leaves",
            "metadata",
            "nbytes",
            "path",
            "prefixes",
            "save_id",
            "step",
            "tree",
            "trees",
        ]
        assert _public(tree) == ["compression", "created", "format", "leaves", "metadata", "nbytes", "save_id", "step"]
        assert _public(tree.leaves[0]) == ["dtype", "key", "kind", "nbytes", "path", "processes", "shape", "value"]

    def test_each_is_documented_and_every_class_they_lead_to_is_exported(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "run", {"w": np.ones(3), "n": 1}, metadata={"a": [1]})
        seen: set[type] = set()
        ahead: list[Any] = [shardkeep.inspect(tmp_path / "run")]
        while ahead:
            thing = ahead.pop()
            if isinstance(thing, Mapping):
                ahead += [*thing.values()]
            elif isinstance(thing, tuple | list):
                ahead += thing
            elif type(thing).__module__.startswith("shardkeep") and type(thing) not in seen:
                seen.add(type(thing))
                ahead += [getattr(thing, name) for name in _public(thing) if name != "tree"]
                for name in _public(thing):
                    attribute = getattr(type(thing), name, None)
                    documented = attribute is not None and attribute.__doc__
                    texts = [cls.__doc__ or "" for cls in type(thing).__mro__]
                    assert documented or any(f"{name}:" in text for text in texts), name
        leaves = {StoredArray, StoredValue}
        assert seen - leaves == {shardkeep.Manifest, shardkeep.Tree}
        assert all(issubclass(cls, shardkeep.StoredLeaf) for cls in leaves)
        assert {"Manifest", "Tree", "StoredLeaf"} <= set(shardkeep.__all__)


def _public(thing: object) -> list[str]:
    return sorted(name for name in dir(thing) if not name.startswith("_"))
