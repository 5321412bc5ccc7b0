"""Orbax's and JAX's checkpoints load from a bucket as they do from a disk, and are complete only with Orbax's mark."""

from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkeep
from buckets.fixtures import Place
from support import assert_same, mesh_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHECKPOINTS = {
    "std_default": "orbax/std_default/ckpt",
    "v1_save": "orbax/v1_save/ckpt",
    "sharded8_default": "orbax/sharded8_default/ckpt",
    "no_ocdbt_zarr2": "orbax/no_ocdbt_zarr2/ckpt",
    "no_ocdbt_zarr3": "orbax/no_ocdbt_zarr3/ckpt",
    "10": "orbax/manager_root/ckpt/10",
    "ckpt_000001": "orbax/manager_composite/ckpt/ckpt_000001",
    "pytree": "jax/pytree",
}


@pytest.mark.filterwarnings("ignore:.*jax_enable_x64")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_loads_as_from_a_disk(name: str, place: Place) -> None:
    local = FIXTURES / CHECKPOINTS[name]
    place.upload(local, name)
    remote = f"{place.url}/{name}"
    expected = shardkeep.inspect(local)
    found = shardkeep.inspect(remote)
    assert (found.source, list(found.trees)) == (expected.source, list(expected.trees))
    for prefix in expected.trees:
        assert_same(shardkeep.load(remote, prefix=prefix), shardkeep.load(local, prefix=prefix))
    report = shardkeep.verify(remote)
    assert (report.ok, report.unchecked) == (True, shardkeep.verify(local).unchecked)
    assert shardkeep.exists(remote)


def test_each_device_gets_its_own_region(place: Place) -> None:
    place.upload(FIXTURES / CHECKPOINTS["sharded8_default"], "made")
    sharding = NamedSharding(mesh_of(2, 4), P("b", "a"))
    local = shardkeep.load(FIXTURES / CHECKPOINTS["sharded8_default"], include="grid")["grid"]
    found = shardkeep.load(f"{place.url}/made", include="grid", shardings=sharding)["grid"]
    assert found.sharding == sharding
    assert_same(jax.device_get(found), jax.device_get(local))


def test_one_without_its_mark_is_unfinished(place: Place) -> None:
    """In a bucket nothing is renamed: Orbax writes `commit_success.txt` last."""
    for step in ("10", "20"):
        place.upload(FIXTURES / "orbax" / "manager_root" / "ckpt" / step, step)
    assert shardkeep.latest(place.url) == f"{place.url}/20"
    place.client.delete("20/commit_success.txt")
    with pytest.raises(shardkeep.errors.IncompleteCheckpointError, match="an unfinished Orbax checkpoint: in a bucket"):
        shardkeep.load(f"{place.url}/20")
    assert not shardkeep.exists(f"{place.url}/20")
    assert shardkeep.latest(place.url) == f"{place.url}/10"


def test_the_steps_of_a_manager_are_those_of_a_run(place: Place) -> None:
    place.upload(FIXTURES / "orbax" / "manager_root" / "ckpt")
    run = shardkeep.Run(place.url, name="{}")
    assert [(step.number, step.source) for step in run.steps()] == [(n, "orbax") for n in (0, 10, 20)]
    assert run.latest().metrics["loss"] == pytest.approx(1 / 21)
