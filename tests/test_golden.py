"""Checkpoints of every released format version load, bit by bit, with this version (tests/golden/make_golden.py)."""

import base64
import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.model.document import VERSION

GOLDEN = Path(__file__).parent / "golden"
SCRIPT = GOLDEN / "make_golden.py"
EXPECTED = {f.parent.name: json.loads(f.read_text()) for f in sorted(GOLDEN.glob("v*/expected.json"))}
CASES = [(version, name) for version, trees in EXPECTED.items() for name in trees]


def _golden_script() -> Any:
    spec = importlib.util.spec_from_file_location("make_golden", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_golden"] = module  # where its static classes are looked for
    spec.loader.exec_module(module)
    return module


golden = _golden_script()


def _split(name: str) -> tuple[str, str | None]:
    path, _, prefix = name.partition("#")
    return path, prefix or None


def test_every_format_version_has_golden_checkpoints() -> None:
    assert set(EXPECTED) == {f"v{version}" for version in range(1, VERSION + 1)}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(("version", "name"), CASES)
def test_loads_every_leaf_bit_by_bit(version: str, name: str, mmap: Any) -> None:
    path, prefix = _split(name)
    tree = shardkeep.load(GOLDEN / version / path, prefix=prefix, mmap=mmap, per_process="all")
    found = golden.expected(tree)
    wanted = EXPECTED[version][name]
    for leaf, expected in zip(found, wanted, strict=False):
        assert leaf == expected
    assert len(found) == len(wanted)


@pytest.mark.parametrize(("version", "name"), CASES)
def test_every_digest_holds(version: str, name: str) -> None:
    path, prefix = _split(name)
    report = shardkeep.verify(GOLDEN / version / path, prefix=prefix)
    assert report.ok, str(report)
    assert report.unchecked == 0


@pytest.mark.parametrize("version", EXPECTED)
@pytest.mark.parametrize("name", ["safetensors", "zarr", "model.safetensors"])
def test_one_process_gets_its_own_value_and_not_that_of_others(version: str, name: str) -> None:
    path = GOLDEN / version / "per process"
    own = shardkeep.load(path / "one" / name)["data"]
    assert golden.expected([own]) == golden.expected(shardkeep.load(path / "one" / name, per_process="all")["data"])
    with pytest.raises(shardkeep.ProcessError, match="leaf data is a PerProcess value of 2 processes"):
        shardkeep.load(path / "two" / name)


@pytest.mark.parametrize("version", EXPECTED)
def test_metadata_comes_back(version: str) -> None:
    wanted = {"step": 100, "note": "golden", "nested": {"list": [1, 2.5, None, True]}}
    for path in ("safetensors", "tensorstore", "single/model.safetensors", "sharded/model.safetensors"):
        assert shardkeep.inspect(GOLDEN / version / path).tree("").metadata == wanted


@pytest.mark.parametrize("version", EXPECTED)
@pytest.mark.parametrize("name", golden.KINDS)
def test_metadata_that_json_does_not_carry_comes_back(version: str, name: str) -> None:
    tree = shardkeep.inspect(GOLDEN / version / "metadata" / name).tree("")
    loss, no_tag = tree.metadata.pop("loss"), tree.metadata.pop("no tag")
    assert math.isnan(loss)
    assert math.isnan(no_tag.pop("more"))
    assert no_tag == {"$shardkeep": {"float": "nan"}}
    assert tree.metadata == {
        "bounds": [-math.inf, math.inf],
        "long": 2**2001,
        "text": "\ud800",
        "tag": {"$shardkeep": {"float": "nan"}},
        "inside": {"$shardkeep": [{"$shardkeep": math.inf}]},
    }
    assert tree.step == 7


@pytest.mark.parametrize("version", EXPECTED)
def test_tagged_metadata_is_what_the_format_says(version: str) -> None:
    document = (GOLDEN / version / "metadata" / "safetensors" / "manifest.json").read_text()
    metadata = json.loads(document, parse_constant=pytest.fail)["trees"][""]["metadata"]
    tagged = {"float": "nan"}, {"float": "-inf"}, {"float": "inf"}, {"int": hex(2**2001)}, {"text": "7aCA"}
    nan, below, above, long, text = ({"$shardkeep": typed} for typed in tagged)
    assert metadata == {
        "loss": nan,
        "bounds": [below, above],
        "long": long,
        "text": text,
        "tag": {"$shardkeep": {"dict": [["$shardkeep", {"dict": [["float", "nan"]]}]]}},
        "inside": {"$shardkeep": {"dict": [["$shardkeep", [{"dict": [["$shardkeep", {"float": "inf"}]]}]]]}},
        "no tag": {**nan, "more": nan},
    }


@pytest.mark.parametrize("version", EXPECTED)
@pytest.mark.parametrize("name", golden.KINDS)
def test_classes_come_back_where_the_program_has_registered_them(version: str, name: str) -> None:
    tree = shardkeep.load(GOLDEN / version / "auxiliary" / name)
    assert type(tree["layer"]) is golden.Layer
    assert type(tree["layer"].settings) is golden.Settings
    assert type(tree["pair"]) is golden.Pair
    assert {type(value) for value in tree.values()} == {golden.Layer, golden.Pair, *golden.STATIC}


@pytest.mark.parametrize("version", EXPECTED)
def test_elsewhere_their_arrays_come_back_without_them(version: str) -> None:
    path = GOLDEN / version / "auxiliary" / "safetensors"
    program = f"""
import shardkeep
tree = shardkeep.load({str(path)!r})
print(tree["layer"].class_name, tree["layer"]["0"].tolist(), type(tree["pair"]).__name__, tree["config"].class_name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__:Layer [0, 1, 2] Pair make_golden:Config\n"


@pytest.mark.parametrize("version", EXPECTED)
def test_auxiliary_data_is_what_the_format_says(version: str) -> None:
    document = json.loads((GOLDEN / version / "auxiliary" / "safetensors" / "manifest.json").read_text())
    nodes = dict(document["trees"][""]["structure"]["dict"])
    assert nodes["layer"]["registered"] == "golden.Layer"
    assert base64.b64decode(nodes["layer"]["aux_bytes"]) == "\0gelu \u00fc".encode()
    assert nodes["pair"]["registered"] == "golden.Pair"
    fields = [
        ["width", {"int": "0x8"}],
        ["rate", {"float": "-inf"}],
        ["shape", {"tuple": [{"int": "0x2"}, {"int": "0x3"}]}],
    ]
    assert nodes["config"] == {"custom": "make_golden:Config", "children": [], "static": {"fields": {"dict": fields}}}
    assert {name: node["static"] for name, node in nodes.items() if "static" in node and name != "config"} == {
        "mode": {"member": "EVAL"},
        "text": {"value": "text"},
        "number": {"value": {"int": hex(-(2**70))}},
        "rate": {"value": {"float": "nan:7ff8000000000000"}},
        "blob": {"value": {"bytes": "AP8="}},
        "shape": {"value": {"tuple": [{"int": "0x2"}, {"int": "0x3"}]}},
    }


@pytest.mark.parametrize("version", EXPECTED)
@pytest.mark.parametrize("name", ["run", "model.safetensors"])
def test_a_document_without_trees_means_that_nothing_is_there(version: str, name: str, tmp_path: Path) -> None:
    """And a save needs no `overwrite=True` to take its place."""
    shutil.copytree(GOLDEN / version / "nothing", tmp_path / "here")
    path = tmp_path / "here" / name
    assert not shardkeep.exists(path)
    for call in (shardkeep.load, shardkeep.inspect, shardkeep.verify):
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint at"):
            call(path)
    assert shardkeep.latest(tmp_path / "here") is None
    assert shardkeep.latest(path) is None
    shardkeep.save(path, {"w": 1})
    assert shardkeep.load(path) == {"w": 1}
    shardkeep.delete(path)
    assert not list((tmp_path / "here").glob(f"**/{name}*/**/*.safetensors"))


@pytest.mark.parametrize("version", EXPECTED)
def test_a_document_without_trees_can_be_deleted(version: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version / "nothing", tmp_path / "here")
    shardkeep.delete(tmp_path / "here" / "run")
    shardkeep.delete(tmp_path / "here" / "model.safetensors")
    assert list((tmp_path / "here").iterdir()) == []


def test_the_script_writes_what_the_golden_files_hold(tmp_path: Path) -> None:
    """So that running it again changes save ids and times, and nothing else."""
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "expected.json").read_text()) == EXPECTED[f"v{VERSION}"]
    for name in EXPECTED[f"v{VERSION}"]:
        path, prefix = _split(name)
        loaded = shardkeep.load(tmp_path / path, prefix=prefix, per_process="all")
        assert golden.expected(loaded) == EXPECTED[f"v{VERSION}"][name]
