"""What objects show at the prompt and in notebooks: short, bounded, escaped, without looking at the disk."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from shardkeep import Keep, Problem, SaveReport, Step, VerifyReport, remap
from shardkeep.runs.resume import Resumed
from shardkeep.saving.pending import BackgroundSave
from support import mesh_of

EVIL = "<script>alert('k')</script>"
ESCAPED = "&lt;script&gt;alert(&#x27;k&#x27;)"
LONG = "k" * 10_000
HOSTILE = {EVIL: EVIL, LONG: LONG, "\u202e\n\x1b[2J": 10**4000, "big": np.float32(1), "null": None}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One of everything that shows itself, with hostile and very many names. The files are gone."""
    home = tmp_path_factory.mktemp("shown")
    sharding = NamedSharding(mesh_of(2, 2), PartitionSpec("a", "b"))
    many = {f"layer_{i:05d}": np.zeros(2, np.float32) for i in range(300)}
    hostile = {f"{EVIL}.dotted": jax.device_put(jnp.ones((4, 6)), sharding), **HOSTILE, **many}
    metadata = {EVIL: [EVIL, {EVIL: LONG}], LONG: LONG, **{str(i): i for i in range(100)}}
    found: dict[str, Any] = {"saved": shardkeep.save(home / "one", hostile, metadata=metadata, step=7)}
    pending = shardkeep.save_async(home / "several", many, metadata=metadata)
    for number in range(6):
        pending.wait()
        pending = shardkeep.save_async(home / "several", hostile, prefix=f"{number}{EVIL}".replace("/", ""))
    found |= {"pending": pending, "reported": pending.wait()}
    manifest = found["manifest"] = shardkeep.inspect(home / "one")
    found |= {"several": shardkeep.inspect(home / "several"), "tree": manifest.tree(), "verified": None}
    found |= {f"leaf {number}": leaf for number, leaf in enumerate(manifest.tree().leaves[:6])}
    found["verified"] = shardkeep.verify(home / "one")
    found["plan"] = shardkeep.plan_load(home / "one", remap=remap.rename("layer_(.*)", rf"{EVIL}\1".replace("/", "")))
    template = {f"{EVIL}{i}": jnp.ones(3) for i in range(60)}
    found["mismatched"] = shardkeep.plan_load(home / "one", template={**template, "layer_00000": jnp.ones((9, 9))})
    with shardkeep.Run(home / "run", save_every=(10, "15 min"), keep=Keep(last=2)) as run:
        state, _ = run.resume(lambda: {"w": jnp.zeros(3)}, shardings=SingleDeviceSharding(jax.devices()[0]))
        found["open run"] = shardkeep.Run(home / "run", keep=None)
        for step in range(1, 21):
            run.step(step, state, metrics={EVIL: 1 / step, LONG: step}, metadata={EVIL: EVIL})
    found |= {"run": run, "resumed": run.resumed, "step": run.steps()[-1], "keep": Keep(last=1, within="12 h")}
    shutil.rmtree(home)
    problems = tuple(Problem(EVIL, "f", LONG if i else EVIL) for i in range(5000))
    found |= {
        "damaged": VerifyReport(EVIL, 1000, 2, 0.1, 3, problems),
        "no time": SaveReport("/x", 10, 1, 0.0),
        "skipped": Resumed(5, EVIL, skipped=tuple((i, EVIL) for i in range(99)), iterators={EVIL: np.zeros(10**6)}),
        "bad step": Step(5, EVIL, {EVIL: float("nan")}, {EVIL: LONG}, state="damaged", reason=EVIL, kept=("last",)),
        "strange keep": Keep(best=1, metric=EVIL, mode="max"),
    }
    return found


NAMES = [
    *(
        "saved",
        "pending",
        "reported",
        "manifest",
        "several",
        "tree",
        "verified",
        "plan",
        "mismatched",
        "open run",
        "run",
    ),
    *("resumed", "step", "keep", "damaged", "no time", "skipped", "bad step", "strange keep"),
    *(f"leaf {number}" for number in range(6)),
]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_at_the_prompt_and_escaped_and_bounded_in_a_notebook(objects: dict[str, Any], name: str) -> None:
    thing = objects[name]
    text = repr(thing)
    assert len(text.splitlines()) <= 21 + 4 * (name == "several")
    assert len(text) < (12_000 if name in ("plan", "mismatched") else 3000)
    assert text.replace("\n", "").isprintable()
    shown = thing._repr_html_()
    assert shown.startswith('<div style="overflow-x:auto')
    assert len(shown) < 60_000
    assert shown.isprintable()
    assert "<script" not in shown
    assert "<img" not in shown


def test_every_public_object_that_calls_return_shows_itself(objects: dict[str, Any]) -> None:
    kinds = {type(thing).__name__ for thing in objects.values()}
    assert {"Manifest", "SaveReport", "VerifyReport", "PendingSave", "Run", "Step"} <= kinds
    assert {"Keep", "Tree", "StoredArray", "StoredValue", "LoadPlan", "Resumed"} <= kinds
    assert set(NAMES) == set(objects)


def test_what_is_hostile_is_there_but_escaped(objects: dict[str, Any]) -> None:
    assert all(
        ESCAPED in objects[name]._repr_html_() for name in ("manifest", "tree", "damaged", "bad step", "skipped")
    )


def test_a_manifest_has_a_table_with_sizes_shardings_and_bars(objects: dict[str, Any]) -> None:
    shown = objects["manifest"]._repr_html_()
    assert "P(a, b) on a=2 b=2" in shown
    assert "96 B" in shown
    assert shown.count("width:100%") == 1
    assert "… and 281 more leaves" in shown
    assert shown.count("<td") < 150
    assert "… and 3 more trees" in objects["several"]._repr_html_()


def test_a_save_shows_its_phases_and_a_verification_its_problems(objects: dict[str, Any]) -> None:
    assert all(f">{phase}<" in objects["pending"]._repr_html_() for phase in ("snapshot", "write", "sync", "commit"))
    assert "✓ no problems" in objects["verified"]._repr_html_()
    damaged = objects["damaged"]._repr_html_()
    assert "✗ 5,000 problems" in damaged
    assert "… and 4,980 more problems" in damaged


def test_a_run_says_what_is_known_without_listing_its_steps(objects: dict[str, Any]) -> None:
    run = objects["run"]
    said = f"{run.path}: open for reading, saves every 10 steps or every 15 min, keeps Keep(last=2), resumed at step 0"
    assert repr(run) == f"<Run {said}>"
    assert "keeps every step" in repr(objects["open run"])
    assert repr(objects["skipped"]).startswith("<Resumed at step 5, skipped 0, 1, 2")
    assert "float64[1000000]" in objects["skipped"]._repr_html_()
    assert repr(objects["resumed"]) == "<Resumed a new run>"


def test_a_run_that_is_being_written_says_so(tmp_path: Path) -> None:
    with shardkeep.Run(tmp_path / "run") as run:
        state, _ = run.resume(lambda: {"w": jnp.zeros(3)}, shardings=SingleDeviceSharding(jax.devices()[0]))
        run.stop()
        run.save(5, state)
        assert "open for writing, and about to stop, saves only when asked" in repr(run)
        assert "writing, and about to stop" in run._repr_html_()


def test_rules_are_shown_in_words() -> None:
    keep = Keep(last=3, every=1000, best=2, metric="loss", mode="min", within="90 min")
    assert repr(keep) == "Keep(last=3, every=1000, best=2, metric='loss', mode='min', within='90 min')"
    assert eval(repr(keep), {"Keep": Keep}) == keep
    shown = keep._repr_html_()
    for said in ("the 3 newest steps", "each multiple of 1,000", "the 2 steps with the smallest loss", "last 90 min"):
        assert said in shown
    assert "the 1 newest step<" in Keep(last=1)._repr_html_()


def test_a_save_in_the_background_tells_its_state_without_waiting() -> None:
    pending = shardkeep.PendingSave(BackgroundSave("somewhere"))
    assert repr(pending) == "<PendingSave 'somewhere': running>"
    assert ">running<" in pending._repr_html_()


def test_a_save_that_failed_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pending = shardkeep.save_async(tmp_path / "file" / "run", {"w": np.ones(3)})
    with pytest.raises(shardkeep.NotADirectoryPathError, match="file"):
        pending.wait()
    shown = pending._repr_html_()
    assert ">failed: NotADirectoryPathError<" in shown
    assert str(tmp_path / "file") in shown


def test_values_that_python_refuses_to_print_are_shown_too() -> None:
    assert repr(shardkeep.PerProcess(10**5000)) == "PerProcess(an integer of 16610 bits)"
    node = shardkeep.OpaqueNode("models:Dense", {"kernel": np.zeros((1000, 1000)), **{str(i): LONG for i in range(99)}})
    assert repr(node).startswith("OpaqueNode('models:Dense', kernel=float64[1000, 1000], 0='kkk")
    assert len(repr(node)) < 1000
    assert repr(node).endswith(", …)")


def test_nothing_is_shown_through_the_file_system(objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a repr looked at the disk")

    for name in ("open", "stat", "listdir", "scandir", "lstat"):
        monkeypatch.setattr(os, name, refuse)
    for thing in objects.values():
        assert repr(thing)
        assert thing._repr_html_()
