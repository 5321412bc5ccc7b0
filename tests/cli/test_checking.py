"""`verify`: good ones pass, and each bad leaf and file is named."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from cli.commands import FIXTURES, Run, data_file, flip, leave_dead_save
from cli.trees import HF_TENSORS, rich_tree, save_like_hugging_face
from shardkeep.stores.local.store import LocalStore
from support import FORMATS, record, save_as


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
    assert result.out.endswith("1 of 2 checkpoints ok\n")
    leave_dead_save(unfinished)
    result = run("verify", unfinished, bad, tmp_path / "nowhere", good)
    assert result.code == 2
    told = [line.split()[0] for line in result.out.splitlines()]
    assert told == ["UNFINISHED", str(unfinished), "DAMAGED", "leaf", "ERROR", "ok", "1"]
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
    assert "; 4 leaves written by another program have no digests\n" in run("verify", directory).out
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert run("verify", directory).code == 1


def test_eformer_checkpoints(run: Run, tmp_path: Path) -> None:
    assert run("verify", FIXTURES / "ts_dtypes" / "ckpt").code == 0
    result = run("verify", FIXTURES / "broken_truncated_chunk" / "ckpt")
    assert result.code == 1
    assert result.out.count("leaf 'w'") == 1
    broken = run("verify", FIXTURES / "broken_killed_mid_save" / "ckpt")
    assert broken.code == 1
    (line,) = [line for line in broken.out.splitlines() if "leaf 'l03'" in line]
    assert "missing" in line
    assert line.count("ckpt/l03/") == 1
    shutil.copytree(FIXTURES / "ts_plain" / "ckpt", tmp_path / "c")
    assert run("verify", tmp_path / "c").code == 0


def test_a_directory_of_checkpoints_stands_for_all_of_them(run: Run, tmp_path: Path) -> None:
    for step in (9, 10):
        shardkeep.save(tmp_path / f"run/step_{step}", {"w": np.ones(64)})
    shardkeep.save(tmp_path / "run/export/model.safetensors", {"w": np.ones(64)})
    result = run("verify", tmp_path / "run")
    assert result.code == 0
    assert [line.split()[:2] for line in result.out.splitlines()] == [
        ["ok", f"{tmp_path}/run/export/model.safetensors:"],
        ["ok", f"{tmp_path}/run/step_9:"],
        ["ok", f"{tmp_path}/run/step_10:"],
        ["3", "of"],
    ]
    assert result.out.endswith("\n3 of 3 checkpoints ok\n")
    flip(data_file(tmp_path / "run/step_9"))
    damaged = run("verify", tmp_path / "run")
    assert damaged.code == 1
    assert f"\nDAMAGED  {tmp_path}/run/step_9: 1 problem" in damaged.out
    assert damaged.out.endswith("\n2 of 3 checkpoints ok\n")
    assert run("verify", tmp_path / "run/step_10", tmp_path / "run").out.endswith("\n3 of 4 checkpoints ok\n")


def test_json_of_a_directory_is_a_list_even_if_it_has_one_checkpoint(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run/step_1", {"w": np.ones(64)})
    (one,) = run.document("verify", tmp_path / "run")
    assert (one["path"], one["ok"]) == (str(tmp_path / "run/step_1"), True)
    manifest = tmp_path / "run/step_2/manifest.json"
    shardkeep.save(manifest.parent, {"w": np.ones(64)})
    manifest.write_text(manifest.read_text().replace('"shardkeep":2', '"shardkeep":9'))
    result = run("verify", tmp_path / "run", "--json")
    assert result.code == 2
    assert [document["ok"] for document in result.document] == [True, False]
    assert result.document[1]["error"]["type"] == "NewerFormatError"


def test_a_running_save_is_no_damage_of_a_run_and_a_dead_one_is_a_finding(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run/step_1", {"w": np.ones(64)})
    running = record(LocalStore(str(tmp_path / "run/step_2")), "ab" * 16, ["x"])
    result = run("verify", tmp_path / "run")
    assert result.code == 0
    assert f"saving  {tmp_path}/run/step_2: not checked, a save is running\n" in result.out
    assert result.out.endswith("1 of 1 checkpoint ok\n")
    assert run.document("verify", tmp_path / "run")[1] == {
        "path": str(tmp_path / "run/step_2"),
        "ok": None,
        "saving": True,
    }
    # Asked for by name it has to be there: `verify X && rm Y` must not go on.
    assert run("verify", tmp_path / "run/step_2").code == 1
    running.release()
    died = run("verify", tmp_path / "run")
    assert died.code == 1
    assert f"\nUNFINISHED  {tmp_path}/run/step_2: 1 problem\n" in died.out


def test_a_checkpoint_with_others_inside_is_checked_with_them(run: Run, tmp_path: Path) -> None:
    """As they are listed: what `transformers` trained has its weights at the top and checkpoints below."""
    for top in ("c", "hf/model.safetensors"):
        shardkeep.save(tmp_path / top, {"w": np.ones(64)})
    for inner in ("c/step_1", "hf/step_1"):
        shardkeep.save(tmp_path / inner, {"w": np.ones(64)})
    assert run("verify", tmp_path / "c").out.endswith("\n2 of 2 checkpoints ok\n")
    assert [document["ok"] for document in run.document("verify", tmp_path / "hf")] == [True, True]
    flip(data_file(tmp_path / "hf/step_1"))
    assert run("verify", tmp_path / "hf").code == 1
    assert run("verify", tmp_path / "hf/model.safetensors").code == 0


def test_a_checkpoint_that_links_lead_to_is_checked_once(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run/step_1", {"w": np.ones(64)})
    shardkeep.save(tmp_path / "run/step_2", {"w": np.ones(64)})
    (tmp_path / "run/latest").symlink_to("step_2")
    assert run("verify", tmp_path / "run").out.endswith("\n2 of 2 checkpoints ok\n")
    assert run("verify", tmp_path / "run/latest").code == 0


def test_a_directory_without_checkpoints_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run("verify", tmp_path / "empty")
    assert (result.code, result.out) == (2, "")
    assert f"no checkpoint at {tmp_path}/empty" in result.err
