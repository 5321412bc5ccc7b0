"""Patterns match whole keys, `{i}` is an index that moves no group's number, and keys are made of matches."""

from typing import Any

import pytest

from shardkeep.remap.patterns import check_key, compiled, expand, inverted, literal, plain


@pytest.mark.parametrize(
    ("pattern", "key", "new", "expected"),
    [
        (r"a/(\d+)/(.*)", "a/7/w", r"b/\2/\1", "b/w/7"),
        ("a/{i}/(.*)", "a/7/w", r"b/\1", "b/w"),
        ("(x)/a_{i}/(.*)", "x/a_12/w", r"\2/{i}/\1", "w/12/x"),
        ("(?P<name>.*)/{i}/(.*)", "x/3/w", r"\g<name>/\2", "x/w"),
        (r"({i})/(a)\2", "5/aa", r"\1\2", "5a"),
        ("layers/{i}/block_{i}/w", "layers/4/block_4/w", "{i}", "4"),
        ("a{2}", "aa", r"\g<0>", "aa"),
        (r"a\\{i}", "a\\7", "b{i}", "b7"),
        ("a(b)?", "a", r"x\1", "x"),
        ("a", "a", r"x\\1", "x\\1"),
        ("a", "a", r"x\{i}", "x{i}"),
    ],
)
def test_keys_are_made_of_matches(pattern: str, key: str, new: str, expected: str) -> None:
    match = compiled(pattern).match(tuple(key.split("/")))
    assert match is not None
    assert "/".join(expand(new, match)) == expected


@pytest.mark.parametrize(
    ("pattern", "key"), [("a", "ab"), ("a", "b/a"), ("a/{i}", "a/x"), ("l{i}/b{i}", "l1/b2"), (r"\{i}", "3")]
)
def test_a_pattern_matches_the_whole_key_or_nothing(pattern: str, key: str) -> None:
    assert compiled(pattern).match(tuple(key.split("/"))) is None


def test_an_index_is_a_number() -> None:
    match = compiled("layer_{i}/w").match(("layer_007", "w"))
    assert match is not None
    assert match.index == 7
    assert compiled(".*").match(("x",)).index is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pattern", "key", "problem"),
    [
        ("a", r"\1", "refers to the group 1"),
        ("(a)", r"\g<name>", "refers to the group name"),
        ("{i}", r"\1", "refers to the group 1"),
        ("(a)", "b\\", "a backslash without a group"),
        ("(a)", "b/{i}", "the pattern '\\(a\\)' has none"),
    ],
)
def test_keys_that_cannot_be_made_are_refused(pattern: str, key: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_key(key, compiled(pattern), index=compiled(pattern).has_index)


def test_an_index_that_takes_no_part_makes_no_key() -> None:
    match = compiled("(layers/{i}|head)/w").match(("head", "w"))
    assert match is not None
    assert match.index is None
    assert expand(r"x/\1", match) == ("x", "head")
    with pytest.raises(ValueError, match="the part of the pattern with {i} does not match"):
        expand("x/{i}", match)


def test_a_number_of_many_digits_is_no_index() -> None:
    assert compiled("{i}").match(("9" * 18,)) is not None
    assert compiled("{i}").match(("9" * 5000,)) is None


@pytest.mark.parametrize("pattern", ["(", "(" * 3000 + ")" * 3000, "a{99999999999999}"])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a valid regular expression"):
        compiled(pattern)


@pytest.mark.parametrize("key", ["a/b", "a.b/c-d", "x{i}", "\\1", "(a)", "a+b*", "ä/é", r"\{i}", ""])
def test_any_key_can_be_written_literally(key: str) -> None:
    for path in ((key,), tuple(key.split("/"))):
        match = compiled(literal(path)).match(path)
        assert match is not None
        assert expand(plain(path), match) == (path if path != ("",) else ())


@pytest.mark.parametrize(
    ("pattern", "path", "new", "expected"),
    [
        ("(.*)/w", ("mlp/~/lin_0", "w"), r"\1/kernel", ("mlp/~/lin_0", "kernel")),
        ("mlp/~/lin_{i}/(.*)", ("mlp/~/lin_0", "w"), r"mlp\/~\/dense_{i}/\1", ("mlp/~/dense_0", "w")),
        (r"mlp\/~\/lin_0/(.*)", ("mlp/~/lin_0", "w"), r"mlp/\1", ("mlp", "w")),
        ("mlp(/.*)/lin(/.*)", ("mlp/~", "lin", "w"), r"a\1\2", ("a/~", "w")),
        ("(.*)lp/(~.)(.*)", ("mlp/~", "x", "y/z"), r"\3 \2\1", ("x", "y/z ~", "m")),
        ("a()/(b)?.*", ("a", "c"), r"x\1/\2y", ("x", "y")),
        ("(.*)", (), r"\1/w", ("", "w")),
        (".*", (), "w", ("w",)),
    ],
)
def test_a_slash_inside_a_name_stays_there(pattern: str, path: Any, new: str, expected: Any) -> None:
    """As in the names of Haiku's modules."""
    match = compiled(pattern).match(path)
    assert match is not None
    assert expand(new, match) == expected


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("a/(.*)", r"b/\1", ("b/(.*)", r"a/\1")),
        (r"(\d+)/(.*)", r"\2/\1/\2", (r"(.*)/(\d+)/\1", r"\2/\1")),
        ("layers/{i}/(.*)", r"layers/\1", ("layers/(.*)", r"layers/{i}/\1")),
        (r"a\.b", "c+d", (r"c\+d", "a.b")),
        (r"a\/~/(.*)", r"b\/c/\1", (r"b\/c/(.*)", r"a\/~/\1")),
        ("a/.*", "b", None),
        ("a/(.*)", "b", None),
        ("(a(b))", r"\1", None),
        ("(a)?", r"\1", None),
        ("(?:a)", "b", None),
    ],
)
def test_a_pattern_of_names_and_groups_can_be_turned_around(pattern: str, key: str, expected: object) -> None:
    assert inverted(pattern, key) == expected
