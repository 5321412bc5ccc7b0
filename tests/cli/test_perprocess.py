"""Values that differ between processes in the commands: shown, compared, checked and kept, without being understood."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from cli.commands import Run
from shardkeep import PerProcess
from shardkeep.model.digests import seal
from shardkeep.model.perprocess import PerProcessRows, encode_value
from support import FORMATS, assert_same, save_as


def save_of(path: Path, values: Sequence[Any]) -> Path:
    """A checkpoint as processes leave it that each had one of these values: the rows are pieces of their own."""
    encoded = [encode_value(value) for value in values]
    rows = PerProcessRows.of([raw.size for raw in encoded])
    filled = np.concatenate([rows.fill(i, raw) for i, raw in enumerate(encoded)])
    shardkeep.save(path, {"w": jnp.ones(3), "data": filled})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["trees"][""]["leaves"][1] |= {"kind": "per_process", "lengths": list(rows.lengths)}
    manifest["digest"] = "0" * 32
    (path / "manifest.json").write_bytes(seal(json.dumps(manifest, separators=(",", ":")).encode()))
    return path


def test_inspect_and_ls_show_how_many_processes_saved_it(run: Run, tmp_path: Path) -> None:
    save_of(tmp_path / "x", [{"n": i} for i in range(3)])
    shown = run("inspect", tmp_path / "x")
    assert "PerProcess[3]" in shown.out
    leaf = run.document("inspect", tmp_path / "x")["trees"][0]["leaves"][1]
    assert (leaf["kind"], leaf["dtype"], leaf["shape"]) == ("per_process", "PerProcess", [3])
    assert run("ls", tmp_path).code == 0


def test_stats_takes_no_numbers_from_it(run: Run, tmp_path: Path) -> None:
    save_of(tmp_path / "x", [{"n": i} for i in range(3)])
    found = {leaf["key"]: leaf for leaf in run.document("stats", tmp_path / "x")["leaves"]}
    assert found["w"]["mean"] == 1
    assert "mean" not in found["data"]
    assert "PerProcess[3]" in run("stats", tmp_path / "x").out


def test_verify_checks_it(run: Run, tmp_path: Path) -> None:
    save_of(tmp_path / "x", [{"n": "findme"}])
    assert run("verify", tmp_path / "x").code == 0
    (file,) = (tmp_path / "x").glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"findme", b"findMe"))
    result = run("verify", tmp_path / "x")
    assert result.code == 1
    assert "data" in result.out + result.err


@pytest.mark.parametrize(
    ("other", "reasons"),
    [
        ([{"n": 1}, {"n": 2}], []),
        ([{"n": 1}, {"n": 3}], ["values"]),
        ([{"n": 1}, {"n": "longer"}], ["values"]),
        ([{"n": 1}], ["shape"]),
    ],
)
def test_diff_compares_it(run: Run, tmp_path: Path, other: Sequence[Any], reasons: list[str]) -> None:
    save_of(tmp_path / "a", [{"n": 1}, {"n": 2}])
    save_of(tmp_path / "b", other)
    for more in ((), ("--values",)):
        found = run.document("diff", tmp_path / "a", tmp_path / "b", *more)
        assert found["equal"] == (not reasons)
        pair = next(pair for pair in found["trees"][0]["leaves"] if pair["key"] == "data")
        assert pair["differs_in"] == reasons
        result = run("diff", tmp_path / "a", tmp_path / "b", *more)
        assert result.code == bool(reasons)
        assert ("values differ" in result.out) == ("values" in reasons)
        assert "max |Δ|" not in result.out


def test_diff_tells_it_from_an_array(run: Run, tmp_path: Path) -> None:
    save_of(tmp_path / "a", [1])
    shardkeep.save(tmp_path / "b", {"w": jnp.ones(3), "data": np.zeros((1, 64), np.uint8)})
    found = run.document("diff", tmp_path / "a", tmp_path / "b")
    pair = next(pair for pair in found["trees"][0]["leaves"] if pair["key"] == "data")
    assert pair["differs_in"] == ["kind"]


def test_convert_keeps_it_whatever_the_formats(run: Run, tmp_path: Path) -> None:
    values = [{"n": i, "part": np.arange(i * 100)} for i in range(3)]
    before = save_of(tmp_path / "start", values)
    to = {"zarr": ["--format", "zarr"], "zstd": ["--format", "zarr", "--compression", "zstd"], "m.safetensors": []}
    for name, options in {**to, "back": []}.items():
        result = run("convert", before, tmp_path / name, *options, "--dtype", "int64")
        assert result.code == 0, result.err
        before = tmp_path / name
        assert_same(shardkeep.load(before, per_process="all")["data"], values)
        assert shardkeep.verify(before).ok
    assert run("diff", tmp_path / "start", tmp_path / "back").code == 0


@pytest.mark.parametrize("kind", FORMATS)
def test_convert_takes_what_one_process_saved(run: Run, tmp_path: Path, kind: str) -> None:
    state = {"n": 1, "part": np.arange(1000)}
    path = save_as(kind, tmp_path / "a", {"w": jnp.ones(3), "data": PerProcess(state)})
    assert run("convert", path, tmp_path / "b", "--subtree", "data").code != 0
    assert run("convert", path, tmp_path / "b", "--include", "data", "--rename", "data=it/state").code == 0
    assert_same(shardkeep.load(tmp_path / "b"), {"it": {"state": state}})
