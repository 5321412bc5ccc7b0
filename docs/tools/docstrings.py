"""Show the examples that end our docstrings as examples."""

import re
from typing import Any

from griffe import Class, Extension, Function, Module, Object

_EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)


class Examples(Extension):
    """Fences the lines from `>>>` to the next empty line, which Markdown would take for a quotation."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        _fence_examples(pkg)


def _fence_examples(thing: Object) -> None:
    if thing.docstring is not None:
        thing.docstring.value = _EXAMPLE.sub(
            lambda example: f"\n```pycon\n{example[0].rstrip()}\n```\n", thing.docstring.value
        )
    for member in thing.members.values():
        if isinstance(member, Class | Function | Module) or (not member.is_alias and member.docstring is not None):
            _fence_examples(member)
