"""What commands print: text for people, one JSON document for programs, colour and progress only on a terminal."""

import datetime
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from shardkeep.errors import counted as counted
from shardkeep.progress import Bar, Progress
from shardkeep.values import show

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")
_SPANS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

Cell = str | tuple[str, str]  # a text, or a text and its style


class UsageError(Exception):
    """What was asked cannot be done like that; the message says how it can."""


class Output:
    """Where a command puts its result: stdout, as text or as JSON."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.coloured = not as_json and _is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")

    def line(self, text: str = "") -> None:
        """A line of text. Characters that the terminal would obey or cannot show are written out."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")

    def paint(self, text: str, style: str) -> str:
        return f"\033[{_STYLES[style]}m{text}\033[0m" if self.coloured and style and text else text

    def table(self, rows: Sequence[Sequence[Cell]], *, right: Iterable[int] = (), indent: str = "") -> None:
        """Rows with their columns aligned; those in `right` to the right. The last column is not padded."""
        cells = [[cell if isinstance(cell, tuple) else (cell, "") for cell in row] for row in rows]
        widths = [max(len(row[i][0]) for row in cells) for i in range(len(cells[0]))] if cells else []
        ragged = set(right)
        for row in cells:
            parts: list[str] = []
            for i, (text, style) in enumerate(row):
                room = " " * (widths[i] - len(text))
                painted = self.paint(text, style)
                parts.append(room + painted if i in ragged else painted + room)
            self.line((indent + "  ".join(parts)).rstrip())

    def document(self, body: Any) -> None:
        """The one JSON document of a command."""
        sys.stdout.write(json.dumps(body, indent=1, allow_nan=False) + "\n")


def _is_terminal(stream: Any) -> bool:
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def bar(label: str, total: int) -> AbstractContextManager[Progress]:
    """A progress bar on a terminal; nothing anywhere else."""
    return Bar(label, total) if _is_terminal(sys.stderr) and total else nullcontext(_ignore)


def shows_progress() -> bool:
    """Whether someone is watching."""
    return _is_terminal(sys.stderr)


def _ignore(_: int) -> None:
    """Nobody is watching."""


def plain(text: str) -> str:
    r"""A text from a file, safe to print: what could steer a terminal, or is not valid Unicode, is escaped.

    >>> plain("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def message_of(error: Exception) -> str:
    """What an error says, safe to print. The library speaks of its arguments; here they are options."""
    text = str(error).replace("pass overwrite=True", "pass --overwrite").replace("say prefix= one", "say --prefix, one")
    return "\n".join(plain(line) for line in text.split("\n"))


def human(nbytes: int) -> str:
    """Bytes for people.

    >>> human(999), human(1_234_567)
    ('999 B', '1.2 MB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    size, unit = nbytes / 1000, 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}"


def age(moment: datetime.datetime | None, now: datetime.datetime | None = None) -> str:
    """How long ago, in one unit; a dash if nobody knows."""
    if moment is None:
        return "-"
    seconds = ((now or datetime.datetime.now(datetime.UTC)) - moment).total_seconds()
    for length, unit in _SPANS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def moment_of(text: object) -> datetime.datetime | None:
    """A recorded time; None if it is none. One without a zone is taken as UTC."""
    try:
        moment = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sorting key by which step_9 comes before step_10."""
    parts = re.split(r"([0-9]+)", text)
    return [(0, int(p), p) if p.isdigit() and p.isascii() else (1, 0, p) for p in parts if p]


def json_number(value: Any) -> Any:
    """A number as strict JSON has it: what is not finite becomes a text (nan, inf, -inf)."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def json_value(value: Any) -> Any:
    """A plain value of a tree as JSON: itself where JSON has it exactly, else its `repr`."""
    if value is None or type(value) is bool or (type(value) is str and plain(value) == value):
        return value
    if (type(value) is int and abs(value) < 2**53) or (type(value) is float and math.isfinite(value)):
        return value
    return show(value)


def short(value: Any, most: int = 60) -> str:
    """A plain value in one line."""
    text = plain(show(value))
    return text if len(text) <= most else text[: most - 1] + "…"


def layout(dtype: str | None, shape: Sequence[int] | None) -> str:
    """
    >>> layout("float32", (2, 3))
    'float32[2,3]'
    """
    return f"{dtype}[{','.join(map(str, shape or ()))}]"


def ask(question: str, read: Callable[[], str] | None = None) -> bool:
    """Whether the user says yes; asked on stderr, so that a piped result stays clean."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    answer = (read or sys.stdin.readline)()
    return answer.strip().lower() in ("y", "yes")
