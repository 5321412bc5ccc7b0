"""From a path to what is there: which forms of it are found, which checkpoint is the newest, which one was meant."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import shardkeep
from faults.spawner import Fault, Spawner
from faults.states import make, same
from support import FORMATS, assert_same, save_as


class TestPaths:
    def test_nothing_there(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "stuff").mkdir()
        (tmp_path / "stuff" / "x.txt").touch()
        for name, message in {
            "no": "nothing there",
            "empty": "nothing there",
            "stuff": "something else",
            "no/deep": "nothing",
        }.items():
            with pytest.raises(shardkeep.CheckpointNotFoundError, match=message):
                shardkeep.load(tmp_path / name)
            assert not shardkeep.exists(tmp_path / name)

    def test_a_file_that_is_no_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").write_text("hello")
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="shardkeep cannot read this kind of file"):
            shardkeep.load(tmp_path / "x.txt")
        with pytest.raises((shardkeep.CheckpointNotFoundError, NotADirectoryError), match=r"x\.txt"):
            shardkeep.load(tmp_path / "x.txt" / "below")
        assert not shardkeep.exists(tmp_path / "x.txt" / "below")

    def test_every_name_of_exchange_files_finds_them(self, tmp_path: Path) -> None:
        path = save_as("shards", tmp_path / "model", make("plain", 1))
        shards = sorted(tmp_path.glob("model-0*.safetensors"))
        assert len(shards) > 1
        for name in (
            path,
            tmp_path / "model.safetensors.index.json",
            tmp_path / "model",
            shards[0],
            shards[-1],
            tmp_path,
        ):
            assert same(shardkeep.load(name), make("plain", 1)), name

    def test_the_manifest_names_its_checkpoint(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "run", make("plain", 1))
        assert same(shardkeep.load(tmp_path / "run" / "manifest.json"), make("plain", 1))

    def test_strings_paths_and_urls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        shardkeep.save("a b%20c", {"x": 1})
        for form in (
            "a b%20c",
            Path("a b%20c"),
            f"file://{tmp_path}/a%20b%2520c",
            str(tmp_path / "a b%20c") + "/",
            "./a b%20c",
        ):
            assert shardkeep.load(form) == {"x": 1}, form

    def test_a_path_of_odd_characters(self, tmp_path: Path) -> None:
        for name in ("ü", "a\nb", "  ", "-x", "*?[", "'\"", "\u202e", "a" * 200):
            shardkeep.save(tmp_path / name, {"w": np.ones(3)}, format="zarr")
            shardkeep.save(tmp_path / name, {"w": np.zeros(3)}, overwrite=True)
            assert_same(shardkeep.load(tmp_path / name), {"w": np.zeros(3)})

    def test_a_path_that_is_too_long_is_an_error_of_ours(self, tmp_path: Path) -> None:
        for name in ("x" * 300, ("y" * 200 + "/") * 30):
            with pytest.raises(shardkeep.StorageError, match="File name too long"):
                shardkeep.save(tmp_path / name, {"w": np.ones(3)})
            assert not shardkeep.exists(tmp_path / name)


class TestLatest:
    """The checkpoint to resume from."""

    def test_the_highest_number_wins(self, tmp_path: Path) -> None:
        for name in ("step_100", "step_9", "step_30"):
            shardkeep.save(tmp_path / name, {"x": 1})
        (tmp_path / "notes_2026.txt").write_text("no checkpoint")
        (tmp_path / "logs_999").mkdir()
        assert shardkeep.latest(tmp_path) == str(tmp_path / "step_100")
        assert shardkeep.latest(f"file://{tmp_path}") == str(tmp_path / "step_100")

    @pytest.mark.parametrize(
        "names",
        [
            ("zero", "best"),
            ("step_1", "best"),
            ("ckpt-0.25-step10", "ckpt-0.19-step20"),
            ("2026-11-17_eval_3", "step_100"),
            ("epoch_2_step_5", "epoch_1_step_9"),
        ],
    )
    def test_names_that_differ_in_more_than_the_last_number_go_by_the_time_of_the_save(
        self, tmp_path: Path, names: tuple[str, str]
    ) -> None:
        """However soon one comes after the other."""
        for some in (names, names[::-1]):
            for name in some:
                shardkeep.save(tmp_path / name, {"x": 1}, overwrite=True)
            assert shardkeep.latest(tmp_path) == str(tmp_path / some[-1])

    def test_a_recorded_step_comes_before_names_and_times(self, tmp_path: Path) -> None:
        for name, step in (("slot_1", 300), ("slot_0", 400), ("slot_2", 200), ("old", 100)):
            shardkeep.save(tmp_path / name, {"x": 1}, step=step)
        assert shardkeep.latest(tmp_path) == str(tmp_path / "slot_0")
        shardkeep.save_async(tmp_path / "export.safetensors", {"x": 1}, step=np.int64(500)).wait()
        assert shardkeep.latest(tmp_path) == str(tmp_path / "export.safetensors")
        shardkeep.save(tmp_path / "slot_2", {"x": 1}, step=jnp.int32(600), overwrite=True, format="zarr")
        assert shardkeep.latest(tmp_path) == str(tmp_path / "slot_2")

    def test_of_several_trees_the_highest_step_counts(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "a", {"x": 1}, prefix="model", step=10)
        shardkeep.save(tmp_path / "a", {"x": 1}, prefix="ema", step=7)
        shardkeep.save(tmp_path / "b", {"x": 1}, step=9)
        assert shardkeep.latest(tmp_path) == str(tmp_path / "a")

    def test_a_file_and_a_directory_with_numbers_for_names_are_one_family(self, tmp_path: Path) -> None:
        """One safetensors file does not make the directory of a run a model."""
        shardkeep.save(tmp_path / "run" / "2.safetensors", {"x": 1})
        assert shardkeep.latest(tmp_path / "run") == str(tmp_path / "run" / "2.safetensors")
        shardkeep.save(tmp_path / "run" / "1", {"x": 1})
        assert shardkeep.latest(tmp_path / "run") == str(tmp_path / "run" / "2.safetensors")
        shardkeep.save(tmp_path / "run" / "3", {"x": 1})
        assert shardkeep.latest(tmp_path / "run") == str(tmp_path / "run" / "3")
        shardkeep.save(tmp_path / "run" / "3.safetensors", {"x": 1})  # the same number, but later
        assert shardkeep.latest(tmp_path / "run") == str(tmp_path / "run" / "3.safetensors")

    def test_a_directory_as_hugging_face_writes_it_is_itself_the_newest(self, tmp_path: Path) -> None:
        safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
        (tmp_path / "onnx").mkdir()
        assert shardkeep.latest(tmp_path) == str(tmp_path)

    def test_a_checkpoint_inside_a_checkpoint_comes_before_it(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "run", {"w": np.ones(3)}, prefix="model", format="zarr")
        assert shardkeep.latest(tmp_path / "run") == str(tmp_path / "run")
        shardkeep.save(tmp_path / "run" / "model.safetensors", {"w": np.ones(3)})
        assert shardkeep.latest(tmp_path / "run") == str(tmp_path / "run" / "model.safetensors")

    def test_a_long_run_is_not_read_through(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Three manifests tell that the numbers are steps: the others could be anything."""
        for step in range(100):
            if step < 97:
                (tmp_path / f"step_{step}").mkdir()
                (tmp_path / f"step_{step}" / "manifest.json").write_text('{"shardkeep":')
            else:
                shardkeep.save(tmp_path / f"step_{step}", {"x": 1}, step=step)
        assert shardkeep.latest(tmp_path) == str(tmp_path / "step_99")
        assert "skipping" not in caplog.text

    @pytest.mark.parametrize("kind", FORMATS)
    def test_every_format_is_found_and_the_unfinished_are_passed_over(
        self, tmp_path: Path, spawner: Spawner, kind: str
    ) -> None:
        ending, arguments = FORMATS[kind]
        for step in (9, 10):
            save_as(kind, tmp_path / f"step_{step}", make("plain", 1))
        dead = tmp_path / f"step_11{ending}"
        assert spawner.run(
            "save", Fault(str(tmp_path), "kill", 14), path=str(dead), kind="plain", number=1, **arguments
        ).signal
        found = shardkeep.latest(tmp_path)
        assert found is not None
        assert found.startswith(str(tmp_path / "step_10"))
        assert same(shardkeep.load(found), make("plain", 1))

    def test_a_damaged_one_is_passed_over_and_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for step in (1, 2):
            shardkeep.save(tmp_path / f"step_{step}", {"x": 1})
        (tmp_path / "step_2" / "manifest.json").write_text("{")
        assert shardkeep.latest(tmp_path) == str(tmp_path / "step_1")
        assert caplog.text.count(f"skipping {tmp_path}/step_2: ") == 1

    def test_one_of_a_later_version_counts(self, tmp_path: Path) -> None:
        """Going back to an older one would lose steps without a word."""
        for step in (1, 2):
            shardkeep.save(tmp_path / f"step_{step}", {"x": 1})
        document = tmp_path / "step_2" / "manifest.json"
        document.write_text(document.read_text().replace('"shardkeep":2', '"shardkeep":9'))
        newest = shardkeep.latest(tmp_path)
        assert newest == str(tmp_path / "step_2")
        with pytest.raises(shardkeep.NewerFormatError, match="step_2"):
            shardkeep.load(newest)

    def test_other_programs_checkpoints_count(self, tmp_path: Path) -> None:
        for step in (500, 1000):
            (tmp_path / f"checkpoint-{step}").mkdir()
            safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert shardkeep.latest(tmp_path) == str(tmp_path / "checkpoint-1000")
        base = Path(__file__).parents[1] / "fixtures" / "eformer" / "checkpointer_runs" / "base"
        assert shardkeep.latest(base) == str(base / "run-25")

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_checkpoint_is_its_own_newest(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "run", make("plain", 1))
        assert shardkeep.latest(path) == str(path)

    def test_nothing_there_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "file.txt").write_text("x")
        for path in (tmp_path, tmp_path / "no", tmp_path / "no" / "deeper", tmp_path / "file.txt"):
            assert shardkeep.latest(path) is None


class TestHints:
    """A path that is no checkpoint: the error names the one that may have been meant."""

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_directory_of_checkpoints(self, tmp_path: Path, kind: str) -> None:
        for step in (9, 10):
            newest = save_as(kind, tmp_path / "run" / f"step_{step}", make("plain", 1))
        told = f"this is a directory of checkpoints; pass one of them, for example the newest, {newest}"
        said = f"no checkpoint at {tmp_path}/run: {told}"
        for action in (shardkeep.load, shardkeep.inspect, shardkeep.verify):
            with pytest.raises(shardkeep.CheckpointNotFoundError, match=f"^{re.escape(said)}$"):
                action(tmp_path / "run")
        assert not shardkeep.exists(tmp_path / "run")

    def test_a_directory_of_runs(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "exp1" / "step_3", {"x": 1})
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="There is a checkpoint below it: .*exp1/step_3$"):
            shardkeep.load(tmp_path)

    def test_a_name_that_is_not_there(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "step_100", {"x": 1})
        for name in ("step_10", "step_10.safetensors"):
            with pytest.raises(
                shardkeep.CheckpointNotFoundError, match=r"nothing there\. The newest checkpoint in .* is .*/step_100$"
            ):
                shardkeep.load(tmp_path / name)

    def test_what_a_dead_save_left_below_is_no_checkpoint(self, tmp_path: Path, spawner: Spawner) -> None:
        """Nor may its arrays be taken for those of another program, one level up."""
        ending, arguments = FORMATS["tensorstore"]
        path = tmp_path / "run" / f"step_1{ending}"
        for point in range(10, 60, 4):
            spawner.run(
                "save", Fault(str(tmp_path), "kill", point), path=str(path), kind="plain", number=1, **arguments
            )
            if list(path.rglob(".zarray")) and not shardkeep.exists(path):
                break
        assert list(path.rglob(".zarray"))
        assert not shardkeep.exists(path)
        assert not shardkeep.exists(tmp_path / "run")
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="something else$"):
            shardkeep.load(tmp_path / "run")
