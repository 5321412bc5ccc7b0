"""What a run continues with: the newest usable step, never a new start over old ones."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from runs.runs import ONE, damage, data_file, new_state, numbers, state_of, trained
from shardkeep import Keep, Run, remap
from shardkeep.errors import (
    CheckpointNotFoundError,
    ConflictError,
    IncompleteCheckpointError,
    IntegrityError,
    StorageError,
    TemplateMismatchError,
)
from shardkeep.runs.control import Control
from shardkeep.stores.location import location
from support import assert_same, mesh_of


def states(run: Run) -> dict[int, str]:
    return {step.number: step.state for step in run.steps()}


def lose_a_file(run: Path, step: int) -> None:
    data_file(run, step).unlink()


def cut_the_manifest(run: Path, step: int) -> None:
    path = run / f"step_{step}" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def lose_the_manifest(run: Path, step: int) -> None:
    (run / f"step_{step}" / "manifest.json").unlink()


@pytest.mark.parametrize("harm", [damage, lose_a_file, cut_the_manifest, lose_the_manifest])
def test_a_damaged_step_is_skipped_loudly_marked_and_replaced_when_it_is_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Any
) -> None:
    path = tmp_path / "run"
    trained(path, [1, 2, 3])
    harm(path, 3)
    with Run(path, save_every=1, keep=None) as run:
        state, step = run.resume(new_state, shardings=ONE)
        assert (step, state["n"]) == (2, 2)
        assert run.resumed is not None
        assert [number for number, _ in run.resumed.skipped] == [3]
        assert states(run) == {1: "usable", 2: "usable", 3: "damaged"}
        assert run.steps()[2].reason
        latest = run.latest()
        assert latest is not None
        assert latest.number == 2
        run.step(3, state_of(33))
        run.wait()
        assert states(run) == {1: "usable", 2: "usable", 3: "usable"}
    assert "step 3 of" in caplog.text
    assert "trying step 2 instead" in caplog.text
    with Run(path) as run:
        assert run.resume(new_state, shardings=ONE)[0]["n"] == 33


@pytest.mark.parametrize("harm", ["cut", "remove"])
def test_a_step_that_lacks_a_tree_which_is_not_loaded_is_skipped_too(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "run"
    with Run(path) as run:
        run.resume(new_state, shardings=ONE)
        for step in (1, 2):
            run.save(step, state_of(step), trees={"ema": {"w": np.full(9, step)}}).wait()
    (file,) = (path / "step_2" / "ema").glob("*.safetensors")
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with Run(path) as run:
        assert run.resume(new_state, shardings=ONE)[1] == 1
        assert run.resumed is not None
        ((number, reason),) = run.resumed.skipped
        assert number == 2
        assert str(file) in reason
        assert run.load(1, prefix="ema")["w"].tolist() == [1] * 9


def test_what_an_iterator_raises_is_raised_and_marks_nothing(tmp_path: Path) -> None:
    class Broken:
        def get_state(self) -> int:
            return 3

        def set_state(self, state: int) -> None:
            raise RuntimeError(f"cannot go to {state}")

    with Run(tmp_path / "run") as run:
        run.resume(new_state, shardings=ONE)
        run.save(1, state_of(1), iterators={"train": Broken()})
    with Run(tmp_path / "run") as run:
        with pytest.raises(RuntimeError, match="cannot go to 3"):
            run.resume(new_state, shardings=ONE, iterators={"train": Broken()})
        assert run.resumed is None
        assert states(run) == {1: "usable"}
        assert run.resume(new_state, shardings=ONE, iterators={"train": 0})[1] == 1


def test_a_mark_stays_when_the_run_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained(path, [1, 2])
    damage(path, 2)
    for _ in range(2):
        with Run(path) as run:
            assert run.resume(new_state, shardings=ONE)[1] == 1
            assert states(run) == {1: "usable", 2: "damaged"}
            assert run.resumed is not None
            ((number, reason),) = run.resumed.skipped
            assert number == 2
            assert "does not match its digest" in reason


def test_if_no_step_is_usable_that_is_an_error_and_never_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained(path, [1, 2])
    damage(path, 1)
    lose_a_file(path, 2)
    for _ in range(2):
        with Run(path) as run, pytest.raises(IntegrityError, match=r"none that can be .*\n  step 2: .*\n  step 1: "):
            run.resume(new_state, shardings=ONE)
    assert states(Run(path)) == {1: "damaged", 2: "damaged"}


@pytest.mark.parametrize("arguments", [{"include": "^n$"}, {"verify": False}])
def test_a_damaged_step_that_one_goes_back_to_stays_marked_unless_all_of_it_was_verified(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    path = tmp_path / "run"
    trained(path, [1, 2])
    damage(path, 2)
    with Run(path) as run:
        assert run.resume(new_state, shardings=ONE)[1] == 1
    with Run(path) as run:
        with pytest.raises(IntegrityError):
            run.resume(new_state, shardings=ONE, step=2)
        assert run.resume(new_state, shardings=ONE, step=2, **arguments)[1] == 2
        assert states(run) == {1: "usable", 2: "damaged"}


def test_a_save_that_was_never_committed_is_no_step_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    shardkeep.save(path / "step_5", {"w": np.ones(3)})
    (path / "step_5" / "manifest.json").unlink()
    (path / "step_5" / ".shardkeep" / "saves").mkdir(exist_ok=True)
    files = [p.name for p in (path / "step_5").iterdir() if p.is_file()]
    (path / "step_5" / ".shardkeep" / "saves" / ("a" * 32)).write_text(f'["{files[0]}"]\n')
    with pytest.raises(IncompleteCheckpointError, match="no committed checkpoint"):
        shardkeep.load(path / "step_5")
    with Run(path) as run:
        assert run.resume(new_state, shardings=ONE)[1] == 0
        run.wait()
    assert not (path / "step_5").exists()


def test_errors_that_are_not_damage_are_raised_and_mark_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained(path, [1, 2])
    with Run(path) as run:
        with pytest.raises(TemplateMismatchError, match="w"):
            run.resume({"w": jnp.zeros((3, 3)), "n": 0})
        with pytest.raises(TypeError, match=r"resume\(\) has no argument 'mapped'"):
            run.resume(new_state, mapped=True)
        data_file(path, 2).rename(path / "aside")
        data_file_name = shardkeep.inspect(path / "step_2").trees[""].files[0].name
        (path / "step_2" / data_file_name).mkdir()
        with pytest.raises((StorageError, IntegrityError), match="step_2"):
            run.resume({"w": jnp.zeros(64), "n": 0}, step=2)
        assert states(run) == {1: "usable", 2: "usable"}


def test_going_back_abandons_later_steps_durably(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained(path, [1, 2, 3, 4], metadata={"lineage": "first"})
    keep = Keep(last=2, metric="loss", mode="min")
    with Run(path, save_every=1, keep=keep, metadata={"lineage": "second"}) as run:
        state, step = run.resume(new_state, step=2, shardings=ONE)
        assert (state["n"], step) == (2, 2)
        reader = Run(path, keep=keep)
        assert states(reader) == {1: "usable", 2: "usable", 3: "abandoned", 4: "abandoned"}
        latest, best = reader.latest(), reader.best()
        assert latest is not None
        assert latest.number == 2
        assert best is not None
        assert best.number == 2  # steps 3 and 4 have a smaller loss
        assert [s.number for s in reader.watch(after=0, timeout=0, hold=False)] == [1, 2]
    with Run(path, save_every=1, keep=keep, metadata={"lineage": "second"}) as run:
        assert run.resume(new_state, shardings=ONE)[1] == 2
        run.step(3, state_of(30))
    assert states(run) == {2: "usable", 3: "usable", 4: "abandoned"}
    assert run.load()["n"] == 30
    assert run.steps()[1].metadata == {"lineage": "second"}


def test_going_back_before_a_pinned_step_is_refused(tmp_path: Path) -> None:
    """It would be abandoned, and replaced when the run comes to it again; but pinned steps stay."""
    path = tmp_path / "run"
    trained(path, [1, 2, 3])
    with Run(path) as run:
        run.pin(2)
        with pytest.raises(ConflictError, match=r"step_2 is pinned, and going back would abandon it.*Unpin it first"):
            run.resume(new_state, step=1, shardings=ONE)
        assert set(states(run).values()) == {"usable"}
        assert run.resume(new_state, step=2, shardings=ONE)[1] == 2
        run.unpin(2)
        assert run.resume(new_state, step=1, shardings=ONE)[1] == 1
        assert states(run) == {1: "usable", 2: "abandoned", 3: "abandoned"}


def test_one_can_go_back_to_an_abandoned_step(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trained(path, [1, 2, 3])
    with Run(path) as run:
        run.resume(new_state, step=1, shardings=ONE)
        assert run.resume(new_state, step=3, shardings=ONE)[1] == 3
        assert states(run) == {1: "usable", 2: "abandoned", 3: "usable"}
        with pytest.raises(CheckpointNotFoundError, match=r"has no such step. It has \(the newest first\): 3, 2, 1"):
            run.resume(new_state, step=9, shardings=ONE)


def test_trees_of_an_abandoned_step_do_not_survive_in_the_one_that_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Run(path, keep=None) as run:
        run.resume(new_state, shardings=ONE)
        run.save(1, state_of(1))
        run.save(2, state_of(2), trees={"ema": {"w": np.zeros(1)}}, iterators={"a": 1})
    with Run(path, keep=None) as run:
        run.resume(new_state, step=1, shardings=ONE)
        run.save(2, state_of(22))
    assert shardkeep.inspect(path / "step_2").prefixes == [""]
    assert len(list((path / "step_2").rglob("*.safetensors"))) == 1, "the files of the other trees are gone"


_KILLED_AT_THE_COMMIT = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from runs.runs import ONE, new_state, state_of
from shardkeep import Run
with Run(sys.argv[1], keep=None) as run:
    run.resume(new_state, step=1, shardings=ONE)
    def die(event, arguments):
        if event == "open" and "step_2/manifest.json." in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(die)
    run.save(2, state_of(22)).wait()
"""


def test_an_abandoned_step_stays_complete_until_the_one_that_replaces_it_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Run(path, keep=None) as run:
        run.resume(new_state, shardings=ONE)
        run.save(1, state_of(1))
        run.save(2, state_of(2), trees={"ema": {"w": np.zeros(1)}}, iterators={"a": 1})
    command = [sys.executable, "-c", _KILLED_AT_THE_COMMIT, str(path), str(Path(__file__).parents[1])]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert shardkeep.verify(path / "step_2").ok
    with Run(path, keep=None) as run:
        assert run.resume(new_state, step=2, shardings=ONE, iterators={"a": 0})[1] == 2
        assert run.load(prefix="ema")["w"].shape == (1,)


@pytest.mark.parametrize("source", ["run", "checkpoint", "exchange"])
def test_a_new_run_can_begin_with_the_weights_of_another(tmp_path: Path, source: str) -> None:
    given = {"run": "base", "checkpoint": "ckpt", "exchange": "weights.safetensors"}[source]
    if source == "run":
        trained(tmp_path / "base", [1, 2])
    else:
        shardkeep.save(tmp_path / given, state_of(2))
    template = {"w": jnp.zeros(64)}
    with Run(tmp_path / "fine") as run:
        state, step = run.resume(template, init_from=tmp_path / given)
        assert (step, float(state["w"][0])) == (0, 2.0)
        assert run.resumed is not None
        assert run.resumed.fresh
        assert run.resumed.init_from is not None
        assert run.resumed.init_from.startswith(str(tmp_path / given))
        run.save(5, {"w": state["w"] + 1})
    with Run(tmp_path / "fine") as run:
        state, step = run.resume(template, init_from=tmp_path / given)
        assert (step, float(state["w"][0])) == (5, 3.0)
        assert run.resumed is not None
        assert run.resumed.init_from is None


def test_init_from_another_run_ignores_its_abandoned_and_damaged_steps_whatever_their_names(tmp_path: Path) -> None:
    base = tmp_path / "base"
    trained(base, [1, 2, 3, 4], name="ckpt_{:04d}")
    with Run(base, keep=None, name="ckpt_{:04d}") as run:
        run.resume(new_state, shardings=ONE, step=3)
        damaged = run.steps()[2]
        run._control.mark("damaged", "ckpt_0003", damaged.save_id, "for this test")
    with Run(tmp_path / "fine") as run:
        assert run.resume(new_state, shardings=ONE, init_from=base)[0]["n"] == 2
        assert run.resumed is not None
        assert run.resumed.init_from == str(base / "ckpt_0002")


def test_init_from_nothing_is_an_error(tmp_path: Path) -> None:
    with Run(tmp_path / "fine") as run, pytest.raises(CheckpointNotFoundError, match="no checkpoint at"):
        run.resume(new_state, shardings=ONE, init_from=tmp_path / "nowhere")


def test_an_abstract_template_cannot_begin_a_run(tmp_path: Path) -> None:
    template = shardkeep.abstract(str(trained(tmp_path / "a", [1]).steps()[0].path), shardings=ONE)
    with (
        Run(tmp_path / "b") as run,
        pytest.raises(ValueError, match="has no steps yet, and the template has only shap"),
    ):
        run.resume(template)
    with Run(tmp_path / "a") as run:
        assert run.resume(template)[1] == 1


def test_the_mark_of_a_deleter_that_died_is_settled_by_the_next_writer(tmp_path: Path) -> None:
    """A step that is still complete stays; one that is not is deleted completely."""
    path = tmp_path / "run"
    run = trained(path, [1, 2, 3])
    control = Control(location(path))
    for step in run.steps()[:2]:
        control.mark("deleting", f"step_{step.number}", step.save_id)
    assert states(Run(path)) == {1: "deleting", 2: "deleting", 3: "usable"}
    data_file(path, 1).unlink()
    with Run(path, keep=None) as run:
        assert run.resume(new_state, shardings=ONE)[1] == 3
        assert states(run) == {2: "usable", 3: "usable"}
    assert not (path / "step_1").exists()
    assert control.marks() == []


def test_checkpoints_that_no_run_saved_can_be_resumed_and_are_never_deleted(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for step in (1, 2):
        shardkeep.save(path / f"step_{step}", state_of(step), step=step)
    with Run(path, save_every=1, keep=Keep(last=1)) as run:
        assert run.resume(new_state, shardings=ONE)[1] == 2
        for step in (3, 4, 5):
            run.step(step, state_of(step))
    assert numbers(run) == [1, 2, 5]
    assert run.steps()[0].kept == ("not saved by a Run",)


class TestChanged:
    """A run that begins with the checkpoint of a model that was another one."""

    RULES = (remap.stack("layers/{i}/(.*)", r"layers/\1"), remap.resize("head", fill="keep"))

    @staticmethod
    def save(path: Path) -> None:
        layers = [{"w": jnp.full((4, 2), i, jnp.float32)} for i in range(3)]
        shardkeep.save(path, {"layers": layers, "head": jnp.ones((2, 4))})

    @staticmethod
    def new() -> Any:
        return {
            "layers": {"w": jnp.zeros((3, 4, 2))},
            "head": jnp.full((3, 4), 5.0),
            "adapter": {"a": jax.random.normal(jax.random.key(0), (8, 2)), "b": jnp.zeros((2, 8), jnp.bfloat16)},
        }

    @pytest.mark.parametrize("kind", ["function", "jitted", "tree"])
    def test_only_what_it_lacks_is_made(self, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.save(tmp_path / "old")
        place = NamedSharding(mesh_of(4, 2), PartitionSpec())
        templates = {"function": self.new, "jitted": jax.jit(self.new, out_shardings=place), "tree": self.new()}
        options = {} if kind == "jitted" else {"shardings": place}
        with shardkeep.Run(tmp_path / "run") as run:
            state, step = run.resume(
                templates[kind], init_from=tmp_path / "old", remap=self.RULES, missing="keep", **options
            )
            assert step == 0
            run.save(1, state)
        fresh = self.new()
        assert np.array_equal(state["layers"]["w"][:, 0, 0], [0, 1, 2])
        assert np.array_equal(state["head"], [[1] * 4, [1] * 4, [5] * 4])
        assert_same(jax.tree.map(np.asarray, state["adapter"]), jax.tree.map(np.asarray, fresh["adapter"]))
        assert all(leaf.sharding == place for leaf in jax.tree.leaves(state))
        assert "'adapter/a', 'adapter/b', 'head (a part)'" in caplog.text
        with shardkeep.Run(tmp_path / "run") as run:  # its own steps have the new tree: rules are for the other one
            again, step = run.resume(
                templates[kind], init_from=tmp_path / "old", remap=self.RULES, missing="keep", **options
            )
        assert step == 1
        assert_same(again, state)

    def test_leaves_that_the_checkpoint_has_are_not_computed(self, tmp_path: Path) -> None:
        """What is compiled has no trace of them: here they would need more memory than there is."""
        shardkeep.save(tmp_path / "old", {"small": jnp.ones(3)})
        huge = 1 << 46

        def new() -> Any:
            noise = jax.random.normal(jax.random.key(1), (huge,)) if False else jnp.zeros((huge,)) + 1
            return {"small": noise[:3] * noise.sum(), "adapter": jnp.arange(4.0)}

        with shardkeep.Run(tmp_path / "run") as run:
            state, _ = run.resume(
                new,
                init_from=tmp_path / "old",
                missing="keep",
                shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            )
        assert np.array_equal(state["adapter"], np.arange(4.0))
        assert np.array_equal(state["small"], np.ones(3))

    def test_rules_need_another_checkpoint(self, tmp_path: Path) -> None:
        with (
            shardkeep.Run(tmp_path / "run") as run,
            pytest.raises(shardkeep.RemapError, match=r"resume\(remap=...\) needs init_from="),
        ):
            run.resume(self.new, remap=self.RULES, shardings=NamedSharding(mesh_of(4, 2), PartitionSpec()))


def test_a_step_that_does_not_fit_the_template_is_named_with_how_to_go_on(tmp_path: Path) -> None:
    """`remap=` is no advice for `resume`, which does not take it for the run's own steps."""
    trained(tmp_path / "run", [1, 2])
    with Run(tmp_path / "run", keep=None) as run:
        for template, kind in (
            (lambda: {"v": jnp.zeros(64), "n": 0}, shardkeep.MissingLeafError),
            (lambda: {"w": jnp.zeros(65), "n": 0}, shardkeep.TemplateMismatchError),
        ):
            with pytest.raises(kind, match=r"resuming from step 2 of .*/run: the checkpoint .*/run/step_2 ") as raised:
                run.resume(template, shardings=ONE)
            text = str(raised.value)
            assert "try remap=" not in text
            assert "shardkeep.load(path, template=..., remap=...)" in text
            assert ('missing="keep"' in text) == (kind is shardkeep.MissingLeafError)
            assert len(raised.value.problems) == 1
            assert raised.value.problems[0] in text
        assert run.resume(new_state, shardings=ONE)[1] == 2


def test_a_run_whose_model_changed_goes_on_in_a_new_run_at_the_same_step_and_position(tmp_path: Path) -> None:
    with Run(tmp_path / "old") as run:
        run.resume(new_state, shardings=ONE)
        run.save(7, state_of(7), iterators={"train": {"at": 3}})
    newest = Run(tmp_path / "old").latest()
    assert newest is not None
    template = {"v": jax.ShapeDtypeStruct((64,), jnp.float32), "n": 0}
    state = shardkeep.load(newest.path, template=template, remap=remap.rename("w", "v"), shardings=ONE)
    positions = shardkeep.load(newest.path, prefix="iterators")
    with Run(tmp_path / "new") as run:
        run.save(newest.number, state, iterators=positions)
        state, step = run.resume(template, iterators={"train": {"at": 0}}, shardings=ONE)
        assert (step, state["n"], float(state["v"][0])) == (7, 7, 7.0)
        assert run.resumed is not None
        assert run.resumed.iterators == {"train": {"at": 3}}
