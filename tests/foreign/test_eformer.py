"""eFormer's directories: every form of its index as a Manifest, and an index of ours that it reads rightly."""

import base64
import dataclasses
import json
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
import shardkeep.serialization
from shardkeep.foreign.base import CompanionIndex
from shardkeep.foreign.eformer import CHECKPOINT_METADATA as METADATA
from shardkeep.foreign.eformer import TENSORSTORE_INDEX as INDEX
from shardkeep.foreign.eformer import EformerIndex, EformerReader
from shardkeep.model.manifest import Manifest
from shardkeep.model.tree import join_key
from shardkeep.stores.local.store import LocalStore
from support import assert_same

DATA = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


def put_array(store: LocalStore, name: str, data: np.ndarray = DATA) -> None:
    directory = Path(store.locate(name))
    directory.mkdir(parents=True, exist_ok=True)
    described = {"zarr_format": 2, "shape": data.shape, "chunks": data.shape, "dtype": data.dtype.str, "order": "C"}
    described |= {"compressor": None, "fill_value": None, "filters": None}
    (directory / ".zarray").write_text(json.dumps(described))
    (directory / ".".join("0" * data.ndim)).write_bytes(data.tobytes())


def read_eformer(store: LocalStore, search: bool) -> Manifest | None:
    """What the reader finds; beside a manifest of ours in which nothing is committed, it does not search."""
    return EformerReader().detect(store, [*store.children(""), *(() if search else ("manifest.json",))])


def put_json(store: LocalStore, name: str, document: Any) -> None:
    Path(store.locate(name)).write_text(json.dumps(document))


def index_of(*names: str, **prefixes: list[str]) -> dict[str, Any]:
    """An index of version 1.0 of some arrays, or of 2.0 with those of prefixes."""
    listed = {p: [{"path": name} for name in inside] for p, inside in prefixes.items()}
    arrays = [{"path": name, "shape": [2, 3], "dtype": "float32"} for name in names]
    index: dict[str, Any] = {"format": "tensorstore", "version": "2.0" if prefixes else "1.0"}
    return index | ({"prefixes": listed} if prefixes else {}) | ({"arrays": arrays} if names or not prefixes else {})


def keys(manifest: Manifest | None) -> dict[str, dict[str, str]]:
    """Of each tree, by prefix: the keys, and the directory each array lies in."""
    assert manifest is not None
    return {
        p: {join_key(leaf.path): leaf.origin.directory for leaf in tree.arrays} for p, tree in manifest.trees.items()
    }


INDICES: dict[str, tuple[dict[str, Any], dict[str, dict[str, str]]]] = {
    "1.0": (index_of("b", "enc/w"), {"": {"b": "b", "enc.w": "enc/w"}}),
    "2.0": (index_of(m=["m/w"], o=["o/w", "o/x/y"]), {"m": {"w": "m/w"}, "o": {"w": "o/w", "x.y": "o/x/y"}}),
    "both": (index_of("b", m=["m/w"]), {"": {"b": "b"}, "m": {"w": "m/w"}}),
    "named after the package": ({**index_of(m=["m/w"]), "version": "0.0.87"}, {"m": {"w": "m/w"}}),
    "no version": ({"format": "tensorstore", "arrays": [{"path": "b"}]}, {"": {"b": "b"}}),
    "more than we know": ({**index_of("b"), "later": [1]}, {"": {"b": "b"}}),
    "no arrays beside prefixes": ({**index_of(m=["m/w"]), "arrays": []}, {"m": {"w": "m/w"}}),
    "no arrays at all": (index_of(), {"": {}}),
    "an empty prefix": (index_of(m=[]), {"m": {}}),
    "nested prefix": (index_of(**{"o.x": ["o/x/y"]}), {"o.x": {"y": "o/x/y"}}),
    "prefix with slashes": (index_of(**{"o/x": ["o/x/y"]}), {"o.x": {"y": "o/x/y"}}),
    "an array outside its prefix": (index_of(m=["o/w"]), {"m": {"o.w": "o/w"}}),
    "some of what is there": (index_of("o/x/y"), {"": {"o.x.y": "o/x/y"}}),
}


@pytest.mark.parametrize("form", INDICES)
@pytest.mark.parametrize("search", [True, False])
def test_every_form_of_the_index_gives_its_trees(form: str, search: bool, store: LocalStore) -> None:
    for name in ("b", "enc/w", "m/w", "o/w", "o/x/y"):
        put_array(store, name)
    put_json(store, INDEX, INDICES[form][0])
    manifest = read_eformer(store, search=search)
    assert keys(manifest) == INDICES[form][1]
    assert manifest is not None
    for tree in manifest.trees.values():
        assert {file.name for file in tree.files} == {
            f"{leaf.origin.directory}/{name}" for leaf in tree.arrays for name in (".zarray", "0.0")
        }
        assert all(file.size == store.size(file.name) for file in tree.files)
        assert (tree.format, {leaf.kind for leaf in tree.leaves} | {"zarr"}) == ("foreign", {"zarr"})


def test_nothing_there_is_none(store: LocalStore) -> None:
    assert read_eformer(store, search=True) is None
    assert read_eformer(LocalStore(store.locate("absent")), search=True) is None


def test_arrays_without_an_index_are_found_only_if_searched_for(store: LocalStore) -> None:
    put_array(store, "enc/w")
    assert read_eformer(store, search=False) is None
    assert keys(read_eformer(store, search=True)) == {"": {"enc.w": "enc/w"}}


def test_an_index_of_ours_is_never_read_as_eformers(store: LocalStore) -> None:
    put_array(store, "w")
    put_json(store, INDEX, {**index_of("w"), "shardkeep": "0" * 32})
    assert read_eformer(store, search=False) is None
    with pytest.raises(shardkeep.IncompleteCheckpointError, match=rf"{INDEX} was written by shardkeep, but manifest"):
        read_eformer(store, search=True)


def test_another_index_is_another_checkpoint(store: LocalStore) -> None:
    """A load that meets a writer sees by this that it must begin again."""
    found = []
    for names in (("a",), ("a", "b"), ("a",)):
        for name in names:
            put_array(store, name)
        put_json(store, INDEX, index_of(*names))
        found.append(read_eformer(store, search=True))
    assert found[0].save_id == found[2].save_id != found[1].save_id
    Path(store.locate(INDEX)).unlink()
    searched = read_eformer(store, search=True)
    put_array(store, "c")
    assert read_eformer(store, search=True).save_id != searched.save_id


@pytest.mark.parametrize("field", ["checksum", "array_metadata", "custom_metadata"])
def test_metadata_of_another_form_are_refused_by_name(field: str, store: LocalStore) -> None:
    put_json(store, INDEX, index_of())
    put_json(store, METADATA, {field: None})
    assert read_eformer(store, search=True).metadata == {field: None}
    put_json(store, METADATA, {field: ["x"]})
    with pytest.raises(shardkeep.IntegrityError, match=rf"{METADATA} is malformed: '{field}' is not a JSON object"):
        read_eformer(store, search=True)


@pytest.mark.parametrize("name", [INDEX, METADATA, "m_structure.json", "m/w/.zarray"])
def test_a_document_that_is_no_plain_file_is_refused_by_name(name: str, store: LocalStore) -> None:
    put_array(store, "m/w")
    put_json(store, INDEX, index_of(m=["m/w"]))
    Path(store.locate(name)).unlink(missing_ok=True)
    Path(store.locate(name)).mkdir()
    with pytest.raises(shardkeep.IntegrityError, match=f"{name} is not a regular file"):
        read_eformer(store, search=True)


@pytest.mark.parametrize("names", [["w", "w/x"], ["w/x", "w"]], ids=" ".join)
@pytest.mark.parametrize("how", ["arrays", "prefix", "search"])
def test_an_array_inside_another_ones_directory_is_not_lost(names: list[str], how: str, store: LocalStore) -> None:
    """eFormer makes such a directory of {"w": …, "w.x": …}."""
    start = "m/" if how == "prefix" else ""
    for name in names:
        put_array(store, start + name, DATA + len(name))
    if how != "search":
        put_json(store, INDEX, index_of(m=[f"m/{n}" for n in names]) if start else index_of(*names))
    (tree,) = keys(read_eformer(store, search=True)).values()
    assert tree == {"w": start + "w", "w/x": start + "w/x"}
    loaded = shardkeep.load(store.url)
    for name in names:
        assert_same(loaded[name], jnp.asarray(DATA + len(name)))


def test_two_spellings_of_one_prefix_lose_no_array(store: LocalStore) -> None:
    put_array(store, "a/b/x")
    put_array(store, "a/b/y")
    put_json(store, INDEX, index_of(**{"a/b": ["a/b/x"], "a.b": ["a/b/y"]}))
    with pytest.raises(shardkeep.IntegrityError, match=rf"{INDEX} is malformed: it lists the prefix 'a\.b' twice"):
        read_eformer(store, search=True)


def test_two_arrays_of_one_name_are_refused_and_one_that_is_listed_twice_is_not(store: LocalStore) -> None:
    """A prefix is taken off the names below it, and an index may list others."""
    put_array(store, "m/w")
    put_array(store, "w")
    put_json(store, INDEX, index_of(m=["m/w", "m/w"]))
    assert keys(read_eformer(store, search=True)) == {"m": {"w": "m/w"}}
    put_json(store, INDEX, index_of(m=["m/w", "w"]))
    with pytest.raises(shardkeep.IntegrityError, match=rf"{INDEX} .* two arrays of prefix 'm' have the same name"):
        read_eformer(store, search=True)


def test_arrays_nest_in_arrays_as_deeply_as_they_like(store: LocalStore) -> None:
    for name in ("a/w/x/y", "a/w", "a/w/x", "a/v", "a.v"):
        put_array(store, name)
    found = {"a.w": "a/w", "a/w/x": "a/w/x", "a/w/x/y": "a/w/x/y", "a.v": "a/v", "a\\.v": "a.v"}
    assert keys(read_eformer(store, search=True)) == {"": found}


def test_an_array_that_is_the_directory_itself_loads(store: LocalStore) -> None:
    put_array(store, "")
    (loaded,) = jax.tree.leaves(shardkeep.load(store.url))
    assert_same(loaded, jnp.asarray(DATA))
    assert shardkeep.verify(store.url).ok
    Path(store.locate("0.0")).unlink()
    assert not shardkeep.verify(store.url).ok


# --- structures


def put_structure(store: LocalStore, tree: Any, prefix: str = "m", **changes: Any) -> None:
    """The structure file eFormer writes for a tree of arrays, all of them `m/w`."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    structure = {
        "prefix": prefix,
        "treedef_b64": base64.b64encode(pickle.dumps(treedef)).decode(),
        "leaf_keys_full": [".".join([prefix, *(str(k).strip("[].'") for k in path)]) for path, _ in paths],
        "arr_mask": [True] * len(paths),
        "array_relpaths": ["m/w"] * len(paths),
        "nonarray_payload": {},
    }
    put_json(store, f"{prefix}_structure.json", structure | changes)


@pytest.fixture
def structured(store: LocalStore) -> LocalStore:
    put_array(store, "m/w")
    put_json(store, INDEX, index_of(m=["m/w"]))
    return store


def test_a_structure_belongs_to_the_files_of_its_tree(structured: LocalStore) -> None:
    put_structure(structured, [1, {"x": 2}], extras={"step": 3})
    tree = read_eformer(structured, search=True).tree("m")
    assert [leaf.path for leaf in tree.leaves] == [("0",), ("1", "x")]
    assert {"m_structure.json", "m/w/.zarray", "m/w/0.0"} == {file.name for file in tree.files}
    assert tree.metadata["custom_metadata"] == {"step": 3}
    assert_same(tree.skeleton.rebuild([5, 6]), [5, {"x": 6}])


def test_a_tree_without_a_prefix_has_no_structure(structured: LocalStore) -> None:
    put_json(structured, INDEX, index_of("m/w"))
    put_json(structured, "_structure.json", {"not": "looked at"})
    assert keys(read_eformer(structured, search=True)) == {"": {"m.w": "m/w"}}


@pytest.mark.parametrize(("factory", "expected"), [(list, list), (int, int), (None, None), (jnp.ones, None)])
def test_only_a_plain_factory_of_a_defaultdict_comes_back(factory: Any, expected: Any, structured: LocalStore) -> None:
    put_structure(structured, defaultdict(factory, {"x": 1}))
    assert_same(read_eformer(structured, search=True).tree("m").skeleton.rebuild([1]), defaultdict(expected, {"x": 1}))


def _treedef(*nodes: Any) -> str:
    """A pickled PyTreeDef of these nodes, whether JAX could make one or not."""
    state = pickle.dumps((None, list(nodes)), protocol=2)
    return base64.b64encode(b"cjaxlib._jax.pytree\nPyTreeDef\n)\x81" + state[2:-1] + b"b.").decode()


LEAF = (0, 0, None, None, 1, 1)
TREEDEFS: dict[str, str] = {
    "nothing": _treedef(),
    "two roots": _treedef(LEAF, LEAF),
    "more leaves than keys": _treedef(LEAF, LEAF, (4, 2, None, None, 2, 3)),
    "no leaf": _treedef((1, 0, None, None, 0, 1)),
    "fewer children than keys": _treedef(LEAF, (5, 1, ["a", "b"], None, 1, 2)),
    "more children than keys": _treedef(LEAF, (5, 1, [], None, 1, 2)),
    "an unknown kind": _treedef(LEAF, (99, 1, None, None, 1, 2)),
    "a class that is none": _treedef(LEAF, (7, 1, None, "os.system", 1, 2)),
    "a short node": _treedef((0, 0)),
    "a key that is an object": _treedef(LEAF, (5, 1, [jax.tree_util.GetAttrKey("x")], None, 1, 2)),
    "another object": base64.b64encode(pickle.dumps(jax.tree_util.GetAttrKey("x"))).decode(),
    "a plain value": base64.b64encode(pickle.dumps({"PyTreeDef": 1})).decode(),
    "a class, not an object": base64.b64encode(b"cjaxlib\nPyTreeDef\n.").decode(),
}


@pytest.mark.parametrize("what", TREEDEFS)
def test_a_structure_that_is_none_is_refused_by_name(what: str, structured: LocalStore) -> None:
    put_structure(structured, 1, treedef_b64=TREEDEFS[what])
    with pytest.raises(shardkeep.IntegrityError, match=r"m_structure\.json is malformed: "):
        read_eformer(structured, search=True)


# --- the index eFormer reads


def documents(store: LocalStore) -> tuple[Any, Any]:
    found = EformerIndex().documents(shardkeep.inspect(store.url))
    assert list(found) == [METADATA, INDEX], "the index is written last"
    index, metadata = (None if text is None else json.loads(text) for text in (found[INDEX], found[METADATA]))
    return index, metadata


def save(store: LocalStore, tree: Any, prefix: str | None = None, format: Any = "tensorstore", **more: Any) -> None:
    shardkeep.save(store.url, tree, prefix=prefix, format=format, overwrite=True, **more)


def test_what_eformer_cannot_read_has_no_index(store: LocalStore) -> None:
    save(store, {"w": DATA}, format="safetensors", metadata={"a": 1})
    assert documents(store) == (None, None)


def test_the_index_lists_every_tree_and_the_metadata_of_the_last(store: LocalStore) -> None:
    save(store, {"w": DATA}, metadata={"of": "none"})
    save(store, {"w": DATA}, "p", "safetensors")
    save(store, {"w": DATA, "n": 3}, "m.n", metadata={"of": "m.n"})
    index, metadata = documents(store)
    entry = {"shape": [2, 3], "dtype": "float32"}
    assert index["arrays"] == [{"path": "w", **entry}]
    assert index["prefixes"] == {"m.n": [{"path": "m/n/w", **entry}]}
    assert (index["format"], index["version"]) == ("tensorstore", "2.0")
    assert index["shardkeep"] == shardkeep.inspect(store.url).save_id
    assert metadata == {"of": "m.n"}


def test_what_the_index_says_is_what_eformer_finds(store: LocalStore) -> None:
    tree = {"enc": {"w": DATA, "b": DATA.astype(jnp.bfloat16)}, "x": np.arange(3), "n": 3}
    save(store, tree, "m", compression="zstd")
    index, _ = documents(store)
    del index["shardkeep"]
    put_json(store, INDEX, index)
    found = read_eformer(store, search=True)
    assert keys(found) == {"m": {"enc.w": "m/enc/w", "enc.b": "m/enc/b", "x": "m/x"}}
    stored = {leaf.key: leaf.spec for leaf in shardkeep.inspect(store.url).tree("m").arrays}
    assert {leaf.key: leaf.spec for leaf in found.tree("m").leaves} == stored


LEFT_OUT: dict[str, tuple[Any, list[str]]] = {
    "PRNG keys": ({"k": jax.random.key(0), "w": DATA}, ["w"]),
    "a type zarr has no name for": ({"t": DATA.astype("M8[s]"), "w": DATA}, ["w"]),
    "keys that eFormer takes for one": ({"a": {"b": DATA}, "a.b": DATA, "w": DATA}, ["w"]),
    "names that are escaped": ({"a b": DATA, "a/b": DATA, "é:": DATA, "w": DATA}, ["a b", "w"]),
    "values": ({"n": 1, "s": "x", "w": DATA}, ["w"]),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_arrays_eformer_would_misread_are_left_out(what: str, store: LocalStore) -> None:
    tree, listed = LEFT_OUT[what]
    save(store, tree)
    assert [entry["path"] for entry in documents(store)[0]["arrays"]] == listed


def test_a_tree_with_nothing_for_eformer_is_left_out_and_an_empty_one_is_not(store: LocalStore) -> None:
    save(store, {"k": jax.random.key(0)}, "m")
    assert documents(store) == (None, None)
    save(store, {"n": 3}, "o")
    assert documents(store)[0]["prefixes"] == {"o": []}


def test_a_tree_under_other_names_or_not_to_be_listed_is_left_out(store: LocalStore) -> None:
    save(store, {"w": DATA}, "a b")
    save(store, {"w": DATA}, "é:")  # the directory has another name than the prefix
    shardkeep.serialization.tree_serialize_leaves(store.url, {"w": DATA}, prefix="m", write_index=False)
    assert set(documents(store)[0]["prefixes"]) == {"a b"}


@pytest.mark.parametrize("times", [2, 3])
def test_a_tree_that_was_overwritten_is_listed_under_its_clean_names(times: int, store: LocalStore) -> None:
    for _ in range(times):
        save(store, {"w": DATA}, "m")
    assert documents(store)[0]["prefixes"] == {"m": [{"path": "m/w", "shape": [2, 3], "dtype": "float32"}]}


def test_metadata_that_is_not_json_becomes_text(store: LocalStore) -> None:
    """A bare NaN is not JSON."""
    save(store, {"w": DATA}, metadata={"loss": 1.5})
    manifest = shardkeep.inspect(store.url)
    tree = dataclasses.replace(manifest.tree(), metadata={"loss": float("nan"), "all": [float("-inf"), 2.0]})
    document = EformerIndex().documents(dataclasses.replace(manifest, trees={"": tree}))[METADATA]
    assert json.loads(document) == {"loss": "nan", "all": ["-inf", 2.0]}


def test_what_an_index_lists_is_known_whoever_wrote_it(store: LocalStore) -> None:
    assert EformerIndex().read_index(store) is None
    put_array(store, "b")
    put_array(store, "m/w")
    put_json(store, INDEX, index_of("b", m=["m/w"]))
    assert EformerIndex().read_index(store) == CompanionIndex(None, frozenset(("b", "m/w")))
    save(store, {"w": DATA}, "n")
    assert EformerIndex().read_index(store) == CompanionIndex(
        shardkeep.inspect(store.url).save_id, frozenset(("b", "m/w", "n/w"))
    )


@pytest.mark.parametrize("text", ["", "[]", "{", '{"arrays": 3}', '{"prefixes": []}', '{"arrays": [{}]}'])
def test_an_index_that_is_none_may_list_anything(text: str, store: LocalStore) -> None:
    Path(store.locate(INDEX)).write_text(text)
    assert EformerIndex().read_index(store) == CompanionIndex(None, None)
