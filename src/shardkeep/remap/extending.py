"""Suggestions for rules whose patterns match only parts of keys: the same rules with patterns that match whole keys."""

import dataclasses
from collections.abc import Iterator, Sequence

from shardkeep.errors import RemapError
from shardkeep.remap.patterns import compiled
from shardkeep.remap.rules import Rule, Within

_Around = Sequence[tuple[str, str]]  # what goes before and after a pattern

_NAMES: _Around = (
    ("", "/(.*)"),
    ("(.*)/", ""),
    ("(.*/)?", "(/.*)?"),
)  # matched at the top of keys, at the end, anywhere
_NAMES_OF_PLACES: _Around = (("(.*/)?", ""),)
_PARTS: _Around = (("(.*)", "(.*)"),)


def around_names(rule: Rule) -> Iterator[Rule]:
    r"""The rules for keys that contain names that a rule matches. The rest of a key stays as it is.

    >>> from shardkeep.remap.rules import Drop, Rename
    >>> for rule in around_names(Rename("enc", "dec")):
    ...     print(rule)
    remap.rename('enc/(.*)', 'dec/\\1')
    remap.rename('(.*)/enc', '\\1/dec')
    remap.rename('(.*/)?enc(/.*)?', '\\1dec\\2')
    >>> print(next(around_names(Drop("enc"))))
    remap.drop('enc/.*')
    """
    return _extended(rule, _NAMES_OF_PLACES if isinstance(rule, Within) else _NAMES)


def around_parts(rule: Rule) -> Iterator[Rule]:
    r"""The rule for keys that contain text that a rule matches.

    >>> from shardkeep.remap.rules import Rename
    >>> print(next(around_parts(Rename("enc", "dec"))))
    remap.rename('(.*)enc(.*)', '\\1dec\\2')
    """
    return _extended(rule, _PARTS)


def _extended(rule: Rule, arounds: _Around) -> Iterator[Rule]:
    fields = {field.name for field in dataclasses.fields(rule)}
    patterns: tuple[str, ...] = getattr(rule, "patterns", None) or (getattr(rule, "pattern", ""),)
    keys: tuple[str, ...] = getattr(rule, "keys", None) or ((getattr(rule, "key", ""),) if "key" in fields else ())
    groups = max(map(_groups_in, patterns))
    for before, after in arounds:
        if groups and (before or len(patterns) > 1):
            continue  # the numbers of its own groups, to which it and the keys may refer, would change
        number = int(bool(before)) + groups + 1
        head = "\\1" + before.partition(")")[2].rstrip("?") if before else ""
        tail = after.partition("(")[0] + f"\\{number}" if after else ""
        if not keys:
            before, after = _ungrouped(before), _ungrouped(after)
        longer = tuple(f"{before}{_alone(pattern)}{after}" for pattern in patterns)
        made = tuple(f"{head}{key}{tail}" for key in keys)
        changes = {"pattern": longer[0], "patterns": longer, "key": made[0] if made else "", "keys": made}
        try:
            yield dataclasses.replace(rule, **{name: value for name, value in changes.items() if name in fields})
        except RemapError:  # such as one with flags, which must be at its start
            continue


def _groups_in(pattern: str) -> int:
    found = compiled(pattern)
    return found.regex.groups - found.has_index


def _alone(pattern: str) -> str:
    return f"(?:{pattern})" if "|" in pattern else pattern


def _ungrouped(around: str) -> str:
    return around if around.endswith("?") else around.replace("(", "").replace(")", "")
