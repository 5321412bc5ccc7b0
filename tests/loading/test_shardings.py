"""Which sharding each leaf gets, and what is said about arrays that a mesh cannot shard as they were."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep
from shardkeep.errors import ShardingError
from shardkeep.loading.shardings import ShapedLeaf, resolve_shardings
from shardkeep.model.leaves import SavedSharding
from support import mesh_of

P = PartitionSpec
MESH = mesh_of(2, 4)


def mesh(*sizes: int, names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


def specs(leaves: list[ShapedLeaf], **asked: Any) -> list[Any]:
    return [place.sharding and place.sharding.spec for place in resolve_shardings(leaves, **asked)]  # type: ignore[attr-defined]


class TestKeys:
    LEAVES = (ShapedLeaf(("layers", "0", "w"), (8, 8)), ShapedLeaf(("a.b",), (8,)), ShapedLeaf(("x/y", "z"), (8,)))

    @pytest.mark.parametrize(
        "shardings",
        [
            {"layers/0/w": P("a"), "a.b": P("b"), "x/y/z": P()},
            {"layers.0.w": P("a"), "a/b": P("b"), "x.y.z": P()},
            {"layers/0": P("a"), "a": {"b": P("b")}, r"x\/y/z": P()},
            {"layers": [P("a")], r"a\.b": P("b"), "x": P()},
        ],
    )
    def test_dicts_of_shardings_understand_slashes_and_dots(self, shardings: Any) -> None:
        assert specs(list(self.LEAVES), mesh=MESH, shardings=shardings) == [P("a"), P("b"), P()]

    def test_the_longer_key_wins_however_it_is_spelled(self) -> None:
        asked = {"layers": P("b"), "layers/0/w": P("a"), "layers.0": P()}
        assert specs([self.LEAVES[0]], mesh=MESH, shardings=asked) == [P("a")]

    def test_of_two_spellings_the_one_of_the_leaf_wins(self) -> None:
        leaves = [ShapedLeaf(("a.b",), (8,)), ShapedLeaf(("a", "b"), (8,))]
        assert specs(leaves, mesh=MESH, shardings={"a.b": P("a"), "a": {"b": P("b")}}) == [P("a"), P("b")]

    def test_two_entries_for_one_leaf_that_differ_are_an_error(self) -> None:
        leaf = ShapedLeaf(("a", "b"), (8,))
        with pytest.raises(ShardingError, match=r"several entries for the leaf 'a/b': 'a\.b' and 'a\\\\/b'"):
            specs([leaf], mesh=MESH, shardings={"a.b": P("a"), "a/b": P("b")})
        assert specs([leaf], mesh=MESH, shardings={"a.b": P("a"), "a/b": P("a")}) == [P("a")]

    def test_messages_show_keys_with_slashes(self, caplog: pytest.LogCaptureFixture) -> None:
        leaf = ShapedLeaf(("layers", "0", "w"), (6,))
        with pytest.raises(ShardingError, match=r"leaf 'layers/0/w' of shape \(6,\)"):
            specs([leaf], mesh=MESH, shardings={"layers.0.w": P("b")})
        specs([leaf], mesh=MESH, shardings={"layers": {"9": P()}})
        assert "'layers/9' match no array" in caplog.text


class TestReplication:
    """A mesh without rules: arrays that were sharded and now are not are named in one warning."""

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        tree = {
            "rows": jax.device_put(jnp.zeros((16, 16)), NamedSharding(MESH, P("a"))),
            "both": jax.device_put(jnp.zeros((16, 12)), NamedSharding(MESH, P("a", "b"))),
            "alone": jnp.zeros((16, 16)),
            "host": np.zeros(4, np.float32),
        }
        shardkeep.save(tmp_path / "c", tree)
        return tmp_path / "c"

    def warnings(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    def test_other_axes_are_one_warning_with_count_bytes_keys_and_the_way_out(
        self, saved: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        loaded = shardkeep.load(saved, mesh=mesh(8, names=("data",)))
        assert loaded["rows"].sharding.is_fully_replicated
        (message,) = self.warnings(caplog)
        assert message == (
            "2 arrays that were sharded when saved are replicated on the mesh {'data': 8}, completely or along some "
            "dimensions, and take 1,792 bytes on each device: 'rows', 'both'. The reason is that the mesh does not "
            "have the axes 'a', 'b'. Pass partition_rules= or shardings= to shard them"
        )

    def test_where_some_axes_are_missing_the_others_are_used_and_the_rest_is_told(
        self, saved: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        loaded = shardkeep.load(saved, mesh=mesh(4, names=("a",)))
        assert loaded["both"].sharding.spec == P("a", None)
        (message,) = self.warnings(caplog)
        assert message.startswith("1 array that was sharded when saved is replicated on the mesh {'a': 4}")
        assert "takes 192 bytes on each device: 'both'" in message
        assert "does not have the axis 'b'" in message

    def test_sizes_that_do_not_divide_are_told(self, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
        loaded = shardkeep.load(saved, mesh=mesh(1, 8, names=("a", "b")))
        assert loaded["both"].sharding.is_fully_replicated
        (message,) = self.warnings(caplog)
        assert "axes of the mesh do not divide the dimensions" in message
        assert "does not have" not in message

    @pytest.mark.parametrize(
        "asked",
        [
            {"mesh": MESH},
            {"mesh": mesh(4, 2, names=("b", "a"))},
            {"mesh": mesh(1, names=("data",))},
            {"mesh": mesh(2, 1, names=("a", "b"))},
            {"mesh": mesh(8, names=("data",)), "partition_rules": [(".*", P())]},
            {"mesh": mesh(8, names=("data",)), "shardings": P()},
            {},
        ],
        ids=["same", "other sizes", "one device", "an axis of one", "rules", "shardings", "no mesh"],
    )
    def test_nothing_is_said_where_the_layout_is_kept_or_asked_for(
        self, saved: Path, asked: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        shardkeep.load(saved, **asked)
        assert self.warnings(caplog) == []

    def test_an_axis_of_size_one_was_no_sharding(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        one = mesh(2, 1, names=("a", "b"))
        shardkeep.save(tmp_path / "c", {"w": jax.device_put(jnp.zeros((8, 8)), NamedSharding(one, P("a", "b")))})
        shardkeep.load(tmp_path / "c", mesh=mesh(2, names=("a",)))
        assert self.warnings(caplog) == []

    def test_with_a_template_that_places_nothing(self, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
        template = {"rows": jax.ShapeDtypeStruct((16, 16), "float32")}
        shardkeep.load(saved, template=template, mesh=mesh(8, names=("data",)))
        (message,) = self.warnings(caplog)
        assert message.startswith("1 array that was sharded")

    @pytest.mark.parametrize(
        "layout",
        [SavedSharding(("a", "a"), ()), SavedSharding((("a", "a"),), (("a", 0),)), SavedSharding((), (("x", 1),))],
    )
    def test_a_strange_recorded_layout_is_no_crash(self, layout: SavedSharding) -> None:
        (place,) = resolve_shardings([ShapedLeaf(("w",), (16, 16), layout, nbytes=4)], mesh=MESH)
        assert place.sharding is not None
