"""Plain values survive as typed JSON, in type and in every bit."""

import json
import struct
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkeep.errors import IntegrityError
from shardkeep.model.values import NotPlainError, decode, encode, is_plain
from support import assert_same


def _through_json(value: object) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


def _float(bits: int) -> float:
    return struct.unpack(">d", struct.pack(">Q", bits))[0]


floats = st.integers(0, 2**64 - 1).map(_float) | st.floats()
# Every code point, lone and paired surrogates included.
texts = st.text(st.integers(0, 0x10FFFF).map(chr), max_size=20)
numpy_scalars = st.sampled_from(
    [
        np.int8(-1),
        np.uint64(2**64 - 1),
        np.float16(-0.0),
        np.float32("nan"),
        np.frombuffer(b"\x01\x00\xa0\x7f", np.float32)[0],
        np.float64(1e308),
        np.complex64(1 - 2j),
        np.complex128(complex(0.0, -0.0)),
        np.bool_(True),
        np.datetime64("2026-11-16T01:02:03", "s"),
        np.datetime64("NaT", "ns"),
        np.timedelta64(-7, "D"),
        ml_dtypes.bfloat16(3.0),
        ml_dtypes.float8_e4m3fn(0.5),
        ml_dtypes.int4(-8),
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | floats
    | st.builds(complex, floats, floats)
    | texts
    | st.binary(max_size=30)
    | numpy_scalars
)
keys = st.recursive(st.none() | st.booleans() | st.integers() | texts | st.binary(max_size=5), st.tuples, max_leaves=4)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=8,
)


@given(plain)
@example("\ud83d\ude00")
@example({"\ud83d\ude00": 1, "😀": 2})
@example({1: 1, "1": 2, b"1": 3, (1,): 4, None: 5})
def test_what_is_decoded_is_what_was_encoded(value: Any) -> None:
    assert_same(_through_json(value), value)


@pytest.mark.parametrize("text", ["\ud83d\ude00", "\udc80", "a\ud800", "😀", "\x00", "‮", "é", "\\ud83d"])
def test_strings_keep_every_code_point_surrogates_too(text: str) -> None:
    assert_same(_through_json(text), text)


def test_integers_of_any_size_survive() -> None:
    for value in (0, -1, 2**63, -(2**63) - 1, 10**5000, -(10**5000)):
        assert_same(_through_json(value), value)


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF0000000000001, 0x7FFFDEADBEEF1234])
def test_the_bits_of_a_nan_survive(bits: int) -> None:
    assert_same(_through_json(_float(bits)), _float(bits))
    assert_same(_through_json(complex(_float(bits), -0.0)), complex(_float(bits), -0.0))


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("-inf"), 5e-324, 1.7976931348623157e308, 0.1])
def test_floats_survive_with_their_sign(value: float) -> None:
    assert_same(_through_json(value), value)


def test_booleans_and_integers_are_kept_apart() -> None:
    assert _through_json([True, 1, 1.0, False, 0]) == [True, 1, 1.0, False, 0]
    assert [type(v) for v in _through_json([True, 1, 1.0, False, 0])] == [bool, int, float, bool, int]


@pytest.mark.parametrize("value", [object(), {1, 2}, frozenset(), range(3), len, np.zeros(2)])
def test_a_value_json_cannot_carry_is_refused(value: object) -> None:
    with pytest.raises(NotPlainError, match=r"."):
        encode(value)


@pytest.mark.parametrize("value", [np.str_("a"), np.bytes_(b"a"), np.void(b"ab"), np.longdouble(1)])
def test_numpy_scalars_without_a_stored_form_are_not_plain(value: object) -> None:
    with pytest.raises(NotPlainError, match=r"."):
        encode(value)


def test_subclasses_are_not_taken_for_their_base() -> None:
    class Text(str):
        pass

    class Number(int):
        pass

    for value in (Text("a"), Number(1)):
        assert not is_plain(value)
        with pytest.raises(NotPlainError, match=type(value).__name__):
            encode(value)


@pytest.mark.parametrize("value", [1, 1.0, True, 1j, "a", b"a", np.float32(1)])
def test_scalars_are_plain_leaves(value: object) -> None:
    assert is_plain(value)


@pytest.mark.parametrize("value", [None, [1], (1,), {"a": 1}, np.zeros(1)])
def test_containers_and_arrays_are_no_plain_leaves(value: object) -> None:
    assert not is_plain(value)


@pytest.mark.parametrize(
    "data",
    [
        1,
        1.5,
        {},
        {"int": "0x1", "float": "1"},
        {"int": 5},
        {"int": "zz"},
        {"float": 1.0},
        {"float": "nan:zz"},
        {"float": "nan:00"},
        {"float": "one"},
        {"complex": ["1"]},
        {"complex": None},
        {"bytes": "?"},
        {"bytes": "é"},
        {"bytes": 3},
        {"tuple": None},
        {"tuple": [1]},
        {"dict": [[["list"], None]]},
        {"dict": [1]},
        {"dict": 1},
        {"numpy": ["float32", "00"]},
        {"numpy": ["object", "00"]},
        {"numpy": ["float32"]},
        {"numpy": [3, "00"]},
        {"numpy": ["datetime64[bogus]", "00" * 8]},
        {"unknown": 1},
    ],
)
def test_what_encode_never_writes_is_an_integrity_error(data: Any) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        decode(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["int", "float", "complex", "bytes", "tuple", "dict", "numpy", "x"]), inner, max_size=2
            )
        ),
        max_leaves=6,
    )
)
def test_any_json_decodes_or_is_an_integrity_error(data: Any) -> None:
    with suppress(IntegrityError):
        decode(data)
