"""What the reference shows otherwise than mkdocstrings would."""

import re
from typing import Any

from griffe import Class, Extension, Module, Object

_EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
_DRAWN = re.compile(r"^\w+\n(?:[├│└ ].*\n)+", re.MULTILINE)


class Docstrings(Extension):
    """Shows examples and drawn trees as code, and no constructor of a class that only shardkeep makes objects of.

    Such a class has no `Args:` in its docstring. List this extension after `dataclasses`, which adds constructors.
    """

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        _prepare(pkg)


def _prepare(thing: Object) -> None:
    docstring = thing.docstring
    if docstring is not None:
        text = _EXAMPLE.sub(lambda found: f"\n```pycon\n{found[0].rstrip()}\n```\n", docstring.value)
        docstring.value = _DRAWN.sub(r"```text\n\g<0>```\n", text)
    if isinstance(thing, Class) and (docstring is None or "\nArgs:" not in docstring.value):
        thing.members.pop("__init__", None)
    for member in thing.members.values():
        if isinstance(member, Object):
            _prepare(member)
