"""What is asked of any Store, asked of the local one; and what counts as a path."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.runtime.scopes import Scope
from shardkeep.stores import base
from shardkeep.stores.base import Store
from shardkeep.stores.local.store import LocalStore
from shardkeep.stores.location import location
from support import hold

# A store that is added goes in here, and everything below is asked of it too.
STORES: dict[str, Callable[[Path], Store]] = {"local": lambda path: LocalStore(str(path / "store"))}


@pytest.fixture(params=STORES.values(), ids=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return request.param(tmp_path)


def put(store: Store, name: str, *parts: bytes) -> None:
    with store.create(name, 100) as file:
        file.write(0, [memoryview(part) for part in parts])


def test_a_store_and_what_it_gives_have_every_method_with_the_same_parameters(store: Store) -> None:
    put(store, "old", b"1")
    held = hold(store, f"{store.saves}/1", b"")
    with store.open("old") as opened, store.create("new", 100) as new:
        things: dict[Any, object] = {base.Store: store, base.StoredFile: opened, base.NewFile: new, base.Held: held}
        if store.mappable:
            things[base.Mapping] = opened.map(0, 1)
        for protocol, thing in things.items():
            assert _parameters(protocol).items() <= _parameters(type(thing)).items(), protocol.__name__
            properties = [name for name, member in vars(protocol).items() if isinstance(member, property)]
            assert all(hasattr(thing, name) for name in (*inspect.get_annotations(protocol), *properties))
    held.remove()


def _parameters(cls: type) -> dict[str, list[str]]:
    """Of each public method the names of its parameters."""
    methods = inspect.getmembers_static(cls, inspect.isfunction)
    return {name: list(inspect.signature(f).parameters) for name, f in methods if not name.startswith("_")}


class TestNothingThere:
    @pytest.mark.parametrize("name", ["x", "a/x", "file/x"])
    def test_a_name_that_nothing_has(self, store: Store, name: str) -> None:
        put(store, "file", b"1")
        assert store.size(name) is None
        assert store.identity(name) is None
        assert store.children(name) == []
        assert not store.is_taken(["x", "a/x"])
        for look in (store.read, store.open):
            with pytest.raises((FileNotFoundError, NotADirectoryError), match=name):
                look(name)
        store.remove([name])  # gone already: no error
        assert store.try_hold("x", Scope("a test")) is None

    def test_looking_at_a_store_does_not_make_it(self, store: Store) -> None:
        assert store.children("") == store.find_directories_with("x") == []
        assert not os.path.exists(store.url)


class TestFiles:
    def test_what_is_written_is_read(self, store: Store) -> None:
        put(store, "a/b", b"12", b"", b"345")
        assert (store.read("a/b"), store.size("a/b"), store.children("a")) == (b"12345", 5, ["b"])
        with store.open("a/b") as file:
            buffer = np.zeros(3, np.uint8)
            file.read_into(1, buffer)
            assert (file.size, buffer.tobytes()) == (5, b"234")
        put(store, "empty")
        assert store.read("empty") == b""

    def test_a_file_can_be_written_in_any_order(self, store: Store) -> None:
        with store.create("a/b", 100) as file:
            file.write(3, [memoryview(b"45"), memoryview(b"6")])
            file.write(0, [memoryview(b"123")])
        store.write_into("a/b", 1, b"xy")
        assert store.read("a/b") == b"1xy456"

    def test_no_way_to_begin_a_file_takes_one_that_is_there(self, store: Store) -> None:
        put(store, "a", b"old")
        with pytest.raises(FileExistsError, match="/a"):
            store.create("a", 100)
        with pytest.raises(FileExistsError, match="/a"):
            hold(store, "a", b"new")
        assert not store.claim("a")
        assert store.read("a") == b"old"

    def test_replace_and_rename_put_one_file_in_the_place_of_another(self, store: Store) -> None:
        put(store, "a", b"old")
        was = store.identity("a")
        store.replace("a", b"new")
        assert store.read("a") == b"new"
        assert store.identity("a") != was
        put(store, "b", b"newer")
        store.rename("b", "a")
        assert (store.read("a"), store.children("")) == (b"newer", ["a"])

    def test_the_identity_of_a_file_stays_until_it_changes(self, store: Store) -> None:
        put(store, "a", b"1")
        was = store.identity("a")
        store.read("a")
        assert store.identity("a") == was
        store.write_into("a", 1, b"2")
        assert store.identity("a") != was

    def test_files_are_removed_with_the_directories_they_leave_empty(self, store: Store) -> None:
        for name in ("a/b/c", "a/d", "e"):
            put(store, name, b"1")
        store.remove(["a/b/c", "e", "absent"])
        assert (store.children(""), store.children("a")) == (["a"], ["d"])

    def test_a_directory_is_no_file(self, store: Store) -> None:
        put(store, "a/b", b"1")
        with pytest.raises(ValueError, match="a is not a regular file"):
            store.read("a")
        with pytest.raises(ValueError, match="a is not a regular file"):
            store.open("a")

    def test_a_directory_has_no_size(self, store: Store) -> None:
        """Where a file is looked for, a directory in its place is nothing."""
        put(store, "a/b", b"1")
        assert store.size("a") is None

    def test_directories_are_found_by_what_is_in_them(self, store: Store) -> None:
        for name in ("x/.zarray", "x/y/.zarray", ".zarray", "z/other", "w/.zarray/file"):
            put(store, name, b"1")
        assert store.find_directories_with(".zarray") == ["", "x", "x/y"]

    def test_a_name_is_taken_by_what_is_there_or_in_its_way(self, store: Store) -> None:
        put(store, "a/b", b"1")
        assert [store.is_taken([name]) for name in ("a/b", "a", "a/b/c", "a/c", "c")] == [
            True,
            True,
            True,
            False,
            False,
        ]


class TestControl:
    def test_a_record_is_held_by_one_until_it_lets_go(self, store: Store) -> None:
        held = hold(store, f"{store.saves}/1", b"one")
        held.append(b"two")
        assert store.read(f"{store.saves}/1") == b"one\ntwo\n"
        assert store.try_hold(f"{store.saves}/1", Scope("a test")) is None
        held.release()
        taken = store.try_hold(f"{store.saves}/1", Scope("a test"))
        assert taken is not None
        taken.remove()
        assert store.children(store.saves) == []
        for end in (held.remove, held.release, taken.remove, taken.release):
            end()  # once more is no error

    def test_the_control_directory_goes_with_everything_shardkeep_puts_there(self, store: Store) -> None:
        put(store, "data", b"1")
        with store.lock(1):
            store.claim(f"{store.control}/claims/x")
            hold(store, f"{store.saves}/1", b"").release()
            store.remove_control()
        assert store.children("") == ["data"]
        store.remove_if_empty()
        assert store.read("data") == b"1"
        store.remove(["data"])
        store.remove_if_empty()
        assert not os.path.exists(store.url)

    def test_a_lock_makes_the_place_and_can_be_had_again(self, store: Store) -> None:
        for _ in range(2):
            with store.lock(1):
                assert store.children("") == [store.control]
        with pytest.raises(ZeroDivisionError, match="division"), store.lock(1):
            _ = 1 // 0
        with store.lock(1):
            pass


class Bytes:
    def __fspath__(self) -> bytes:
        return b"/r\xc3\xa9/\xff"


def located(path: Any) -> bytes:
    """A path as bytes: what is no Unicode could not be put in a report."""
    found = location(path).text
    assert isinstance(found, str)
    return os.fsencode(found)


class TestLocation:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/a/b", "/a/b"),
            ("/a//b/./c/../", "/a/b"),
            (Path("/a/b"), "/a/b"),
            ("file:///a%20b/%C3%A9%25", "/a b/é%"),
            ("file://localhost/a", "/a"),
            ("/a%20b", "/a%20b"),
            ("/a#1?x=2", "/a#1?x=2"),
            ("/a/~b", "/a/~b"),
            pytest.param(Bytes(), b"/r\xc3\xa9/\xff", id="bytes"),
            ("file:///r%C3%A9/%FF", b"/r\xc3\xa9/\xff"),
            ("file:///a%3F%23\t", "/a?#\t"),
        ],
    )
    def test_a_path_in_any_form_is_absolute_text(self, path: Any, expected: Any) -> None:
        assert located(path) == os.fsencode(expected)

    def test_a_relative_path_begins_here_and_a_tilde_at_home(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", "/somewhere")
        assert located("run") == located(Path("x/../run")) == bytes(tmp_path / "run")
        assert located("~/run") == located(Path("~/run")) == b"/somewhere/run"
        assert located("file:///~/run") == b"/~/run"

    @pytest.mark.parametrize("path", ["https://x/y", "FILE:///x", "x://"])
    def test_a_place_that_is_not_known_is_refused_by_name_with_those_that_are(self, path: str) -> None:
        with pytest.raises(ValueError, match=f"'{path}': unknown URL scheme; use a local path, file://"):
            location(path)

    def test_a_file_url_of_another_machine_is_refused_with_what_to_write(self) -> None:
        with pytest.raises(ValueError, match=r"names the host 'tmp'; write file:///path for a local path"):
            location("file://tmp/run")

    @given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3))
    def test_a_path_is_found_again_from_its_text(self, parts: list[bytes]) -> None:
        raw = b"/" + b"/".join(part.replace(b"/", b"x").replace(b"\0", b"y") for part in parts)
        assert located(os.fsdecode(raw)) == os.path.abspath(raw)

    def test_a_path_is_found_again_from_its_url(self) -> None:
        path = Path(os.fsdecode(b"/runs/\xff"))
        assert located(path.as_uri()) == bytes(path)

    @pytest.mark.parametrize("url", ["file:///runs/a#1", "file:///runs/a?1"])
    def test_no_part_of_a_url_is_ignored(self, url: str) -> None:
        with pytest.raises(ValueError, match=r"has a query or a fragment; write \? as %3F"):
            location(url)

    @pytest.mark.parametrize("url", ["file:///a%00b", "file://", "file://localhost"])
    def test_a_url_without_a_path_or_with_a_nul_in_it_is_no_path(self, url: str) -> None:
        with pytest.raises(ValueError, match=f"not a path: '{url}'"):
            location(url)
