"""The scanner of MessagePack finds what Flax's own decoder does; the rest is in test_flax.py."""

from typing import Any

import flax.serialization
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreign.test_zips import Memory
from shardkeep.foreign.msgpack import FoundArray, begins_a_dict, scan
from shardkeep.foreign.windows import FileWindow
from support import assert_same

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.complex_numbers(allow_nan=False)
    | st.builds(lambda n: np.arange(n, dtype=np.int16), st.integers(0, 400))
    | st.builds(np.float32, st.floats(width=32, allow_nan=False)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=30,
)


def _whole(found: Any, data: bytes) -> Any:
    """The value with the arrays in it."""
    if isinstance(found, FoundArray):
        raw = b"".join(data[offset : offset + length] for offset, length in found.runs)
        return np.frombuffer(raw, found.spec.dtype).reshape(found.spec.shape)
    if isinstance(found, dict):
        return {key: _whole(value, data) for key, value in found.items()}
    return [_whole(value, data) for value in found] if isinstance(found, list) else found


@settings(max_examples=40)
@given(VALUES, st.sampled_from([10, 1 << 30]))
def test_everything_is_found_that_flax_finds(value: Any, largest: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flax.serialization, "MAX_CHUNK_SIZE", largest)
        data = flax.serialization.msgpack_serialize(value)
    found, end = scan(FileWindow(Memory(data)))
    assert end == len(data)
    assert_same(_whole(found, data), flax.serialization.msgpack_restore(data))


@settings(max_examples=40)
@given(VALUES, st.data())
def test_a_file_that_is_cut_anywhere_is_refused(value: Any, data: st.DataObject) -> None:
    packed = flax.serialization.msgpack_serialize({"x": value})
    end = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ValueError, match=r"."):
        scan(FileWindow(Memory(packed[:end])))


def test_a_value_inside_is_found_by_its_place() -> None:
    packed = flax.serialization.msgpack_serialize({"x": {"w": np.arange(3)}})
    whole, _ = scan(FileWindow(Memory(packed)))
    again, _ = scan(FileWindow(Memory(packed)), whole["x"]["w"].start)
    assert again == whole["x"]["w"]


def test_many_values_and_long_names_are_refused_before_they_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.foreign.msgpack._MOST_VALUES", 1000)
    with pytest.raises(ValueError, match="more than 1,000 values"):
        scan(FileWindow(Memory(b"\xdd\x00\x00\x10\x00" + bytes(0x1000))))
    monkeypatch.setattr("shardkeep.foreign.msgpack._MOST_NAMED", 10_000)
    with pytest.raises(ValueError, match="more than 10,000 characters"):
        scan(FileWindow(Memory(flax.serialization.msgpack_serialize({"x" * 5000: [1, 2, 3]}))))


def test_the_start_of_a_dict_with_names_is_known() -> None:
    for value in ({"a": 1}, {"a" * 300: 1}, {str(i): 1 for i in range(70_000)}, {}):
        assert begins_a_dict(flax.serialization.msgpack_serialize(value)[:16])
    for start in (b"{", b"\x89PNG", b"\x80\x04", b"PK\x03\x04", b"\x93NUMPY", b"\x81", b"\x81\x01"):
        assert not begins_a_dict(start)
