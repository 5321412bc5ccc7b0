"""From a path to a checkpoint: what counts as one, what moves with it, and how it goes away."""

import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep
from faults.spawner import Fault, Spawner
from faults.states import make, same
from faults.sweep import left_overs
from support import FORMATS, assert_same, save_as

EXAMPLES = int(os.environ.get("SHARDKEEP_EXAMPLES", "150"))


@pytest.fixture(scope="module")
def spawner() -> Iterator[Spawner]:
    with Spawner() as spawner:
        yield spawner


@pytest.mark.parametrize("kind", FORMATS)
class TestCopies:
    """A checkpoint is its files: wherever they go, it goes."""

    def test_it_can_be_moved(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "old" / "run", make("plain", 1))
        (tmp_path / "old").rename(tmp_path / "new")
        moved = tmp_path / "new" / path.name
        assert same(shardkeep.load(moved), make("plain", 1))
        assert shardkeep.verify(moved).ok
        shardkeep.save(moved, make("plain", 2), overwrite=True, **FORMATS[kind][1])
        assert same(shardkeep.load(moved), make("plain", 2))

    def test_it_can_be_copied_and_each_copy_goes_its_own_way(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "old" / "run", make("plain", 1))
        subprocess.run(["cp", "-r", str(tmp_path / "old"), str(tmp_path / "new")], check=True)
        copied = tmp_path / "new" / path.name
        shardkeep.save(path, make("plain", 2), overwrite=True, **FORMATS[kind][1])
        assert same(shardkeep.load(copied), make("plain", 1))
        shardkeep.delete(copied)
        assert same(shardkeep.load(path), make("plain", 2))

    def test_it_survives_a_tar_round_trip(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "old" / "run", make("plain", 1))
        subprocess.run(["tar", "-C", str(tmp_path / "old"), "-cf", str(tmp_path / "x.tar"), "."], check=True)
        shutil.rmtree(tmp_path / "old")
        (tmp_path / "new").mkdir()
        subprocess.run(["tar", "-C", str(tmp_path / "new"), "-xf", str(tmp_path / "x.tar")], check=True)
        assert same(shardkeep.load(tmp_path / "new" / path.name), make("plain", 1))
        assert shardkeep.verify(tmp_path / "new" / path.name).ok

    def test_it_needs_no_control_directory_to_be_loaded_or_overwritten(self, tmp_path: Path, kind: str) -> None:
        """Copies by tools that leave out dot files are whole all the same."""
        path = save_as(kind, tmp_path / "run", make("plain", 1))
        shutil.rmtree(tmp_path / "run" / ".shardkeep", ignore_errors=True)
        assert same(shardkeep.load(path), make("plain", 1))
        shardkeep.save(path, make("plain", 2), overwrite=True, **FORMATS[kind][1])
        assert same(shardkeep.load(path), make("plain", 2))
        assert left_overs(path) == set()

    def test_it_can_be_reached_through_a_link(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "real" / "run", make("plain", 1))
        (tmp_path / "link").symlink_to(tmp_path / "real")
        linked = tmp_path / "link" / path.name
        assert same(shardkeep.load(linked), make("plain", 1))
        shardkeep.save(linked, make("plain", 2), overwrite=True, **FORMATS[kind][1])
        assert same(shardkeep.load(path), make("plain", 2))

    def test_a_copy_without_its_manifest_is_no_checkpoint(self, tmp_path: Path, kind: str) -> None:
        """Data of ours whose document is gone is refused, never read as another program's."""
        path = save_as(kind, tmp_path / "run", make("plain", 1))
        document = {"shards": path.with_name(path.name + ".index.json"), "exchange": path}.get(
            kind, path / "manifest.json"
        )
        document.unlink()
        with pytest.raises(
            (shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError), match=str(tmp_path)
        ):
            shardkeep.load(path)
        assert not shardkeep.exists(path)
        if path.is_dir():
            shutil.rmtree(path / ".shardkeep")
            with pytest.raises(
                (shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError), match=str(tmp_path)
            ):
                shardkeep.load(path)


@pytest.mark.parametrize("kind", FORMATS)
class TestDelete:
    def test_it_removes_everything_of_ours(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "room" / "run", make("plain", 1))
        for number in range(2, 4):
            shardkeep.save(path, make("plain", number), overwrite=True, **FORMATS[kind][1])
        shardkeep.delete(path)
        assert not shardkeep.exists(path)
        assert [p for p in (tmp_path / "room").rglob("*") if p.is_file()] == []
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint"):
            shardkeep.load(path)
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint"):
            shardkeep.delete(path)

    def test_a_new_save_takes_its_place(self, tmp_path: Path, kind: str) -> None:
        for number in range(3):
            path = save_as(kind, tmp_path / "run", make("plain", number))
            assert same(shardkeep.load(path), make("plain", number))
            shardkeep.delete(path)

    def test_other_files_stay(self, tmp_path: Path, kind: str) -> None:
        path = save_as(kind, tmp_path / "run", make("plain", 1))
        room = path if path.is_dir() else tmp_path
        (room / "notes.txt").write_text("mine")
        (room / "other.safetensors").write_bytes(b"mine")
        shardkeep.delete(path)
        assert sorted(p.name for p in room.iterdir()) == ["notes.txt", "other.safetensors"]


def test_delete_removes_every_prefix(tmp_path: Path) -> None:
    for prefix in ("a", "b", None):
        shardkeep.save(tmp_path / "run", make("plain", 1), prefix=prefix, format="zarr")
    shardkeep.delete(tmp_path / "run")
    assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") == []


def test_delete_while_others_save_and_load_never_shows_half(tmp_path: Path, spawner: Spawner) -> None:
    """Saves, deletes and loads in three processes: each gives a state, or says that nothing is there."""
    path = str(tmp_path / "run")
    saving = spawner.start("save_whatever", path=path, kind="plain", count=25)
    deleting = spawner.start("delete_whatever", path=path, count=25)
    loading = spawner.start("load_whatever", path=path, kind="plain", count=60)
    for child in (saving, deleting, loading):
        outcome = child.wait()
        assert outcome.ok, outcome
    shardkeep.save(path, make("plain", 5), overwrite=True)
    assert same(shardkeep.load(path), make("plain", 5))
    assert left_overs(Path(path)) == set()


def test_delete_leaves_another_programs_files_alone(tmp_path: Path) -> None:
    """A folder of someone else's model is not ours to remove."""
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(shardkeep.ShardkeepError, match=str(tmp_path)):
        shardkeep.delete(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_exists_means_committed(tmp_path: Path, spawner: Spawner, kind: str) -> None:
    ending, arguments = FORMATS[kind]
    path = tmp_path / ("run" + ending)
    assert not shardkeep.exists(path)
    assert spawner.run(
        "save", Fault(str(tmp_path), "kill", 12), path=str(path), kind="plain", number=1, **arguments
    ).signal
    assert not shardkeep.exists(path)
    shardkeep.save(path, make("plain", 1), **arguments)
    assert shardkeep.exists(path)


def test_a_save_that_never_finished_is_called_incomplete(tmp_path: Path, spawner: Spawner) -> None:
    for name, arguments in (("run", {}), ("zarr", {"format": "zarr"}), ("m.safetensors", {})):
        path = tmp_path / name
        assert spawner.run(
            "save", Fault(str(tmp_path), "kill", 14), path=str(path), kind="plain", number=1, **arguments
        ).signal
        for action in (shardkeep.load, shardkeep.inspect):
            with pytest.raises(shardkeep.IncompleteCheckpointError, match="never finished"):
                action(path)
        shardkeep.delete(path)
    assert not os.listdir(tmp_path)


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
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="it is not a safetensors file"):
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
        document.write_text(document.read_text().replace('"shardkeep":1', '"shardkeep":9'))
        newest = shardkeep.latest(tmp_path)
        assert newest == str(tmp_path / "step_2")
        with pytest.raises(shardkeep.NewerFormatError, match="step_2"):
            shardkeep.load(newest)

    def test_other_programs_checkpoints_count(self, tmp_path: Path) -> None:
        for step in (500, 1000):
            (tmp_path / f"checkpoint-{step}").mkdir()
            safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert shardkeep.latest(tmp_path) == str(tmp_path / "checkpoint-1000")
        base = Path(__file__).parent / "fixtures" / "eformer" / "checkpointer_runs" / "base"
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


NASTY: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**53, 2**63, 10**30, 0.5, "", "F32", "F4", "F6_E2M3", "I64", "BOOL", "x", [], {},
    [0], [0, 0], [-1, 4], [4, 0], [0, 2**62], [2**40] * 3, [1.5, 2], ["a"], [0] * 70, {"a": 1}, [[]],
]  # fmt: skip


def _write_safetensors(path: Path, header: Any, data: bytes = b"\0" * 64, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_changed_safetensors_header_gives_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "dtypes": "{}"},
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b.c": {"dtype": "U8", "shape": [32], "data_offsets": [32, 64]},
    }
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(list(header)))
        value = data.draw(st.sampled_from(NASTY))
        if isinstance(header[name], dict) and header[name] and data.draw(st.booleans()):
            header[name][data.draw(st.sampled_from([*header[name], "shardkeep", "digest", "save", "dtypes"]))] = value
        elif data.draw(st.booleans()):
            header[data.draw(st.sampled_from(["", "a.", "b", "\0", "__metadata__", "x/../y", "a"]))] = header[name]
        else:
            header[name] = value
    _write_safetensors(path, header, length=data.draw(st.sampled_from([None, None, None, 0, 7, 2**63, 2**40])))
    for action in (shardkeep.load, shardkeep.inspect, shardkeep.verify, shardkeep.exists):
        try:
            action(path)
        except shardkeep.ShardkeepError:
            pass


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"a":1}',
        b'{"a":{}}',
        b'{"a":{"dtype":"F32"}}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"__metadata__":5}',
    ],
)
def test_a_broken_safetensors_header_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    _write_safetensors(path, header)
    with pytest.raises(shardkeep.IntegrityError, match=r"x\.safetensors"):
        shardkeep.load(path)
    assert not shardkeep.verify(path).ok
    assert not shardkeep.exists(path)


@pytest.mark.parametrize(
    "dtypes",
    [
        '{"a": "object"}',
        '{"a": "float64"}',
        '{"a": 5}',
        "[]",
        "{",
        '{"a": "datetime64[9999999999999999999s]"}',
        "[" * 99_999,
    ],
)
def test_a_note_of_a_dtype_that_does_not_fit_is_an_error_or_ignored(tmp_path: Path, dtypes: str) -> None:
    path = tmp_path / "x.safetensors"
    header = {"__metadata__": {"dtypes": dtypes}, "a": {"dtype": "U8", "shape": [4, 16], "data_offsets": [0, 64]}}
    _write_safetensors(path, header)
    try:
        loaded = shardkeep.load(path)
    except shardkeep.ShardkeepError as error:
        assert "x.safetensors" in str(error)  # noqa: PT017  (either is right)
    else:
        assert np.asarray(loaded["a"]).nbytes == 64


INDEXES: list[Any] = [
    b"", b"{}", b"[]", b"null", b"[" * 100_000, {"weight_map": 5}, {"weight_map": {"a": 5}},
    {"weight_map": {"a": "../x.safetensors"}}, {"weight_map": {"a": "/etc/passwd"}},
    {"weight_map": {"a": "gone.safetensors"}}, {"weight_map": {"a": "m.safetensors.index.json"}},
    {"weight_map": {"a": ""}}, {"weight_map": {"a": None}}, {"metadata": 5, "weight_map": {"a": "s.safetensors"}},
    {"metadata": {"shardkeep": 5}, "weight_map": {}}, {"metadata": {"shardkeep": "{}"}, "weight_map": {}},
    {"weight_map": {"a": "."}},
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=lambda index: str(index)[:60])
def test_a_hostile_index_gives_only_our_errors(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    for name in (path, tmp_path / "m.safetensors", tmp_path):
        with pytest.raises(shardkeep.ShardkeepError, match=str(tmp_path)):
            shardkeep.load(name)
        assert not shardkeep.exists(name)


def test_a_foreign_file_of_every_plain_dtype_loads(tmp_path: Path) -> None:
    tensors = {name: np.ones((2, 3), name) for name in ("float32", "int8", "uint16", "bool", "float16")}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", metadata={"who": "someone else"})
    loaded = shardkeep.load(tmp_path / "x.safetensors")
    assert {name: jnp.asarray(array).dtype.name for name, array in loaded.items()} == {name: name for name in tensors}
    assert shardkeep.verify(tmp_path / "x.safetensors").unchecked == 5


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "model.safetensors.index.json",
            '"weight_map": {',
            '"weight_map": {"a": "x.safetensors", "a": "y.safetensors", ',
        ),
        ("tensorstore_index.json", '"format"', '"arrays": [], "arrays": [], "format"'),
        ("w/.zarray", '"shape"', '"shape":[1],"shape"'),
    ],
)
def test_a_name_that_appears_twice_is_refused_in_another_programs_files(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    """It means one thing to one reader and another to the next."""
    fixtures = Path(__file__).parent / "fixtures" / "eformer"
    source = fixtures / ("safetensors_sharded" if name.startswith("model") else "ts_plain/ckpt")
    shutil.copytree(source, tmp_path / "run")
    shardkeep.load(tmp_path / "run")
    document = tmp_path / "run" / name
    text = document.read_text()
    assert old in text
    document.write_text(text.replace(old, new, 1))
    with pytest.raises(shardkeep.IntegrityError, match="an object has a repeated key"):
        shardkeep.load(tmp_path / "run")


def test_a_delete_that_failed_can_be_repeated(tmp_path: Path) -> None:
    """The record of the first one is not taken for a running save."""
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)})
    (data,) = (tmp_path / "run").glob("*.safetensors")
    data.unlink()
    (data / "in the way").mkdir(parents=True)
    with pytest.raises(shardkeep.StorageError, match="no longer a checkpoint, but some of its files remain"):
        shardkeep.delete(tmp_path / "run")
    (data / "in the way").rmdir()
    data.rmdir()
    shardkeep.delete(tmp_path / "run")
    assert not (tmp_path / "run").exists()
