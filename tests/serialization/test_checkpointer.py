"""eFormer's Checkpointer: when it saves, what it leaves, what it removes, and what is found again."""

import datetime
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkeep
import shardkeep.serialization
from shardkeep.eformer.removal import Removal, remove_run
from shardkeep.errors import CallbackError, CheckpointNotFoundError, IntegrityError
from shardkeep.foreign.rundirs import run_directories
from shardkeep.serialization import AsyncCheckpointManager, Checkpointer, CheckpointInterval
from shardkeep.serialization import checkpointer as module
from shardkeep.serialization.checkpointer import find_latest_checkpoint, read_checkpoint_metadata
from shardkeep.stores.location import location
from support import Point, assert_same, mesh_of

MINUTE = datetime.timedelta(minutes=1)
START = datetime.datetime(2026, 1, 1)
EFORMER = Path(__file__).parents[1] / "fixtures" / "eformer"


class Clock:
    """A time that stands still until it is moved."""

    def __init__(self, now: datetime.datetime = START) -> None:
        self.now = now

    def __call__(self) -> datetime.datetime:
        return self.now


def tree(seed: float = 0) -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3) + seed, "layers": {"0": jnp.ones(3) * seed}}


def every(steps: int, until: int | None = None) -> CheckpointInterval:
    return CheckpointInterval(steps, until)


def runs(base: Path) -> list[str]:
    return sorted(os.listdir(base), key=lambda name: int(name.rpartition("-")[2])) if base.exists() else []


def kinds(base: Path) -> dict[int, bool]:
    """Whether each checkpoint is temporary."""
    read = [read_checkpoint_metadata(base / name) for name in runs(base)]
    return {metadata["step"]: metadata["is_temporary"] for metadata in read}


def test_its_names_are_where_eformer_has_them() -> None:
    assert shardkeep.serialization.Checkpointer is module.Checkpointer
    assert shardkeep.serialization.CheckpointInterval is module.CheckpointInterval
    assert module._read_checkpoint_metadata is module.read_checkpoint_metadata


REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, tuple[list[tuple[str, Any]], list[tuple[str, Any]]]] = {
    "__init__": (
        [("base_path", REQUIRED), ("save_interval", REQUIRED), ("step_policies", REQUIRED)],
        [("manager", None), ("dt_now_injection", None), ("delete_old_temp_checkpoints", True)],
    ),
    "on_step": (
        [("mesh", None), ("pytree", None), ("force", False)],
        [("step", REQUIRED), ("true_callbacks", None), ("extras", None)],
    ),
    "save_checkpoint": (
        [("tree", REQUIRED), ("destination", REQUIRED)],
        [
            ("commit_callback", None), ("is_temporary", False), ("mesh", None), ("step", -1), ("shardings", None),
            ("partition_rules", None), ("prefix", None), ("structured", False), ("dtype", None), ("extras", None),
        ],
    ),
    "load_checkpoint": (
        [("mesh", REQUIRED)],
        [
            ("path", None), ("discover_latest", True), ("shardings", None), ("partition_rules", None), ("dtype", None),
            ("prefix", None), ("structured", False), ("template", None), ("strict_shapes", True),
        ],
    ),
    "save_pytree": (
        [("tree", REQUIRED), ("prefix", REQUIRED)],
        [
            ("step", None), ("destination", None), ("mesh", None), ("dtype", None), ("extras", None),
            ("temporary", False), ("write_index", True),
        ],
    ),
    "load_pytree": (
        [("mesh", REQUIRED)],
        [
            ("prefix", REQUIRED), ("path", None), ("discover_latest", False), ("discover_raise", True),
            ("shardings", None), ("partition_rules", None), ("dtype", None), ("load_treedef", True), ("template", None),
            ("strict_shapes", True), ("callback", None), ("chunk_size", None),
        ],
    ),
    "wait_until_finished": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_method_has_the_agreed_parameters(name: str) -> None:
    _, *found = inspect.signature(getattr(Checkpointer, name)).parameters.values()
    plain = [(p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [(p.name, p.default) for p in found if p.kind is p.KEYWORD_ONLY]
    assert (plain, named) == SIGNATURES[name]
    explained = (inspect.getdoc(Checkpointer if name == "__init__" else getattr(Checkpointer, name)) or "").split(
        "Args:"
    )
    assert [p.name for p in found if f"\n    {p.name}: " not in explained[-1]] == []


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([every(1), every(2)], "only the last"),
        ([every(1), every(2, 10)], "only the last"),
        ([every(1, 10), every(2, 10)], "sorted by 'until'"),
        ([every(1, 10), every(2, 5), every(3)], "sorted by 'until'"),
    ],
)
def test_policies_that_are_not_in_order_are_refused(tmp_path: Path, policies: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, None, policies)
    with pytest.raises(ValueError, match="at least 1"):
        every(0)
    with pytest.raises(TypeError, match="must be an AsyncCheckpointManager, not an object"):
        Checkpointer(tmp_path, None, [], manager=object())  # type: ignore[arg-type]


def test_permanent_checkpoints_are_due_at_the_steps_of_the_current_policy(tmp_path: Path) -> None:
    base = tmp_path / "base"
    checkpointer = Checkpointer(base, None, [every(2, 4), every(5, 20)])
    for step in range(31):
        checkpointer.on_step(pytree={"w": jnp.float32(step)}, step=step)
    checkpointer.wait_until_finished()
    assert kinds(base) == dict.fromkeys((2, 4, 5, 10, 15, 20), False)
    assert float(checkpointer.load_checkpoint(None)[0]["w"]) == 20


def test_without_any_policy_only_forced_steps_are_saved(tmp_path: Path) -> None:
    base = tmp_path / "base"
    checkpointer = Checkpointer(base, None, [])
    for step in (0, 1, 2):
        checkpointer.on_step(pytree=tree(step), step=step)
    assert runs(base) == []
    checkpointer.on_step(None, tree(), True, step=0)
    checkpointer.wait_until_finished()
    assert kinds(base) == {0: False}


def test_elapsed_time_makes_a_temporary_checkpoint_due_and_the_one_before_goes(tmp_path: Path) -> None:
    base, clock = tmp_path / "base", Clock()
    checkpointer = Checkpointer(base, 2 * MINUTE, [every(10)], dt_now_injection=clock)
    seen = []
    for step in range(1, 12):
        clock.now += MINUTE
        checkpointer.on_step(pytree=tree(step), step=step)
        checkpointer.wait_until_finished()
        seen.append(kinds(base))
    assert seen[0] == {}
    assert seen[1] == seen[2] == {2: True}
    assert seen[3] == {4: True}
    assert seen[7] == {8: True}
    assert seen[9] == {10: False}, "permanent, and the temporary one before it is gone"
    assert seen[10] == {10: False}, "the time since the last save counts, of whatever kind"
    assert read_checkpoint_metadata(base / "run-10") == {
        "step": 10,
        "timestamp": (START + 10 * MINUTE).isoformat(),
        "is_temporary": False,
    }


def test_step_0_starts_the_clock_and_a_repeated_step_is_skipped_unless_forced(tmp_path: Path) -> None:
    base, clock = tmp_path / "base", Clock()
    checkpointer = Checkpointer(base, MINUTE, [every(3)], dt_now_injection=clock)
    clock.now += 5 * MINUTE
    checkpointer.on_step(pytree=tree(0), step=0)
    checkpointer.on_step(pytree=tree(1), step=1)
    assert runs(base) == []
    clock.now += MINUTE
    checkpointer.on_step(pytree=tree(1), step=1)
    clock.now += MINUTE
    checkpointer.on_step(pytree=tree(7), step=1)
    checkpointer.wait_until_finished()
    assert kinds(base) == {1: True}
    assert_same(checkpointer.load_checkpoint(None)[0], tree(1))
    checkpointer.on_step(pytree=tree(8), step=1, force=True)
    checkpointer.wait_until_finished()
    assert kinds(base) == {1: False}, "made permanent, so it is not removed as the temporary one before itself"
    assert_same(checkpointer.load_checkpoint(None)[0], tree(8))


def test_a_temporary_checkpoint_that_was_made_permanent_stays(tmp_path: Path) -> None:
    base, clock = tmp_path / "base", Clock()
    checkpointer = Checkpointer(base, MINUTE, [], dt_now_injection=clock)
    for step in (1, 2, 3):
        clock.now += MINUTE
        checkpointer.on_step(pytree=tree(step), step=step)
        checkpointer.wait_until_finished()
        if step == 1:
            kept = {**read_checkpoint_metadata(base / "run-1"), "is_temporary": False}
            (base / "run-1/metadata.json").write_text(json.dumps(kept))
    assert kinds(base) == {1: False, 3: True}


def test_a_temporary_checkpoint_whose_metadata_is_damaged_stays(
    tmp_path: Path, logged: Callable[[], list[str]]
) -> None:
    base, clock = tmp_path / "base", Clock()
    checkpointer = Checkpointer(base, MINUTE, [], dt_now_injection=clock)
    for step in (1, 2):
        clock.now += MINUTE
        checkpointer.on_step(pytree=tree(step), step=step)
        checkpointer.wait_until_finished()
        (base / f"run-{step}/metadata.json").write_text("{")
    assert runs(base) == ["run-1", "run-2"]
    assert [text for text in logged() if "whether it is temporary is unknown" in text]


def test_a_save_that_fails_leaves_the_temporary_checkpoint_before_it(tmp_path: Path) -> None:
    base, clock = tmp_path / "base", Clock()
    checkpointer = Checkpointer(base, MINUTE, [], dt_now_injection=clock)
    clock.now += MINUTE
    checkpointer.on_step(pytree=tree(1), step=1)
    checkpointer.wait_until_finished()
    (base / "run-2").write_text("in the way")
    clock.now += MINUTE
    with pytest.raises(NotADirectoryError, match="run-2 is a file"):
        checkpointer.on_step(pytree=tree(2), step=2)
    (base / "run-3/metadata.json").mkdir(parents=True)
    clock.now += MINUTE
    checkpointer.on_step(pytree=tree(3), step=3)
    with pytest.raises(CallbackError, match=r"run-3 was saved, but .*metadata\.json"):
        checkpointer.wait_until_finished()
    assert read_checkpoint_metadata(base / "run-1")["is_temporary"] is True
    (base / "run-2").unlink()
    shutil.rmtree(base / "run-3")
    clock.now += MINUTE
    checkpointer.on_step(pytree=tree(4), step=4)
    checkpointer.wait_until_finished()
    assert kinds(base) == {4: True}


@pytest.mark.parametrize("removes", [True, False])
def test_temporary_checkpoints_of_earlier_runs_go_after_the_first_commit(tmp_path: Path, removes: bool) -> None:
    """All of them, the newest and those that a crash has left; and only if asked to."""
    base = tmp_path / "base"
    earlier = Checkpointer(base, None, [])
    for step, temporary in ((1, True), (2, False), (3, True)):
        earlier.save_pytree(tree(step), "model", step=step, temporary=temporary)
    checkpointer = Checkpointer(base, None, [every(5)], delete_old_temp_checkpoints=removes)
    checkpointer.on_step(pytree=tree(4), step=4)
    checkpointer.wait_until_finished()
    assert runs(base) == ["run-1", "run-2", "run-3"], "nothing is removed before something newer is committed"
    checkpointer.on_step(pytree=tree(5), step=5)
    checkpointer.wait_until_finished()
    assert runs(base) == (["run-2", "run-5"] if removes else ["run-1", "run-2", "run-3", "run-5"])


def test_the_base_itself_is_never_removed(tmp_path: Path) -> None:
    base = tmp_path / "base"
    Checkpointer(tmp_path, None, []).save_pytree(tree(1), "model", step=1, destination="base", temporary=True)
    checkpointer = Checkpointer(base, None, [every(1)])
    checkpointer.on_step(pytree=tree(2), step=2)
    checkpointer.wait_until_finished()
    assert read_checkpoint_metadata(base)["step"] == 1
    for path in (base, tmp_path, f"file://{base}"):
        with pytest.raises(ValueError, match="it contains the checkpoints of this Checkpointer"):
            checkpointer._queue_checkpoint_removal(path)


def test_several_checkpointers_share_a_base(tmp_path: Path) -> None:
    """Neither locks it, and what one has removed already is no error for the other."""
    base, clock = tmp_path / "base", Clock()
    one, two = (Checkpointer(base, MINUTE, [], dt_now_injection=clock) for _ in range(2))
    clock.now += MINUTE
    one.on_step(pytree=tree(1), step=1)
    one.wait_until_finished()
    two.on_step(pytree=tree(2), step=2)
    two.wait_until_finished()
    assert kinds(base) == {2: True}
    clock.now += MINUTE
    one.on_step(pytree=tree(3), step=3)
    two.on_step(pytree=tree(4), step=4)
    one.wait_until_finished()
    two.wait_until_finished()
    assert kinds(base) == {3: True, 4: True}


def test_callbacks_are_called_when_a_save_is_due_and_metadata_is_written_after_them(tmp_path: Path) -> None:
    base = tmp_path / "base"
    checkpointer = Checkpointer(base, None, [every(2)])
    mesh = mesh_of(8)
    told: list[Any] = []

    def save(destination: str, at: Any, metadata: dict[str, Any]) -> None:
        told.append((destination, at, dict(metadata), (base / destination / "metadata.json").exists()))
        checkpointer.save_pytree(tree(metadata["step"]), "model", destination=destination)
        metadata.clear()  # its own copy

    for step in range(1, 5):
        checkpointer.on_step(mesh, step=step, true_callbacks=[save, save], extras={"loss": 0.5})
        assert runs(base) == [f"run-{n}" for n in (2, 4) if n <= step]
    expected = {"is_temporary": False, "loss": 0.5}
    assert told[:2] == [("run-2", mesh, {"step": 2, **expected}, False)] * 2
    assert told[2:] == [("run-4", mesh, {"step": 4, **expected}, False)] * 2
    assert kinds(base) == {2: False, 4: False}
    loaded, metadata = checkpointer.load_pytree(None, prefix="model", discover_latest=True)
    assert_same(loaded, tree(4))
    assert metadata["step"] == 4
    assert checkpointer._last_save_step == 4


def test_a_callback_that_raises_leaves_nothing_to_be_discovered(tmp_path: Path) -> None:
    base, clock = tmp_path / "base", Clock()
    checkpointer = Checkpointer(base, MINUTE, [], dt_now_injection=clock)
    clock.now += MINUTE
    checkpointer.on_step(pytree=tree(1), step=1)

    def refuse(*_: Any) -> None:
        raise RuntimeError("no space for the tokenizer")

    clock.now += MINUTE
    with pytest.raises(RuntimeError, match="no space for the tokenizer"):
        checkpointer.on_step(pytree=tree(2), step=2, true_callbacks=[refuse])
    checkpointer.wait_until_finished()
    assert find_latest_checkpoint(base) == str(base / "run-1")
    checkpointer.on_step(pytree=tree(2), step=2, true_callbacks=[lambda *_: None])
    checkpointer.wait_until_finished()
    assert kinds(base) == {2: True}
    assert_same(checkpointer.load_checkpoint(None)[0], tree(2))


def test_a_due_save_of_nothing_is_an_error(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, None, [every(2)])
    checkpointer.on_step(step=1)
    with pytest.raises(ValueError, match="due at step 2, but on_step got neither a pytree nor true_callbacks"):
        checkpointer.on_step(step=2)
    with pytest.raises(TypeError, match="step must be an integer"):
        checkpointer.on_step(step=None)  # type: ignore[arg-type]


def test_a_tree_is_saved_in_the_background_and_may_be_donated(tmp_path: Path) -> None:
    """`on_step` returns while the commit cannot happen yet: the checkpoint's lock is held here."""
    base = tmp_path / "base"
    checkpointer = Checkpointer(base, None, [every(1)])
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    target = shardkeep.catalog.new_target(location(base / "run-1"), "zarr", None, None, directory=True)
    with target.store.lock(5):
        weights = jnp.zeros(1000)
        checkpointer.on_step(pytree={"w": weights}, step=1)
        weights = step(weights)
        assert not (base / "run-1/metadata.json").exists()
    assert float(checkpointer.load_checkpoint(None)[0]["w"][0]) == 0, "a load waits for pending saves"


def test_with_saving_turned_off_nothing_is_written_or_called(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    base = tmp_path / "base"
    told: list[Any] = []
    checkpointer = Checkpointer(base, None, [every(1)], manager=AsyncCheckpointManager(enable=False))
    checkpointer.on_step(pytree=tree(), step=1)
    checkpointer.on_step(step=2, true_callbacks=[lambda *_: told.append(1)])
    checkpointer.save_checkpoint(tree(), "x", commit_callback=lambda: told.append(2))
    assert checkpointer.save_pytree(tree(), "model", step=3) == str(base / "run-3")
    checkpointer.wait_until_finished()
    assert (told, base.exists()) == ([], False)
    assert len([text for text in logged() if "saving is disabled" in text]) == 4


@pytest.mark.parametrize("arguments", [{}, {"use_tensorstore": False}, {"enable_compression": True}])
def test_the_manager_given_saves_and_loads(tmp_path: Path, arguments: dict[str, Any]) -> None:
    manager = AsyncCheckpointManager(enable_validation=True, **arguments)
    checkpointer = Checkpointer(tmp_path, None, [every(1)], manager=manager)
    checkpointer.on_step(pytree=tree(1), step=1)
    manager.wait_until_finished()
    manifest = shardkeep.inspect(tmp_path / "run-1")
    assert manifest.step == 1
    assert manifest.tree("").format == ("safetensors" if arguments.get("use_tensorstore") is False else "zarr")
    loaded, metadata = checkpointer.load_checkpoint(None)
    assert_same(loaded, tree(1))
    assert sorted(metadata["checksum"]) == ["layers.0", "w"]
    assert metadata["custom_metadata"] == {"step": 1, "is_temporary": False}


def test_save_checkpoint_takes_a_name_a_prefix_a_dtype_extras_and_a_callback(tmp_path: Path) -> None:
    told: list[Any] = []
    checkpointer = Checkpointer(tmp_path, None, [every(7)])
    checkpointer.save_checkpoint(
        tree(1), "best/eval", commit_callback=lambda: told.append(1),
        is_temporary=True, step=7, prefix="ema", dtype="bf16", extras={"loss": 0.25},
    )  # fmt: skip
    checkpointer.wait_until_finished()
    assert told == [1]
    path = tmp_path / "best/eval"
    metadata = read_checkpoint_metadata(path)
    assert (metadata["step"], metadata["is_temporary"]) == (7, True)
    assert shardkeep.inspect(path).prefixes == ["ema"]
    loaded, found = checkpointer.load_checkpoint(None, path=path, discover_latest=False, prefix="ema")
    assert loaded["w"].dtype == jnp.bfloat16
    assert found["custom_metadata"] == {"step": 7, "is_temporary": True, "loss": 0.25}
    assert (found["step"], found["is_temporary"]) == (7, True)
    checkpointer.on_step(pytree=tree(2), step=7)
    assert not (tmp_path / "run-7").exists(), "that step was saved last"
    checkpointer.save_checkpoint(tree(1), "unnumbered")
    checkpointer.wait_until_finished()
    assert read_checkpoint_metadata(tmp_path / "unnumbered")["step"] == -1
    assert shardkeep.inspect(tmp_path / "unnumbered").step is None


def test_the_commit_callback_comes_after_the_metadata_and_what_it_raises_is_told(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, None, [])
    seen: list[bool] = []
    checkpointer.save_checkpoint(
        tree(), "a", commit_callback=lambda: seen.append((tmp_path / "a/metadata.json").exists())
    )
    checkpointer.wait_until_finished()
    assert seen == [True]

    def refuse() -> None:
        raise RuntimeError("no")

    checkpointer.save_checkpoint(tree(), "b", commit_callback=refuse)
    with pytest.raises(CallbackError, match="b was saved, but the callback raised RuntimeError: no"):
        checkpointer.wait_until_finished()


def test_structured_saves_and_loads_keep_the_structure(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, None, [])
    state = {"point": Point(jnp.ones(2), [3, None]), "name": "x"}
    checkpointer.save_checkpoint(state, "run-3", step=3, prefix="tx", structured=True, extras={"lr": 0.1})
    loaded, metadata = checkpointer.load_checkpoint(None, prefix="tx", structured=True)
    assert_same(loaded, state)
    assert (metadata["lr"], metadata["step"], metadata["is_temporary"]) == (0.1, 3, False)
    assert "custom_metadata" not in metadata
    flat, metadata = checkpointer.load_checkpoint(None, prefix="tx")
    assert sorted(flat["point"]) == sorted(Point._fields)
    assert metadata["custom_metadata"] == {"lr": 0.1, "step": 3}
    for call in (
        lambda: checkpointer.save_checkpoint(state, "x", structured=True),
        lambda: checkpointer.load_checkpoint(None, structured=True),
        lambda: checkpointer.save_pytree(state, ""),
    ):
        with pytest.raises(ValueError, match="needs a prefix that is a non-empty string"):
            call()


def test_loads_take_rules_shardings_dtype_and_a_template(tmp_path: Path) -> None:
    mesh = mesh_of(8)
    checkpointer = Checkpointer(tmp_path, None, [every(1)])
    checkpointer.on_step(pytree={"w": jnp.ones((8, 3))}, step=1)
    rules, by_key = [("w", P("a"))], {"w": NamedSharding(mesh, P("a"))}
    for arguments in ({"partition_rules": rules}, {"shardings": by_key}):
        loaded, _ = checkpointer.load_checkpoint(mesh, dtype="fp16", **arguments)
        assert (loaded["w"].sharding.spec, loaded["w"].dtype) == (P("a"), jnp.float16)
        loaded, _ = checkpointer.load_checkpoint(
            mesh, template={"w": jax.ShapeDtypeStruct((8, 3), jnp.float32)}, **arguments
        )
        assert loaded["w"].sharding.spec == P("a")
    template = {"w": jax.ShapeDtypeStruct((8, 3), jnp.bfloat16)}
    loaded, _ = checkpointer.load_checkpoint(None, template=template)
    assert loaded["w"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="Array shape mismatch for key 'w'"):
        checkpointer.load_checkpoint(None, template={"w": jnp.zeros((3, 8))})
    with pytest.raises(KeyError, match="Missing array for key 'b'"):
        checkpointer.load_checkpoint(None, template={"w": jnp.zeros((8, 3)), "b": jnp.zeros(1)})
    loaded, _ = checkpointer.load_checkpoint(None, template={"w": jnp.zeros((3, 8))}, strict_shapes=False)
    assert loaded["w"].shape == (3, 8)


def test_load_pytree_takes_every_argument(tmp_path: Path) -> None:
    mesh = mesh_of(8)
    checkpointer = Checkpointer(tmp_path, None, [])
    state = {"w": jnp.ones((8, 3)), "pair": (jnp.zeros(2), 5)}
    path = checkpointer.save_pytree(state, "tx", step=4, extras={"note": "x"})
    assert path == str(tmp_path / "run-4")
    loaded, metadata = checkpointer.load_pytree(None, prefix="tx", path=path)
    assert_same(loaded, state)
    assert (metadata["note"], metadata["step"], metadata["is_temporary"]) == ("x", 4, False)
    loaded, metadata = checkpointer.load_pytree(None, prefix="tx", path=path, load_treedef=False)
    assert sorted(loaded["pair"]) == ["0", "1"]
    assert (metadata["custom_metadata"], metadata["step"]) == ({"note": "x", "step": 4}, 4)
    seen: list[str] = []

    def double(array: Any, key: str) -> Any:
        seen.append(key)
        return array * 2

    for load_treedef in (True, False):
        loaded, _ = checkpointer.load_pytree(
            mesh, prefix="tx", path=path, partition_rules=[("w", P("a")), (".*", P())], dtype="bf16",
            callback=double, chunk_size=1, load_treedef=load_treedef,
        )  # fmt: skip
        assert (loaded["w"].sharding.spec, loaded["w"].dtype, float(loaded["w"][0, 0])) == (P("a"), jnp.bfloat16, 2.0)
        loaded, _ = checkpointer.load_pytree(
            mesh, prefix="tx", path=path, shardings={"w": P("a"), "pair.0": P()}, load_treedef=load_treedef
        )
        assert loaded["w"].sharding.spec == P("a")
        with pytest.raises(ValueError, match="chunk_size must be at least 1"):
            checkpointer.load_pytree(None, prefix="tx", path=path, chunk_size=0, load_treedef=load_treedef)
    assert {"w", "pair.0"} <= set(seen)
    template = {"w": jnp.zeros((8, 3), jnp.bfloat16)}
    loaded, _ = checkpointer.load_pytree(None, prefix="tx", path=path, template=template)
    assert loaded["w"].dtype == jnp.bfloat16
    with pytest.raises(KeyError, match="Missing array for key 'b'"):
        checkpointer.load_pytree(None, prefix="tx", path=path, template={"b": jnp.zeros(1)})
    with pytest.raises(ValueError, match="Array shape mismatch for key 'w'"):
        checkpointer.load_pytree(None, prefix="tx", path=path, template={"w": jnp.zeros(1)})
    with pytest.raises(ValueError, match="'tx'"):
        checkpointer.load_pytree(None, prefix="absent", path=path)


def test_discovery_of_load_pytree(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "base", None, [])
    for arguments in ({}, {"discover_latest": True}, {"discover_latest": True, "discover_raise": False}):
        with pytest.raises(FileNotFoundError, match="base"):
            checkpointer.load_pytree(None, prefix="m", **arguments)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint found under"):
        checkpointer.load_checkpoint(None)
    assert checkpointer.save_pytree(tree(0), "m") == str(tmp_path / "base")
    assert not (tmp_path / "base/metadata.json").exists(), "without a step"
    assert_same(checkpointer.load_pytree(None, prefix="m")[0], tree(0))
    with pytest.raises(FileNotFoundError, match="no checkpoint found under"):
        checkpointer.load_pytree(None, prefix="m", discover_latest=True)
    loaded, metadata = checkpointer.load_pytree(None, prefix="m", discover_latest=True, discover_raise=False)
    assert_same(loaded, tree(0))
    assert metadata == {}
    for step in (1, 2):
        checkpointer.save_pytree(tree(step), "m", step=step)
    assert_same(checkpointer.load_pytree(None, prefix="m", discover_latest=True)[0], tree(2))
    assert_same(checkpointer.load_pytree(None, prefix="m", path=tmp_path / "base/run-1")[0], tree(1))
    assert_same(checkpointer.load_pytree(None, prefix="m")[0], tree(0))


def test_save_pytree_writes_below_the_base_or_where_a_whole_path_says(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "base", None, [])
    assert checkpointer.save_pytree(tree(), "m", step=1) == str(tmp_path / "base/run-1")
    assert checkpointer.save_pytree(tree(), "m", step=1, destination="x", temporary=True) == str(tmp_path / "base/x")
    assert read_checkpoint_metadata(tmp_path / "base/x")["is_temporary"] is True
    assert checkpointer.save_pytree(tree(), "m", destination="y") == str(tmp_path / "base/y")
    assert checkpointer.save_pytree(tree(), "m", destination=str(tmp_path / "z")) == str(tmp_path / "z")
    assert shardkeep.inspect(tmp_path / "base/run-1").step == 1
    checkpointer.save_pytree({"w": jnp.ones(2)}, "half", destination="y", dtype="bf16", write_index=False)
    assert shardkeep.inspect(tmp_path / "base/y").tree("half").arrays[0].dtype == "bfloat16"
    index = json.loads((tmp_path / "base/y/tensorstore_index.json").read_text())
    assert list(index["prefixes"]) == ["m"]
    checkpointer.save_pytree(tree(5), "m", destination="y")
    assert_same(checkpointer.load_pytree(None, prefix="m", path=tmp_path / "base/y")[0], tree(5))


@pytest.mark.parametrize("name", ["mesh", "shardings", "partition_rules"])
def test_what_is_accepted_for_compatibility_changes_nothing(tmp_path: Path, name: str) -> None:
    """docs/migrating-from-eformer.md lists these: arrays are saved with the sharding that they have."""
    value = {"mesh": mesh_of(8), "shardings": {"w": P()}, "partition_rules": [(".*", P())]}[name]
    state = {"w": jax.device_put(jnp.arange(80_000.0), NamedSharding(mesh_of(8), P("a")))}
    checkpointer = Checkpointer(tmp_path, None, [])
    checkpointer.save_checkpoint(state, "plain")
    checkpointer.save_checkpoint(state, "given", **{name: value})
    checkpointer.wait_until_finished()
    files = [sorted(p.name for p in (tmp_path / n / "w").iterdir()) for n in ("plain", "given")]
    assert files[0] == files[1]
    if name == "mesh":
        checkpointer.save_pytree(state, "m", destination="more", mesh=value)
        assert_same(checkpointer.load_pytree(None, prefix="m", path=tmp_path / "more")[0], state)
    page = (Path(__file__).parents[2] / "docs/migrating-from-eformer.md").read_text()
    assert f"`{name}`" in page.partition("ccepted for compatibility")[2]


def test_a_checkpoint_that_is_saved_later_is_newer_even_if_the_clock_was_set_back(tmp_path: Path) -> None:
    clock = Clock()
    checkpointer = Checkpointer(tmp_path, None, [every(1)], dt_now_injection=clock)
    for step in (1, 2, 3):
        checkpointer.on_step(pytree=tree(step), step=step)
        checkpointer.wait_until_finished()
        clock.now -= datetime.timedelta(hours=1)
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-3")
    stamps = [read_checkpoint_metadata(tmp_path / f"run-{n}")["timestamp"] for n in (1, 2, 3)]
    assert stamps == [START.isoformat(), *(f"2026-01-01T00:00:00.{n:06}" for n in (1, 2))]
    again = Checkpointer(tmp_path, None, [every(1)], dt_now_injection=clock)
    again.on_step(pytree=tree(4), step=4)
    again.wait_until_finished()
    assert find_latest_checkpoint(tmp_path) == str(tmp_path / "run-4"), "also after a restart"


def test_a_clock_with_a_zone_keeps_it(tmp_path: Path) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=3))
    clock = Clock(START.replace(tzinfo=zone))
    checkpointer = Checkpointer(tmp_path, None, [every(1)], dt_now_injection=clock)
    for step in (1, 2):
        checkpointer.on_step(pytree=tree(step), step=step)
    checkpointer.wait_until_finished()
    stamps = [read_checkpoint_metadata(tmp_path / f"run-{n}")["timestamp"] for n in (1, 2)]
    assert stamps == ["2026-01-01T00:00:00+03:00", "2026-01-01T00:00:00.000001+03:00"]


def test_the_latest_checkpoint_is_given_as_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "a b"
    Checkpointer(base, None, []).save_pytree(tree(), "m", step=1)
    assert find_latest_checkpoint(str(base)) == find_latest_checkpoint(base) == str(base / "run-1")
    url = base.as_uri()
    assert find_latest_checkpoint(url) == f"{url}/run-1"
    assert_same(Checkpointer(url, None, []).load_pytree(None, prefix="m", discover_latest=True)[0], tree())
    monkeypatch.chdir(tmp_path)
    assert find_latest_checkpoint("a b") == str(base / "run-1")
    with pytest.raises(TypeError, match="find_latest_checkpoint"):
        find_latest_checkpoint(None)
    with pytest.raises(FileNotFoundError, match=r"metadata\.json"):
        read_checkpoint_metadata(base)
    (base / "run-1/metadata.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a JSON object"):
        read_checkpoint_metadata(base / "run-1")


def test_damaged_metadata_does_not_keep_a_checkpoint_from_loading(
    tmp_path: Path, logged: Callable[[], list[str]]
) -> None:
    checkpointer = Checkpointer(tmp_path, None, [])
    checkpointer.save_pytree(tree(), "m", step=1)
    (tmp_path / "run-1/metadata.json").write_text("{")
    loaded, metadata = checkpointer.load_pytree(None, prefix="m", discover_latest=True)
    assert_same(loaded, tree())
    assert metadata == {"step": 1}, "its own record"
    assert [text for text in logged() if "without its step" in text]


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, None, [])
    checkpointer.save_pytree({"w": np.arange(100)}, "m", step=1)
    (data,) = [p for p in (tmp_path / "run-1/m/w").iterdir() if p.name != ".zarray"]
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(IntegrityError, match="w"):
        checkpointer.load_pytree(None, prefix="m", discover_latest=True)


@pytest.mark.parametrize("steps", [("model", "tx"), ("tx", "model", "model")])
def test_what_easydel_looks_for_is_beside_the_weights(tmp_path: Path, steps: tuple[str, ...]) -> None:
    for seed, prefix in enumerate(steps):
        Checkpointer(tmp_path, None, []).save_pytree(tree(seed), prefix)
    assert (tmp_path / "tensorstore_index.json").is_file()
    assert (tmp_path / "tx").is_dir()
    assert AsyncCheckpointManager.is_tensorstore(tmp_path)
    assert_same(Checkpointer(tmp_path, None, []).load_pytree(None, prefix=steps[-1])[0], tree(len(steps) - 1))


class Removing:
    """A removal stopped in its middle: the thread waits at the door until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.door, self.begun = threading.Event(), threading.Event()
        removal = shardkeep.eformer.removal

        def wait(some: Removal) -> None:
            self.begun.set()
            assert self.door.wait(60)
            remove_run(some)

        monkeypatch.setattr(removal, "remove_run", wait)


def test_waiting_includes_removals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread that makes them ends when there are none left."""
    checkpointer = Checkpointer(tmp_path, None, [])
    paths = [checkpointer.save_pytree(tree(), "m", step=step) for step in (1, 2)]
    (tmp_path / "run-1/tokenizer").mkdir()
    (tmp_path / "run-1/tokenizer/vocabulary.json").write_text("{}")
    stopped = Removing(monkeypatch)
    for path in paths:
        checkpointer._queue_checkpoint_removal(path)
    assert stopped.begun.wait(60)
    assert runs(tmp_path) == ["run-1", "run-2"]
    opener = threading.Timer(0.2, stopped.door.set)
    opener.start()
    checkpointer.wait_until_finished()
    assert stopped.door.is_set()
    assert runs(tmp_path) == []
    opener.join()
    assert not [t for t in threading.enumerate() if t.name == "shardkeep-removal"]


def test_a_save_waits_for_the_removal_of_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, None, [])
    path = checkpointer.save_pytree(tree(1), "m", step=1)
    stopped = Removing(monkeypatch)
    checkpointer._queue_checkpoint_removal(path)
    assert stopped.begun.wait(60)
    checkpointer.save_pytree(tree(2), "m", step=2)
    opener = threading.Timer(0.2, stopped.door.set)
    opener.start()
    checkpointer.save_pytree(tree(3), "m", step=1)
    assert stopped.door.is_set()
    opener.join()
    checkpointer.wait_until_finished()
    assert_same(checkpointer.load_pytree(None, prefix="m", path=path)[0], tree(3))


def test_what_cannot_be_removed_is_reported_and_removed_later(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    base = tmp_path / "base"
    checkpointer = Checkpointer(base, None, [every(1)])
    path = base / "run-1"
    checkpointer.save_pytree(tree(), "m", step=1)
    target = shardkeep.catalog.new_target(location(path), "zarr", None, None, directory=True)
    held = target.store.hold(f"{target.store.saves}/running")
    with target.store.lock(5):
        held.take(b"{}\n")
    checkpointer._queue_checkpoint_removal(path)
    checkpointer.wait_until_finished()
    assert [text for text in logged() if "run-1 could not be removed: a save to" in text]
    assert find_latest_checkpoint(base) is None, "it is marked, so nobody resumes from what is being removed"
    held.remove()
    again = Checkpointer(base, None, [every(1)])
    again.on_step(pytree=tree(2), step=2)
    again.wait_until_finished()
    assert runs(base) == ["run-2"]


KILLED = """
import os, signal, sys
import shardkeep.stores.local.store as local
from pathlib import Path
from shardkeep.serialization import Checkpointer, CheckpointInterval
base, name = sys.argv[1:]
import numpy as np
checkpointer = Checkpointer(base, None, [CheckpointInterval(1)])
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if name == "removal":
    remove = local.shutil.rmtree
    local.shutil.rmtree = lambda path: (remove(path), die())
elif name == "metadata":
    import shardkeep.eformer.committing as committing
    committing.write_metadata = die
checkpointer.on_step(pytree={"w": np.full(3, 2.0)}, step=2)
checkpointer.wait_until_finished()
"""


@pytest.mark.parametrize("name", ["removal", "metadata"])
def test_after_a_kill_the_old_checkpoint_or_the_new_one_is_found_and_nothing_is_left_behind(
    tmp_path: Path, name: str
) -> None:
    """Killed while a temporary checkpoint is half removed, or between a commit and its metadata."""
    base = tmp_path / "base"
    Checkpointer(base, None, []).save_pytree({"w": np.full(3, 1.0)}, "m", step=1, temporary=True)
    (base / "run-1/tokenizer").mkdir()
    (base / "run-1/tokenizer/x").write_text("x")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(base), name], capture_output=True, check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert runs(base) == ["run-1", "run-2"]
    checkpointer = Checkpointer(base, None, [every(3)])
    loaded, metadata = checkpointer.load_checkpoint(None)
    newest = {"removal": 2, "metadata": 1}[name]
    assert (float(loaded["w"][0]), metadata["step"]) == (newest, newest)
    checkpointer.on_step(pytree={"w": np.full(3, 3.0)}, step=3)
    checkpointer.wait_until_finished()
    assert runs(base) == ["run-2", "run-3"]


def test_a_directory_that_eformer_wrote_is_found_loaded_and_removed(copy_of: Callable[[str], Path]) -> None:
    names = [p.parent.relative_to(EFORMER) for p in EFORMER.rglob("metadata.json") if p.parent.name.startswith("run-")]
    assert names, "there are runs of eFormer's Checkpointer among the fixtures"
    base = copy_of(str(names[0].parent))
    found = [run for run in run_directories(base) if run.place.name.startswith("run-")]
    assert [run.problem for run in found] == [None] * len(found)
    checkpointer = Checkpointer(base, None, [])
    newest = find_latest_checkpoint(base)
    assert newest == found[-1].path
    prefixes = shardkeep.inspect(newest).prefixes
    tree, metadata = checkpointer.load_checkpoint(None, prefix=prefixes[0] if prefixes else None)
    assert jax.tree.leaves(tree)
    assert metadata["step"] == found[-1].step
    checkpointer._queue_checkpoint_removal(newest)
    checkpointer.wait_until_finished()
    assert not Path(newest).exists()
