"""What the decoder of torch's pickles takes for a tensor, and that everything else stays inert."""

import numpy as np
import pytest

import shardkeep
from foreign.torchfiles import Call, Global, Pickle, StorageId, Strided
from shardkeep.foreign.torchpickles import (
    Entries,
    StandIn,
    Storage,
    Tensor,
    as_counts,
    decode_torch,
    dtype_named,
    nbytes_of,
    tensor_of,
)

V2, V3 = (Global("torch._utils", f"_rebuild_tensor_v{n}") for n in (2, 3))
FLOATS = StorageId(Global("torch", "FloatStorage"), "0", 6)
BYTES = StorageId(Global("torch.storage", "UntypedStorage"), "0", 6)


def decoded(value: object) -> object:
    return decode_torch(Pickle().dumps(value), "x.pt")


def tensor(value: object) -> Tensor | None:
    return tensor_of(decoded(value), "x.pt")


def test_a_tensor_says_which_elements_it_has() -> None:
    found = tensor(Strided(np.arange(6, dtype=np.float32), 1, (2, 2), (3, 1)))
    assert found is not None
    assert (found.storage.key, found.storage.type_name, found.storage.count) == ("0", "FloatStorage", 6)
    assert (found.dtype, found.offset, found.shape, found.strides) == (np.dtype("float32"), 1, (2, 2), (3, 1))
    assert not found.is_contiguous
    assert nbytes_of(found.storage) == 24


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((2, 3), (3, 1), True),
        ((2, 1, 3), (3, 99, 1), True),
        ((0, 3), (9, 9), True),
        ((), (), True),
        ((2, 3), (1, 2), False),
    ],
)
def test_contiguous_are_elements_one_after_the_other(
    shape: tuple[int, ...], strides: tuple[int, ...], contiguous: bool
) -> None:
    found = tensor(Strided(np.arange(999.0), 0, shape, strides))
    assert found is not None
    assert found.is_contiguous is contiguous


def test_parameters_and_subclasses_are_the_tensors_in_them() -> None:
    inner = Call(V2, (FLOATS, 0, (6,), (1,), False, 0))
    wrapped = Call(Global("torch._utils", "_rebuild_parameter"), (inner, True, 0))
    typed = Call(Global("torch._tensor", "_rebuild_from_type_v2"), (V2, Global("x", "T"), inner.args, {}))
    for value in (inner, wrapped, typed):
        found = tensor(value)
        assert found is not None
        assert found.shape == (6,)
    assert (
        tensor(Call(Global("torch._tensor", "_rebuild_from_type_v2"), (Global("os", "system"), 1, ("ls",), 2))) is None
    )
    assert tensor({"a": 1}) is None


def test_a_dtype_that_no_array_can_have_is_kept_as_a_name() -> None:
    found = tensor(Call(V3, (BYTES, 0, (3,), (1,), False, 0, Global("torch", "complex32"))))
    assert found is not None
    assert (found.dtype, found.type_name) == (None, "complex32")
    assert dtype_named("float8_e5m2") is not None
    assert dtype_named("object") is None


@pytest.mark.parametrize(
    "value",
    [
        Call(V2, ()),
        Call(V2, (1, 0, (6,), (1,), False, 0)),
        Call(V2, (BYTES, 0, (6,), (1,), False, 0)),
        Call(V2, (FLOATS, 0, 6, (1,), False, 0)),
        Call(V2, (FLOATS, True, (6,), (1,), False, 0)),
        Call(V2, (FLOATS, 0, (1,) * 65, (1,) * 65, False, 0)),
        Call(V3, (BYTES, 0, (6,), (1,), False, 0)),
        Call(Global("torch._utils", "_rebuild_parameter"), ()),
    ],
)
def test_a_tensor_that_is_described_otherwise_is_damage(value: object) -> None:
    with pytest.raises(shardkeep.IntegrityError, match="a tensor is not described as torch does"):
        tensor(value)


@pytest.mark.parametrize(
    "document",
    [
        b"\x80\x02K\x01Q.",  # a persistent id that is a number
        b"\x80\x02(X\x01\x00\x00\x00xtQ.",
        b"\x80\x02ccollections\nOrderedDict\n](K\x01K\x02e\x85R.",  # with the items of Python 2
        b"\x80\x02c_codecs\nencode\nK\x01K\x02\x86R.",
        b"\x80\x02c_codecs\nencode\n}b.",
        b"\x80\x02}]K\x01s.",  # a list as a key
        b"\x80\x02\x82\x01.",  # an extension
    ],
)
def test_what_torch_does_not_write_is_damage(document: bytes) -> None:
    with pytest.raises(shardkeep.IntegrityError, match="cannot be decoded"):
        decode_torch(document, "x.pt")


def test_objects_keep_what_is_put_into_them() -> None:
    found = decode_torch(b"\x80\x02cx\nList\n)R(K\x01K\x02eK\x03a(K\x04K\x05u.", "x.pt")
    assert isinstance(found, StandIn)
    assert (found.class_name(), found.items) == ("x:List", [1, 2, 3, (4, 5)])
    assert type(decoded(Call(Global("collections", "OrderedDict")))) is Entries
    kept = decode_torch(b"\x80\x02ccollections\nOrderedDict\n)R}X\x01\x00\x00\x00aK\x01sb.", "x.pt")
    assert kept == {}


def test_bytes_of_old_protocols_take_no_more_memory_than_the_pickle() -> None:
    assert decoded([b"\0\xff", b""])[0] == b"\0\xff"  # type: ignore[index]
    again = b"h\x00h\x01h\x02\x86Ra" * 50
    long = b"\x80\x02c_codecs\nencode\nq\x000X\xe8\x03\x00\x00" + b"x" * 1000 + b"q\x010X\x06\x00\x00\x00latin1q\x020]"
    with pytest.raises(shardkeep.IntegrityError, match="repeats itself too often"):
        decode_torch(long + again + b".", "x.pt")


def test_shapes_are_tuples_of_numbers() -> None:
    assert as_counts(decoded(Call(Global("torch", "Size"), ((2, 3),)))) == (2, 3)
    for value in (None, (1.0,), (-1,), (True,), (1 << 63,), "12"):
        with pytest.raises(TypeError, match="a shape is not a tuple of numbers"):
            as_counts(value)
    assert isinstance(decoded(FLOATS), Storage)
