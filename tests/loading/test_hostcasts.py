"""Casts in host memory: the bits that JAX computes on a CPU, and fewer bytes to transfer."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from device.runner import run_on_device
from dtypes import dtype_of
from shardkeep.loading import hostcasts
from shardkeep.loading.hostcasts import cast_before, cast_destinations, sent_to_devices
from shardkeep.loading.matching import Wanted
from shardkeep.loading.plan import Destination
from shardkeep.loading.request import LoadRequest, Policy
from shardkeep.loading.shardings import Place
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import UNSHARDED, PrngKeys, StoredArray
from support import bits, crew_of

ONE = SingleDeviceSharding(jax.devices()[0])
EXACT = sorted(hostcasts._EXACT)


def leaf_of(dtype: str, shape: tuple[int, ...] = (4,), origin: Any = UNSHARDED) -> StoredArray:
    return StoredArray(("w",), ArraySpec(shape, dtype_of(dtype)), (), origin)


def cast_here(array: np.ndarray, dtype: str) -> np.ndarray:
    destination = Destination(
        leaf_of(array.dtype.name, array.shape), [Region.whole(array.shape)], False, [array], dtype_of(dtype)
    )
    with crew_of() as crew:
        cast_destinations([destination], crew)
    assert destination.dtype == destination.whole.dtype == dtype_of(dtype)
    return destination.whole


def many_values(dtype: str) -> np.ndarray:
    """Every value of 16 bits. Of 32: all signs and exponents with mantissas at and around every place of rounding."""
    if dtype_of(dtype).itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype))
    tops = np.arange(1 << 9, dtype=np.uint32) << 23
    ones = [(1 << i) - 1 for i in range(24)] + [1 << i for i in range(23)] + [(1 << i) + 1 for i in range(1, 23)]
    ones += [(3 << i) + d for i in range(21) for d in (-1, 0, 1)] + [
        (5 << i) + d for i in range(20) for d in (-1, 0, 1)
    ]
    ones += np.random.default_rng(0).integers(0, 1 << 23, 2000).tolist()
    low = np.array(sorted({n & 0x7FFFFF for n in ones}), np.uint32)
    return (tops[:, None] | low[None, :]).reshape(-1).view(np.float32)


@pytest.mark.parametrize(("source", "target"), EXACT)
def test_floats_become_what_jax_makes_of_them_on_a_cpu(source: str, target: str) -> None:
    """Denormals, infinities, overflow, ties and the payloads of NaNs included."""
    values = many_values(source)
    expected = np.asarray(jnp.asarray(values).astype(target))
    found = cast_here(values, target)
    assert bits(found) == bits(expected)


def test_large_arrays_are_cast_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcasts, "_STEP", 1000)
    values = many_values("float32")[:12345].reshape(5, -1)
    assert bits(cast_here(values, "float16")) == bits(jnp.asarray(values).astype("float16"))


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5)])
def test_a_cast_keeps_the_shape(shape: tuple[int, ...]) -> None:
    assert cast_here(np.ones(shape, np.float32), "bfloat16").shape == shape


def test_integers_must_fit() -> None:
    """The smallest and the largest that do are kept; the message has the leaf and its range."""
    assert cast_here(np.array([-128, 127], np.int32), "int8").tolist() == [-128, 127]
    assert cast_here(np.array([-8, 7], np.int8), "int4").astype(int).tolist() == [-8, 7]
    assert cast_here(np.array([0, 2**31 - 1], np.uint32), "int32").tolist() == [0, 2**31 - 1]
    with pytest.raises(ValueError, match="leaf 'w' holds -129 to 127, which does not fit int8"):
        cast_here(np.array([-129, 127], np.int32), "int8")
    with pytest.raises(ValueError, match="leaf 'w' holds -1 to 0, which does not fit uint32"):
        cast_here(np.array([-1, 0], np.int32), "uint32")


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float8_e4m3fn", "float8_e4m3fn"),
        ("bfloat16", "float32", None),  # larger: fewer bytes go to the device as they are
        ("float16", "bfloat16", None),
        ("int32", "int8", "int8"),
        ("int8", "int32", None),
        ("int32", "uint32", "uint32"),
        ("float64", "float32", "float32"),  # JAX cannot hold the one, but the other
        ("float32", "float64", None),
        ("int64", "uint64", None),
        ("float32", "int32", None),  # another kind is not cast at all
        ("float32", "float32", None),
    ],
)
def test_casts_that_make_arrays_smaller_come_before_the_transfer(
    source: str, target: str, expected: str | None
) -> None:
    w = Wanted(leaf_of(source), Place(ONE), dtype=dtype_of(target))
    found = cast_before(w, LoadRequest())
    assert found == (None if expected is None else dtype_of(expected))


def test_functions_and_callbacks_see_arrays_as_they_were_saved() -> None:
    leaf, dtype = leaf_of("float32"), dtype_of("bfloat16")
    assert cast_before(Wanted(leaf, Place(ONE, lambda x: x), dtype=dtype), LoadRequest()) is None
    assert cast_before(Wanted(leaf, Place(ONE), dtype=dtype), LoadRequest(policy=Policy(treat=lambda x, *_: x))) is None
    assert (
        cast_before(
            Wanted(leaf_of("uint32", (2,), PrngKeys("fry")), Place(ONE), dtype=np.dtype("uint8")), LoadRequest()
        )
        is None
    )


def test_nothing_goes_through_the_pipeline_on_cpu_devices() -> None:
    assert not sent_to_devices([Wanted(leaf_of("float32"), Place(ONE))], LoadRequest())
    assert not sent_to_devices([Wanted(leaf_of("float32"))], LoadRequest())


PROGRAM = """
import sys
import jax, numpy as np, shardkeep
from jax.sharding import NamedSharding, PartitionSpec as P
from device.loads import *
from support import bits, pattern

root = sys.argv[1]
cpu = jax.devices("cpu")[0]
host = {"f": pattern("float32", (64, 256)), "i": np.arange(-64, 64, dtype=np.int32).reshape(8, 16)}
host["wide"] = pattern("float64", (64, 256))
shardkeep.save(root + "/x", jax.device_put({"f": host["f"], "i": host["i"]}, cpu) | {"wide": host["wide"]})
half = pattern("bfloat16", (64, 256))
shardkeep.save(root + "/half", {"w": jax.device_put(half, cpu)})

def attempt(call):
    settle()
    try:
        call()
        return "", sum(arrived())
    except Exception as error:
        return f"{type(error).__name__}: {error}", sum(arrived())

template = {
    "f": jax.ShapeDtypeStruct((64, 256), "bfloat16", sharding=sharding_of("sharded")),
    "i": jax.ShapeDtypeStruct((8, 16), "int8", sharding=sharding_of("replicated")),
    "wide": jax.ShapeDtypeStruct((64, 256), "float32", sharding=sharding_of("single")),
}
settle()
loaded = shardkeep.load(root + "/x", template=template)
sent = sum(arrived())
with jax.default_device(cpu):
    expected = {"f": jax.numpy.asarray(host["f"]).astype("bfloat16"), "i": host["i"].astype("int8")}
    with np.errstate(all="ignore"):
        expected["wide"] = host["wide"].astype("float32")
right = {name: bits(loaded[name]) == bits(expected[name]) for name in expected}
settle()
shardkeep.load(root + "/half")  # the first time, one element is sent to learn whether JAX can hold bfloat16
settle()
both = shardkeep.load(root + "/x", include="^[fi]$", dtype="bfloat16", shardings=sharding_of("sharded"))
say(
    sent=sent, right=right, asked=[sum(arrived()), bits(both["f"]) == bits(expected["f"]), str(both["i"].dtype)],
    larger=attempt(lambda: shardkeep.load(root + "/half", dtype="float32")),
    unfit=attempt(lambda: shardkeep.load(root + "/x", include="i", dtype="int4")),
)
"""


def test_fewer_bytes_go_to_devices(tmp_path: Path) -> None:
    """A cast to a larger dtype comes after the transfer, on the device (the simulated one cannot compute)."""
    said = run_on_device(PROGRAM, str(tmp_path))
    assert said["right"] == {"f": True, "i": True, "wide": True}
    assert said["sent"] == 64 * 256 * 2 + 4 * 128 + 64 * 256 * 4
    assert said["asked"] == [64 * 256 * 2 + 128 * 4, True, "int32"]
    message, sent = said["larger"]
    assert "does not implement" in message
    assert sent == 64 * 256 * 2
    message, sent = said["unfit"]
    assert message == "ValueError: leaf 'i' holds -64 to 63, which does not fit int4"
    assert sent <= 1, "nothing but an element to learn whether JAX can hold int4"
