"""Any key has a place on any file system, and two keys never share one."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import system
from shardkeep.errors import IntegrityError
from shardkeep.model.naming import check_name, clean_name, hashed, leaf_directories, own_directory, prefix_directory
from shardkeep.model.tree import flatten
from support import assert_same

any_text = st.text(st.integers(0, 0x10FFFF).map(chr), max_size=10)
awkward = st.sampled_from(
    [
        "",
        ".",
        "..",
        "/",
        "a/b",
        "~",
        "%",
        "%h",
        "a",
        "A",
        "ß",
        "SS",
        "ss",
        "é",
        "e\u0301",
        "\ufb01",
        "fi",
        "K",
        "\u212a",
        "ı",
        "I",
        "i",
        "İ",
        " ",
        "a ",
        "0",
        "0.0",
        "1.2.3",
        ".zarray",
        ".ZARRAY",
        "zarr.json",
        "Manifest.json",
        "manifest.json",
        ".shardkeep",
        "tensorstore_index.json",
        "\x00",
        "\n",
        "\udc80",
        "\ud83d\ude00",
        "😀",
        "x" * 199,
        "x" * 200,
        "x" * 201,
        "x" * 1000,
        "é" * 150,
        "con",
        "a.b",
        "a%2Fb",
    ]
)
parts = awkward | any_text


def _folded(name: str) -> str:
    """As a file system that ignores case and Unicode form might see it."""
    text = unicodedata.normalize("NFD", name)
    for _ in range(3):
        text = unicodedata.normalize("NFKD", text.casefold())
    return text


def _check(directories: list[str]) -> None:
    assert len({_folded(d) for d in directories}) == len(directories)
    for directory in directories:
        assert len(directory.encode()) <= 1000
        for part in directory.split("/"):
            assert part not in ("", ".", "..")
            assert len(part.encode()) <= 200
            assert "\0" not in part
            assert part.casefold() not in (".zarray", ".zattrs", ".zgroup", ".zmetadata", ".shardkeep")
    # No leaf's directory may lie inside another's, where its chunks are.
    folded = {_folded(d) for d in directories}
    assert not any(_folded(d)[:i] in folded for d in directories for i, c in enumerate(_folded(d)) if c == "/")


@st.composite
def leaf_paths(draw: st.DrawFn) -> list[tuple[str, ...]]:
    """Paths a tree can have: none is the start of another."""
    found = draw(st.lists(st.lists(parts, min_size=1, max_size=4).map(tuple), max_size=8, unique=True))
    return [p for p in found if not any(p != q and q[: len(p)] == p for q in found)]


@settings(max_examples=300)
@given(leaf_paths())
@example([("A",), ("a",)])
@example([("A", "x"), ("a", "x")])
@example([("A", "x"), ("a", "y")])
@example([("é",), ("e\u0301",)])
@example([("ß",), ("ss",), ("SS",)])
@example([(".zarray",), (".ZARRAY",)])
@example([("\udc80",), ("%ED%B2%80",)])
@example([("\ud83d\ude00",), ("😀",)])
@example([("",), ("%",)])
@example([("w", "0"), ("w", "0.0")])
@example([("k" * 150,) * 8, ("K" * 150,) * 8])
def test_every_leaf_has_a_directory_of_its_own_on_any_file_system(paths: list[tuple[str, ...]]) -> None:
    _check(leaf_directories(paths))


def test_a_long_path_is_not_taken_for_its_parts_joined() -> None:
    """A path too long for a file system becomes a hash, which no other leaf may have."""
    path = tuple(f"{i:03}" + "k" * 60 for i in range(20))
    directories = leaf_directories([path, ("\0".join(path),)])
    assert len(set(directories)) == 2


def test_the_tree_that_is_one_leaf_has_a_directory() -> None:
    _check(leaf_directories([()]))


def test_ordinary_keys_stay_readable() -> None:
    assert leaf_directories([("layers", "0", "kernel"), ("step size",), ("v1.5",)]) == [
        "layers/0/kernel",
        "step size",
        "v1.5",
    ]


def test_where_nothing_clashes_only_the_odd_name_changes() -> None:
    assert leaf_directories([("a", "W"), ("b", "w")]) == ["a/W", "b/w"]
    assert leaf_directories([("w",), ("a/b",)]) == ["w", "a%2Fb"]


def test_names_that_clash_by_case_become_hashes() -> None:
    assert leaf_directories([("W",), ("w",), ("x",)]) == [hashed("W"), hashed("w"), "x"]


def test_reserved_names_are_reserved_in_any_case() -> None:
    assert leaf_directories([("Manifest.JSON",), ("CONFIG.json",), ("config",)]) == [
        hashed("Manifest.JSON"), hashed("CONFIG.json"), "config",
    ]  # fmt: skip


def test_windows_reserves_more_names(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [("aux",), ("Nul.x",), ("com1",), ("auxiliary",)]
    assert leaf_directories(paths) == ["aux", "Nul.x", "com1", "auxiliary"]
    assert check_name("a:b") == "a:b"
    monkeypatch.setattr(system, "RESERVES_NAMES", True)
    assert leaf_directories(paths) == [hashed("aux"), hashed("Nul.x"), hashed("com1"), "auxiliary"]
    with pytest.raises(IntegrityError, match="not a file name: 'C:/x'"):  # it is elsewhere, or part of another file
        check_name("C:/x")


@given(parts.filter(lambda p: "." not in p and p))
def test_a_prefix_has_a_plain_directory(prefix: str) -> None:
    _check([prefix_directory(prefix)])


def test_a_prefix_nests_by_its_dots() -> None:
    assert prefix_directory("") == ""
    assert prefix_directory("model.encoder") == "model/encoder"


AWKWARD_TREE = {
    "..": 0,
    ".": 1,
    "": 2,
    "/etc/passwd": 3,
    "../../escape": 4,
    "a": {"b": 5, "B": 6},
    "A": {"b": 7},
    "a.b": 8,
    ".zarray": 9,
    "0.0": 10,
    "x" * 1000: 11,
    "X" * 1000: 12,
    "é": 13,
    "e\u0301": 14,
    "\udc80": 15,
    "😀": 16,
    "nul\0line\nbreak": 17,
    "~": 18,
    "manifest.json": 19,
    "tensorstore_index.json": 20,
    " ": 21,
    "con": 22,
    "__metadata__": 23,
    ".shardkeep": 24,
    "\\": 25,
    "\\.": 26,
    1: 27,
    "1": 28,
    "%": 29,
    "%25": 30,
}


@pytest.mark.parametrize("arguments", [{}, {"format": "zarr"}, {"format": "zarr", "compression": "zstd"}])
def test_any_key_is_saved_inside_the_checkpoint_and_found_again(tmp_path: Path, arguments: dict[str, str]) -> None:
    def filled(tree: object) -> object:
        if isinstance(tree, dict):
            return {k: filled(v) for k, v in tree.items()}
        return np.full(3, tree, np.int16)

    tree = filled(AWKWARD_TREE)
    path = tmp_path / "deep" / "er" / "checkpoint"
    shardkeep.save(path, tree, **arguments)
    assert_same(shardkeep.load(path), tree)
    assert list(tmp_path.iterdir()) == [tmp_path / "deep"], "nothing was written outside"
    assert list((tmp_path / "deep" / "er").iterdir()) == [path]
    assert shardkeep.verify(path).ok
    assert len(flatten(tree)[1]) == 31 == len(shardkeep.inspect(path).leaves)


@pytest.mark.parametrize("prefix", ["", "m", "m.n", "a b", "é:", "..", "a~b"])
def test_a_clean_name_is_that_of_the_first_tree_of_the_prefix(prefix: str) -> None:
    save_id = "0123456789abcdef" * 2
    start = f"{prefix_directory(prefix)}/" if prefix else ""
    for name in ("w/.zarray", "a~b/0.0", f"x~{save_id}/0"):
        assert clean_name(f"{own_directory(prefix, save_id)}/{name}", save_id) == start + name


@pytest.mark.parametrize(
    "name", ["w/0", "m/w", "~1/w", "m~2", "m~22/w", "~2/.zgroup/x", "~2/config.json", ".shardkeep~2/x"]
)
def test_a_file_elsewhere_has_no_clean_name(name: str) -> None:
    with pytest.raises(ValueError, match="has no clean name"):
        clean_name(name, "2")
