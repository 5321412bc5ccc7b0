"""`convert --subtree` and `--rename`: trees under the names other programs expect."""

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import shardkeep
from cli.commands import Run
from cli.trees import HF_TENSORS, rich_tree, save_like_hugging_face
from shardkeep.converting.rename import renamed
from shardkeep.serialization import AsyncCheckpointManager
from support import FORMATS, assert_same, mesh_of, save_as


def flax_state() -> dict[str, Any]:
    """What a flax program saves: parameters, moments of the same names, a step."""
    params = {"params": {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}}}
    return {"params": params, "opt_state": jax.tree.map(jnp.zeros_like, params), "step": 7}


def names(path: Path) -> list[str]:
    return sorted(safetensors.numpy.load_file(path))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("target", ["d", "d.safetensors"])
def test_a_subtree_is_written_as_the_tree_it_is(run: Run, tmp_path: Path, kind: str, target: str) -> None:
    tree = rich_tree()
    source = save_as(kind, tmp_path / "c", {"other": np.ones(3), "deep": {"er": tree}}, metadata={"step": 3})
    assert run("convert", source, tmp_path / target, "--subtree", "deep/er").code == 0
    assert_same(shardkeep.load(tmp_path / target), shardkeep.load(source)["deep"]["er"])
    assert shardkeep.inspect(tmp_path / target).metadata == {"step": 3}
    assert shardkeep.verify(tmp_path / target)


def test_weights_of_a_flax_state_get_the_names_other_programs_expect(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", flax_state())
    for key in ("params/params", "params.params", "params/params/"):
        assert run("convert", tmp_path / "c", tmp_path / "m.safetensors", "--subtree", key, "--overwrite").code == 0
        assert names(tmp_path / "m.safetensors") == ["dense.bias", "dense.kernel"]
    found = safetensors.numpy.load_file(tmp_path / "m.safetensors")["dense.kernel"]
    np.testing.assert_array_equal(found, np.arange(6.0).reshape(2, 3))


def test_an_equinox_model_out_of_a_state(run: Run, tmp_path: Path) -> None:
    arrays = eqx.filter(eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), eqx.is_array)
    shardkeep.save(tmp_path / "c", {"model": arrays, "step": 1})
    assert run("convert", tmp_path / "c", tmp_path / "m.safetensors", "--subtree", "model").code == 0
    assert names(tmp_path / "m.safetensors") == [f"layers.{i}.{n}" for i in (0, 1) for n in ("bias", "weight")]


def test_match_chooses_before_a_subtree_is_taken(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", flax_state())
    words = ["--include", "^params/.*kernel", "--subtree", "params/params"]
    assert run("convert", tmp_path / "c", tmp_path / "m.safetensors", *words).code == 0
    assert names(tmp_path / "m.safetensors") == ["dense.kernel"]


def test_trees_without_the_subtree_are_left_out(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", flax_state(), prefix="model")
    shardkeep.save(tmp_path / "c", {"w": np.ones(3)}, prefix="ema")
    assert run("convert", tmp_path / "c", tmp_path / "d", "--subtree", "params").code == 0
    assert shardkeep.inspect(tmp_path / "d").prefixes == ["model"]


def test_keys_are_renamed_rule_by_rule(run: Run, tmp_path: Path) -> None:
    layers = [{"up": {"kernel": jnp.full((2, 3), i)}} for i in range(2)]
    shardkeep.save(tmp_path / "c", {"params": {"layers": layers}, "step": 7})
    words = ["--subtree", "params", "--rename", "^=model/", "--rename", r"(\d+)/up/kernel=\1/mlp/up_proj/weight"]
    assert run("convert", tmp_path / "c", tmp_path / "m.safetensors", *words).code == 0
    assert names(tmp_path / "m.safetensors") == [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    after = shardkeep.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(after["model"]["layers"]["1"]["mlp"]["up_proj"]["weight"], np.ones((2, 3)))
    assert shardkeep.verify(tmp_path / "m.safetensors")


def test_a_hugging_face_model_is_renamed_into_a_checkpoint(run: Run, tmp_path: Path) -> None:
    source = save_like_hugging_face(tmp_path / "hf", HF_TENSORS)
    assert run("convert", source, tmp_path / "d", "--rename", "^model/=", "--rename", "weight$=kernel").code == 0
    assert sorted(shardkeep.inspect(tmp_path / "d").leaves) == [
        "embed/kernel",
        "layers/0/bias",
        "layers/0/kernel",
        "lm_head/kernel",
    ]
    np.testing.assert_array_equal(shardkeep.load(tmp_path / "d")["embed"]["kernel"], HF_TENSORS["model.embed.weight"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--subtree", "param"], "--subtree 'param' does not exist; the top level has params, opt_state, step"),
        (["--subtree", "step"], "--subtree 'step' is a leaf"),
        (["--subtree", ""], "does not exist"),
        (["--include", "step", "--subtree", "params"], "--subtree 'params' does not exist; the top level has step"),
        (["--rename", "zzz=y"], "--rename 'zzz=y' changes no key; the keys are params/params/dense/kernel, "),
        (["--rename", "params"], "write OLD=NEW"),
        (["--rename", "=x"], "write OLD=NEW"),
        (["--rename", "(=x"], "not a valid regular expression or replacement"),
        (["--rename", r"step=\1"], "not a valid regular expression or replacement"),
        (["--rename", "kernel|bias=w"], "change both 'params/params/dense/kernel' and 'params/params/dense/bias' to '"),
        (["--rename", "^params/params/dense/kernel$=step/x"], "to 'step/x', but 'step' would be a leaf"),
        (["--rename", "^step$="], "which contains an empty name"),
    ],
)
@pytest.mark.parametrize("target", ["d", "d.safetensors"])
def test_what_does_not_work_out_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, words: list[str], message: str, target: str
) -> None:
    shardkeep.save(tmp_path / "c", flax_state())
    result = run("convert", tmp_path / "c", tmp_path / target, *words)
    assert result.code == 2
    assert message in result.err
    assert not (tmp_path / target).exists()


def test_dotted_names_that_meet_in_plain_files_are_refused(run: Run, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"params": {"a.b": np.ones(3), "a": {"b": np.zeros(3)}}})
    result = run("convert", tmp_path / "c", tmp_path / "m.safetensors", "--subtree", "params")
    assert result.code == 2
    assert "two leaves would both be called 'a.b'" in result.err
    assert run("convert", tmp_path / "c", tmp_path / "d", "--subtree", "params").code == 0


def test_recorded_checksums_follow_their_arrays(run: Run, tmp_path: Path) -> None:
    """Under its new name an array must not meet the checksum of another one that had that name."""
    manager = AsyncCheckpointManager(enable_validation=True)
    manager.save({"params": {"w": jnp.ones(3)}, "w": jnp.zeros(3)}, str(tmp_path / "c"))
    assert run("convert", tmp_path / "c", tmp_path / "d", "--subtree", "params").code == 0
    before, after = (shardkeep.inspect(tmp_path / name).metadata["checksum"] for name in ("c", "d"))
    assert after == {"w": before["params.w"]}
    loaded, _ = manager.load(str(tmp_path / "d"), mesh_of(1), validate=True)
    np.testing.assert_array_equal(loaded["w"], np.ones(3))
    assert run("convert", tmp_path / "c", tmp_path / "e", "--rename", "^w$=v").code == 0
    manager.load(str(tmp_path / "e"), mesh_of(1), validate=True)


@pytest.mark.parametrize(
    "words", [["--subtree", "params"], ["--rename", "^params/=model/"], ["--include", "w"], ["--dtype", "bfloat16"]]
)
def test_metadata_of_the_users_own_is_never_changed(run: Run, tmp_path: Path, words: list[str]) -> None:
    """Whatever its keys are: only what eFormer's manager recorded follows the arrays."""
    metadata = {"checksum": {"shard-0": "ab"}, "array_metadata": {"params.w": {"unit": "m"}, "x": 3}, "version": 2}
    shardkeep.save(tmp_path / "c", {"params": {"w": jnp.ones(3)}, "v": jnp.zeros(3)}, metadata=metadata)
    assert run("convert", tmp_path / "c", tmp_path / "d", *words).code == 0
    assert shardkeep.inspect(tmp_path / "d").metadata == metadata


def test_checksums_of_parts_follow_too(tmp_path: Path) -> None:
    """Those of arrays that span processes have the region after the name."""
    AsyncCheckpointManager().save({"w": jnp.ones(4), "v": jnp.ones(2)}, str(tmp_path / "c"))
    saved = shardkeep.inspect(tmp_path / "c").tree()
    recorded = {"w[0:2]": "a", "w[2:4]": "b", "v": "c", "gone": "d"}
    saved = dataclasses.replace(saved, metadata={**saved.metadata, "checksum": recorded})
    changed = renamed({"": saved}, ["^w$=u"])[""]
    assert changed.metadata["checksum"] == {"u[0:2]": "a", "u[2:4]": "b", "v": "c"}
    assert sorted(changed.metadata["array_metadata"]) == ["u", "v"]
