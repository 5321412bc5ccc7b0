"""What commands print: text, or one JSON document with `--json`; colours and progress bars only on a terminal."""

import datetime
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from shardkeep.errors import counted as counted
from shardkeep.model.summaries import human as human
from shardkeep.model.values import show
from shardkeep.runtime.progress import Bar, Progress

if TYPE_CHECKING:
    from shardkeep.model.leaves import StoredArray

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_SPANS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

_LONGEST = 60  # characters of a plain value in a table

Cell = str | tuple[str, str]  # text, or text and its style


class Output:
    """Writes a command's result to stdout, as text or as JSON."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.coloured = not as_json and _is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")

    def line(self, text: str = "") -> None:
        """Print a line. Characters that the encoding of stdout lacks are escaped."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")

    def paint(self, text: str, style: str) -> str:
        return f"\033[{_STYLES[style]}m{text}\033[0m" if self.coloured and style and text else text

    def table(self, rows: Sequence[Sequence[Cell]], *, right: Iterable[int] = (), indent: str = "") -> None:
        """Print rows with aligned columns; those numbered in `right` are right-aligned.

        The last cell of a row that has fewer cells than others spans the remaining columns and widens none of them.
        """
        cells = [[cell if isinstance(cell, tuple) else (cell, "") for cell in row] for row in rows]
        columns = max(map(len, cells), default=0)
        widths = [0] * columns
        for row in cells:
            for i, (text, _) in enumerate(row if len(row) == columns else row[:-1]):
                widths[i] = max(widths[i], len(text))
        to_the_right = set(right)
        for row in cells:
            parts: list[str] = []
            for i, (text, style) in enumerate(row):
                padding = " " * (widths[i] - len(text))
                painted = self.paint(text, style)
                parts.append(padding + painted if i in to_the_right else painted + padding)
            self.line((indent + "  ".join(parts)).rstrip())

    def document(self, body: object) -> None:
        """Print the JSON document of a command. A NaN or an infinity in it is a mistake: JSON has none."""
        sys.stdout.write(json.dumps(body, indent=1, allow_nan=False) + "\n")


def _is_terminal(stream: Any) -> bool:
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def bar(label: str, total: int) -> AbstractContextManager[Progress]:
    """A progress bar if stderr is a terminal, else nothing."""
    return Bar(label, total) if _is_terminal(sys.stderr) and total else nullcontext(_ignore)


def shows_progress() -> bool:
    """Whether to draw progress bars: only if stderr is a terminal."""
    return _is_terminal(sys.stderr)


def _ignore(_: int) -> None:
    """Progress that is not shown."""


def plain(text: str) -> str:
    r"""Text from a file, made safe to print: control characters and invalid Unicode are escaped.

    >>> plain("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def name_prefix(prefix: str) -> str:
    """A tree's prefix as it is shown, also if it has none.

    >>> name_prefix("model"), name_prefix("")
    ('model', '(no prefix)')
    """
    return plain(prefix) or "(no prefix)"


def message_of(error: Exception) -> str:
    """An error's message, safe to print, with the options of the command instead of the arguments of Python."""
    text = re.sub(r"(?<=[ (])overwrite=True\b", "--overwrite", str(error))
    text = re.sub(r"(?<=[ (])(prefix|include)= ?", r"--\1 ", text)
    return "\n".join(plain(line) for line in text.split("\n"))


def age(moment: datetime.datetime | None, now: datetime.datetime | None = None) -> str:
    """How long ago a moment was, in one unit; a dash for an unknown one."""
    if moment is None:
        return "-"
    seconds = ((now or datetime.datetime.now(datetime.UTC)) - moment).total_seconds()
    for length, unit in _SPANS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def json_number(value: object) -> object:
    """A number as strict JSON; NaN and infinities become the strings nan, inf and -inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def json_value(value: object) -> object:
    """A plain value of a tree as strict JSON: the value itself if JSON holds it exactly, else its `repr`."""
    if value is None or type(value) is bool or (type(value) is str and plain(value) == value):
        return value
    if (type(value) is int and abs(value) < 2**53) or (type(value) is float and math.isfinite(value)):
        return value
    return show(value)


def short(value: object) -> str:
    """A plain value in one line of at most 60 characters; of a long string or bytes, the start and the length.

    >>> short(1.5), short(b"x" * 1_000_000)
    ('1.5', "b'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx… (1,000,000 bytes)")
    """
    is_long = isinstance(value, str | bytes) and len(value) > _LONGEST  # megabytes are not written out to be cut
    text = plain(show(cast("str | bytes", value)[:_LONGEST] if is_long else value))
    if not is_long and len(text) <= _LONGEST:
        return text
    if isinstance(value, str | bytes):
        return f"{text[:32]}… ({counted(len(value), 'byte' if isinstance(value, bytes) else 'character')})"
    return text[: _LONGEST - 1] + "…"


def layout(leaf: "StoredArray") -> str:
    """dtype and shape in one word, for example float32[2,3]."""
    return f"{leaf.logical_dtype}[{','.join(map(str, leaf.logical_shape))}]"


def ask(question: str, read: Callable[[], str] | None = None) -> bool:
    """Ask the user on stderr, so that a piped result stays clean; True for yes."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    answer = (read or sys.stdin.readline)()
    return answer.strip().lower() in ("y", "yes")
