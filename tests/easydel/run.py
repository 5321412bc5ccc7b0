"""Real EasyDeL with `shardkeep.serialization` in the place of `eformer.serialization`. Run it by `make test-easydel`.

Every function named `check_…` is called with an empty directory. EasyDeL needs its own environment, so this is no part
of the other tests. Everything is small, random, on the CPU and offline.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8", HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
os.environ["ENABLE_DISTRIBUTED_INIT"] = "0"

import replaced  # before EasyDeL

# At the end: the tests have a package `multiprocess`, and datasets needs another of that name.
sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from datasets import Dataset
from easydel.infra import base_state
from flax import nnx

import easydel as ed
import shardkeep
from checks import run_checks
from shardkeep.serialization.checkpointer import find_latest_checkpoint, read_checkpoint_metadata

LENGTH = 16


def config(**more: Any) -> Any:
    return ed.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_scan_mlp=False,
        sharding_axis_dims=(1, 2, 1, 4, 1), attn_mechanism="vanilla", **more,
    )  # fmt: skip


def model(seed: int = 0) -> Any:
    made = ed.LlamaForCausalLM(config(), dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(seed))
    return made.shard_model()


def load_model(path: Path) -> Any:
    return ed.AutoEasyDeLModelForCausalLM.from_pretrained(
        str(path), dtype=jnp.float32, param_dtype=jnp.float32, sharding_axis_dims=(1, 2, 1, 4, 1)
    )


def load_state(path: Path, transformation: Any = None) -> Any:
    return ed.EasyDeLState.load_state(
        str(path), dtype=jnp.float32, param_dtype=jnp.float32, sharding_axis_dims=(1, 2, 1, 4, 1),
        tx_template=transformation,
    )  # fmt: skip


def values(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves if hasattr(leaf, "dtype")}


def weights(module: Any) -> dict[str, np.ndarray]:
    return values(nnx.split(module, nnx.Param, ...)[1].to_pure_dict())


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    assert found, "nothing was compared"
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert found[key].tobytes() == value.tobytes(), key


def check_easydel_uses_shardkeep(_: Path) -> None:
    assert base_state.Checkpointer is shardkeep.serialization.Checkpointer
    assert base_state.AsyncCheckpointManager is shardkeep.serialization.AsyncCheckpointManager
    loaded = [name for name in sys.modules if name.startswith(f"{replaced.PLACE}.")]
    assert all(sys.modules[name].__name__.startswith("shardkeep.") for name in loaded), loaded


def check_a_model_is_saved_and_loaded_again(path: Path) -> None:
    made = model()
    made.save_pretrained(str(path / "m"))
    assert (path / "m/tensorstore_index.json").is_file()
    assert shardkeep.verify(path / "m").ok
    loaded = load_model(path / "m")
    assert_same(weights(loaded), weights(made))
    kernel = loaded.model.layers[0].mlp.up_proj.kernel.value
    assert len(kernel.sharding.device_set) == 8, kernel.sharding


def check_two_saves_into_one_directory_leave_the_second(path: Path) -> None:
    for seed in (1, 2):
        model(seed).save_pretrained(str(path / "m"))
    assert_same(weights(load_model(path / "m")), weights(model(2)))
    assert not np.array_equal(*(next(iter(weights(model(seed)).values())) for seed in (1, 2)))


def check_a_state_is_saved_and_loaded_with_its_optimizer_and_step(path: Path) -> None:
    transformation = optax.adamw(1e-3)
    state = model().to_state().init_tx(transformation)
    state = state.replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state), step=jnp.int32(7))
    for _ in range(2):  # the second into the same directory
        state.save_state(str(path / "s"))
        assert (path / "s/tx").is_dir()
        metadata = json.loads((path / "s/metadata.json").read_text())
        assert (metadata["step"], metadata["has_optimizer_state"]) == (7, True), metadata
        for given in (transformation, None):
            loaded = load_state(path / "s", given)
            assert int(loaded.step) == 7
            assert_same(weights(loaded.model), weights(state.model))
            assert_same(values(loaded.opt_state), values(state.opt_state))
            if given is not None:
                assert jax.tree.structure(loaded.opt_state) == jax.tree.structure(state.opt_state)
        state = state.replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))


def check_an_optimizer_that_does_not_match_is_told_as_easydel_expects(path: Path) -> None:
    state = model().to_state().init_tx(optax.sgd(1e-3, momentum=0.9))
    state.save_state(str(path / "s"))
    raised: list[Exception] = []
    try:
        state.load_optimizer(str(path / "s"), tx_template=optax.adamw(1e-3))
    except KeyError as error:
        raised.append(error)
    assert raised, "not refused"
    assert "Missing array for key" in str(raised[0])
    assert base_state._is_optimizer_template_incompatibility(raised[0])


def trainer(path: Path, steps: int, **more: Any) -> Any:
    arguments = ed.TrainingArguments(
        save_directory=str(path), model_name="tiny", max_training_steps=steps, num_train_epochs=1, total_batch_size=8,
        save_steps=2, save_total_limit=2, learning_rate=1e-2, max_length=LENGTH, use_wandb=False, log_steps=1,
        report_steps=1, shuffle_train_dataset=False, progress_bar_type="json", track_memory=False,
        process_zero_is_admin=True, **more,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 64, (14 * 8, LENGTH))
    rows = {"input_ids": tokens.tolist(), "attention_mask": np.ones_like(tokens).tolist()}
    return ed.Trainer(arguments=arguments, model=model(), dataset_train=Dataset.from_dict(rows))


def runs(path: Path) -> list[str]:
    return sorted((each.name for each in (path / "tiny").glob("run-*")), key=lambda name: int(name[4:]))


def check_a_trainer_is_resumed_with_the_newest_of_two_checkpoints(path: Path) -> None:
    """10 steps, then a new trainer to 14: the same as 14 without a stop, and two checkpoints left."""
    first = trainer(path / "a", 10)
    first.train()
    first.checkpointer.wait_until_finished()
    assert runs(path / "a") == ["run-8", "run-10"], runs(path / "a")
    newest = find_latest_checkpoint(path / "a/tiny")
    assert newest == str(path / "a/tiny/run-10"), newest
    assert read_checkpoint_metadata(newest)["is_temporary"] is False
    assert shardkeep.verify(newest).ok
    second = trainer(path / "a", 14)
    assert second._resumed_from_checkpoint
    assert int(second.model_state.step) == 10
    result = second.train()
    second.checkpointer.wait_until_finished()
    assert int(result.state.step) == 14
    assert runs(path / "a") == ["run-12", "run-14"], runs(path / "a")
    assert_same(weights(load_state(path / "a/tiny/run-14").model), weights(result.state.model))
    straight = trainer(path / "b", 14)
    expected = straight.train().state
    straight.checkpointer.wait_until_finished()
    for key, value in weights(expected.model).items():
        np.testing.assert_allclose(weights(result.state.model)[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return run_checks(globals())


if __name__ == "__main__":
    sys.exit(main())
