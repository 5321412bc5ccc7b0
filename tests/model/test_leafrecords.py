"""The records of leaves: in version 1 with their pieces, since then with a grid and a pattern."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from shardkeep.model.digests import seal
from shardkeep.model.document import decode_manifest, encode_manifest
from shardkeep.model.leaves import StoredArray
from shardkeep.model.pieces import StoredPieces, have_digests
from support import mesh_of

GOLDEN = Path(__file__).parents[1] / "golden"
FIRST = sorted(GOLDEN.glob("v1/**/manifest.json"))


@pytest.mark.parametrize("document", FIRST, ids=[str(path.parent.relative_to(GOLDEN / "v1")) for path in FIRST])
def test_a_manifest_of_version_1_says_the_same_when_it_is_written_as_version_2(document: Path) -> None:
    first = decode_manifest(document.read_bytes(), "x", "x")
    written = encode_manifest(first)
    assert written.startswith(b'{"shardkeep":2,')
    second = decode_manifest(written, "x", "x")
    assert second.prefixes == first.prefixes
    for prefix, tree in first.trees.items():
        again = second.trees[prefix]
        assert replace(again, leaves=(), metadata={}) == replace(tree, leaves=(), metadata={})
        for old, new in zip(tree.leaves, again.leaves, strict=True):
            if not isinstance(old, StoredArray):
                assert repr(new) == repr(old)
                continue
            assert isinstance(new, StoredArray)
            assert (new.path, new.spec, new.origin) == (old.path, old.spec, old.origin)
            assert isinstance(new.pieces, StoredPieces)
            assert sorted(new.pieces, key=lambda p: p.region.start) == sorted(old.pieces, key=lambda p: p.region.start)
    assert encode_manifest(second) == written


def test_digests_that_are_not_known_stay_unknown() -> None:
    """Arrays of other programs have none, and neither have pieces of ours that were saved beside them."""
    (document,) = GOLDEN.glob("v1/safetensors/manifest.json")
    body = json.loads(document.read_bytes())
    arrays = [leaf for leaf in body["trees"][""]["leaves"] if "pieces" in leaf]
    for leaf in arrays[::2]:
        for piece in leaf["pieces"]:
            piece["digests"] = None
    several = next(leaf for leaf in arrays if len(leaf["pieces"]) > 2)
    several["pieces"][0]["digests"], several["pieces"][1]["digests"] = None, ["0" * 32]
    first = decode_manifest(seal(json.dumps({**body, "digest": "0" * 32}, separators=(",", ":")).encode()), "x", "x")
    second = decode_manifest(encode_manifest(first), "x", "x")
    for old, new in zip(first.tree("").arrays, second.tree("").arrays, strict=True):
        assert sorted(new.pieces, key=lambda p: p.region.start) == sorted(old.pieces, key=lambda p: p.region.start)
        assert have_digests(new.pieces) == have_digests(old.pieces) or any(p.digests for p in old.pieces)


HOSTILE: dict[str, Any] = {
    "no table": (lambda tree: tree.update(tables=[]), "no table for a piece"),
    "a table that is nothing": (lambda tree: tree.update(tables=[{}]), "neither in the manifest nor in a file"),
    "a table that is both": (lambda tree: tree["tables"][0].update(file=0), "neither in the manifest nor in a file"),
    "a table in a file with data": (lambda tree: tree.update(tables=[{"file": 0}]), "has no digest"),
    "a table in a file that is not there": (lambda tree: tree.update(tables=[{"file": 1}]), "missing file"),
    "a table in a file before the first": (lambda tree: tree.update(tables=[{"file": -1}]), "missing file"),
    "a table that is no text": (lambda tree: tree.update(tables=[{"data": 1}]), "not text"),
    "a base before the first file": (lambda tree: tree["tables"][0].update(base=-1), "neither"),
    "a base after the last file": (lambda tree: tree["tables"][0].update(base=1), "outside its file"),
    "digests that are there after all": (lambda tree: tree["tables"][0].update(digests=False), "unexpected digests"),
    "digests that are no boolean": (lambda tree: tree["tables"][0].update(digests=0), "neither"),
    "a pattern with another table": (lambda tree: tree.update(patterns=[[1] * 8]), "a missing table"),
    "a pattern with a negative table": (lambda tree: tree.update(patterns=[[-1] * 8]), "a missing table"),
    "a pattern of text": (lambda tree: tree.update(patterns=[["0"] * 8]), "not an integer"),
    "a pattern for fewer cells": (
        lambda tree: (tree.update(patterns=[[0]]), tree["leaves"][0].update(pattern=0)),
        "no table for each of its pieces",
    ),
    "a pattern that is not there": (lambda tree: tree["leaves"][0].update(pattern=0), "malformed"),
    "a pattern before the first": (
        lambda tree: (tree.update(patterns=[[0] * 8]), tree["leaves"][0].update(pattern=-1)),
        "no table for each of its pieces",
    ),
    "a grid of more cells": (lambda tree: tree["leaves"][0].update(grid=[1, 1]), "instead of 524,288 pieces"),
    "a grid of fewer cells": (lambda tree: tree["leaves"][0].update(grid=[512, 1024]), "8 instead of 1 pieces"),
    "a grid with as many cells elsewhere": (lambda tree: tree["leaves"][0].update(grid=[64, 1024]), None),
    "a grid of other axes": (lambda tree: tree["leaves"][0].update(grid=[64]), "axes"),
    "no grid": (lambda tree: tree["leaves"][0].pop("grid"), "8 instead of 1 pieces"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_contradicts_itself_is_an_error_of_ours(tmp_path: Path, case: str) -> None:
    spread = NamedSharding(mesh_of(2, 4), PartitionSpec("a", "b"))
    shardkeep.save(tmp_path, {"w": jax.device_put(jnp.ones((512, 1024)), spread)})
    body = json.loads((tmp_path / "manifest.json").read_bytes())
    change, problem = HOSTILE[case]
    change(body["trees"][""])
    text = json.dumps({**body, "digest": "0" * 32}, separators=(",", ":"))
    (tmp_path / "manifest.json").write_bytes(seal(text.encode()))
    if problem is None:  # cells of the same size: their bytes are those that were saved, in another order
        assert (shardkeep.load(tmp_path)["w"] == 1).all()
        return
    with pytest.raises(shardkeep.IntegrityError, match=problem):
        shardkeep.load(tmp_path)
    assert not shardkeep.verify(tmp_path).ok
