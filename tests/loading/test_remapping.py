"""Leaves that the checkpoint or the template does not have, and templates that a changed tree is matched with."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardkeep
from shardkeep import MissingLeafError, RemapError, TemplateMismatchError, remap
from support import Dense, assert_same

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def on(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*spec))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    layers = [{"w": np.full((8, 4), i, np.float32), "b": np.full(4, i, np.float16)} for i in range(4)]
    embed = jnp.arange(24.0).reshape(6, 4)
    shardkeep.save(tmp_path / "c", {"layers": layers, "embed": embed, "step": 5, "old": {"x": np.zeros(2)}})
    return tmp_path / "c"


STACK = remap.stack("layers/{i}/(.*)", r"layers/\1")


class TestTemplates:
    def test_a_template_says_structure_sharding_and_dtype_of_the_changed_tree(self, saved: Path) -> None:
        template = {
            "layers": Dense(
                jax.ShapeDtypeStruct((4, 8, 4), jnp.bfloat16, sharding=on("a", "b")),
                jax.ShapeDtypeStruct((4, 4), jnp.float16, sharding=on(None, "a")),
            ),
            "step": jnp.zeros((), jnp.int32),
        }
        rules = [STACK, remap.rename("layers/w", "layers/kernel"), remap.rename("layers/b", "layers/bias")]
        loaded = shardkeep.load(saved, template=template, remap=rules)
        assert isinstance(loaded["layers"], Dense)
        kernel = loaded["layers"].kernel
        assert kernel.sharding == on("a", "b")
        assert kernel.dtype == jnp.bfloat16
        expected = np.broadcast_to(np.arange(4)[:, None, None], (4, 8, 4))
        assert np.array_equal(np.asarray(kernel, np.float32), expected)
        assert int(loaded["step"]) == 5

    def test_include_and_rules_of_sharding_are_about_the_new_keys(self, saved: Path) -> None:
        specs = [("layers/w", PartitionSpec(None, "a"))]
        loaded = shardkeep.load(saved, remap=STACK, include="layers/w|embed", mesh=MESH, partition_rules=specs)
        assert set(loaded) == {"layers", "embed"}
        assert set(loaded["layers"]) == {"w"}
        assert loaded["layers"]["w"].sharding == on(None, "a")

    def test_numpy_arrays_stay_numpy_arrays_that_can_be_written_to(self, saved: Path) -> None:
        loaded = shardkeep.load(saved, remap=[STACK, remap.copy("old/x", "new")])
        for array in (loaded["layers"]["w"], loaded["old"]["x"], loaded["new"]):
            assert isinstance(array, np.ndarray)
            array += 1
        assert loaded["new"] is not loaded["old"]["x"]

    def test_byte_order_and_saved_shardings_follow(self, tmp_path: Path) -> None:
        array = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), on("a", "b"))
        shardkeep.save(tmp_path / "c", {"x": np.arange(6, dtype=">i4").reshape(2, 3), "y": array})
        loaded = shardkeep.load(tmp_path / "c", remap=[remap.transpose(".", (1, 0))], mesh=MESH)
        assert_same(loaded["x"], np.arange(6, dtype=">i4").reshape(2, 3).T.copy())
        assert loaded["y"].sharding == on("b", "a")

    def test_values_that_were_saved_as_none_are_the_templates_own_under_new_names_too(self, tmp_path: Path) -> None:
        """As `eqx.filter(model, eqx.is_array)` leaves them."""
        shardkeep.save(tmp_path / "c", {"fc": {"w": np.ones(2), "act": {"p": None}}, "drop": {"p": None}})
        template = {"dense": {"w": np.zeros(2), "act": {"p": 0.5}}, "drop": {"p": 0.1}}
        loaded = shardkeep.load(tmp_path / "c", template=template, remap=remap.rename("fc/(.*)", r"dense/\1"))
        assert_same(loaded, {"dense": {"w": np.ones(2), "act": {"p": 0.5}}, "drop": {"p": 0.1}})

    def test_what_does_not_fit_is_said_for_the_changed_tree(self, saved: Path) -> None:
        template = {"layers": {"w": jax.ShapeDtypeStruct((8, 4, 4), jnp.float32)}}
        with pytest.raises(TemplateMismatchError, match=r"saved \(4, 8, 4\), the template has \(8, 4, 4\)") as told:
            shardkeep.load(saved, template=template, remap=STACK)
        assert "try remap=[remap.transpose(" in str(told.value)


class TestMissing:
    def test_the_templates_own_values_are_kept_and_logged(self, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
        adapter = jax.device_put(jnp.ones((4, 2)), on("a"))
        template = {"embed": jnp.zeros((6, 4)), "adapter": {"a": adapter, "scale": 0.5}}
        loaded = shardkeep.load(saved, template=template, missing="keep")
        assert loaded["adapter"]["a"] is adapter
        assert loaded["adapter"]["scale"] == 0.5
        assert np.array_equal(loaded["embed"], np.arange(24.0).reshape(6, 4))
        (record,) = [r for r in caplog.records if "not from the checkpoint" in r.message]
        assert record.levelno == logging.WARNING
        assert "2 leaves (32 bytes) are taken from the template" in record.message
        assert "'adapter/a', 'adapter/scale'" in record.message

    def test_a_function_makes_them_where_the_template_wants_them(self, saved: Path) -> None:
        place = on("a", "b")
        template = {
            "embed": jnp.zeros((6, 4)),
            "new": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=place),
            "host": np.zeros(3, np.float64),
            "key": jax.random.key(0),
        }
        asked: dict[str, Any] = {}

        def make(key: str, like: Any) -> Any:
            asked[key] = like
            return jax.random.key(7) if key == "key" else np.full(like.shape, 2, np.float32)

        loaded = shardkeep.load(saved, template=template, missing=make)
        assert set(asked) == {"new", "host", "key"}
        assert asked["new"].shape == (8, 4)
        assert_same(loaded["new"], jax.device_put(jnp.full((8, 4), 2, jnp.bfloat16), place))
        assert loaded["new"].sharding == place
        assert_same(loaded["host"], np.full(3, 2, np.float64))
        assert loaded["key"] == jax.random.key(7)

    def test_shardings_of_the_call_are_for_what_is_made_too(self, saved: Path) -> None:
        template = {"new": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
        loaded = shardkeep.load(
            saved, template=template, missing=lambda _, like: np.ones(like.shape), shardings={"new": on("a")}
        )
        assert loaded["new"].sharding == on("a")
        assert loaded["new"].dtype == jnp.float32

    @pytest.mark.parametrize("made", [np.zeros(3), np.zeros((8, 4), np.int32), "text"])
    def test_a_function_that_makes_something_else_is_an_error(self, made: Any, saved: Path) -> None:
        template = {"new": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
        with pytest.raises(
            TemplateMismatchError, match=r"the function returned .* for 'new', but the template has float32"
        ):
            shardkeep.load(saved, template=template, missing=lambda *_: made)

    def test_shapes_have_no_values_to_keep(self, saved: Path) -> None:
        template = {"new": jax.ShapeDtypeStruct((8, 4), jnp.float32), "embed": jnp.zeros((6, 4))}
        with pytest.raises(MissingLeafError, match=r"no values to keep, for 1 leaf: 'new'. Pass a template with"):
            shardkeep.load(saved, template=template, missing="keep")

    def test_by_default_they_are_an_error(self, saved: Path) -> None:
        with pytest.raises(MissingLeafError, match="Missing array for key 'new'"):
            shardkeep.load(saved, template={"new": jnp.zeros(3)})

    def test_other_values_of_the_argument_are_refused(self, saved: Path) -> None:
        with pytest.raises(ValueError, match='missing must be "error", "keep" or a function, not None'):
            shardkeep.load(saved, missing=None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match='extra must be "ignore" or "error"'):
            shardkeep.load(saved, extra="keep")  # type: ignore[arg-type]


class TestExtra:
    def test_leaves_that_the_template_does_not_have_are_refused_if_asked(self, saved: Path) -> None:
        template = {"embed": jnp.zeros((6, 4)), "step": 0}
        with pytest.raises(
            TemplateMismatchError, match="c: 9 leaves of the checkpoint are not in the template"
        ) as told:
            shardkeep.load(saved, template=template, extra="error")
        assert told.value.problems[0] == "Extra leaf 'layers/0/w'"
        assert shardkeep.load(saved, template=template)["step"] == 5

    def test_what_is_dropped_or_left_out_on_purpose_is_not_extra(self, saved: Path) -> None:
        template = {"embed": jnp.zeros((6, 4)), "step": 0, "old": ...}
        loaded = shardkeep.load(saved, template=template, extra="error", remap=remap.drop("layers/.*"))
        assert loaded["old"] is ...


class TestResizing:
    def test_the_size_is_that_of_the_template(self, saved: Path) -> None:
        template = {"embed": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=on("a", "b"))}
        loaded = shardkeep.load(saved, template=template, remap=remap.resize("embed", fill=-1))["embed"]
        expected = np.full((8, 4), -1, np.float32)
        expected[:6] = np.arange(24.0).reshape(6, 4)
        assert np.array_equal(loaded, expected)
        smaller = {"embed": jnp.zeros((2, 4))}
        assert np.array_equal(
            shardkeep.load(saved, template=smaller, remap=remap.resize("embed"))["embed"], expected[:2]
        )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
    def test_new_elements_keep_the_templates_values_exactly(self, dtype: str, saved: Path) -> None:
        """Whatever dtype the checkpoint has: a value of the template is not rounded to it."""
        with jax.enable_x64(True):
            third = jnp.full((8, 4), 1 / 3, dtype)
            like = jax.device_put(third, on("a", "b"))
            rules = [remap.resize("embed", fill="keep"), remap.rename("embed", "e/x")]
            loaded = shardkeep.load(saved, template={"e": {"x": like}}, remap=rules)["e"]["x"]
            assert loaded.dtype == like.dtype
            assert loaded.sharding == like.sharding
            assert_same(np.asarray(loaded[6:]), np.asarray(third[6:]))
            assert np.array_equal(loaded[:6], jnp.arange(24.0).reshape(6, 4))

    def test_dtypes_without_a_common_one_are_refused(self, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"x": jnp.zeros(3, jnp.float16)})
        with pytest.raises(TemplateMismatchError, match="neither dtype can represent all values of the other"):
            shardkeep.load(
                tmp_path / "c", template={"x": jnp.zeros(4, jnp.bfloat16)}, remap=remap.resize("x", fill="keep")
            )

    @pytest.mark.parametrize(
        ("saved", "dtype"),
        [("float8_e4m3fn", "bfloat16"), ("bfloat16", "float8_e5m2"), ("int4", "int8"), ("int8", "int4")],
    )
    def test_small_dtypes_keep_values_as_well(self, saved: str, dtype: str, tmp_path: Path) -> None:
        shardkeep.save(tmp_path / "c", {"x": jnp.asarray([1, -2, 3], saved)})
        template = {"x": jnp.asarray([7, 7, 7, -4, 7], dtype)}
        loaded = shardkeep.load(tmp_path / "c", template=template, remap=remap.resize("x", fill="keep"))["x"]
        assert_same(np.asarray(loaded), np.asarray(jnp.asarray([1, -2, 3, -4, 7], dtype)))

    def test_values_that_are_kept_move_with_the_rules_after_it(self, saved: Path) -> None:
        """What the template has at the place where they end up is kept."""
        like = np.arange(100.0, 132.0, dtype=np.float32).reshape(4, 8)
        rules = [remap.resize("embed", 0, "keep", 8), remap.transpose("embed", (1, 0))]
        loaded = shardkeep.load(saved, template={"embed": like}, remap=rules)["embed"]
        assert np.array_equal(loaded[:, 6:], like[:, 6:])
        assert np.array_equal(loaded[:, :6], np.arange(24.0).reshape(6, 4).T)

    def test_shapes_have_no_values_to_fill_with(self, saved: Path) -> None:
        template = {"embed": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
        with pytest.raises(MissingLeafError, match="no values to keep, for 1 leaf: 'embed'"):
            shardkeep.load(saved, template=template, remap=remap.resize("embed", fill="keep"))
        loaded = shardkeep.load(
            saved,
            template=template,
            remap=remap.resize("embed", fill="keep"),
            missing=lambda _, like: np.full(like.shape, 3.0, np.float32),
        )["embed"]
        assert np.array_equal(loaded[6:], np.full((2, 4), 3.0))


class TestFunctions:
    def test_whole_arrays_go_through_a_function_one_at_a_time(self, saved: Path) -> None:
        seen: list[Any] = []

        def sort(array: np.ndarray) -> np.ndarray:
            seen.append(array.shape)
            return np.sort(array, axis=0)[::-1]

        rules = [STACK, remap.apply("layers/.*|embed", sort), remap.transpose("layers/w", (2, 0, 1))]
        loaded = shardkeep.load(saved, remap=rules, shardings={"layers/w": on("a", "b")})
        assert sorted(seen) == [(4, 4), (4, 8, 4), (6, 4)]
        assert np.array_equal(loaded["layers"]["w"][0, :, 0], [3, 2, 1, 0])
        assert np.array_equal(loaded["embed"], np.arange(24.0).reshape(6, 4)[::-1])

    def test_a_function_that_changes_the_form_must_say_so(self, saved: Path) -> None:
        with pytest.raises(
            RemapError,
            match=r"leaf '.*': the function returned float32\[4\] for float32\[6, 4\], but float32\[6, 4\] was",
        ):
            shardkeep.load(saved, remap=remap.apply("embed", lambda a: a.sum(0)))
        rule = remap.apply("embed", lambda a: a.sum(0).astype(np.float16), shape=(4,), dtype="fp16")
        assert_same(
            np.asarray(shardkeep.load(saved, remap=rule)["embed"]), np.arange(24.0).reshape(6, 4).sum(0).astype("f2")
        )

    def test_functions_of_jax_and_changes_of_dtype_work_on_elements(self, saved: Path) -> None:
        rules = [
            remap.apply("embed", jnp.square, elementwise=True),
            remap.apply("layers/./w", lambda a: a > 1, elementwise=True),
        ]
        loaded = shardkeep.load(saved, remap=[*rules, STACK])
        assert np.array_equal(loaded["embed"], np.arange(24.0).reshape(6, 4) ** 2)
        assert loaded["layers"]["w"].dtype == bool
        assert loaded["layers"]["w"].sum() == 2 * 32

    def test_an_error_in_a_function_is_raised(self, saved: Path) -> None:
        with pytest.raises(ZeroDivisionError, match="division"):
            shardkeep.load(saved, remap=remap.apply("embed", lambda a: a * (1 // 0)))
