"""The documented (eFormer) API on buckets: every call that takes a path takes a URL."""

import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import shardkeep
from buckets.fixtures import Place
from servers.gcs import GCSServer
from servers.service_account import EMAIL, claims, write_service_account
from shardkeep.serialization import (
    AsyncCheckpointManager,
    Checkpointer,
    CheckpointInterval,
    tree_deserialize_leaves,
    tree_serialize_leaves,
)
from shardkeep.serialization.checkpointer import find_latest_checkpoint, read_checkpoint_metadata
from shardkeep.serialization.sharding_utils import create_sharding_tree_from_index
from shardkeep.serialization.utils import is_gcs_path, parse_gcs_path
from support import Point, assert_same, mesh_of

MESH = mesh_of(8)


def tree(seed: int = 0) -> dict[str, Any]:
    values = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) + seed
    return {"layers": {"0": {"w": jax.device_put(values, NamedSharding(MESH, P("a")))}}, "b": jnp.ones(3) * seed}


@pytest.mark.parametrize("tensorstore", [True, False])
@pytest.mark.parametrize("name", ["run", "model.safetensors"])
def test_the_manager_saves_and_loads(tensorstore: bool, name: str, place: Place) -> None:
    path = f"{place.url}/{name}"
    told: list[str] = []
    with AsyncCheckpointManager(
        use_tensorstore=tensorstore, enable_validation=True, enable_compression=tensorstore
    ) as manager:
        assert not manager.is_tensorstore(path)
        assert not manager.safe_loadpath(path).exists()
        assert manager.save(tree(1), path, MESH, metadata={"step": 1}, callback=told.append) == path
        manager.save_async(tree(2), path, MESH, metadata={"step": 2}, callback=told.append)
        manager.wait_until_finished()
        assert told == [path, path]
        assert manager.is_tensorstore(path) is tensorstore
        assert manager.is_tensorstore(f"{path}/tensorstore_index.json") is tensorstore
        assert manager.safe_loadpath(path).exists()
        assert str(manager.safe_loadpath(f"{path}/tensorstore_index.json")) == path
        assert (manager.safe_loadpath(place.url) / name).exists()
        assert not (manager.safe_loadpath(place.url) / "other").exists()
        loaded, metadata = manager.load(path, MESH, partition_rules=[("w", P(None, "a")), (".*", P())], validate=True)
        assert_same(loaded, tree(2))
        assert loaded["layers"]["0"]["w"].sharding.spec == PartitionSpec(None, "a")
        assert metadata["custom_metadata"] == {"step": 2}
        loaded, _ = manager.load_tree_parallel(path, prefix_filter="layers")
        assert_same(loaded, {"layers": tree(2)["layers"]})
        shardings = create_sharding_tree_from_index(path, MESH, default_sharding=lambda _: NamedSharding(MESH, P()))
        assert_same(manager.load(path, MESH, shardings=shardings, use_async=False)[0], tree(2))


@pytest.mark.parametrize("tensorstore", [True, False])
def test_pytrees_keep_their_structure(tensorstore: bool, place: Place) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    path = f"{place.url}/run"
    saved = {"model": Point(jnp.arange(4), [jnp.ones(2), None, 3]), "opt": (jnp.zeros(5), {"count": 7})}
    for prefix, one in saved.items():
        assert manager.save_pytree(one, path, MESH, prefix=prefix, extras={"of": prefix}) == path
    for prefix, one in saved.items():
        loaded, extras = manager.load_pytree(path, None, prefix=prefix)
        assert_same(loaded, one)
        assert extras == {"of": prefix}
    assert all(
        name.startswith(("run/model/", "run/opt/", "run/.shardkeep/")) or name.endswith(".json")
        for name in place.names()
    )
    assert_same(manager.load_tree_parallel(path, prefix_filter="opt")[0], {"0": jnp.zeros(5), "1": {"count": 7}})


@pytest.mark.parametrize("kind", ["none", "ours", "jax"])
def test_leaves_are_serialized(kind: str, place: Place) -> None:
    ours = AsyncCheckpointManager()
    manager = {"none": None, "ours": ours, "jax": ours.global_manager}[kind]
    path = f"{place.url}/leaves"
    told: list[int] = []
    tree_serialize_leaves(path, tree(1), manager, prefix="model", commit_callback=lambda: told.append(1))
    tree_serialize_leaves(path, tree(2), manager, write_index=False)
    loaded = tree_deserialize_leaves(path, MESH, manager, prefix="model", chunk_size=1)
    assert_same(loaded, tree(1))
    assert told == [1]
    assert_same(tree_deserialize_leaves(f"{path}/", None, manager), tree(2))
    index = json.loads(place.get("leaves/tensorstore_index.json"))
    assert (list(index["prefixes"]), "arrays" in index) == (["model"], False)
    found = create_sharding_tree_from_index(path, MESH, prefix="model", default_sharding=P("a"))
    assert found["layers"]["0"]["w"] == NamedSharding(MESH, P("a"))
    with pytest.raises(FileNotFoundError, match="there is nothing there"):
        create_sharding_tree_from_index(f"{place.url}/other", MESH)


def test_relative_paths_lie_in_the_managers_bucket(gcs: Place, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(gcs_bucket="bucket")
    assert manager.save(tree(1), "runs/1", MESH) == "runs/1"
    assert "runs/1/manifest.json" in gcs.server.objects["bucket"]
    assert_same(manager.load("runs/1", MESH)[0], tree(1))
    assert_same(manager.load("gs://bucket/runs/1", MESH)[0], tree(1))
    manager.save(tree(2), str(tmp_path / "local"), MESH)
    assert shardkeep.exists(tmp_path / "local")
    manager.gcs_bucket = None
    with pytest.raises(FileNotFoundError, match="there is nothing there"):
        manager.load("runs/1", MESH)


class Named(GCSServer):
    """Notes who asks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: set[str] = set()

    def rights(self, authorization: str) -> str:
        said = claims(authorization.removeprefix("Bearer").strip(), self.accounts)
        self.asked.add(said["iss"] if said else authorization)
        return super().rights(authorization)


@pytest.fixture
def accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Named, Path, Path]]:
    """A server that knows two service accounts, and their key files."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    known = write_service_account(first, "http://127.0.0.1:9/token")
    other = json.loads(first.read_text()) | {"client_email": "other@shardkeep.iam.gserviceaccount.com"}
    second.write_text(json.dumps(other))
    with Named(accounts={**known, other["client_email"]: known[EMAIL]}) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server, first, second


def test_two_managers_have_a_key_file_each(accounts: tuple[Named, Path, Path]) -> None:
    server, first, second = accounts
    before = dict(os.environ)
    for number, (path, form) in enumerate([("run", True), ("run2", False), ("model.safetensors", False)]):
        one = AsyncCheckpointManager(gcs_bucket="bucket", gcs_credentials_path=str(first), use_tensorstore=form)
        two = AsyncCheckpointManager(gcs_credentials_path=str(second), use_tensorstore=form)
        one.save(tree(number), path, MESH)
        one.save_async(tree(number), path, MESH).wait()
        one.load(path, MESH)
        one.load_tree_parallel(path, prefix_filter="layers")
        assert server.asked == {EMAIL}
        server.asked.clear()
        assert_same(two.load(f"gs://bucket/{path}", MESH)[0], tree(number))
        assert server.asked == {"other@shardkeep.iam.gserviceaccount.com"}
        server.asked.clear()
    assert dict(os.environ) == before


def test_without_a_key_file_the_manager_is_refused(accounts: tuple[Named, Path, Path]) -> None:
    manager = AsyncCheckpointManager(gcs_bucket="bucket")
    with pytest.raises(PermissionError, match=r"access denied by http.*GOOGLE_APPLICATION_CREDENTIALS"):
        manager.save(tree(), "run", MESH)


@pytest.mark.parametrize("name", ["GOOGLE_SERVICE_ACCOUNT", "GOOGLE_BEARER_TOKEN"])
def test_a_variable_that_would_win_over_the_key_file_is_refused(
    name: str, accounts: tuple[Named, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, first, second = accounts
    monkeypatch.setenv(name, str(second))
    manager = AsyncCheckpointManager(gcs_bucket="bucket", gcs_credentials_path=str(first))
    with pytest.raises(PermissionError, match=f"{name} is set and would override .*first.json"):
        manager.save(tree(), "run", MESH)
    assert server.requests == []


def test_names_of_google_paths() -> None:
    class Shown:
        def __str__(self) -> str:
            return "gs://bucket/a"

    assert [is_gcs_path(path) for path in ("gs://bucket/a", Shown(), "s3://bucket/a", "/gs/a", Path("/a"))] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert parse_gcs_path(Shown()) == ("bucket", "a")
    with pytest.raises(ValueError, match="not a Google Cloud Storage path"):
        parse_gcs_path("s3://bucket/a")


def test_a_checkpointer_saves_finds_and_removes(place: Place) -> None:
    """Runs of eFormer's, temporary ones, and what other programs put beside them."""
    now = [datetime.datetime(2026, 1, 1)]
    base = f"{place.url}/base"
    assert find_latest_checkpoint(base) is None
    place.put("base/run-0/metadata.json", b'{"step": 0, "timestamp": "2025-01-01T00:00:00", "is_temporary": true}')
    place.put("base/run-0/model/tokenizer.json", b"{}")
    checkpointer = Checkpointer(
        base, datetime.timedelta(minutes=1), [CheckpointInterval(3)], dt_now_injection=lambda: now[0]
    )
    seen: list[list[str]] = []
    for step in range(1, 5):
        now[0] += datetime.timedelta(minutes=1)
        checkpointer.on_step(MESH, tree(step), step=step)
        checkpointer.wait_until_finished()
        seen.append(sorted({name.split("/")[1] for name in place.names()}))
        assert find_latest_checkpoint(base) == f"{base}/run-{step}"
    assert seen == [["run-1"], ["run-2"], ["run-3"], ["run-3", "run-4"]]
    assert json.loads(place.get("base/run-4/metadata.json"))["is_temporary"] is True
    loaded, metadata = checkpointer.load_checkpoint(MESH)
    assert_same(loaded, tree(4))
    assert (metadata["step"], read_checkpoint_metadata(f"{base}/run-3")["step"]) == (4, 3)
    path = checkpointer.save_pytree(tree(9), "model", step=9)
    assert path == f"{base}/run-9"
    assert_same(checkpointer.load_pytree(MESH, prefix="model", discover_latest=True)[0], tree(9))
    checkpointer._queue_checkpoint_removal(path)
    checkpointer.wait_until_finished()
    assert not place.names("base/run-9")
