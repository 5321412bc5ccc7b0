"""Patterns of rules: regular expressions on whole keys, with `{i}` for an index, and keys made of what they match."""

import re
from dataclasses import dataclass
from functools import lru_cache

from shardkeep.model.tree import Path

INDEX = "{i}"  # stands for an index in patterns and keys

_GROUP = "_index"  # the group that matches it
_HOLE = re.compile(r"(?<!\\)((?:\\\\)*)\{i\}")
_DIGITS = "[0-9]{1,18}"  # of an index
_BACKREFERENCE = re.compile(r"(\\\\)|\\([1-9][0-9]?)")
_TOKEN = re.compile(r"\\(?P<number>[0-9]{1,2})|\\g<(?P<name>\w+)>|\\(?P<plain>[\\{/])|(?P<index>\{i\})|(?P<bad>\\)")


@dataclass(frozen=True)
class Match:
    """A key that a pattern matches, and the index in it, if the pattern has one and it takes part in the match."""

    path: Path
    found: re.Match[str]
    place: int  # the number of the index's group; 0 if there is none

    @property
    def index(self) -> int | None:
        found = self.found[self.place] if self.place else None
        return None if found is None else int(found)

    def group(self, name: str) -> list[str]:
        """A group, as names, by its name, or by its number in the pattern as it was written."""
        group: str | int = name
        if name.isdecimal():
            number = int(name)
            group = number + 1 if self.place and number >= self.place else number
        start, end = self.found.span(group)
        if end <= start:  # it is empty, or takes no part
            return [""]
        names: list[str] = []
        first = 0
        for each in self.path:  # a name may have slashes itself, and keeps them
            last = first + len(each)
            if start <= last and first <= end:
                names.append(each[max(start - first, 0) : end - first])
            first = last + 1
        return names


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern."""

    text: str
    regex: re.Pattern[str]
    place: int

    @property
    def has_index(self) -> bool:
        return self.place > 0

    def match(self, path: Path) -> Match | None:
        """The match, if the pattern matches all of the key."""
        found = self.regex.fullmatch("/".join(path))
        return None if found is None else Match(path, found, self.place)


@lru_cache(maxsize=1024)
def compiled(text: str) -> Pattern:
    """A pattern. `ValueError` for one that is not a regular expression.

    >>> compiled("layers/{i}/(.*)").match(("layers", "12", "w")).index
    12
    """
    try:
        place = re.compile(_with_group(text)).groupindex.get(_GROUP, 0)
        if place:  # its group moves the numbers of those after it
            text = _BACKREFERENCE.sub(lambda m: m[1] or f"\\{int(m[2]) + (int(m[2]) >= place)}", text)
        return Pattern(text, re.compile(_with_group(text)), place)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from None


def _with_group(text: str) -> str:
    first = _HOLE.sub(rf"\1(?P<{_GROUP}>{_DIGITS})", text, count=1)
    return _HOLE.sub(rf"\1(?P={_GROUP})", first)


def has_index(key: str) -> bool:
    """Whether a key is made with an index."""
    return any(token["index"] for token in _TOKEN.finditer(key))


def check_key(text: str, pattern: Pattern, *, index: bool) -> None:
    """`ValueError` unless a key can be made of every match. `index` says whether it may contain an index."""
    for token in _TOKEN.finditer(text):
        name = token["number"] or token["name"]
        if token["bad"]:
            raise ValueError(f"{text!r} has a backslash without a group; write \\\\ for a backslash")
        if token["index"] and not index:
            raise ValueError(f"{text!r} has {INDEX}, but the pattern {pattern.text!r} has none")
        groups = pattern.regex.groups - pattern.has_index
        if name and (int(name) > groups if name.isdecimal() else name not in pattern.regex.groupindex):
            raise ValueError(f"{text!r} refers to the group {name}, which {pattern.text!r} does not have")


def expand(text: str, match: Match, index: int | None = None) -> Path:
    r"""The path that a match is made into. `index` stands for `{i}`; by default it is that of the match.

    `ValueError` if there is none, because that part of the pattern takes no part in the match.

    >>> expand(r"layers/{i}/\1", compiled(r"encoder_(.*)").match(("encoder_w",)), 3)
    ('layers', '3', 'w')
    """
    index = match.index if index is None else index
    names = [""]

    def add(more: list[str]) -> None:
        names[-1] += more[0]
        names.extend(more[1:])

    position = 0
    for token in _TOKEN.finditer(text):
        add(text[position : token.start()].split("/"))
        position = token.end()
        if token["index"]:
            if index is None:
                raise ValueError(f"the part of the pattern with {INDEX} does not match")
            add([str(index)])
        else:
            add([token["plain"]] if token["plain"] else match.group(token["number"] or token["name"]))
    add(text[position:].split("/"))
    return () if names == [""] else tuple(names)


def literal(path: Path) -> str:
    """The pattern that matches this key only."""
    return "/".join(map(re.escape, path))


def plain(path: Path) -> str:
    """The text that is expanded to this path, whatever matches."""
    return "/".join(map(_plain_name, path))


def _plain_name(name: str) -> str:
    return name.replace("\\", "\\\\").replace("/", "\\/").replace(INDEX, "\\" + INDEX)


def inverted(pattern: str, key: str) -> tuple[str, str] | None:
    r"""The pattern of the keys that matches become, and the key that makes the matches of them again.

    None if that cannot be told from the text: the pattern must be names, groups and `{i}`.

    >>> inverted(r"encoder/(\d+)/(.*)", r"layers/\1/\2")
    ('layers/(\\d+)/(.*)', 'encoder/\\1/\\2')
    """
    before = _pieces(pattern)
    if before is None:
        return None
    groups = [text for kind, text in before if kind == "group"]
    order: list[int] = []
    turned = ""
    position = 0
    for token in _TOKEN.finditer(key):
        turned += re.escape(key[position : token.start()])
        position = token.end()
        if token["index"]:
            turned += INDEX
        elif token["plain"]:
            turned += "\\/" if token["plain"] == "/" else re.escape(token["plain"])
        elif token["number"] is None or not 0 < int(token["number"]) <= len(groups):
            return None
        else:
            number = int(token["number"])
            turned += f"({groups[number - 1]})" if number not in order else f"\\{order.index(number) + 1}"
            order += [number] if number not in order else []
    turned += re.escape(key[position:])
    if len(order) < len(groups):
        return None
    numbers = iter(order.index(number) + 1 for number in range(1, len(groups) + 1))
    parts = {"index": INDEX, "slash": "\\/"}
    made = [
        f"\\{next(numbers)}" if kind == "group" else parts.get(kind) or plain(tuple(text.split("/")))
        for kind, text in before
    ]
    return turned, "".join(made)


_PIECE = re.compile(
    r"\((?P<group>(?!\?)(?:[^()\\]|\\.)*)\)(?![?*+{])|(?P<index>\{i\})|(?P<slash>\\/)|\\(?P<escaped>\W)|(?P<text>[^\\()\[\]{}.*+?|^$])"
)


def _pieces(pattern: str) -> list[tuple[str, str]] | None:
    """A pattern as text, groups, the index and slashes of names, in order; None if there is anything else in it."""
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(pattern):
        piece = _PIECE.match(pattern, position)
        if piece is None:
            return None
        kind = piece.lastgroup or "text"
        text, kind = piece[kind], "text" if kind == "escaped" else kind
        if kind == "text" and found and found[-1][0] == "text":  # together: `{`, `i` and `}` are not an index
            found[-1] = kind, found[-1][1] + text
        else:
            found.append((kind, text))
        position = piece.end()
    return found
