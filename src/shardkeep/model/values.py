"""Plain Python values as typed JSON that decodes to the same type and the same bits."""

import base64
import binascii
import json
import math
import re
import struct
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from shardkeep.errors import IntegrityError
from shardkeep.model.arrays import dtype_from_name, dtype_name

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = dict[str, Json]


to_text = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # the JSON of documents and headers
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT = re.compile(r"-?0x[0-9a-f]+")  # as `hex` and `repr` write them
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-][0-9]+)?|-?inf|nan")


class NotPlainError(TypeError):
    """The value has a type that cannot be stored exactly as JSON."""


def encode(value: object) -> Json:
    """The typed JSON of a plain value.

    >>> encode(255), encode(0.5), encode((1, None))
    ({'int': '0xff'}, {'float': '0.5'}, {'tuple': [{'int': '0x1'}, None]})
    """
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if not isinstance(value, np.generic):
        raise NotPlainError(type(value).__qualname__)
    try:
        return {"numpy": [dtype_name(value.dtype), value.tobytes().hex()]}
    except TypeError:
        raise NotPlainError(f"NumPy {value.dtype}") from None


def decode(data: Json) -> Any:
    """The value that was encoded; `IntegrityError` for JSON that `encode` does not produce."""
    if data is None or isinstance(data, bool | str):
        return data
    if isinstance(data, list):
        return [decode(v) for v in data]
    if isinstance(data, dict) and len(data) == 1:
        ((tag, body),) = data.items()
        decoder = _DECODERS.get(tag)
        if decoder is not None:
            try:
                return decoder(body)
            except (TypeError, ValueError, IndexError, OverflowError, struct.error, binascii.Error) as error:
                raise IntegrityError(f"malformed {tag} value in a manifest: {error}") from error
    raise IntegrityError(f"malformed value in a manifest: {str(data)[:80]}")


def as_list(value: object) -> list[Any]:
    """The value, which must be a list of a document; `ValueError` for anything else."""
    if not isinstance(value, list):
        raise ValueError(f"not a list: {value!r:.80}")
    return cast("list[Any]", value)


def is_plain(value: object) -> bool:
    """Whether `value` is a leaf that is stored as a plain value (containers are not leaves)."""
    return type(value) in _SCALARS or isinstance(value, np.generic)


def is_unicode(text: str) -> bool:
    """Whether the text is free of surrogates, which JSON readers do not carry faithfully."""
    return text.isascii() or not _SURROGATE.search(text)


def is_data(value: object) -> bool:
    """Whether a leaf is data: an array, an abstract array such as a `jax.ShapeDtypeStruct`, or a plain value.

    This is the one definition of what belongs in a checkpoint. Everything else (functions, classes, modules, dtypes,
    other objects) is part of the program: `save` refuses it, and `load` keeps it from the template.

    >>> import math
    >>> is_data(3), is_data(np.zeros(2)), is_data(math.sin), is_data(np.float32), is_data(np.array([math]))
    (True, True, False, False, False)
    """
    if type(value) in _SCALARS:
        return True
    dtype = getattr(value, "dtype", None)
    if isinstance(value, type) or dtype is None or not hasattr(value, "shape"):
        return False
    try:
        dtype_name(dtype if isinstance(dtype, np.dtype) else np.dtype(dtype))
    except TypeError:
        return _is_prng(dtype)
    return True


def _is_prng(dtype: object) -> bool:
    jax = sys.modules.get("jax")  # imported wherever there are keys
    try:
        return jax is not None and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
    except TypeError:
        return False


def show(value: object) -> str:
    """A value for a message: its `repr`, except for integers so long that Python refuses to print them.

    >>> show(0.5), show(10**5000)
    ('0.5', 'an integer of 16610 bits')
    """
    try:
        return repr(value)
    except ValueError:
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def _encode_text(value: str) -> Json:
    # JSON readers join two surrogates into one character, so text with surrogates is stored as bytes.
    if is_unicode(value):
        return value
    return {"text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}


def _encode_float(value: float) -> str:
    # repr() is exact for finite floats and infinities; a NaN also has a payload.
    return f"nan:{struct.pack('>d', value).hex()}" if math.isnan(value) else repr(value)


def _decode_hex(digits: str) -> bytes:
    raw = bytes.fromhex(digits)
    if raw.hex() != digits:  # capital letters or spaces
        raise ValueError(f"not hexadecimal: {digits!r:.80}")
    return raw


def _decode_float(text: Json) -> float:
    if not isinstance(text, str):
        raise TypeError("not a string")
    if text.startswith("nan:"):
        return struct.unpack(">d", _decode_hex(text[4:]))[0]
    if not _FLOAT.fullmatch(text):
        raise ValueError(f"not a float: {text!r:.80}")
    return float(text)


def _decode_int(text: Json) -> int:
    if not isinstance(text, str):
        raise TypeError("not a string")
    if not _INT.fullmatch(text):
        raise ValueError(f"not an integer: {text!r:.80}")
    return int(text, 16)


def _decode_complex(body: Json) -> complex:
    real, imaginary = as_list(body)
    return complex(_decode_float(real), _decode_float(imaginary))


def _decode_numpy(body: Json) -> np.generic:
    name, digits = as_list(body)
    dtype = dtype_from_name(name)
    raw = _decode_hex(digits)
    if len(raw) != dtype.itemsize:
        raise ValueError("wrong number of bytes")
    return cast(np.generic, np.frombuffer(raw, dtype=dtype)[0])


_ENCODERS: dict[type[object], Callable[[Any], Json]] = {
    type(None): lambda v: v,
    bool: lambda v: v,
    str: lambda v: _encode_text(v),
    int: lambda v: {"int": hex(v)},
    float: lambda v: {"float": _encode_float(v)},
    complex: lambda v: {"complex": [_encode_float(v.real), _encode_float(v.imag)]},
    bytes: lambda v: {"bytes": base64.b64encode(v).decode()},
    list: lambda v: [encode(x) for x in v],
    tuple: lambda v: {"tuple": [encode(x) for x in v]},
    dict: lambda v: {"dict": [[encode(k), encode(x)] for k, x in v.items()]},
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "text": lambda b: base64.b64decode(b, validate=True).decode("utf-8", "surrogatepass"),
    "int": _decode_int,
    "float": _decode_float,
    "complex": _decode_complex,
    "bytes": lambda b: base64.b64decode(b, validate=True),
    "tuple": lambda b: tuple(decode(v) for v in as_list(b)),
    "dict": lambda b: {decode(k): decode(v) for k, v in map(as_list, as_list(b))},
    "numpy": _decode_numpy,
}
_SCALARS = frozenset((bool, int, float, complex, str, bytes))
