"""The pickles in PyTorch's files: tensors as descriptions of where their elements are, everything else inert.

A tensor is pickled as a call of `torch._utils._rebuild_tensor_v2` with a storage, which is a persistent id that names
the entry of the archive with the elements. No call is made: the few that are known are recognized by name, and what is
not known stays a `PickledObject`.
"""

import pickle
from collections.abc import Sequence
from typing import cast

from shardkeep.errors import IntegrityError
from shardkeep.foreign.pickles import InertUnpickler, PickledObject, check_length, decode_with
from shardkeep.foreign.strided import CONJUGATED, NEGATED, check_flags, span_of
from shardkeep.model.arrays import DType, dtype_from_name, is_possible
from shardkeep.model.fastclass import fast_dataclass

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_UNTYPED = "UntypedStorage"
# Those whose names are the same here.
_NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "complex64", "complex128")
_FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
_DTYPES = frozenset([*_NUMBERS, *_FLOATS, "float8_e5m2fnuz", "float8_e8m0fnu"])
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # as protocol 2 names modules
_DICTS = (("collections", "OrderedDict"), ("collections", "defaultdict"))
# How calls that rebuild a tensor are named, and where in their arguments the tensor is that they return.
_WRAPPERS = {
    "torch._utils:_rebuild_parameter": 0,
    "torch._utils:_rebuild_parameter_with_state": 0,
    "torch._utils:_rebuild_device_tensor_from_cpu_tensor": 0,
}
_TENSORS = ("torch._utils:_rebuild_tensor", "torch._utils:_rebuild_tensor_v2", "torch._utils:_rebuild_tensor_v3")
_OF_A_CLASS = ("torch._tensor:_rebuild_from_type_v2", "torch._tensor:_rebuild_from_type")
_MOST_WRAPPED = 20  # levels of calls around a tensor


@fast_dataclass
class Storage:
    """The elements of one or more tensors: an entry of the archive.

    Attributes:
        archive: The number of the archive, if there are several.
        key: The name of the entry, below `data/`.
        dtype: Of its elements; None if the storage does not say, or has a type that no array here can have.
        type_name: What torch calls the type.
        count: The number of elements, or of bytes if it is untyped.
    """

    archive: int
    key: str
    dtype: DType | None
    type_name: str
    count: int


@fast_dataclass
class Tensor:
    """A tensor: which elements of a storage, in the storage's order. Numbers count elements.

    Attributes:
        storage: Where the elements are.
        dtype: Of its elements; None for one that no array here can have.
        type_name: What torch calls the dtype.
        offset: The first element.
        shape: The shape.
        strides: The distance between neighbours along each axis.
        flags: What is done with the elements (`strided.CONJUGATED`, `strided.NEGATED`).
    """

    storage: Storage
    dtype: DType | None
    type_name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flags: str = ""

    @property
    def is_contiguous(self) -> bool:
        """Whether the stored elements, one after the other, are those of the tensor in C order."""
        if 0 in self.shape:
            return True
        expected = 1
        for extent, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return not self.flags


class Entries(dict[object, object]):
    """Stands for an `OrderedDict` or `defaultdict`. Attributes that were pickled with it are left out."""

    module, name = _DICTS[0]

    def __init__(self, *args: object) -> None:
        """Take the factory of a `defaultdict`, which is left out too."""
        if any(isinstance(arg, list | tuple | dict) for arg in args):
            raise pickle.UnpicklingError("it gives a dict its items as only Python 2 does")
        super().__init__()

    def __setstate__(self, state: object) -> None: ...


class StandIn(PickledObject):
    """Stands for an object that is not known, and keeps what is put into it."""

    def __new__(cls, *args: object, **named: object) -> "StandIn":
        made = cast("StandIn", super().__new__(cls, *args, **named))
        made.items = []
        return made

    items: list[object]

    def __setitem__(self, key: object, value: object) -> None:
        self.items.append((key, value))

    def append(self, value: object) -> None:
        self.items.append(value)

    def extend(self, values: Sequence[object]) -> None:
        self.items.extend(values)

    add = append


class _Encode:
    """Stands for `_codecs.encode`, which old protocols write bytes with. They take no more memory than the pickle."""

    __slots__ = ("_left",)

    def __init__(self, most: int) -> None:
        self._left = most

    def __call__(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("bytes are not written as pickle writes them")
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("it repeats itself too often")
        return text.encode("latin-1")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a function has no state")


class _TorchUnpickler(InertUnpickler):
    stand_in = StandIn

    def __init__(self, data: bytes, archive: int) -> None:
        super().__init__(data)
        self._archive = archive
        self._encode = _Encode(len(data))

    def find_class(self, module: str, name: str) -> object:
        module = _RENAMED.get(module, module)
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        return Entries if (module, name) in _DICTS else super().find_class(module, name)

    @staticmethod
    def is_key(value: object) -> bool:
        """Objects too: what stands for them is compared and hashed by identity, which runs nothing."""
        return isinstance(value, StandIn) or InertUnpickler.is_key(value)

    def persistent_load(self, pid: object) -> Storage:
        parts = cast("tuple[object, ...]", pid) if isinstance(pid, tuple) else ()
        if len(parts) < 5 or parts[0] != "storage":
            raise pickle.UnpicklingError("a persistent id does not name a storage")
        _, kind, key, _, count = parts[:5]
        if not (
            isinstance(kind, type) and issubclass(kind, PickledObject) and isinstance(key, str) and _is_count(count)
        ):
            raise pickle.UnpicklingError("a storage is not described as torch does")
        dtype = _STORAGES.get(kind.name)
        return Storage(
            self._archive, key, None if dtype is None else dtype_from_name(dtype), kind.name, cast(int, count)
        )


def decode_torch(data: bytes, where: str, archive: int = 0) -> object:
    """What is in a `data.pkl`: plain values, containers, `Storage`s, `Entries`, and `StandIn`s for the rest.

    Args:
        data: The pickle.
        where: Its file, for errors.
        archive: The number of the archive that it is in, which its storages are given.
    """
    check_length(len(data), where)
    return decode_with(_TorchUnpickler(data, archive), where)


def is_tensor(value: object) -> bool:
    """Whether a decoded value is a call that gives a tensor."""
    return isinstance(value, PickledObject) and value.class_name() in (*_TENSORS, *_WRAPPERS, *_OF_A_CLASS)


def tensor_of(value: object, where: str) -> Tensor | None:
    """The tensor that a decoded value stands for; None if it is no tensor. `IntegrityError` for an impossible one."""
    try:
        for _ in range(_MOST_WRAPPED):
            if not isinstance(value, PickledObject):
                return None
            name, args = value.class_name(), value.args
            if name in _OF_A_CLASS:  # (function, class, arguments, state)
                if args[0].class_name() not in (*_TENSORS, *_WRAPPERS):
                    return None
                name, args = args[0].class_name(), tuple(args[2])
            if name in _TENSORS:
                return _tensor(name, args)
            if name not in _WRAPPERS:
                return None
            value = args[_WRAPPERS[name]]
        raise ValueError("it is wrapped too often")
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise IntegrityError(f"{where}: a tensor is not described as torch does: {error!r:.200}", file=where) from error


def dtype_named(name: str) -> DType | None:
    """The dtype here of one of torch's; None if no array here can have it."""
    return dtype_from_name(name) if name in _DTYPES else None


def _tensor(name: str, args: Sequence[object]) -> Tensor:
    storage = args[0]
    if not isinstance(storage, Storage):
        raise TypeError("it has no storage")
    (offset,), shape, strides = as_counts(args[1:2]), as_counts(args[2]), as_counts(args[3])
    metadata = args[6] if len(args) > 6 else None
    dtype, type_name = storage.dtype, storage.type_name
    if name.endswith("_v3"):
        type_name = str(getattr(args[6], "name", ""))
        dtype = dtype_named(type_name)
        metadata = args[7] if len(args) > 7 else None
    elif storage.type_name == _UNTYPED:
        raise ValueError("its storage has no type")
    if len(shape) != len(strides):
        raise ValueError("it does not have one stride per axis")
    itemsize = 1 if dtype is None else dtype.itemsize
    if not is_possible(shape, itemsize):
        raise ValueError(f"the shape {shape!r:.80} is not valid")
    told = cast("dict[object, object]", metadata) if isinstance(metadata, dict) else {}
    flags = (CONJUGATED if told.get("conj") is True else "") + (NEGATED if told.get("neg") is True else "")
    if dtype is not None:
        check_flags(flags, dtype)
        if (offset + span_of(shape, strides)) * itemsize > nbytes_of(storage):
            raise ValueError(f"a tensor of the shape {shape!r:.80} reaches beyond its storage")
    return Tensor(storage, dtype, type_name, offset, shape, strides, flags)


def nbytes_of(storage: Storage) -> int:
    """The bytes of a storage whose dtype is known, or that is untyped."""
    return storage.count * (1 if storage.dtype is None else storage.dtype.itemsize)


def as_counts(values: object) -> tuple[int, ...]:
    """A shape or strides: a tuple of numbers, or a `torch.Size` of one."""
    if isinstance(values, PickledObject) and values.class_name() == "torch:Size":
        (values,) = values.args
    if not isinstance(values, tuple | list) or not all(map(_is_count, cast("list[object]", values))):
        raise TypeError("a shape is not a tuple of numbers")
    return tuple(cast("list[int]", values))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
