"""The auxiliary data of registered classes, where it is more than plain values.

Two kinds can be stored. A class that the program has registered with `jax.export` (`register_pytree_node_serialization`
or `register_namedtuple_serialization`) has a name and functions from its auxiliary data to bytes and back. A class
registered with `jax.tree_util.register_static` is its own auxiliary data: a dataclass of plain values, an enum
member or a subclass of a plain type can be stored without any function.

A file only names what it wants: a class or function is used if this program has registered it, never imported.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, cast

from shardkeep.jaxapi import export_registry
from shardkeep.model.values import Json, JsonObject, NotPlainError, decode, encode

_BASES: tuple[type[object], ...] = (str, int, float, bytes, tuple)


def serializer_of(cls: type[object]) -> tuple[str, Callable[[object], bytes]] | None:
    """The name a class is registered under with `jax.export`, and the function from its auxiliary data to bytes."""
    return export_registry("serialization_registry").get(cls)


def deserializer_named(name: str) -> tuple[type[object], Callable[[bytes], object]] | None:
    """The class registered under a name in this program, and the function from bytes to its auxiliary data."""
    found = export_registry("deserialization_registry").get(name)
    return None if found is None else (found[0], found[1])


def has_serializers() -> bool:
    """Whether the program has registered any class; JAX itself registers `OrderedDict`."""
    return len(export_registry("serialization_registry")) > 1


def describe_static(value: object) -> Json:
    """What is stored of an object that is its own auxiliary data; None if it holds more than plain values.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     width: int
    >>> describe_static(Config(8))
    {'fields': {'dict': [['width', {'int': '0x8'}]]}}
    """
    cls = type(value)
    try:
        if isinstance(value, enum.Enum):
            return {"member": value.name} if type(value).__members__.get(value.name) is value else None
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            if not set(getattr(value, "__dict__", ())) <= set(names):
                return None
            return {"fields": encode({name: getattr(value, name) for name in names})}
        base = next((base for base in _BASES if issubclass(cls, base)), None)
        if base is None or getattr(value, "__dict__", None) or _has_slots(cls, base):
            return None
        return {"value": encode(cast(Any, base).__getnewargs__(value)[0])}
    except (NotPlainError, AttributeError, RecursionError):
        return None


def build_static(cls: type[object], described: Json) -> object:
    """An object of `cls` from what `describe_static` gave, without running its constructor; None if it does not fit."""
    kind, body = next(iter(cast(JsonObject, described).items()))
    if issubclass(cls, enum.Enum):
        return cls.__members__.get(cast(str, body)) if kind == "member" else None
    stored: object = None if kind == "member" else decode(body)
    if kind == "fields" and dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__:
        values = cast("dict[str, object]", stored) if isinstance(stored, dict) else None
        if values is None or {field.name for field in dataclasses.fields(cls)} != set(values):
            return None
        made = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made
    base = type(stored)
    if kind != "value" or base not in _BASES or not issubclass(cls, base) or _has_slots(cls, base):
        return None
    return cast(Any, base).__new__(cls, stored)


def check_static(described: Json) -> Json:
    """What a file says of such an object, or a `ValueError` if it is malformed."""
    if not isinstance(described, dict) or len(described) != 1:
        raise ValueError("a static object must have one description")
    ((kind, body),) = described.items()
    if kind not in ("member", "fields", "value") or (kind == "member" and not isinstance(body, str)):
        raise ValueError(f"unknown description of a static object: {kind!r}")
    if kind != "member":
        decode(body)
    return described


def _has_slots(cls: type[object], base: type[object]) -> bool:
    """Whether a subclass of a plain type has further attributes, in slots."""
    return any(vars(part).get("__slots__") for part in cls.__mro__ if part is not base and issubclass(part, base))
