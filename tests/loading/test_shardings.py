"""Which sharding each leaf gets, and what is said about arrays that a mesh cannot shard as they were."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
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
            "dimensions, and take 1,792 bytes on each device: 'rows', 'both'. The reason: the mesh does not "
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


class TestMeshThatIsSet:
    """With `jax.set_mesh` in force, a spec needs no mesh."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        place = NamedSharding(mesh(8, names=("old",)), P("old"))
        shardkeep.save(tmp_path / "x", {"w": jax.device_put(np.arange(64.0).reshape(8, 8), place), "n": np.ones(8)})
        return tmp_path / "x"

    @pytest.mark.parametrize("asked", [{"shardings": {"w": P("b")}}, {"partition_rules": [("w", P("b"))]}])
    def test_specs_are_for_it(self, path: Path, asked: Any) -> None:
        with jax.set_mesh(MESH):
            loaded = shardkeep.load(path, include="w", **asked)["w"]
            template = shardkeep.abstract(path, include="w", **asked)["w"]
        assert loaded.sharding == template.sharding == NamedSharding(MESH, P("b"))
        assert (np.asarray(loaded) == np.arange(64.0).reshape(8, 8)).all()

    @pytest.mark.parametrize("asked", [{"shardings": {"w": P("b")}}, {"partition_rules": [("w", P("b"))]}])
    def test_an_explicit_mesh_takes_precedence(self, path: Path, asked: Any) -> None:
        other = mesh(2, names=("b",))
        with jax.set_mesh(MESH):
            loaded = shardkeep.load(path, include="w", mesh=other, **asked)["w"]
            template = shardkeep.abstract(path, include="w", mesh=other, **asked)["w"]
        assert loaded.sharding == template.sharding == NamedSharding(other, P("b"))

    def test_specs_of_a_template_are_for_it(self, path: Path) -> None:
        """Also those that were made for an abstract mesh."""
        abstract = NamedSharding(MESH.abstract_mesh, P("a", "b"))
        with jax.set_mesh(MESH):
            struct = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=P("a", "b"))
            loaded = shardkeep.load(path, template={"w": struct})["w"]
            again = shardkeep.load(path, template={"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=abstract)})
        assert loaded.sharding == again["w"].sharding == NamedSharding(MESH, P("a", "b"))

    def test_loads_without_specs_ignore_it(self, path: Path) -> None:
        with jax.set_mesh(MESH):
            assert len(shardkeep.load(path)["w"].sharding.device_set) == 1
            assert shardkeep.abstract(path)["w"].sharding is None
            one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
            assert shardkeep.load(path, include="w", shardings={"w": one})["w"].sharding == one

    def test_what_no_rule_matches_is_replicated_on_it(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with jax.set_mesh(MESH), caplog.at_level(logging.WARNING):
            loaded = shardkeep.load(path, include="w", partition_rules=[("other", P("b"))])
        assert loaded["w"].sharding == NamedSharding(MESH, P())
        assert "no partition rule and no sharding matches 'w'" in caplog.text

    def test_the_error_without_one_says_how_to_set_it(self, path: Path) -> None:
        for asked in ({"shardings": {"w": P("b")}}, {"partition_rules": [("w", P("b"))]}):
            with pytest.raises(ShardingError, match="a mesh; pass mesh=, or set one with jax.set_mesh"):
                shardkeep.load(path, **asked)


def test_memory_kinds_are_kept_where_a_spec_is_cut_or_moves_to_a_mesh(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "x", {"w": jnp.ones(8)})
    long = NamedSharding(MESH, P("a", None), memory_kind="pinned_host")
    found = shardkeep.load(tmp_path / "x", shardings={"w": long})["w"].sharding
    assert (found.spec, found.memory_kind) == (P("a"), "pinned_host")
    abstract = NamedSharding(MESH.abstract_mesh, P("b"), memory_kind="pinned_host")
    found = shardkeep.load(tmp_path / "x", mesh=MESH, shardings={"w": abstract})["w"].sharding
    assert found == NamedSharding(MESH, P("b"), memory_kind="pinned_host")


def test_layouts_are_kept(tmp_path: Path) -> None:
    """Of a sharding, of an abstract template and of arrays; the values are the same."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    shardkeep.save(tmp_path / "x", {"w": jnp.asarray(values)})
    form = Format(Layout((1, 0)), NamedSharding(MESH, P("a")))
    struct = shardkeep.abstract(tmp_path / "x", shardings=form)["w"]
    assert struct.format == form
    like = jax.jit(jnp.copy, out_shardings=form)(values)
    templates: list[Any] = [{"template": {"w": struct}}, {"template": {"w": like}}]
    for asked in [{"shardings": form}, {"shardings": lambda _: form}, *templates]:
        loaded = shardkeep.load(tmp_path / "x", **asked)["w"]
        assert loaded.format.layout.major_to_minor == (1, 0)
        assert loaded.sharding == form.sharding
        assert (np.asarray(loaded) == values).all()
    with pytest.raises(ShardingError, match="leaf 'w': the layout must be a jax.experimental.layout.Layout, not"):
        shardkeep.load(tmp_path / "x", shardings={"w": Format(Layout.AUTO, form.sharding)})

    def test_casts_without_specs_ignore_it(self, path: Path) -> None:
        """JAX would compute on all devices of the mesh, and refuse arrays that are on others."""
        one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
        template = {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=one)}
        layout = Format(Layout((1, 0)), one)
        with jax.set_mesh(MESH):
            cast = shardkeep.load(path, dtype="bfloat16")["w"]
            there = shardkeep.load(path, template=template)["w"]
            turned = shardkeep.load(path, include="w", shardings={"w": layout})["w"]
            few = NamedSharding(mesh(2, names=("few",)), P("few"))
            moved = shardkeep.load(path, include="w", shardings={"w": lambda _: few})["w"]
        assert cast.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
        assert not cast.committed
        assert there.sharding == one
        assert turned.format == layout
        assert moved.sharding == few
        assert there.dtype == cast.dtype == jnp.bfloat16
        for found in (cast, there, turned, moved):
            assert (np.asarray(found) == np.arange(64.0).reshape(8, 8)).all()


class TestReduced:
    """Specs of meshes with explicit axes may say over which axes an array is reduced, or not yet."""

    MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        shardkeep.save(tmp_path / "x", {"w": jnp.arange(32.0).reshape(8, 4)})
        return tmp_path / "x"

    def test_what_is_reduced_is_loaded_as_such(self, path: Path) -> None:
        place = NamedSharding(self.MESH, P("a", reduced={"b"}))
        for asked in ({"mesh": self.MESH, "shardings": {"w": place.spec}}, {"shardings": {"w": place}}):
            found = shardkeep.load(path, **asked)["w"]
            assert found.sharding == place
            assert (np.asarray(found) == np.arange(32.0).reshape(8, 4)).all()

    def test_what_is_not_reduced_is_refused_by_name(self, path: Path) -> None:
        with pytest.raises(ShardingError, match=r"leaf 'w' of shape \(8, 4\).* is unreduced.*leave out unreduced="):
            shardkeep.load(path, mesh=self.MESH, shardings={"w": P("a", unreduced={"b"})})
