"""Checkpoints of every released format version load, bit by bit, with this version (tests/golden/make_golden.py)."""

import importlib.util
import json
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
