"""The user's metadata: what is accepted, what it becomes, and how it is written as strict JSON.

In memory, metadata is a dict of strings, numbers, booleans, None, lists and dicts. JSON has no NaN and no infinity, so
these are written as a tagged value, `{"$shardkeep": {"float": "nan"}}`. Every document that shardkeep reads back goes
through `encode_metadata` and `decode_metadata`; documents for other programs go through `untagged`.
"""

import datetime
import enum
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import numpy as np

from shardkeep.errors import IntegrityError, MetadataError, an
from shardkeep.jaxapi import transfers_allowed
from shardkeep.model.arrays import Array, kind_of
from shardkeep.model.values import Json, JsonObject, decode, encode, is_unicode, show

TAG = "$shardkeep"
RUN_KEY = "shardkeep_run"  # what a `Run` records about a step, next to the program's own metadata
_DEEPEST = 100  # levels: JSON readers recurse
_LONGEST = 2000  # bits: Python may refuse to write or read longer integers in decimal
_UNCHANGED = frozenset((type(None), bool, int, str))

_Where = tuple[str | int, ...]
_Value = TypeVar("_Value")


def without_notes(metadata: Mapping[str, _Value]) -> dict[str, _Value]:
    """The metadata of a tree as the program passed it, without what a `Run` recorded.

    >>> without_notes({"loss": 0.5, "shardkeep_run": {"version": 1}})
    {'loss': 0.5}
    """
    return {key: value for key, value in metadata.items() if key != RUN_KEY}


def check_metadata(metadata: Mapping[str, Any] | None) -> JsonObject:
    """A copy of the metadata in its JSON form; `MetadataError` naming what has no obvious one.

    NumPy and JAX scalars become Python numbers, tuples lists, paths strings, enums their values, dates ISO strings,
    and keys strings. NaN and the infinities are kept as they are.

    >>> import pathlib
    >>> check_metadata({"loss": np.float32("nan"), "shape": (2, 3), "data": pathlib.Path("a/b"), 7: None})
    {'loss': nan, 'shape': [2, 3], 'data': 'a/b', '7': None}
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (given by the user)
        raise MetadataError(f"metadata must be a dict, not {an(type(metadata).__name__)}")
    return _mapping(metadata, ())


def _mapping(value: Mapping[Any, Any], where: _Where) -> JsonObject:
    found: JsonObject = {}
    for key, inner in value.items():
        name = key if type(key) is str and is_unicode(key) else _key(key, where)
        if name in found:
            raise MetadataError(f"{_place(where)} has two keys that become {name!r}; JSON keys are strings")
        found[name] = inner if type(inner) in _UNCHANGED else _convert(inner, (*where, name))
    return found


def _key(key: object, where: _Where) -> str:
    """The string that a key becomes: that of the plain value which it is, or stands for."""
    plain = key.value if isinstance(key, enum.Enum) else key
    name = None
    if not isinstance(plain, Mapping | list | tuple):
        with suppress(ValueError):  # no JSON form, or an integer that Python does not write out
            name = str(_convert(plain, where))
    if name is None or not is_unicode(name):
        raise MetadataError(f"{_place(where)} has the key {show(key)}; use strings of valid Unicode as keys")
    return name


def _convert(value: Any, where: _Where) -> Json:
    """A value in its JSON form. Subclasses of the builtin types become the builtin type."""
    if type(value) in _UNCHANGED:
        return value
    if isinstance(value, enum.Enum):  # before str and int: it may be one
        return _convert(value.value, where)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return _one_nan(float.__float__(value))
    if len(where) > _DEEPEST:
        raise MetadataError(f"metadata contains itself, or is nested more than {_DEEPEST} levels deep")
    if isinstance(value, Mapping):
        return _mapping(cast(Mapping[Any, Any], value), where)
    if isinstance(value, list | tuple):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return [v if type(v) in _UNCHANGED else _convert(v, (*where, i)) for i, v in enumerate(items)]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return os.fsdecode(cast("os.PathLike[str]", value))
    if getattr(value, "shape", None) == () and not isinstance(value, np.ma.MaskedArray):
        return _scalar(value, where)
    raise _refused(value, where)


def _scalar(value: object, where: _Where) -> Json:
    """A NumPy or JAX scalar, or an array without axes, as a Python value. A JAX array is fetched from its device."""
    try:
        with transfers_allowed():
            host: Array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise MetadataError(f"{_place(where)} is {an(type(value).__name__)} without a readable value: {why}") from error
    kind = kind_of(host.dtype)
    if kind == "float":
        return _one_nan(float(host.item()))
    if kind in ("int", "bool") or host.dtype.kind == "U":
        return host.item()
    if host.dtype.kind == "M":
        return str(host[()])  # ISO 8601
    raise _refused(value, where)


def _one_nan(value: float) -> float:
    """NaNs differ in sign and payload, which mean nothing here and must not make processes differ."""
    return math.nan if value != value else value


def _place(where: _Where) -> str:
    return "metadata" + "".join(f"[{part!r}]" for part in where)


def _refused(value: object, where: _Where) -> MetadataError:
    kind = type(value)
    advice = "convert it to a string, a number, a list or a dict"
    if hasattr(value, "dtype") and getattr(value, "shape", ()) != ():
        advice = "save it as a leaf of the tree, or convert it with .tolist()"
    elif isinstance(value, set | frozenset):
        advice = "convert it to a list, for example with sorted()"
    elif isinstance(value, bytes | bytearray):
        advice = "decode it to a string"
    elif isinstance(value, datetime.timedelta):
        advice = "convert it with .total_seconds()"
    return MetadataError(f"{_place(where)} is {an(kind.__name__)}, which has no obvious JSON form; {advice}")


def encode_metadata(value: Any) -> Json:
    """Metadata as strict JSON. What JSON does not carry exactly is tagged, and so is a dict that looks like a tag.

    >>> encode_metadata({"loss": math.inf})
    {'loss': {'$shardkeep': {'float': 'inf'}}}
    """
    kind = type(cast(object, value))  # exact: `check_metadata` has made it so, and so does a JSON reader
    if kind is str:
        return value if is_unicode(value) else {TAG: encode(value)}
    if kind is int:
        return value if value.bit_length() <= _LONGEST else {TAG: encode(value)}
    if kind is list:
        return [encode_metadata(inner) for inner in value]
    if kind is dict:
        if TAG in value and len(value) == 1:
            return {TAG: encode(value)}
        return {key: encode_metadata(inner) for key, inner in value.items()}
    if kind is float and not math.isfinite(value):
        return {TAG: {"float": str(value)}}
    return value


def decode_metadata(data: Json) -> Json:
    """The metadata that `encode_metadata` was given. A tag that this version does not know is left as it is."""
    if isinstance(data, dict):
        if TAG in data and len(data) == 1 and isinstance(data[TAG], dict):
            with suppress(IntegrityError):
                return decode(data[TAG])
        return {key: inner if type(inner) in _UNCHANGED else decode_metadata(inner) for key, inner in data.items()}
    if isinstance(data, list):
        return [inner if type(inner) in _UNCHANGED else decode_metadata(inner) for inner in data]
    return data


def untagged(value: Any) -> Json:
    """Metadata as strict JSON for programs that do not know the tag: NaN, infinities and long integers are strings.

    >>> untagged({"loss": math.nan, "best": [-math.inf]})
    {'loss': 'nan', 'best': ['-inf']}
    """
    if isinstance(value, dict):
        return {str(key): untagged(inner) for key, inner in cast(dict[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [untagged(inner) for inner in cast("list[object]", value)]
    if type(value) is float and not math.isfinite(value):
        return str(value)
    if type(value) is int and value.bit_length() > _LONGEST:
        return hex(value)
    return value
