"""The HTML that objects show in notebooks: escaped, bounded, and readable on light and on dark pages.

Names and values come from files that anyone may have written, so every text is cut and escaped here, and other modules
write no HTML. Styles are inline, since notebooks do not keep style sheets. Text has the colour of the page; everything
else is half transparent.
"""

import html
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NewType, TypeAlias

from shardkeep.model.summaries import cut

Html = NewType("Html", str)  # escaped

_LONGEST = 100  # characters of a text that does not wrap
_LONGEST_WRAPPED = 400  # characters of a path or a sentence
_LINE = "1px solid rgba(128,128,128,.35)"
_CELL = "text-align:left;vertical-align:top;padding:.2em .8em .2em 0;border:none;white-space:{}"
_TABLE = "border-collapse:collapse;border:none;margin:.2em 0 .6em;width:auto"
_CODE = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.95em"
_GAUGE = "display:inline-block;width:4em;height:.6em;background:rgba(128,128,128,.25)"
_BEFORE_GAUGE = "display:inline-block;min-width:4.5em;margin-right:.6em;text-align:right"


@dataclass(frozen=True, slots=True)
class Gauge:
    """A text with a bar after it: a share from 0 to 1."""

    text: str
    share: float


@dataclass(frozen=True, slots=True)
class Code:
    """A name, a path or a piece of code."""

    text: str


Cell: TypeAlias = str | Gauge | Code


def panel(kind: str, subject: Cell, parts: Iterable[Html]) -> str:
    """What an object shows: what it is, what it is about, and tables and lines below.

    >>> panel("Tree", "<script>", [])
    '<div style="overflow-x:auto;line-height:1.4"><div><b>Tree</b> &lt;script&gt;</div></div>'
    """
    title = f"<div><b>{_escaped(kind)}</b> {_content(subject, _LONGEST_WRAPPED)}</div>"
    return f'<div style="overflow-x:auto;line-height:1.4">{title}{"".join(parts)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], wraps: Collection[int] = ()) -> Html:
    """A table. Long texts wrap in the columns whose numbers are in `wraps`."""

    def row(tag: str, cells: Sequence[Cell]) -> str:
        return f"<tr>{''.join(_cell(tag, cell, i in wraps) for i, cell in enumerate(cells))}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    start = f'<thead style="border-bottom:{_LINE}">{row("th", head)}</thead>'
    return Html(f'<table class="shardkeep" style="{_TABLE}">{start}<tbody>{body}</tbody></table>')


def facts(rows: Iterable[tuple[str, Cell | None]]) -> Html:
    """A table of names and values. Those without a value are left out."""
    shown = [
        f"<tr>{_cell('th', name, weight='400;opacity:.7')}{_cell('td', value, wraps=True)}</tr>"
        for name, value in rows
        if value not in (None, "")
    ]
    body = f"<tbody>{''.join(shown)}</tbody>"
    return Html(f'<table class="shardkeep" style="{_TABLE}">{body}</table>' if shown else "")


def line(text: str, heading: bool = False) -> Html:
    """A line of text: a sentence, or the heading of the table below it."""
    style = "margin:.5em 0 0;font-weight:600" if heading else "margin:.2em 0"
    return Html(f'<div style="{style}">{_escaped(text, _LONGEST_WRAPPED)}</div>')


def _cell(tag: str, cell: Cell, wraps: bool = False, weight: str = "600") -> str:
    style = _CELL.format("normal;overflow-wrap:anywhere;min-width:12em" if wraps else "nowrap")
    content = _content(cell, _LONGEST_WRAPPED if wraps else _LONGEST)
    return f'<{tag} style="{style}{f";font-weight:{weight}" if tag == "th" else ""}">{content}</{tag}>'


def _content(cell: Cell, most: int) -> Html:
    if isinstance(cell, Gauge):
        return Html(f'<span style="{_BEFORE_GAUGE}">{_escaped(cell.text, most)}</span>{_gauge(cell.share)}')
    if isinstance(cell, Code):
        return Html(f'<span style="{_CODE}">{_escaped(cell.text, most)}</span>')
    return _escaped(cell, most)


def _gauge(share: float) -> str:
    width = 100 * min(max(share, 0.0), 1.0) if share == share else 0.0
    filled = f"display:block;height:100%;width:{width:.0f}%;background:rgba(70,130,220,.85)"
    return f'<span style="{_GAUGE}"><span style="{filled}"></span></span>'


def _escaped(text: str, most: int = _LONGEST) -> Html:
    return Html(html.escape(cut(text, most)))
