"""The functions that make rules, and the JSON form of rules."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np

from shardkeep.errors import RemapError, an
from shardkeep.model.arrays import parse_dtype
from shardkeep.model.values import Json, JsonObject
from shardkeep.remap.expressions import Function
from shardkeep.remap.rules import (
    Apply,
    Copy,
    Drop,
    Fill,
    Fuse,
    Rename,
    Reshape,
    Resize,
    Rule,
    Split,
    Stack,
    Transpose,
    Unstack,
    Within,
    as_rules,
)

_Value = TypeVar("_Value")


def rename(pattern: str, key: str) -> Rule:
    r"""Rename leaves.

    Args:
        pattern: A regular expression that matches whole keys. `{i}` matches an index.
        key: The new key. `\1` or `\g<name>` inserts a group of the pattern, `{i}` the index.

    >>> rename(r"encoder/(\d+)/attn/(.*)", r"layers/\1/attention/\2")
    remap.rename('encoder/(\\d+)/attn/(.*)', 'layers/\\1/attention/\\2')
    """
    return Rename(pattern, key)


def copy(pattern: str, key: str) -> Rule:
    r"""Duplicate leaves under another key. Data that both need is read once.

    Args:
        pattern: A regular expression that matches whole keys.
        key: The key of the copy.

    >>> copy("embed/embedding", "head/kernel")
    remap.copy('embed/embedding', 'head/kernel')
    """
    return Copy(pattern, key)


def drop(pattern: str) -> Rule:
    """Remove leaves.

    Args:
        pattern: A regular expression that matches whole keys.

    >>> drop("old_head/.*")
    remap.drop('old_head/.*')
    """
    return Drop(pattern)


def stack(pattern: str, key: str, axis: int = 0) -> Rule:
    r"""Stack arrays along a new axis, in the order of their indices, which must be 0, 1, 2, ...

    Args:
        pattern: A regular expression that matches whole keys, with `{i}` for the index.
        key: The key of the result. Arrays that map to the same key are stacked.
        axis: The position of the new axis.

    >>> stack("layers/{i}/(.*)", r"layers/\1")
    remap.stack('layers/{i}/(.*)', 'layers/\\1')
    """
    return Stack(pattern, key, _number(axis))


def unstack(pattern: str, key: str, axis: int = 0) -> Rule:
    r"""Split stacked arrays along an axis, and remove that axis.

    Args:
        pattern: A regular expression that matches whole keys.
        key: The keys of the parts, with `{i}` for the index.
        axis: The axis to remove.

    >>> unstack("layers/(.*)", r"layers/{i}/\1")
    remap.unstack('layers/(.*)', 'layers/{i}/\\1')
    """
    return Unstack(pattern, key, _number(axis))


def split(pattern: str, keys: Sequence[str], axis: int = -1, sizes: Sequence[int] | None = None) -> Rule:
    r"""Split arrays into several parts along an axis.

    Args:
        pattern: A regular expression that matches whole keys.
        keys: The keys of the parts.
        axis: The axis to split.
        sizes: The size of each part along the axis. None splits into equal parts.

    >>> split("(.*)/qkv", [r"\1/q", r"\1/k", r"\1/v"], sizes=[512, 128, 128])
    remap.split('(.*)/qkv', ('\\1/q', '\\1/k', '\\1/v'), sizes=(512, 128, 128))
    """
    return Split(pattern, _strings("split", keys), _number(axis), None if sizes is None else _numbers("split", sizes))


def fuse(patterns: Sequence[str], key: str, axis: int = -1) -> Rule:
    r"""Concatenate arrays along an axis.

    Args:
        patterns: Regular expressions that match whole keys, one for each part.
        key: The key of the result. Arrays that map to the same key are concatenated.
        axis: The axis to concatenate along.

    >>> fuse(["(.*)/q", "(.*)/k", "(.*)/v"], r"\1/qkv")
    remap.fuse(('(.*)/q', '(.*)/k', '(.*)/v'), '\\1/qkv')
    """
    return Fuse(_strings("fuse", patterns), key, _number(axis))


def transpose(pattern: str, axes: Sequence[int]) -> Rule:
    """Permute the axes of arrays.

    Args:
        pattern: A regular expression that matches whole keys.
        axes: The permutation, as for `numpy.transpose`.

    >>> transpose(".*/proj/kernel", (1, 0))
    remap.transpose('.*/proj/kernel', (1, 0))
    """
    return Transpose(pattern, _numbers("transpose", axes))


def reshape(pattern: str, shape: Sequence[int]) -> Rule:
    """Reshape arrays, with the elements in the same order.

    Args:
        pattern: A regular expression that matches whole keys.
        shape: The new shape. One size may be -1, and is then inferred from the others.

    >>> reshape(".*/o/kernel", (16, 64, 1024))
    remap.reshape('.*/o/kernel', (16, 64, 1024))
    """
    return Reshape(pattern, _numbers("reshape", shape))


def resize(pattern: str, axis: int = 0, fill: Fill = "zeros", size: int | None = None) -> Rule:
    """Extend or truncate arrays at the end of an axis.

    Args:
        pattern: A regular expression that matches whole keys.
        axis: The axis to resize.
        fill: The value of new elements: "zeros", a number, or "keep" for the template's values.
        size: The new size. None uses the template's size.

    >>> resize("embed/embedding", axis=0, fill="keep")
    remap.resize('embed/embedding', fill='keep')
    """
    return Resize(pattern, _number(axis), _number(size), _number(fill))


def apply(
    pattern: str,
    function: Function,
    *,
    elementwise: bool = False,
    shape: Sequence[int] | None = None,
    dtype: object = None,
    inverse: Function | None = None,
) -> Rule:
    """Apply a function to arrays.

    With `elementwise=True`, the function is called with parts of an array as they are read, on several threads; its
    result must not depend on how the array is divided. Otherwise it is called with whole arrays in host memory, one at
    a time, even if only a part of the result is needed. These arrays do not count towards the memory budget.

    Args:
        pattern: A regular expression that matches whole keys.
        function: A function that takes a NumPy array and returns an array.
        elementwise: Whether each element of the result depends only on the same element of the argument.
        shape: The shape of the result, if it differs from that of the argument. Cannot be combined with `elementwise`.
        dtype: The dtype of the result, if it differs from that of the argument. Optional with `elementwise`, which
            determines it by calling the function with an empty array.
        inverse: The inverse function, for `plan.inverse()`.

    >>> apply(".*/scale", abs, elementwise=True)
    remap.apply('.*/scale', abs, elementwise=True)
    """
    if not callable(function):
        raise RemapError(f"remap.apply({pattern!r}): function must be callable, not {function!r}")
    if elementwise and shape is not None:
        raise RemapError(f"remap.apply({pattern!r}): an elementwise function cannot change the shape; remove shape=")
    try:
        made = None if dtype is None else parse_dtype(dtype)
    except ValueError as error:
        raise RemapError(f"remap.apply({pattern!r}): {error}") from None
    return Apply(pattern, function, elementwise, None if shape is None else _numbers("apply", shape), made, inverse)


def within(pattern: str, rules: Rule | Sequence[Rule]) -> Rule:
    """Apply rules to subtrees, such as optimizer moments and averages that have the structure of the parameters.

    Args:
        pattern: A regular expression that matches the whole key of each subtree. If matching subtrees are nested, the
            rules are applied to the outermost one.
        rules: The rules. Their keys are relative to the subtree.

    >>> within("opt_state/.*/(mu|nu)", [rename("w", "kernel")])
    remap.within('opt_state/.*/(mu|nu)', (remap.rename('w', 'kernel'),))
    """
    return Within(pattern, as_rules(rules))


def _strings(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RemapError(f"remap.{name}: expected a list of strings, not {values!r}")
    return tuple(cast("Sequence[str]", values))


def _number(value: _Value) -> _Value:
    """A number as Python has it, so that it has a JSON form. Shapes are often computed with NumPy."""
    return cast(_Value, value.item()) if isinstance(value, np.generic) else value


def _numbers(name: str, values: object) -> tuple[int, ...]:
    several = isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.ndim == 1)
    found = tuple(map(_number, cast("Sequence[int]", values))) if several else None
    if found is None or isinstance(values, str) or not all(type(value) is int for value in found):
        raise RemapError(f"remap.{name}: expected a list of integers, not {values!r}")
    return found


def to_json(rules: Rule | Sequence[Rule]) -> list[Json]:
    """Convert rules to JSON, for `shardkeep convert --remap` and `from_json`.

    Args:
        rules: The rules, without functions.

    Raises:
        RemapError: A rule contains a function.

    >>> to_json([transpose("w", (1, 0))])
    [{'rule': 'transpose', 'pattern': 'w', 'axes': [1, 0]}]
    """
    return [_rule_to_json(rule) for rule in as_rules(rules)]


def _rule_to_json(rule: Rule) -> JsonObject:
    if isinstance(rule, Apply):
        raise RemapError(f"{rule} has no JSON form, because it contains a function")
    found: JsonObject = {"rule": rule.name}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(rule, Within) and field.name == "rules":
            found["rules"] = to_json(rule.rules)
        elif value != field.default:
            found[field.name] = list(cast("tuple[Json, ...]", value)) if isinstance(value, tuple) else value
    return found


_MAKERS: dict[str, Callable[..., Rule]] = {
    "rename": rename,
    "copy": copy,
    "drop": drop,
    "stack": stack,
    "unstack": unstack,
    "split": split,
    "fuse": fuse,
    "transpose": transpose,
    "reshape": reshape,
    "resize": resize,
    "within": within,
}


def from_json(data: object) -> list[Rule]:
    """Convert the output of `to_json` back to rules.

    Args:
        data: The parsed JSON, a list of objects.

    Raises:
        RemapError: `data` does not describe rules.

    >>> from_json([{"rule": "drop", "pattern": "old/.*"}])
    [remap.drop('old/.*')]
    """
    if not isinstance(data, list):
        raise RemapError(f"rules must be a JSON list of objects, not {an(type(data).__name__)}")
    try:
        return [_rule_from_json(each) for each in cast("list[object]", data)]
    except RecursionError:
        raise RemapError('rules of "within" are nested too deeply') from None


def _rule_from_json(data: object) -> Rule:
    fields = dict(cast("dict[str, object]", data)) if isinstance(data, dict) else {}
    name = fields.pop("rule", None)
    if name == "within" and "rules" in fields:
        fields["rules"] = from_json(fields["rules"])
    maker = _MAKERS.get(name) if isinstance(name, str) else None
    if maker is None:
        raise RemapError(f'{data!r:.200} is not a rule: "rule" must be one of {", ".join(_MAKERS)}')
    try:
        return maker(**fields)
    except TypeError as error:
        raise RemapError(f"{data!r:.200} is not a rule: {error}") from None
