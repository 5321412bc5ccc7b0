"""The manager's own part: which saves it still answers for, and how its arguments become one request."""

import logging
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from shardkeep.eformer.loader import as_dict, checked_chunk_size, refuse_unsaid_layout
from shardkeep.eformer.manager import AsyncCheckpointManager
from shardkeep.model.tree import flatten
from support import Point, assert_same, mesh_of

P = PartitionSpec
MESH = mesh_of(8)
STATE = {"w": jnp.ones(2)}


@pytest.fixture
def manager() -> AsyncCheckpointManager:
    return AsyncCheckpointManager()


@pytest.fixture
def blocked(tmp_path: Path) -> list[Path]:
    """Paths that no save can go to: each is below a file."""
    for i in range(3):
        (tmp_path / f"file{i}").write_text("")
    return [tmp_path / f"file{i}" / "run" for i in range(3)]


class TestPending:
    def test_of_several_failures_the_first_is_raised_and_each_was_logged(
        self, manager: AsyncCheckpointManager, blocked: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for path in (blocked[1], tmp_path / "good", blocked[0], blocked[2]):
            manager.save_async(STATE, path, MESH)
        with pytest.raises(NotADirectoryError, match="file1"):
            manager.wait_until_finished()
        for path in blocked:
            assert f"the save to {path} failed" in caplog.text
        assert_same(shardkeep.load(tmp_path / "good"), STATE)
        manager.wait_until_finished()  # told once

    def test_a_failure_is_remembered_through_later_saves_that_go_well(
        self, manager: AsyncCheckpointManager, blocked: list[Path], tmp_path: Path
    ) -> None:
        manager.save_async(STATE, blocked[0], MESH)
        for number in range(3):
            manager.save_async(STATE, tmp_path / str(number), MESH).wait()
        with pytest.raises(NotADirectoryError, match="file0"):
            manager.check_for_errors()

    def test_a_save_that_went_well_is_not_kept(self, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        """A training run makes thousands."""
        for number in range(4):
            manager.save_async(STATE, tmp_path / str(number), MESH).wait()
        assert [save.path for save in manager._pending] == [str(tmp_path / "3")]

    def test_an_error_inside_with_is_raised_after_pending_saves_have_ended(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError, match="division"), AsyncCheckpointManager() as manager:  # noqa: PT012
            pending = manager.save_async(STATE, tmp_path / "run", MESH)
            _ = 1 // 0
        assert pending.done()
        assert_same(shardkeep.load(tmp_path / "run"), STATE)

    def test_an_error_inside_with_is_not_hidden_by_one_of_a_save(
        self, blocked: list[Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Why the training stopped is told nowhere else; that a save failed is logged."""
        with pytest.raises(ZeroDivisionError, match="division"), AsyncCheckpointManager() as manager:  # noqa: PT012
            manager.save_async(STATE, blocked[0], MESH)
            _ = 1 // 0
        assert any("a pending save failed too" in message and "file0" in message for message in caplog.messages)

    def test_a_save_that_failed_is_raised_at_the_end_of_with(self, blocked: list[Path]) -> None:
        with pytest.raises(NotADirectoryError, match="file0"), AsyncCheckpointManager() as manager:
            manager.save_async(STATE, blocked[0], MESH)

    def test_saves_from_many_threads_are_all_waited_for(self, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        def save(number: int) -> None:
            manager.save_async({"n": number}, tmp_path / str(number), MESH)

        threads = [threading.Thread(target=save, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        manager.close()
        assert [shardkeep.load(tmp_path / str(number))["n"] for number in range(6)] == list(range(6))

    def test_a_verbose_manager_tells_of_each_save_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        manager = AsyncCheckpointManager(verbose=True)
        for number in range(4):
            manager.save_async(STATE, tmp_path / str(number), MESH).wait()
        manager.wait_until_finished()
        told = [message for message in caplog.messages if message.startswith("saved ")]
        assert [message.split(":")[0].split("/")[-1] for message in told] == ["0", "1", "2", "3"]

    def test_metadata_may_be_changed_after_the_call(self, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        opened = threading.Event()
        first = manager.save_async(STATE, tmp_path, MESH, prefix="a", callback=lambda _: opened.wait(60))
        metadata: dict[str, Any] = {"log": [1]}
        manager.save_async(STATE, tmp_path, MESH, prefix="b", metadata=metadata)
        metadata["log"].append(2)
        opened.set()
        manager.close()
        assert first.done()
        assert manager.load(tmp_path, None, prefix="b")[1]["custom_metadata"] == {"log": [1]}


class TestRequests:
    def test_a_save_leaves_the_callers_tree_alone(self, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        host = np.arange(3, dtype=np.float32)
        tree = {"h": host, "j": jax.device_put(jnp.arange(8.0), NamedSharding(MESH, P("a"))), "p": Point(1, [2])}
        arrays = {"h": host, "j": tree["j"]}
        manager.save(tree, tmp_path, MESH, float_dtype="bf16", do_all_gather=True, cpu_offload=True)
        assert {key: tree[key] for key in arrays} == arrays
        assert_same(host, np.arange(3, dtype=np.float32))
        assert tree["j"].sharding == NamedSharding(MESH, P("a"))
        assert manager.load(tmp_path, None)[0]["h"].dtype == jnp.bfloat16

    def test_prefix_goes_before_prefix_filter(self, manager: AsyncCheckpointManager, tmp_path: Path) -> None:
        for prefix in "ab":
            manager.save({"of": prefix}, tmp_path, MESH, prefix=prefix)
        with pytest.warns(DeprecationWarning, match="prefix_filter is deprecated; use prefix"):
            tree, _ = manager.load(tmp_path, None, prefix="a", prefix_filter="b")
        assert tree == {"of": "a"}

    @pytest.mark.parametrize(
        ("name", "keys"),
        [("a.b", ["a/b"]), ("a+", ["a+"]), ("a", ["a/b", "a/bc"]), ("a/b/", ["a/b"]), ("/a.b.", ["a/b"])],
    )
    def test_the_filter_of_a_parallel_load_is_a_name_and_no_pattern(
        self, name: str, keys: list[str], manager: AsyncCheckpointManager, tmp_path: Path
    ) -> None:
        manager.save({"a": {"b": 1, "bc": 2}, "a+": 3, "aa": 4, "x": {"a": 5}}, tmp_path, MESH)
        tree, _ = manager.load_tree_parallel(tmp_path, prefix_filter=name)
        assert [leaf.key for leaf in flatten(tree)[1]] == keys

    @pytest.mark.parametrize("size", [0, -1])
    def test_a_chunk_size_is_at_least_one(self, size: int) -> None:
        assert (checked_chunk_size(None), checked_chunk_size(1)) == (None, 1)
        with pytest.raises(ValueError, match=f"chunk_size must be at least 1, not {size}"):
            checked_chunk_size(size)

    def test_a_mesh_of_several_axes_needs_a_layout(self) -> None:
        grid = mesh_of(2, 4)
        for mesh, rules, shardings in (
            (None, None, None),
            (MESH, None, None),
            (grid, [("x", P())], None),
            (grid, [], {}),
        ):
            refuse_unsaid_layout(mesh, rules, shardings)
        for rules in (None, []):
            with pytest.raises(shardkeep.ShardingError, match=r"the axes a, b: pass partition_rules= or shardings="):
                refuse_unsaid_layout(grid, rules, None)

    def test_a_tree_as_dicts_has_names_for_places(self) -> None:
        skeleton, leaves = flatten({"p": Point(1, [2, None]), 3: (4,), "a.b": 5})
        found = as_dict(skeleton, [leaf.value for leaf in leaves])
        assert found == {"p": {"x": 1, "y": {"0": 2}}, "3": {"0": 4}, "a": {"b": 5}}
        assert as_dict(*_parts(7)) == {"": 7}
        assert as_dict(*_parts([])) == {}


def _parts(tree: Any) -> Any:
    skeleton, leaves = flatten(tree)
    return skeleton, [leaf.value for leaf in leaves]


def test_a_path_to_load_from_is_a_value() -> None:
    safe = AsyncCheckpointManager.safe_loadpath
    assert safe("/run/tensorstore_index.json") == safe(Path("/run")) != safe("/other")
    assert len({safe("/run"), safe("/run/tensorstore_index.json")}) == 1
    assert safe("/run") != "/run"
    assert repr(safe("gs://b/run")) == "LoadPath('gs://b/run')"
    assert str(safe("/run/") / "/x") == "/run/x"


def test_a_manager_that_is_off_says_so_and_its_handle_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = AsyncCheckpointManager(enable=False)
    with caplog.at_level(logging.WARNING, "shardkeep"):
        pending = manager.save_async({"not": object()}, tmp_path / "run", MESH)
    assert (pending.done(), pending.path, pending.wait().files) == (True, str(tmp_path / "run"), 0)
    assert f"nothing was written to {tmp_path / 'run'}" in caplog.text
    manager.close()
    assert not (tmp_path / "run").exists()
