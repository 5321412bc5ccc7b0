"""What the reference shows otherwise than mkdocstrings would."""

import re
from typing import Any

from griffe import Class, Extension, Module, Object

_EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
_ATTRIBUTES = re.compile(r"^Attributes:\n((?: +.*\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+):.*\n?(?:     .*\n?)*", re.MULTILINE)
_DRAWN = re.compile(r"^\w+\n(?:[├│└ ].*\n)+", re.MULTILINE)


class Docstrings(Extension):
    """Shows examples and drawn trees as code, each property once, and no constructor that is not for users.

    A class that users do not make objects of has no `Args:` in its docstring. List this extension after `dataclasses`,
    which adds constructors.
    """

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        _prepare(pkg)


def _prepare(thing: Object) -> None:
    docstring = thing.docstring
    if docstring is not None:
        text = _EXAMPLE.sub(lambda found: f"\n```pycon\n{found[0].rstrip()}\n```\n", docstring.value)
        docstring.value = _DRAWN.sub(r"```text\n\g<0>```\n", text)
    if isinstance(thing, Class) and docstring is not None:
        docstring.value = _ATTRIBUTES.sub(lambda section: _without_properties(section[1], thing), docstring.value)
    if isinstance(thing, Class) and (docstring is None or "\nArgs:" not in docstring.value):
        thing.members.pop("__init__", None)
    for member in thing.members.values():
        if isinstance(member, Object):
            _prepare(member)


def _without_properties(entries: str, cls: Class) -> str:
    """The section of a class's attributes without those that have docstrings, and so entries, of their own."""
    own = {name for name, member in cls.members.items() if not member.is_alias and member.docstring is not None}
    left = _ENTRY.sub(lambda entry: "" if entry[1] in own else entry[0], entries)
    return f"Attributes:\n{left}" if left.strip() else ""
