"""The HTML of notebooks: whatever is shown is escaped, bounded and well formed."""

import html
import math
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.model.markup import Code, Gauge, facts, line, panel, table

TEXTS = st.text() | st.sampled_from(["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "&lt;", "\u202e"])


class Checked(HTMLParser):
    """Fails at an element or an attribute that the module does not write, or one that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("div", "b", "span", "table", "thead", "tbody", "tr", "th", "td")
        assert {name for name, _ in attrs} <= {"style", "class"}
        assert all(value and "url" not in value for _, value in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


@given(TEXTS, TEXTS, st.floats())
def test_any_text_stays_text(one: str, other: str, share: float) -> None:
    parts = [
        facts([(one, other), (other, Code(one)), ("left out", ""), ("too", None)]),
        table((one, other), [[Code(other), Gauge(one, share)], [one, other]], wraps=(1,)),
        line(one),
        line(other, heading=True),
    ]
    shown = Checked(panel("Kind", Code(one), parts))
    assert "left out" not in shown.said
    assert len("".join(shown.said)) < 12 * 4000
    if one.isprintable() and 0 < len(one) < 100:
        assert one in shown.said


def test_a_name_that_is_a_script_is_shown_as_it_is() -> None:
    shown = panel("Tree", "", [table(("leaf",), [[Code("<script>alert(1)</script>")]])])
    assert "<script>" not in shown
    assert html.escape("<script>alert(1)</script>") in shown


def test_a_long_text_is_cut() -> None:
    cell = Checked(table(("leaf", "size"), [["k" * 10_000, "s" * 10_000]], wraps=(0,))).said
    assert [len(text) for text in cell] == [4, 4, 400, 100]
    assert all("…" in text for text in cell[2:])
    assert len(Checked(line("x" * 10_000)).said[0]) == 400


@pytest.mark.parametrize(("share", "width"), [(-1, 0), (0.256, 26), (7, 100), (math.nan, 0), (math.inf, 100)])
def test_a_bar_stays_in_its_place(share: float, width: int) -> None:
    assert f"width:{width}%" in table(("size",), [[Gauge("24 B", share)]])


def test_no_facts_are_no_table() -> None:
    assert facts([("a", None), ("b", "")]) == ""
