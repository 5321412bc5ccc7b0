"""What a load can be asked: a template, some leaves, a prefix, a layout, a dtype. It reads no more than that."""

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from shardkeep.catalog import open_checkpoint
from shardkeep.loading.blocks import BlockReader
from shardkeep.loading.plan import Destination, plan_read
from shardkeep.loading.read import read_into
from shardkeep.model.arrays import Region
from shardkeep.stores.local.mapping import LocalFile
from shardkeep.stores.location import location
from support import Dense, Keyed, Point, assert_same, bits, crew_of, every_dtype, mesh_of, pattern, run_python, save_as

P = PartitionSpec
MIB = 1 << 20


def _struct(shape: tuple[int, ...], dtype: Any = "float32", sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tree = {
        "layers": [
            {"w": jnp.asarray(pattern("float32", (8, 16), i)), "b": jnp.full(8, i, jnp.int32)} for i in range(3)
        ],
        "host": np.arange(6.0).reshape(2, 3),
        "step": 100,
        "rate": 0.5,
        "name": "run",
        "key": jax.random.key(1),
    }
    shardkeep.save(tmp_path / "c", tree)
    return tmp_path / "c"


class TestTemplate:
    def test_it_may_name_a_part_of_the_tree(self, saved: Path) -> None:
        whole = shardkeep.load(saved)
        part = shardkeep.load(saved, template={"layers": [None, {"w": _struct((8, 16))}], "step": 0})
        assert_same(part, {"layers": [None, {"w": whole["layers"][1]["w"]}], "step": 100})

    def test_every_missing_leaf_is_listed_with_the_nearest_name(self, saved: Path) -> None:
        template = {"layers": [{"ww": _struct((8, 16)), "w": _struct((8, 16))}], "stepp": 0, "nothing": {"like": 1}}
        with pytest.raises(shardkeep.MissingLeafError) as caught:
            shardkeep.load(saved, template=template)
        text = str(caught.value)
        assert text.startswith(f"{saved}: 3 of the template's 4 leaves do not match the checkpoint")
        assert "Missing array for key 'layers/0/ww'; the checkpoint has 'layers/0/w'" in text
        assert "Missing value for key 'stepp'; the checkpoint has 'step'" in text
        assert "Missing value for key 'nothing/like'" in text
        assert isinstance(caught.value, KeyError)

    def test_every_wrong_shape_is_listed_with_both_sides(self, saved: Path) -> None:
        template = {"layers": [{"w": _struct((8, 17))}, {"w": _struct((16, 8))}], "host": np.zeros((2, 3))}
        with pytest.raises(shardkeep.TemplateMismatchError) as caught:
            shardkeep.load(saved, template=template)
        text = str(caught.value)
        for part in ("'layers/0/w'", "'layers/1/w'", "(8, 16)", "(8, 17)", "(16, 8)"):
            assert part in text
        assert "host" not in text
        assert isinstance(caught.value, ValueError)

    def test_missing_and_wrong_leaves_are_told_together(self, saved: Path) -> None:
        with pytest.raises(shardkeep.MissingLeafError, match=r"(?s)nope.*\(8, 16\)"):
            shardkeep.load(saved, template={"nope": 1, "layers": [{"w": _struct((3,))}]})

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
    def test_its_float_dtype_wins(self, saved: Path, dtype: str) -> None:
        loaded = shardkeep.load(saved, template={"layers": [{"w": _struct((8, 16), dtype)}]})["layers"][0]["w"]
        expected = shardkeep.load(saved)["layers"][0]["w"].astype(dtype)
        assert_same(loaded, expected)

    @pytest.mark.parametrize(("key", "dtype"), [("w", "int32"), ("b", "float32"), ("b", "bool"), ("w", "complex64")])
    def test_another_kind_of_dtype_is_refused(self, saved: Path, key: str, dtype: str) -> None:
        shape = (8, 16) if key == "w" else (8,)
        with pytest.raises(shardkeep.TemplateMismatchError, match=rf"layers/0/{key}'.*template has {dtype}"):
            shardkeep.load(saved, template={"layers": [{key: _struct(shape, dtype)}]})

    def test_an_integer_that_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"n": jnp.array([1, 300]), "m": jnp.array([1, 200])})
        with pytest.raises(ValueError, match=r"'n' holds 1 to 300.*uint8"):
            shardkeep.load(tmp_path / "c", template={"n": _struct((2,), "uint8")})
        loaded = shardkeep.load(tmp_path / "c", template={"m": _struct((2,), "uint8")})
        assert_same(loaded, {"m": jnp.array([1, 200], jnp.uint8)})

    def test_numpy_in_the_template_gives_numpy(self, saved: Path) -> None:
        loaded = shardkeep.load(saved, template={"layers": [{"w": np.zeros((8, 16), np.float32)}]})["layers"][0]["w"]
        assert type(loaded) is np.ndarray
        assert loaded.flags.writeable
        assert bits(loaded) == bits(shardkeep.load(saved)["layers"][0]["w"])

    def test_jax_in_the_template_gives_jax(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"w": pattern("float32", (8, 4))})
        sharding = NamedSharding(mesh_of(8), P("a"))
        for like in (jnp.zeros((8, 4)), _struct((8, 4)), _struct((8, 4), sharding=sharding)):
            loaded = shardkeep.load(tmp_path / "c", template={"w": like})["w"]
            assert isinstance(loaded, jax.Array)
            assert bits(loaded) == bits(pattern("float32", (8, 4)))
        assert loaded.sharding == sharding

    @pytest.mark.parametrize("host", [np.arange(8.0), np.arange(8, dtype=">f4"), np.arange(8, dtype=">f8")])
    def test_a_wide_or_big_endian_numpy_array_becomes_what_the_template_says(self, tmp_path: Path, host: Any) -> None:
        shardkeep.save(tmp_path / "c", {"w": host})
        sharding = NamedSharding(mesh_of(8), P("a"))
        loaded = shardkeep.load(tmp_path / "c", template={"w": _struct((8,), "float32", sharding)})["w"]
        assert_same(loaded, jax.device_put(np.arange(8, dtype=np.float32), sharding))
        assert loaded.sharding == sharding

    def test_shardings_of_the_template_win(self, saved: Path) -> None:
        mesh = mesh_of(2, 4)
        sharding = NamedSharding(mesh, P("b", "a"))
        for like in (_struct((8, 16), sharding=sharding), jax.device_put(jnp.zeros((8, 16)), sharding)):
            loaded = shardkeep.load(
                saved, template={"layers": [{"w": like}]}, mesh=mesh, partition_rules=[(".*", P("a"))]
            )
            assert loaded["layers"][0]["w"].sharding == sharding

    def test_where_it_says_nothing_rules_do(self, saved: Path) -> None:
        mesh = mesh_of(8)
        template = {"layers": [{"w": _struct((8, 16)), "b": _struct((8,), "int32")}]}
        loaded = shardkeep.load(saved, template=template, mesh=mesh, partition_rules=[("w", P(None, "a")), (".*", P())])
        assert loaded["layers"][0]["w"].sharding.spec == P(None, "a")
        assert loaded["layers"][0]["b"].sharding.is_fully_replicated

    def test_it_gives_the_structure(self, tmp_path: Path) -> None:
        """The same names in other containers: what counts is the path."""
        shardkeep.save(tmp_path / "c", {"x": 1, "y": {"kernel": np.ones(2), "bias": None}})
        loaded = shardkeep.load(tmp_path / "c", template=Point(0, Dense(np.zeros(2), None, "mine")))
        assert_same(loaded, Point(1, Dense(np.ones(2), None, "mine")))

    def test_a_flat_dotted_one_finds_nested_leaves(self, saved: Path) -> None:
        loaded = shardkeep.load(saved, template={"layers.1.w": _struct((8, 16)), "step": 0})
        assert bits(loaded["layers.1.w"]) == bits(shardkeep.load(saved)["layers"][1]["w"])

    def test_it_brings_back_classes_with_functions_in_them(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", Keyed(np.ones(2), 3, tag=len))
        loaded = shardkeep.load(tmp_path / "c", template=Keyed(np.zeros(2), 0, tag=len))
        assert_same(loaded, Keyed(np.ones(2), 3, tag=len))

    def test_saved_values_win_over_the_templates(self, saved: Path) -> None:
        assert_same(
            shardkeep.load(saved, template={"step": 0, "rate": 0.0, "name": ""}),
            {"step": 100, "rate": 0.5, "name": "run"},
        )

    @pytest.mark.parametrize("like", [jnp.int32(0), np.array(0, np.int32), _struct((), "int32")])
    def test_a_saved_number_fills_a_0d_array(self, saved: Path, like: Any) -> None:
        loaded = shardkeep.load(saved, template={"step": like})["step"]
        expected = np.array(100, np.int32) if isinstance(like, np.ndarray) else jnp.int32(100)
        assert_same(loaded, expected)

    def test_a_saved_number_fills_a_sharded_0d_array(self, saved: Path) -> None:
        sharding = NamedSharding(mesh_of(8), P())
        loaded = shardkeep.load(saved, template={"rate": _struct((), "bfloat16", sharding)})["rate"]
        assert_same(loaded, jnp.bfloat16(0.5))
        assert loaded.sharding == sharding

    @pytest.mark.parametrize(
        ("value", "like"),
        [
            (300, np.array(0, np.uint8)),
            (-1, np.array(0, np.uint8)),
            (2**40, jnp.int32(0)),
            (2**70, jnp.int32(0)),
            (2**70, np.array(0)),
            (1.5, jnp.int32(0)),
            (1.5, np.array(0)),
            (1 + 2j, np.array(0.0)),
            (1 + 2j, jnp.float32(0)),
            (np.int64(2**40), jnp.int32(0)),
            (float("nan"), np.array(0)),
            (2, np.array(False)),
        ],
    )
    def test_a_saved_number_that_does_not_fit_a_0d_array_is_refused(
        self, tmp_path: Path, value: Any, like: Any
    ) -> None:
        """A step counter must not come back as another number."""
        shardkeep.save(tmp_path / "c", {"n": value})
        with pytest.raises(ValueError, match="n"):
            shardkeep.load(tmp_path / "c", template={"n": like})

    @pytest.mark.parametrize(
        ("array", "like", "expected"),
        [
            (jnp.int32(7), 0, 7),
            (np.array(7), 0, 7),
            (np.array(2.5), 0.0, 2.5),
            (jnp.float32(2.5), 0.0, 2.5),
            (np.array(True), False, True),
            (np.array(1 + 2j), 0j, 1 + 2j),
            (np.array(2.5, np.float32), np.float32(0), np.float32(2.5)),
            (np.array(2.5), np.float32(0), np.float32(2.5)),
        ],
    )
    def test_a_saved_0d_array_fills_a_number(self, tmp_path: Path, array: Any, like: Any, expected: Any) -> None:
        shardkeep.save(tmp_path / "c", {"n": array})
        assert_same(shardkeep.load(tmp_path / "c", template={"n": like}), {"n": expected})

    @pytest.mark.parametrize(
        ("array", "like"), [(np.array(2.5), 0), (np.array(2), False), (np.array(1 + 2j), 0.0), (jnp.float32(1.5), 1)]
    )
    def test_a_saved_0d_array_that_does_not_fit_a_number_is_refused(
        self, tmp_path: Path, array: Any, like: Any
    ) -> None:
        shardkeep.save(tmp_path / "c", {"n": array})
        with pytest.raises((ValueError, TypeError), match="n"):
            shardkeep.load(tmp_path / "c", template={"n": like})

    @pytest.mark.parametrize("like", [np.zeros(3), jnp.zeros(1), _struct((1,))])
    def test_an_array_in_place_of_a_value_is_refused(self, saved: Path, like: Any) -> None:
        with pytest.raises(shardkeep.TemplateMismatchError, match="key 'step': saved the value 100"):
            shardkeep.load(saved, template={"step": like})

    def test_a_value_in_place_of_an_array_is_refused(self, saved: Path) -> None:
        with pytest.raises(
            shardkeep.TemplateMismatchError, match=r"key 'host': saved float64\[2, 3\], the template has 0"
        ):
            shardkeep.load(saved, template={"host": 0})

    def test_prng_keys(self, saved: Path) -> None:
        key = jax.random.key(1)
        for like in (jax.random.key(0), jax.eval_shape(lambda: jax.random.key(0))):
            assert_same(shardkeep.load(saved, template={"key": like}), {"key": key})

    @pytest.mark.parametrize("like", [jnp.zeros((2,), jnp.uint32), np.zeros((2,), np.uint32), _struct(())])
    def test_an_array_in_place_of_prng_keys_is_refused(self, saved: Path, like: Any) -> None:
        with pytest.raises(shardkeep.TemplateMismatchError, match="key 'key': saved PRNG keys"):
            shardkeep.load(saved, template={"key": like})

    def test_prng_keys_in_place_of_an_array_are_refused(self, saved: Path) -> None:
        with pytest.raises(shardkeep.TemplateMismatchError, match="host"):
            shardkeep.load(saved, template={"host": jax.random.split(jax.random.key(0), (2, 3))})

    def test_prng_keys_of_another_implementation_are_refused(self, saved: Path) -> None:
        """Keys of another kind give other numbers: the program would go on with a generator it did not ask for."""
        with pytest.raises(shardkeep.TemplateMismatchError, match=r"(?s)key.*(fry|rbg)"):
            shardkeep.load(saved, template={"key": jax.random.key(0, impl="rbg")})

    def test_sharded_prng_keys(self, tmp_path: Path) -> None:
        keys = jax.random.split(jax.random.key(0), 8)
        shardkeep.save(tmp_path / "c", {"k": keys})
        sharding = NamedSharding(mesh_of(8), P("a"))
        loaded = shardkeep.load(tmp_path / "c", template={"k": jax.device_put(keys, sharding)})["k"]
        assert_same(loaded, keys)
        assert loaded.sharding == sharding

    def test_what_eval_shape_gives_on_an_explicit_mesh_is_laid_out_on_the_mesh_given(self, tmp_path: Path) -> None:
        """`jax.make_mesh` makes explicit axes, and then abstract arrays know axes but no devices."""
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("a", "b")))
        shardkeep.save(tmp_path / "c", {"x": array})
        template = jax.eval_shape(lambda t: t, {"x": array})
        assert isinstance(template["x"].sharding.mesh, jax.sharding.AbstractMesh)
        loaded = shardkeep.load(tmp_path / "c", template=template, mesh=mesh)
        assert_same(loaded, {"x": array})
        assert loaded["x"].sharding == NamedSharding(mesh, P("a", "b"))

    def test_what_eval_shape_gives_on_an_explicit_mesh_needs_one(self, tmp_path: Path) -> None:
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("a", "b")))
        shardkeep.save(tmp_path / "c", {"x": array})
        with pytest.raises(shardkeep.ShardingError, match=r"'x'.*mesh="):
            shardkeep.load(tmp_path / "c", template=jax.eval_shape(lambda t: t, {"x": array}))

    def test_an_empty_template_gives_an_empty_tree(self, saved: Path) -> None:
        assert shardkeep.load(saved, template={}) == {}
        assert shardkeep.load(saved, template=[None]) == [None]

    def test_with_include_the_rest_of_the_template_stays(self, saved: Path) -> None:
        mine = np.zeros((2, 3))
        loaded = shardkeep.load(saved, template={"step": 0, "host": mine, "unknown": "kept"}, include="^step$")
        assert loaded["step"] == 100
        assert loaded["host"] is mine
        assert loaded["unknown"] == "kept"

    def test_a_bare_array_is_a_template(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", jnp.arange(4.0))
        assert_same(shardkeep.load(tmp_path / "c", template=_struct((4,), "bfloat16")), jnp.arange(4, dtype="bfloat16"))
        with pytest.raises(shardkeep.TemplateMismatchError, match=r"\(4,\).*\(5,\)"):
            shardkeep.load(tmp_path / "c", template=_struct((5,)))


class TestEquinox:
    """Models are saved as their arrays and loaded with the whole model as the template."""

    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout
        norm: eqx.nn.LayerNorm
        act: Any

        def __init__(self, seed: int, rate: float = 0.25) -> None:
            self.mlp = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(seed))
            self.dropout = eqx.nn.Dropout(rate)
            self.norm = eqx.nn.LayerNorm(4)
            self.act = jax.nn.gelu

    @pytest.mark.parametrize("how", ["filter", "partition", "inexact"])
    @pytest.mark.parametrize("template", ["model", "abstract", "filtered"])
    def test_arrays_are_loaded_and_the_rest_is_the_templates(self, how: str, template: str, tmp_path: Path) -> None:
        model = self.Model(0)
        arrays = {
            "filter": lambda: eqx.filter(model, eqx.is_array),
            "partition": lambda: eqx.partition(model, eqx.is_array)[0],
            "inexact": lambda: eqx.filter(model, eqx.is_inexact_array),
        }[how]()
        shardkeep.save(tmp_path / "c", {"model": arrays, "step": 7})
        like = {
            "model": lambda: self.Model(1),
            "abstract": lambda: eqx.filter_eval_shape(lambda: self.Model(1)),
            "filtered": lambda: eqx.filter(self.Model(1), eqx.is_array),
        }[template]()
        loaded = shardkeep.load(tmp_path / "c", template={"model": like, "step": 0})
        assert loaded["step"] == 7
        if template == "filtered":
            loaded["model"] = eqx.combine(loaded["model"], self.Model(1))
        assert isinstance(loaded["model"], self.Model)
        assert eqx.tree_equal(loaded["model"], model)
        assert loaded["model"].act is jax.nn.gelu
        x = jnp.ones(4)
        assert_same(loaded["model"].mlp(x), model.mlp(x))

    def test_the_whole_model_with_its_functions_is_not_saved(self, tmp_path: Path) -> None:
        with pytest.raises(shardkeep.UnsupportedLeafError, match="mlp/activation: a function or class"):
            shardkeep.save(tmp_path / "c", self.Model(0))

    def test_arrays_that_were_filtered_out_are_still_missed(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"model": eqx.filter(self.Model(0), lambda x: False), "step": 1})
        with pytest.raises(shardkeep.MissingLeafError, match="Missing array for key 'model/mlp/layers/0/weight'"):
            shardkeep.load(tmp_path / "c", template={"model": self.Model(1), "step": 0})


class TestAbstract:
    TREE: dict[str, Any] = {
        "layers": [{"w": pattern("float32", (8, 16), i), "b": np.arange(3, dtype=">i2")} for i in range(2)],
        "point": Point(jnp.ones((2, 2), jnp.bfloat16), None),
        "node": Keyed(jnp.zeros(3), np.zeros((0, 2)), "tag"),
        "day": np.zeros(2, "datetime64[ns]"),
        "fp4": np.zeros(3, ml_dtypes.float4_e2m1fn),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 4),
        "n": 3,
        "t": ("text", b"bytes", 0.5, None),
        "scalar": jnp.float32(1),
    }

    @pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange", "shards"])
    def test_it_loads_the_tree_again(self, kind: str, tmp_path: Path) -> None:
        path = save_as(kind, tmp_path / "c", self.TREE)
        assert_same(shardkeep.load(path, template=shardkeep.abstract(path)), shardkeep.load(path))
        assert_same(shardkeep.load(path, template=shardkeep.abstract(path)), self.TREE)

    def test_arrays_are_structs_and_values_are_themselves(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", self.TREE)
        found = shardkeep.abstract(tmp_path / "c")
        leaf = found["layers"][1]["w"]
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert (leaf.shape, leaf.dtype, leaf.sharding) == ((8, 16), np.float32, None)
        assert found["keys"].dtype == jax.random.key(0, impl="rbg").dtype
        assert found["keys"].shape == (4,)
        assert found["t"] == ("text", b"bytes", 0.5, None)
        assert type(found["point"]) is Point
        assert jax.eval_shape(lambda x: x + 1, leaf).shape == (8, 16)

    def test_no_array_is_read(self, tmp_path: Path, counter: "_Counter") -> None:
        shardkeep.save(tmp_path / "c", {"w": pattern("uint8", (MIB,)), "n": 3})
        shardkeep.abstract(tmp_path / "c")
        assert counter.total == 0

    def test_shardings_are_those_a_load_gives(self, tmp_path: Path) -> None:
        mesh = mesh_of(2, 4)
        tree = {
            "a": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("a", "b"))),
            "b": jnp.ones(8),
            "c": np.ones(8),
        }
        shardkeep.save(tmp_path / "c", tree)
        for asked in (
            {"mesh": mesh},
            {"mesh": mesh_of(8)},
            {"mesh": mesh, "partition_rules": [("a", P("b")), (".*", P())]},
            {"shardings": {"b": NamedSharding(mesh, P("b"))}},
            {"mesh": mesh, "shardings": {"c": P("a")}},
        ):
            found = shardkeep.abstract(tmp_path / "c", **asked)
            direct = shardkeep.load(tmp_path / "c", **asked)
            again = shardkeep.load(tmp_path / "c", template=found)
            assert_same(again, direct)
            for name in "abc":
                if isinstance(direct[name], jax.Array) and found[name].sharding is not None:
                    assert again[name].sharding == direct[name].sharding == found[name].sharding

    def test_dtype_prefix_and_include_are_those_of_load(self, tmp_path: Path) -> None:
        for prefix in ("a", "b"):
            shardkeep.save(tmp_path / "c", {prefix: [jnp.ones(2), np.ones(3)], "n": jnp.arange(2)}, prefix=prefix)
        found = shardkeep.abstract(tmp_path / "c", prefix="b", include="^b|n", dtype="bf16")
        assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [jnp.bfloat16, jnp.bfloat16, jnp.int32]
        assert_same(
            shardkeep.load(tmp_path / "c", prefix="b", template=found),
            shardkeep.load(tmp_path / "c", prefix="b", dtype="bf16"),
        )
        assert shardkeep.abstract(tmp_path / "c", prefix="b", include="b/1")["b"][0] is None

    def test_it_is_edited_and_passed_as_template(self, tmp_path: Path) -> None:
        tree = {"params": {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}, "opt": {"mu": jnp.ones((4, 2))}, "step": 3}
        shardkeep.save(tmp_path / "c", tree)
        template = shardkeep.abstract(tmp_path / "c")
        template["opt"] = ...
        template["params"]["b"] = template["params"]["b"].update(dtype=jnp.bfloat16)
        loaded = shardkeep.load(tmp_path / "c", template=template)
        assert loaded["opt"] is ...
        assert_same(loaded["params"], {"w": jnp.ones((4, 2)), "b": jnp.ones(2, jnp.bfloat16)})

    def test_an_ellipsis_is_not_read(self, tmp_path: Path, counter: "_Counter") -> None:
        shardkeep.save(tmp_path / "c", {"w": pattern("uint8", (MIB,)), "x": pattern("uint8", (MIB,)), "n": 3})
        template = {**shardkeep.abstract(tmp_path / "c"), "w": ...}
        assert shardkeep.load(tmp_path / "c", template=template, mmap=False)["w"] is ...
        assert counter.total == MIB

    def test_files_of_other_programs(self, tmp_path: Path) -> None:
        safetensors.numpy.save_file({"a.w": np.ones((2, 3), np.float32)}, tmp_path / "m.safetensors")
        found = shardkeep.abstract(tmp_path / "m.safetensors")
        assert found == {"a": {"w": jax.ShapeDtypeStruct((2, 3), np.float32)}}
        loaded = shardkeep.load(tmp_path / "m.safetensors", template=found)
        assert_same(loaded, shardkeep.load(tmp_path / "m.safetensors"))

    def test_eformers_directories(self, tmp_path: Path) -> None:
        path = Path(__file__).parents[1] / "fixtures" / "eformer"
        name = next(p for p in sorted(path.iterdir()) if shardkeep.exists(p) and len(shardkeep.inspect(p).trees) == 1)
        assert_same(shardkeep.load(name, template=shardkeep.abstract(name)), shardkeep.load(name))

    def test_classes_that_are_not_here_are_opaque_nodes_in_both(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"node": Keyed(jnp.ones(2), 3, tag=len)})
        loaded = shardkeep.load(tmp_path / "c", template=shardkeep.abstract(tmp_path / "c"))
        assert isinstance(loaded["node"], shardkeep.OpaqueNode)
        assert_same(loaded["node"].left, jnp.ones(2))

    def test_errors_are_those_of_load(self, tmp_path: Path) -> None:
        with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint"):
            shardkeep.abstract(tmp_path / "nothing")
        shardkeep.save(tmp_path / "c", {"w": jnp.ones(6)})
        with pytest.raises(shardkeep.MissingLeafError, match="matches no leaf"):
            shardkeep.abstract(tmp_path / "c", include="x")
        with pytest.raises(shardkeep.ShardingError, match="leaf 'w' of shape"):
            shardkeep.abstract(tmp_path / "c", mesh=mesh_of(4), shardings=P("a"))
        with pytest.raises(shardkeep.ShardingError, match="takes no functions in shardings"):
            shardkeep.abstract(tmp_path / "c", shardings=lambda x: x)
        with pytest.raises(shardkeep.PrefixError, match="'p'"):
            shardkeep.abstract(tmp_path / "c", prefix="p")


class TestInclude:
    def test_only_what_matches_is_loaded(self, saved: Path) -> None:
        whole = shardkeep.load(saved)
        assert_same(shardkeep.load(saved, include=r"layers/1/.*"), {"layers": [None, whole["layers"][1], None]})
        assert_same(shardkeep.load(saved, include=re.compile("^(step|name)$")), {"step": 100, "name": "run"})
        assert_same(shardkeep.load(saved, include="/b$")["layers"][2], {"b": whole["layers"][2]["b"]})

    def test_nothing_that_matches_is_an_error_that_shows_some_keys(self, saved: Path) -> None:
        with pytest.raises(shardkeep.MissingLeafError, match="matches no leaf; the keys are layers/0/w"):
            shardkeep.load(saved, include="layer/")
        with pytest.raises(TypeError, match=r"include must be a regular expression .* not a list"):
            shardkeep.load(saved, include=["step", "name"])  # type: ignore[arg-type]

    def test_tuples_and_classes_keep_their_shape(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"p": Point(np.ones(1), np.zeros(1)), "t": (1, [2, 3])})
        loaded = shardkeep.load(tmp_path / "c", include="p/x|t/1/1")
        assert_same(loaded, {"p": Point(np.ones(1), None), "t": (None, [None, 3])})


class TestPrefix:
    @pytest.fixture
    def several(self, tmp_path: Path) -> Path:
        for prefix in ("model", "optimizer", "model.ema"):
            shardkeep.save(tmp_path / "c", {"name": prefix}, prefix=prefix)
        return tmp_path / "c"

    @pytest.mark.parametrize("prefix", ["model", "optimizer", "model.ema", "model/ema"])
    def test_each_has_its_tree(self, several: Path, prefix: str) -> None:
        assert shardkeep.load(several, prefix=prefix) == {"name": prefix.replace("/", ".")}

    def test_an_unknown_one_is_an_error_that_lists_them(self, several: Path) -> None:
        with pytest.raises(ValueError, match=r"'modell'.*'model', 'optimizer', 'model.ema'"):
            shardkeep.load(several, prefix="modell")

    def test_of_several_one_must_be_named(self, several: Path) -> None:
        with pytest.raises(ValueError, match=r"several trees.*'model', 'optimizer', 'model.ema'"):
            shardkeep.load(several)

    def test_the_tree_without_one_is_the_default(self, several: Path) -> None:
        shardkeep.save(several, {"name": "none"})
        assert shardkeep.load(several) == {"name": "none"}
        assert shardkeep.load(several, prefix="model") == {"name": "model"}

    def test_the_only_one_is_the_default(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"a": 1}, prefix="only")
        assert shardkeep.load(tmp_path / "c") == shardkeep.load(tmp_path / "c", prefix="only") == {"a": 1}

    @pytest.mark.parametrize("prefix", ["..", "a/../b", "/etc", "a\nb", "a//b", ".a", "a.", 3, "\x7f", "~root"])
    def test_an_impossible_one_is_a_value_error_before_any_write(self, tmp_path: Path, prefix: Any) -> None:
        with pytest.raises(ValueError, match="prefix"):
            shardkeep.save(tmp_path / "c", {"a": 1}, prefix=prefix)
        assert list(tmp_path.iterdir()) == []
        shardkeep.save(tmp_path / "c", {"a": 1})
        with pytest.raises(ValueError, match="prefix"):
            shardkeep.load(tmp_path / "c", prefix=prefix)

    def test_rules_match_keys_with_the_prefix_only_if_none_matches_without(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"w": jnp.zeros((8, 8))}, prefix="model")
        mesh = mesh_of(8)
        for rules in ([("^w", P("a"))], [("^model/w", P("a"))], [("^model/w", P(None, "a")), ("^w", P("a"))]):
            loaded = shardkeep.load(tmp_path / "c", prefix="model", mesh=mesh, partition_rules=rules)
            assert loaded["w"].sharding.spec == P("a")


class TestDtype:
    @pytest.mark.parametrize(
        "dtype", ["bf16", "bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16]
    )
    def test_a_float_dtype_casts_floats_only(self, saved: Path, dtype: Any) -> None:
        loaded = shardkeep.load(saved, dtype=dtype)
        whole = shardkeep.load(saved)
        assert loaded["layers"][0]["w"].dtype == jnp.bfloat16
        assert loaded["host"].dtype == jnp.bfloat16
        assert type(loaded["host"]) is np.ndarray
        assert_same(loaded["layers"][0]["b"], whole["layers"][0]["b"])
        assert_same(loaded["key"], whole["key"])
        assert loaded["step"] == 100
        assert loaded["rate"] == 0.5

    def test_an_integer_dtype_casts_integers_only(self, saved: Path) -> None:
        loaded = shardkeep.load(saved, dtype=np.int8)
        assert loaded["layers"][0]["b"].dtype == jnp.int8
        assert loaded["layers"][0]["w"].dtype == jnp.float32

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint2"])
    @pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
    def test_an_integer_that_does_not_fit_is_an_error(
        self, tmp_path: Path, dtype: str, make: Callable[[Any], Any]
    ) -> None:
        shardkeep.save(tmp_path / "c", {"n": make(np.array([-300, 300], np.int32))})
        with pytest.raises(ValueError, match=f"'n' holds -300 to 300, which does not fit {dtype}"):
            shardkeep.load(tmp_path / "c", dtype=dtype)

    @pytest.mark.parametrize("source", ["int2", "uint2", "int4", "uint4", "int8", "uint64"])
    @pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
    def test_small_integers_can_be_cast(self, tmp_path: Path, source: str, make: Callable[[Any], Any]) -> None:
        if source == "uint64" and make is jnp.asarray:
            pytest.skip("needs x64")
        host = np.array([0, 1, 1], np.dtype(getattr(ml_dtypes, source, source)))
        shardkeep.save(tmp_path / "c", {"n": make(host)})
        assert_same(shardkeep.load(tmp_path / "c", dtype="int32"), {"n": make(np.array([0, 1, 1], np.int32))})

    def test_an_unknown_one_is_a_value_error(self, saved: Path) -> None:
        with pytest.raises(ValueError, match="unknown dtype 'bf17'"):
            shardkeep.load(saved, dtype="bf17")

    def test_the_sharding_stays(self, saved: Path) -> None:
        loaded = shardkeep.load(saved, include="w$", mesh=mesh_of(8), shardings=P("a"), dtype="bf16")
        assert loaded["layers"][0]["w"].sharding == NamedSharding(mesh_of(8), P("a"))

    def test_a_64_bit_dtype_without_x64_gives_numpy_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        shardkeep.save(tmp_path / "c", {"w": jnp.arange(3.0)})
        loaded = shardkeep.load(tmp_path / "c", dtype="float64")
        assert_same(loaded, {"w": np.arange(3.0)})
        assert "jax_enable_x64" in caplog.text

    @pytest.mark.parametrize("dtype", ["float32", np.float32, jnp.float32, "fp32"])
    def test_a_float_can_become_wider(self, tmp_path: Path, dtype: Any) -> None:
        shardkeep.save(tmp_path / "c", {"w": jnp.arange(3, dtype="bfloat16")})
        assert_same(shardkeep.load(tmp_path / "c", dtype=dtype), {"w": jnp.arange(3, dtype="float32")})


class TestShardings:
    MESH = staticmethod(lambda: mesh_of(2, 4))

    def _forms(self) -> dict[str, Any]:
        spec, full = P("b"), NamedSharding(self.MESH(), P("b"))
        return {
            "nested specs": {"layers": [{"w": spec}, {"w": spec}, {"w": spec}]},
            "nested shardings": {"layers": [{"w": full}, {"w": full}, {"w": full}]},
            "dotted": {f"layers.{i}.w": spec for i in range(3)},
            "string keys for positions": {"layers": {str(i): {"w": full} for i in range(3)}},
            "one for all": spec,
            "one sharding for all": full,
            "one for all below": {"layers": spec},
            "a function giving a sharding": lambda array: full,
            "a function per leaf": {"layers": {"0": {"w": lambda array: full}, "1": full, "2": full}},
            "a function that shards": lambda array: jax.device_put(array, full) if array.ndim else array,
        }

    @pytest.mark.parametrize("form", [*"abcdefghij"])
    def test_every_form_gives_the_layout_asked_for(self, saved: Path, form: str) -> None:
        name, asked = list(self._forms().items())["abcdefghij".index(form)]
        template = {"layers": [{"w": _struct((8, 16))}] * 3}
        loaded = shardkeep.load(saved, template=template, mesh=self.MESH(), shardings=asked)
        for layer, original in zip(loaded["layers"], shardkeep.load(saved)["layers"], strict=True):
            assert layer["w"].sharding.is_equivalent_to(NamedSharding(self.MESH(), P("b")), 2), name
            assert_same(layer["w"], original["w"])

    def test_none_means_replicated_on_the_mesh(self, saved: Path) -> None:
        loaded = shardkeep.load(
            saved, include="/w$", mesh=self.MESH(), shardings={"layers.0.w": None, "layers.1.w": P("a"), "layers": None}
        )
        assert loaded["layers"][0]["w"].sharding == NamedSharding(self.MESH(), P())
        assert loaded["layers"][1]["w"].sharding == NamedSharding(self.MESH(), P("a"))

    def test_none_without_a_mesh_means_the_default_device(self, saved: Path) -> None:
        loaded = shardkeep.load(saved, include="0/w", shardings={"layers.0.w": None})
        assert loaded["layers"][0]["w"].sharding == SingleDeviceSharding(jax.devices()[0])

    def test_a_single_device(self, saved: Path) -> None:
        device = SingleDeviceSharding(jax.devices()[5])
        loaded = shardkeep.load(saved, shardings=device)
        assert loaded["layers"][2]["w"].devices() == {jax.devices()[5]}
        assert loaded["key"].devices() == {jax.devices()[5]}

    def test_what_a_function_returns_is_the_leaf(self, saved: Path) -> None:
        loaded = shardkeep.load(saved, include="0/b", shardings={"layers.0.b": lambda array: array + 1})
        assert_same(loaded["layers"][0]["b"], jnp.ones(8, jnp.int32))

    def test_a_numpy_leaf_named_by_a_sharding_becomes_a_sharded_array(self, tmp_path: Path) -> None:
        host = {"w": pattern("float32", (8, 4)), "x": pattern("float32", (8, 4)), "big": np.arange(8, dtype=">i4")}
        shardkeep.save(tmp_path / "c", host)
        loaded = shardkeep.load(tmp_path / "c", mesh=mesh_of(8), shardings={"w": P("a"), "big": P("a")})
        assert loaded["w"].sharding == NamedSharding(mesh_of(8), P("a"))
        assert bits(loaded["w"]) == bits(host["w"])
        assert_same(loaded["x"], host["x"])
        assert_same(loaded["big"], jnp.arange(8, dtype=jnp.int32))

    @pytest.mark.parametrize("dtype", ["float6_e2m3fn", "float6_e3m2fn"])
    def test_types_that_only_newer_versions_of_jax_hold_are_placed_where_they_are_held(
        self, tmp_path: Path, dtype: str
    ) -> None:
        host = pattern(getattr(ml_dtypes, dtype), (8,))
        shardkeep.save(tmp_path / "c", {"x": host})
        loaded = shardkeep.load(tmp_path / "c", mesh=mesh_of(8), shardings=P("a"))["x"]
        assert isinstance(loaded, jax.Array) == (dtype in every_dtype())
        assert bits(loaded) == bits(host)
        if isinstance(loaded, jax.Array):
            assert loaded.sharding == NamedSharding(mesh_of(8), P("a"))

    @pytest.mark.parametrize("dtype", ["datetime64[s]", ">m8[s]", "float64", ">f8", "int64"])
    def test_what_jax_cannot_hold_stays_numpy_unchanged_whatever_the_shardings_say(
        self, tmp_path: Path, dtype: Any
    ) -> None:
        host = {"x": pattern(dtype, (8,))}
        shardkeep.save(tmp_path / "c", host)
        for arguments in ({"shardings": P("a")}, {"partition_rules": [(".*", P())]}):
            assert_same(shardkeep.load(tmp_path / "c", mesh=mesh_of(8), **arguments), host)

    def test_specs_are_cut_to_the_rank_and_scalars_replicated(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"v": jnp.zeros(8), "s": jnp.float32(1), "k": jax.random.key(0)})
        loaded = shardkeep.load(tmp_path / "c", mesh=self.MESH(), shardings=P("a", "b", None))
        assert loaded["v"].sharding.spec == P("a")
        assert loaded["s"].sharding.is_fully_replicated
        full = NamedSharding(self.MESH(), P("a", "b"))
        assert shardkeep.load(tmp_path / "c", shardings=full)["v"].sharding.spec == P("a")

    @pytest.mark.parametrize("how", ["shardings", "rules"])
    def test_an_unknown_axis_names_key_shape_spec_and_mesh(self, saved: Path, how: str) -> None:
        arguments: dict[str, Any] = {
            "rules": {"partition_rules": [("1/w", P(None, "tp")), (".*", P())]},
            "shardings": {"shardings": {"layers.1.w": P(None, "tp")}},
        }[how]
        with pytest.raises(ValueError, match=r"(?s)layers/1/w.*\(8, 16\).*'tp'.*'a': 2, 'b': 4"):
            shardkeep.load(saved, mesh=self.MESH(), **arguments)

    @pytest.mark.parametrize("how", ["shardings", "rules", "sharding", "template"])
    def test_an_indivisible_dimension_names_key_shape_spec_and_mesh(self, tmp_path: Path, how: str) -> None:
        shardkeep.save(tmp_path / "c", {"layer": {"w": jnp.zeros((6, 10))}})
        mesh = self.MESH()
        full = NamedSharding(mesh, P(None, "b"))
        arguments: dict[str, Any] = {
            "shardings": {"mesh": mesh, "shardings": {"layer.w": P(None, "b")}},
            "rules": {"mesh": mesh, "partition_rules": [("w", P(None, "b"))]},
            "sharding": {"shardings": {"layer": {"w": full}}},
            "template": {"template": {"layer": {"w": _struct((6, 10), sharding=full)}}},
        }[how]
        with pytest.raises(ValueError, match=r"(?s)layer/w.*\(6, 10\).*'b'.*10.*4.*'a': 2, 'b': 4"):
            shardkeep.load(tmp_path / "c", **arguments)

    def test_the_same_axis_twice_names_the_key(self, saved: Path) -> None:
        with pytest.raises(ValueError, match=r"layers/0/w"):
            shardkeep.load(saved, mesh=self.MESH(), shardings={"layers.0.w": P("a", "a")})

    @pytest.mark.parametrize("arguments", [{"shardings": {"layers.0.w": P("a")}}, {"partition_rules": [("w", P("a"))]}])
    def test_a_spec_without_a_mesh_is_an_error(self, saved: Path, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="mesh="):
            shardkeep.load(saved, **arguments)

    @pytest.mark.parametrize("asked", ["a", 3, jnp.zeros(2)])
    def test_what_is_no_sharding_is_refused(self, saved: Path, asked: Any) -> None:
        with pytest.raises(ValueError, match=r"layers/0/w.*must be a Sharding"):
            shardkeep.load(saved, mesh=self.MESH(), shardings={"layers.0.w": asked})

    def test_the_first_rule_that_matches_wins(self, saved: Path) -> None:
        rules = [("layers/0/w", P("a")), ("layers/.*/w", P("b")), ("w", P(None, "a")), (".*", P())]
        loaded = shardkeep.load(saved, mesh=self.MESH(), partition_rules=rules)
        assert [layer["w"].sharding.spec for layer in loaded["layers"]] == [P("a"), P("b"), P("b")]

    def test_rules_go_before_shardings(self, saved: Path) -> None:
        loaded = shardkeep.load(
            saved, mesh=self.MESH(), partition_rules=[("0/w", P("a"))], shardings={"layers": P("b"), "key": None}
        )
        assert [layer["w"].sharding.spec for layer in loaded["layers"]] == [P("a"), P("b"), P("b")]

    def test_leaves_without_a_rule_are_replicated_with_one_warning(
        self, saved: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        loaded = shardkeep.load(saved, mesh=self.MESH(), partition_rules=[("/w", P("a"))])
        assert loaded["layers"][0]["b"].sharding == NamedSharding(self.MESH(), P())
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "'layers/0/b'" in warnings[0]

    def test_a_sharding_that_matches_no_array_is_warned_about(
        self, saved: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        shardkeep.load(saved, mesh=self.MESH(), shardings={"layers.0.w": P("a"), "layers.9.w": P("a")})
        assert "layers.9.w" in caplog.text
        assert "layers.0.w" not in caplog.text

    def test_a_mesh_alone_keeps_the_saved_layout_as_far_as_it_goes(self, tmp_path: Path) -> None:
        mesh = mesh_of(2, 4)
        tree = {
            "rows": jax.device_put(jnp.zeros((16, 16)), NamedSharding(mesh, P("b"))),
            "both": jax.device_put(jnp.zeros((16, 16)), NamedSharding(mesh, P("a", "b"))),
            "joined": jax.device_put(jnp.zeros((16, 16)), NamedSharding(mesh, P(("a", "b")))),
            "odd": jax.device_put(jnp.zeros((4, 4)), NamedSharding(mesh, P("b"))),
            "alone": jnp.zeros((16, 16)),
        }
        shardkeep.save(tmp_path / "c", tree)
        loaded = shardkeep.load(tmp_path / "c", mesh=mesh)
        for name in ("rows", "both", "joined", "odd"):
            assert loaded[name].sharding.is_equivalent_to(tree[name].sharding, 2), name
        assert loaded["alone"].sharding == NamedSharding(mesh, P())
        other = shardkeep.load(tmp_path / "c", mesh=mesh_of(8))  # has only the axis a, of 8
        assert other["rows"].sharding.is_fully_replicated
        assert other["both"].sharding.is_equivalent_to(NamedSharding(mesh_of(8), P("a")), 2)
        assert other["joined"].sharding.is_equivalent_to(NamedSharding(mesh_of(8), P("a")), 2)

    def test_arrays_in_pinned_host_memory_are_saved_and_loaded(self, tmp_path: Path) -> None:
        sharding = NamedSharding(mesh_of(8), P("a"), memory_kind="pinned_host")
        array = jax.device_put(jnp.arange(64.0), sharding)
        shardkeep.save(tmp_path / "c", {"x": array})
        assert_same(shardkeep.load(tmp_path / "c"), {"x": jnp.arange(64.0)})
        for arguments in ({"shardings": sharding}, {"template": {"x": _struct((64,), sharding=sharding)}}):
            loaded = shardkeep.load(tmp_path / "c", **arguments)["x"]
            assert loaded.sharding == sharding
            assert loaded.sharding.memory_kind == "pinned_host"
            assert bits(loaded) == bits(array)

    def test_a_mesh_with_explicit_axes_works_like_any_other(self, tmp_path: Path) -> None:
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("a", "b")))
        shardkeep.save(tmp_path / "c", {"x": array})
        for arguments in ({"mesh": mesh}, {"template": {"x": array}}, {"mesh": mesh, "shardings": P("a", "b")}):
            loaded = shardkeep.load(tmp_path / "c", **arguments)["x"]
            assert_same(loaded, array)
            assert jax.typeof(loaded) == jax.typeof(array)

    def test_prng_keys_are_sharded_by_their_own_shape(self, tmp_path: Path) -> None:
        keys = jax.random.split(jax.random.key(0), (8, 4))
        shardkeep.save(tmp_path / "c", {"k": keys, "one": jax.random.key(1)})
        loaded = shardkeep.load(tmp_path / "c", mesh=self.MESH(), shardings=P("a", "b"))
        assert_same(loaded["k"], keys)
        assert loaded["k"].sharding.is_equivalent_to(NamedSharding(self.MESH(), P("a", "b")), 2)
        with pytest.raises(ValueError, match=r"'k'.*\(8, 4\)"):
            shardkeep.load(tmp_path / "c", mesh=mesh_of(8), shardings={"k": P(None, "a")})

    def test_a_tree_of_the_arrays_own_shardings_fits(self, tmp_path: Path) -> None:
        mesh = self.MESH()
        tree = {
            "a": [jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("a", "b")))],
            "b": Point(jnp.ones(8), None),
        }
        shardkeep.save(tmp_path / "c", tree)
        loaded = shardkeep.load(tmp_path / "c", shardings=jax.tree.map(lambda x: x.sharding, tree))
        assert jax.tree.map(lambda x: x.sharding, loaded) == jax.tree.map(lambda x: x.sharding, tree)

    def test_a_bad_pattern_is_an_error_that_shows_it(self, saved: Path) -> None:
        with pytest.raises(shardkeep.ShardingError, match=r"pattern '\(w' in partition_rules is not .*: missing \)"):
            shardkeep.load(saved, mesh=self.MESH(), partition_rules=[("(w", P("a"))])
        with pytest.raises(ValueError, match=r"include='\*w' is not a valid regular expression: nothing to repeat"):
            shardkeep.load(saved, include="*w")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    run_python(
        f"""
import pathlib
mesh = mesh_of(8)
from jax.sharding import NamedSharding, PartitionSpec as P
big = jax.device_put(jnp.arange(1 << 18, dtype=jnp.float64) + 1e-12, NamedSharding(mesh, P("a")))
tree = {{"f": jnp.array([1 + 1e-12]), "i": jnp.array([2**40]), "u": jnp.array([2**63], jnp.uint64),
        "c": jnp.array([1e-300 + 1j]), "n": jnp.float32(1), "big": big}}
assert tree["i"].dtype == jnp.int64
for kind in ("safetensors", "tensorstore", "exchange"):
    save_as(kind, pathlib.Path({str(path)!r}) / kind, tree)
""",
        devices=8,
        JAX_ENABLE_X64="1",
    )
    return path


class Test64Bit:
    @pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange.safetensors"])
    @pytest.mark.parametrize("arguments", [{}, {"mesh": None, "shardings": None}])
    def test_without_x64_wide_arrays_are_numpy_unchanged_with_a_warning(
        self, wide: Path, kind: str, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        if arguments:
            arguments = {"mesh": mesh_of(8), "partition_rules": [("big", P("a")), (".*", P())]}
        loaded = shardkeep.load(wide / kind, **arguments)
        assert_same(
            {k: loaded[k] for k in "fiuc"},
            {
                "f": np.array([1 + 1e-12]),
                "i": np.array([2**40]),
                "u": np.array([2**63], np.uint64),
                "c": np.array([1e-300 + 1j]),
            },
        )
        assert_same(loaded["big"], np.arange(1 << 18, dtype=np.float64) + 1e-12)
        assert loaded["big"].flags.writeable
        assert isinstance(loaded["n"], jax.Array)
        assert "jax_enable_x64" in caplog.text
        assert len([r for r in caplog.records if "x64" in r.getMessage()]) == 1

    def test_with_x64_they_are_jax_arrays(self, wide: Path) -> None:
        printed = run_python(
            f"""
loaded = shardkeep.load({str(wide / "safetensors")!r})
print(all(isinstance(x, jax.Array) for x in loaded.values()), loaded["i"].dtype, int(loaded["i"][0]) == 2**40)
""",
            JAX_ENABLE_X64="1",
        )
        assert printed == "True int64 True\n"

    @pytest.mark.parametrize("how", ["template", "dtype"])
    def test_asked_for_in_32_bits_they_are_jax_arrays(self, wide: Path, how: str) -> None:
        """What JAX can hold after the cast is on the device, where and as it was asked for."""
        sharding = NamedSharding(mesh_of(8), P("a"))
        if how == "template":
            loaded = shardkeep.load(wide / "safetensors", template={"big": _struct((1 << 18,), sharding=sharding)})
        else:
            loaded = shardkeep.load(wide / "safetensors", include="big", dtype="float32", shardings={"big": sharding})
        expected = (np.arange(1 << 18, dtype=np.float64) + 1e-12).astype(np.float32)
        assert isinstance(loaded["big"], jax.Array)
        assert loaded["big"].sharding == sharding
        assert bits(loaded["big"]) == bits(expected)


def _can_trace() -> bool:
    command = ["strace", "-o", "/dev/null", "true"]
    return shutil.which("strace") is not None and subprocess.run(command, check=False, timeout=20).returncode == 0


class _Counter:
    """How many bytes were read from which data files."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []

    @property
    def total(self) -> int:
        return sum(size for _, _, size in self.ranges)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Counter]:
    found = _Counter()
    real = LocalFile.read_into

    def read_into(self: Any, offset: int, buffer: Any) -> None:
        if not self.path.endswith("manifest.json"):
            found.ranges.append((self.path, offset, buffer.nbytes))
        real(self, offset, buffer)

    monkeypatch.setattr(LocalFile, "read_into", read_into)
    return found


class TestPartialReads:
    KINDS = pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange"])

    @KINDS
    def test_one_layer_reads_that_layer_only(self, kind: str, tmp_path: Path, counter: "_Counter") -> None:
        tree = {"layers": [{"w": pattern("uint8", (2 * MIB + i,), i)} for i in range(6)]}
        path = save_as(kind, tmp_path / "c", tree)
        loaded = shardkeep.load(path, include="layers/3/", mmap=False)
        assert_same(loaded["layers"][3], tree["layers"][3])
        assert 2 * MIB <= counter.total <= 2 * MIB + 64 * 1024  # an exchange file's header is read too

    @KINDS
    def test_a_template_reads_its_leaves_only(self, kind: str, tmp_path: Path, counter: "_Counter") -> None:
        tree = {"a": pattern("uint8", (3 * MIB,)), "b": pattern("uint8", (MIB,)), "c": pattern("uint8", (3 * MIB,))}
        path = save_as(kind, tmp_path / "c", tree)
        shardkeep.load(path, template={"b": tree["b"]}, mmap=False)
        assert MIB <= counter.total <= MIB + 64 * 1024

    @pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
    def test_one_prefix_reads_that_tree_only(self, kind: str, tmp_path: Path, counter: "_Counter") -> None:
        for number, prefix in enumerate(("model", "optimizer")):
            save_as(kind, tmp_path / "c", {"w": pattern("uint8", ((number + 1) * MIB,))}, prefix=prefix)
        shardkeep.load(tmp_path / "c", prefix="model", mmap=False)
        assert counter.total == MIB

    def test_nothing_is_read_for_plain_values(self, tmp_path: Path, counter: "_Counter") -> None:
        shardkeep.save(tmp_path / "c", {"w": pattern("uint8", (MIB,)), "step": 3})
        assert shardkeep.load(tmp_path / "c", include="step", mmap=False) == {"step": 3}
        assert counter.total == 0

    def test_inspect_reads_no_data(self, tmp_path: Path, counter: "_Counter") -> None:
        shardkeep.save(tmp_path / "c", {"w": pattern("uint8", (MIB,))})
        assert shardkeep.inspect(tmp_path / "c").leaves["w"].nbytes == MIB
        assert counter.total == 0

    @KINDS
    @pytest.mark.parametrize("saved_on", [1, 8])
    def test_one_row_shard_reads_its_blocks_only(
        self, kind: str, saved_on: int, tmp_path: Path, counter: _Counter
    ) -> None:
        """As one process of many would: 1/8 of the rows of a 64 MiB array."""
        host = pattern("uint8", (64, MIB))
        array = jax.device_put(host, NamedSharding(mesh_of(saved_on), P("a")))
        path = save_as(kind, tmp_path / "c", {"w": array})
        store, manifest = open_checkpoint(location(path))
        tree = manifest.tree()
        counter.ranges.clear()
        for verify in (True, False):
            region = Region((24, 0), (8, MIB))
            (leaf,) = tree.leaves
            destination = Destination(leaf, [region], True, [None])
            source = BlockReader(store, tree.files, tree.compression, verify=verify, mapped=False)
            with crew_of() as crew:
                read_into(source, {0: destination}, plan_read(0, leaf, [region]), 1 << 30, crew, lambda _: None)
            assert destination.arrays[0] is not None
            assert bits(destination.arrays[0]) == host[24:32].tobytes()
        assert counter.total == 2 * 8 * MIB

    def test_one_small_row_reads_one_block(self, tmp_path: Path, counter: "_Counter") -> None:
        host = pattern("uint8", (1024, 64 * 1024))
        shardkeep.save(tmp_path / "c", {"w": host})
        store, manifest = open_checkpoint(location(tmp_path / "c"))
        tree = manifest.tree()
        (leaf,) = tree.leaves
        region = Region((513, 7), (1, 100))
        destination = Destination(leaf, [region], True, [None])
        with crew_of() as crew:
            read_into(
                BlockReader(store, tree.files, mapped=False),
                {0: destination},
                plan_read(0, leaf, [region]),
                1 << 30,
                crew,
                lambda _: None,
            )
        assert bits(destination.arrays[0]) == host[513:514, 7:107].tobytes()
        assert counter.total == 4 * MIB

    def test_each_byte_is_read_once_however_many_devices_want_it(self, tmp_path: Path, counter: "_Counter") -> None:
        shardkeep.save(tmp_path / "c", {"w": jnp.zeros((1024, 2048))})
        for spec in (P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))):
            counter.ranges.clear()
            shardkeep.load(tmp_path / "c", mesh=mesh_of(2, 4), shardings=spec, mmap=False)
            assert counter.total == 8 * MIB

    @pytest.mark.skipif(not _can_trace(), reason="strace is not installed or not allowed")
    def test_the_system_sees_no_other_reads(self, tmp_path: Path) -> None:
        """Not only our own count: what the process asks of the kernel."""
        tree = {f"l{i}": pattern("uint8", (8 * MIB,), i) for i in range(4)}
        shardkeep.save(tmp_path / "c", tree)
        code = f"import shardkeep; shardkeep.load({str(tmp_path / 'c')!r}, include='l2', mmap=False)"
        command = ["strace", "-f", "-y", "-e", "trace=read,pread64,preadv,preadv2,mmap", "-o", str(tmp_path / "trace")]
        subprocess.run([*command, sys.executable, "-c", code], check=True, timeout=200, capture_output=True)
        lines = [x for x in (tmp_path / "trace").read_text(errors="replace").splitlines() if ".safetensors>" in x]
        assert lines
        assert all("mmap" not in line for line in lines)
        assert sum(int(line.rsplit("= ", 1)[1]) for line in lines if " = " in line) == 8 * MIB


_MEASURE = """
import gc, os
def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))
import threading, time
class Peak:
    def __enter__(self):
        gc.collect(); self.start = self.peak = anonymous(); self.on = True
        self.thread = threading.Thread(target=self.watch); self.thread.start(); return self
    def watch(self):
        while self.on:
            self.peak = max(self.peak, anonymous()); time.sleep(0.001)
    def __exit__(self, *_):
        self.on = False; self.thread.join(); self.peak = max(self.peak, anonymous())
    @property
    def grown(self): return self.peak - self.start
from jax.sharding import NamedSharding, PartitionSpec as P
"""


class TestMemory:
    def _load(self, path: Path, arguments: str) -> int:
        """How much anonymous memory a load takes at its peak, in MiB, with a budget of 32 MiB."""
        code = f"""
shardkeep.set_memory_budget({32 * MIB})
shardkeep.load({str(path)!r}, include="warm", mesh=mesh_of(8), shardings=P(None, "a"), mmap=False)
with Peak() as peak:
    tree = shardkeep.load({str(path)!r}, {arguments})
print(peak.grown >> 20)
"""
        return int(run_python(_MEASURE + code, devices=8))

    def test_reading_many_arrays_stays_within_the_budget_beside_the_result(self, tmp_path: Path) -> None:
        """Columns of arrays saved whole: nothing can be used as it lies, so everything passes through a buffer."""
        tree = {f"w{i}": np.ones((1024, 2048), np.float32) for i in range(32)}  # 256 MiB in pieces of 8
        tree = {"warm": jnp.ones((8, 8)), **{k: jnp.asarray(v) for k, v in tree.items()}}
        shardkeep.save(tmp_path / "c", tree)
        grown = self._load(tmp_path / "c", 'mesh=mesh_of(8), shardings=P(None, "a"), mmap=False')
        assert 240 <= grown <= 256 + 2 * 32 + 24

    def test_reading_one_large_array_stays_within_the_budget_beside_the_result(self, tmp_path: Path) -> None:
        """An array of one piece, larger than the budget, is not held twice."""
        shardkeep.save(tmp_path / "c", {"warm": jnp.ones((8, 8)), "w": jnp.ones((4096, 16384))})  # 256 MiB
        grown = self._load(tmp_path / "c", 'mesh=mesh_of(8), shardings=P(None, "a"), mmap=False')
        assert 240 <= grown <= 256 + 2 * 32 + 24

    def test_rows_need_no_memory_beside_the_result(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"warm": jnp.ones((8, 8)), "w": jnp.ones((4096, 16384))})
        grown = self._load(tmp_path / "c", 'mesh=mesh_of(8), shardings=P("a"), mmap=False')
        assert 240 <= grown <= 256 + 32 + 24

    def test_a_mapped_load_needs_almost_none(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"warm": jnp.ones((8, 8)), "w": jnp.ones((4096, 16384))})
        assert self._load(tmp_path / "c", "") <= 32

    def test_a_part_of_a_large_array_needs_the_memory_of_the_part(self, tmp_path: Path) -> None:
        tree = {"warm": jnp.ones((8, 8)), "a": jnp.ones((4096, 16384)), "b": jnp.ones((1024, 4096))}
        shardkeep.save(tmp_path / "c", tree)
        assert self._load(tmp_path / "c", 'include="^b$", mmap=False') <= 16 + 32


@pytest.mark.parametrize("mmap", ["auto", "always", None])
def test_mmap_is_true_or_false(saved: Path, mmap: Any) -> None:
    with pytest.raises(TypeError, match="mmap must be True or False"):
        shardkeep.load(saved, mmap=mmap)


def test_mapped_is_an_old_name_of_mmap(saved: Path) -> None:
    assert_same(shardkeep.load(saved, mapped=True), shardkeep.load(saved))
    with pytest.raises(TypeError, match="mmap must be True or False"):
        shardkeep.load(saved, mapped="auto")  # type: ignore[arg-type]


def test_a_mapped_array_outlives_the_checkpoint(tmp_path: Path) -> None:
    host = pattern("float32", (1024, 1024))
    shardkeep.save(tmp_path / "c", {"w": jnp.asarray(host)})
    loaded = shardkeep.load(tmp_path / "c")
    shardkeep.save(tmp_path / "c", {"w": jnp.zeros((1024, 1024))}, overwrite=True)
    assert bits(loaded["w"]) == host.tobytes()
    shardkeep.delete(tmp_path / "c")
    assert bits(loaded["w"]) == host.tobytes()


def test_a_mapped_array_can_be_donated_and_the_checkpoint_stays(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"w": jnp.ones((1024, 1024))})
    loaded = shardkeep.load(tmp_path / "c")
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    result = loaded["w"]
    for _ in range(3):
        result = step(result)
    assert float(result[0, 0]) == 4
    assert shardkeep.verify(tmp_path / "c").ok
    assert_same(shardkeep.load(tmp_path / "c"), {"w": jnp.ones((1024, 1024))})


@pytest.mark.parametrize("path", ["nothing", "nothing.safetensors", "empty", "nothing.safetensors.index.json"])
def test_nothing_there_is_file_not_found(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        shardkeep.load(tmp_path / path)


@pytest.mark.parametrize(
    "form", [str, lambda p: p, lambda p: f"file://{p}", lambda p: f"{p}/", lambda p: p / "manifest.json"]
)
def test_a_path_may_be_said_in_many_ways(saved: Path, form: Callable[[Path], Any]) -> None:
    assert shardkeep.load(form(saved), include="step") == {"step": 100}


def test_any_object_whose_text_is_a_url(saved: Path) -> None:
    class Place:
        def __str__(self) -> str:
            return f"file://{saved}"

    assert shardkeep.load(Place(), include="step") == {"step": 100}


def test_the_path_may_be_relative_or_begin_with_a_tilde(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    assert shardkeep.load("c", include="step") == {"step": 100}
    monkeypatch.setenv("HOME", str(saved.parent))
    assert shardkeep.load("~/c", include="step") == {"step": 100}


def _new_state() -> dict[str, jax.Array]:
    return {"w": jnp.zeros(3)}


def test_a_function_is_no_template(tmp_path: Path) -> None:
    """`Run.resume` takes a function that makes a new state. `load` says what to pass instead."""
    shardkeep.save(tmp_path / "a", _new_state())
    for call in (shardkeep.load, shardkeep.plan_load):
        with pytest.raises(
            TypeError, match=r"template must be a tree, not a function; pass jax.eval_shape\(_new_state\)"
        ):
            call(tmp_path / "a", template=_new_state)
    assert shardkeep.load(tmp_path / "a", template=jax.eval_shape(_new_state))["w"].shape == (3,)
    model = jax.tree_util.Partial(_new_state, w=jnp.zeros(3))  # can be called, and is a tree
    shardkeep.save(tmp_path / "b", model)
    assert shardkeep.load(tmp_path / "b", template=model).keywords["w"].shape == (3,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": (2, 4)}, r"mesh must be a jax.sharding.Mesh, not \(2, 4\); jax.make_mesh makes one"),
        ({"partition_rules": {".*": P()}}, r"partition_rules must be a list of pairs .* not \{'\.\*'"),
        ({"partition_rules": (".*", P())}, "partition_rules must be a list of pairs"),
        ({"partition_rules": ".*"}, "partition_rules must be a list of pairs"),
    ],
)
def test_arguments_of_another_kind_are_named(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "a", _new_state())
    for call in (shardkeep.load, shardkeep.plan_load, shardkeep.abstract):
        with pytest.raises(shardkeep.ShardingError, match=message):
            call(tmp_path / "a", **arguments)
