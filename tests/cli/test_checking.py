"""`verify`: good ones pass, and each bad leaf and file is named."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import FIXTURES, Run, data_file, flip, leave_dead_save
from trees import HF_TENSORS, rich_tree, save_like_hugging_face

import shardkeep
from support import FORMATS, save_as


@pytest.mark.parametrize("kind", FORMATS)
def test_a_good_checkpoint_is_ok(run: Run, tmp_path: Path, kind: str) -> None:
    path = save_as(kind, tmp_path / "c", rich_tree())
    result = run("verify", path)
    assert result.code == 0
    assert result.out.startswith("ok  ")
    assert str(tmp_path / "c") in result.out
    assert re.search(r", \d+\.\d [kMG]B/s$", result.out.strip())
    document = run.document("verify", path)
    assert document["ok"] is True
    assert document["problems"] == []
    assert document["stored_bytes"] > 0
    assert document["gb_per_second"] > 0


def test_a_flipped_byte_is_found_and_named(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"first": np.ones(64), "second": np.ones(64)})
    file = data_file(tmp_path / "c")
    flip(file)
    result = run("verify", tmp_path / "c")
    assert result.code == 1
    assert result.out.startswith("DAMAGED  ")
    assert "leaf 'second': " in result.out
    assert str(file) in result.out
    assert "'first'" not in result.out
    (problem,) = run.document("verify", tmp_path / "c")["problems"]
    assert (problem["leaf"], problem["file"]) == ("second", str(file))


def test_a_missing_file_and_a_damaged_manifest_are_findings(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.ones(64)})
    data_file(tmp_path / "c").unlink()
    assert run("verify", tmp_path / "c").code == 1
    flip(tmp_path / "c" / "manifest.json")
    document = run("verify", tmp_path / "c", "--json").document
    assert document["ok"] is False
    assert document["problems"][0]["file"] == str(tmp_path / "c" / "manifest.json")


def test_prefix_limits_the_check(run: Run, tmp_path: Path) -> None:
    for prefix in ("good", "bad"):
        shardkeep.save(tmp_path, {"w": np.ones(64)}, prefix=prefix)
    flip(next((tmp_path / "bad").glob("*.safetensors")))
    assert run("verify", tmp_path, "--prefix", "good").code == 0
    assert run("verify", tmp_path, "--prefix", "bad").code == 1
    assert run("verify", tmp_path).code == 1
    assert run("verify", tmp_path, "--prefix", "none").code == 2


def test_several_are_all_checked_and_the_worst_gives_the_exit_code(run: Run, tmp_path: Path) -> None:
    good, bad, unfinished = (tmp_path / name for name in ("good", "bad", "unfinished"))
    for path in (good, bad):
        shardkeep.save(path, {"w": np.ones(64)})
    assert run("verify", good, good).code == 0
    flip(data_file(bad))
    result = run("verify", bad, good)
    assert result.code == 1
    assert [line.split()[0] for line in result.out.splitlines()] == ["DAMAGED", "leaf", "ok", "1"]
    assert result.out.endswith("1 of 2 are ok\n")
    leave_dead_save(unfinished)
    result = run("verify", unfinished, bad, tmp_path / "nowhere", good)
    assert result.code == 2
    told = [line.split()[0] for line in result.out.splitlines()]
    assert told == ["DAMAGED", str(unfinished), "DAMAGED", "leaf", "ERROR", "ok", "1"]
    assert f"{unfinished}: 1 problem\n" in result.out  # and no bytes in no files at no speed


def test_json_of_several_is_a_list_and_of_one_a_document(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": np.ones(64)})
    assert run.document("verify", tmp_path / "c")["ok"] is True
    result = run("verify", tmp_path / "c", tmp_path / "nowhere", "--json")
    assert result.code == 2
    first, second = result.document
    assert (first["path"], first["ok"], first["problems"]) == (str(tmp_path / "c"), True, [])
    assert (second["path"], second["ok"]) == (str(tmp_path / "nowhere"), False)
    assert second["error"]["type"] == "CheckpointNotFoundError"


def test_leaves_without_digests_are_counted(run: Run, tmp_path: Path) -> None:
    directory = save_like_hugging_face(tmp_path / "hf", HF_TENSORS)
    assert run.document("verify", directory)["unchecked"] == 4
    assert "no digests for 4 leaves of another program" in run("verify", directory).out
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert run("verify", directory).code == 1


def test_eformer_checkpoints(run: Run, tmp_path: Path) -> None:
    assert run("verify", FIXTURES / "ts_dtypes" / "ckpt").code == 0
    result = run("verify", FIXTURES / "broken_truncated_chunk" / "ckpt")
    assert result.code == 1
    assert result.out.count("leaf 'w'") == 1
    broken = run("verify", FIXTURES / "broken_killed_mid_save" / "ckpt")
    assert broken.code == 1
    assert "leaf 'l03': the file is missing" in broken.out
    assert "ckpt/l03)" in broken.out
    shutil.copytree(FIXTURES / "ts_plain" / "ckpt", tmp_path / "c")
    assert run("verify", tmp_path / "c").code == 0
