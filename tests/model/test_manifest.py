"""The manifest: what it says and what is shown of it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep.model.leaves import StoredArray, StoredValue
from shardkeep.model.manifest import check_prefix
from support import assert_same

EXAMPLES = int(os.environ.get("SHARDKEEP_EXAMPLES", "150"))


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
            "source",
            "step",
            "stored_bytes",
            "tree",
            "trees",
        ]
        assert _public(tree) == [
            "compression",
            "created",
            "format",
            "leaves",
            "metadata",
            "nbytes",
            "save_id",
            "source",
            "step",
        ]
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
