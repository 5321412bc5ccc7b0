"""What is asked of every store. A new store subclasses `StoreTests` and says how its place is opened."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardkeep.errors import ConflictError
from shardkeep.runtime.scopes import Scope
from shardkeep.stores import base
from shardkeep.stores.base import EditableStore, Held, Store
from support import hold

Make = Callable[[], Store]
TAKEN = (FileExistsError, ConflictError)
ABSENT = (FileNotFoundError, NotADirectoryError)
CUT = (EOFError, ValueError)  # an IntegrityError is a ValueError


def put(store: Store, name: str, *parts: bytes) -> None:
    file = store.write_new(name, sum(map(len, parts)), [memoryview(part) for part in parts])
    if file is not None:
        file.close()


def take_over(store: Store, name: str) -> Held:
    """The record of a process that has ended, as soon as the store can tell."""
    until = time.monotonic() + 20
    with store.lock(20):
        while (held := store.try_hold(name, Scope("a test"))) is None and time.monotonic() < until:
            time.sleep(0.1)
    assert held is not None
    return held


def assert_has_methods(protocol: Any, thing: object) -> None:
    """Every method of a protocol, called in the same way; it may have more parameters after those."""
    found = _parameters(type(thing))
    for name, wanted in _parameters(protocol).items():
        assert found[name][: len(wanted)] == wanted, f"{protocol.__name__}.{name}"


def _parameters(cls: type) -> dict[str, list[str]]:
    """Of each public method the names of its parameters."""
    methods = inspect.getmembers_static(cls, inspect.isfunction)
    return {name: list(inspect.signature(f).parameters) for name, f in methods if not name.startswith("_")}


class StoreTests:
    """Asked of every store. `make` opens the same place each time: a reader may keep what it has seen."""

    @pytest.fixture
    def make(self) -> Make:
        raise AssertionError("a subclass says how its place is opened")

    @pytest.fixture
    def store(self, make: Make) -> Store:
        return make()

    def test_it_and_what_it_gives_have_every_method_with_the_same_parameters(self, store: Store) -> None:
        put(store, "old", b"1")
        held = hold(store, f"{store.saves}/1", b"")
        with store.open("old") as opened:
            things: dict[Any, object] = {base.Store: store, base.StoredFile: opened, base.Held: held}
            things[base.MappedFile] = opened.map(0, 1)
            if store.traits.editable:
                things[base.EditableStore] = store
            for protocol, thing in things.items():
                assert_has_methods(protocol, thing)
            assert all(hasattr(store, name) for name in ("url", "traits", "mappable", "control", "saves"))
        held.remove()

    @pytest.mark.parametrize("name", ["x", "a/x", "file/x"])
    def test_a_name_that_nothing_has(self, name: str, make: Make) -> None:
        put(make(), "file", b"1")
        store = make()
        assert store.size(name) is None
        assert store.sizes([name, "file"]) == {name: None, "file": 1}
        assert store.modified(name) is None
        assert store.identity(name) is None
        assert store.children(name) == []
        assert not store.is_held(name)
        assert not store.is_taken(["x", "a/x"])
        for look in (store.read, store.open):
            with pytest.raises(ABSENT, match=name):
                look(name)
        store.remove([name])  # gone already: no error
        with store.lock(5):
            assert store.try_hold("x", Scope("a test")) is None

    def test_looking_at_a_place_does_not_make_it(self, make: Make) -> None:
        store = make()
        assert store.children("") == store.find_directories_with("x") == []
        assert store.entries() == ([], [])
        assert (make().children(""), make().identity("")) == ([], None)

    def test_what_is_written_is_read(self, make: Make) -> None:
        put(make(), "a/b", b"12", b"", b"345")
        put(make(), "empty")
        store = make()
        assert (store.read("a/b"), store.size("a/b"), store.children("a")) == (b"12345", 5, ["b"])
        assert (store.read("empty"), store.sizes(["a/b", "empty"])) == (b"", {"a/b": 5, "empty": 0})
        with store.open("a/b") as file:
            buffer = np.zeros(3, np.uint8)
            file.read_into(1, buffer)
            assert (file.size, buffer.tobytes()) == (5, b"234")
            with pytest.raises(CUT, match="truncated"):
                file.read_into(3, buffer)
        assert abs((store.modified("a/b") or 0) - time.time()) < 60

    def test_a_part_of_a_file_as_memory(self, make: Make) -> None:
        put(make(), "a", bytes(range(100)) * 100)
        with make().open("a") as file:
            mapping = file.map(100, 300, [(100, 50), (350, 50)])
        mapping.bring_in(0, 50)
        mapping.bring_in(250, 300)
        assert mapping.data[:50].tobytes() == bytes(range(50))
        assert mapping.data[250:].tobytes() == bytes(range(50, 100))

    def test_no_way_to_begin_a_file_takes_one_that_is_there(self, store: Store, make: Make) -> None:
        put(store, "a", b"old")
        with pytest.raises(TAKEN, match="/a"):
            put(store, "a", b"new")
        with pytest.raises(TAKEN, match="/a"):
            hold(store, "a", b"new")
        assert not store.claim("a")
        assert make().read("a") == b"old"

    def test_replace_and_rename_put_one_file_in_the_place_of_another(self, store: Store, make: Make) -> None:
        with store.lock(5):
            store.replace("a", b"old")
            was = store.identity("a")
            store.replace("a", b"new")
            assert (store.read("a"), make().read("a")) == (b"new", b"new")
            assert store.identity("a") != was
            aside = f"{store.control}/x.tmp"
            put(store, aside, b"newer")
            store.rename(aside, "a")
            assert make().size(aside) is None
        assert make().read("a") == b"newer"

    def test_the_identity_of_a_file_stays_until_it_changes(self, store: Store, make: Make) -> None:
        put(store, "a", b"1")
        was = store.identity("a")
        assert was is not None
        store.read("a")
        assert store.identity("a") == make().identity("a") == was
        make().replace("a", b"22")
        assert store.identity("a") != was

    def test_files_are_removed_with_the_directories_they_leave_empty(self, store: Store, make: Make) -> None:
        for name in ("a/b/c", "a/d", "e"):
            put(store, name, b"1")
        store.sync(["a/b/c", "a/d", "e"])
        store.remove(["a/b/c", "e", "absent"])
        store.sync_directory("")
        assert make().sizes(["a/b/c", "a/d", "e"]) == {"a/b/c": None, "a/d": 1, "e": None}
        assert make().children("a/b") == []
        if store.traits.has_directories:  # else some servers list those they have made themselves
            assert (make().children(""), make().children("a")) == (["a"], ["d"])

    def test_a_place_is_cleared_of_everything_its_last_file_included(self, make: Make) -> None:
        for name in ("a/b/c", "a/.d", "e", "last", ".control/lock"):
            put(make(), name, b"1")
        make().clear("last")
        assert (make().entries(), make().children("a/b")) == (([], []), [])
        put(make(), "e", b"2")
        make().clear("absent")
        assert make().entries() == ([], [])

    def test_a_directory_is_no_file(self, make: Make) -> None:
        put(make(), "a/b", b"1")
        for look in (make().read, make().open):
            with pytest.raises((*ABSENT, ValueError), match="/a"):
                look("a")
        assert make().size("a") is None

    def test_what_is_in_a_place(self, make: Make) -> None:
        for name in ("x/.zarray", "x/y/.zarray", ".zarray", "z/other", "w/.zarray/file"):
            put(make(), name, b"1")
        assert make().entries() == (["w", "x", "z"], [".zarray"])
        assert make().find_directories_with(".zarray") == ["", "x", "x/y"]

    def test_a_name_is_taken_by_what_is_there_or_in_its_way(self, make: Make) -> None:
        put(make(), "a/b", b"1")
        store = make()
        taken = [store.is_taken([name]) for name in ("a/b", "a", "a/b/c", "a/c", "c")]
        in_the_way = store.traits.has_directories
        assert taken == [True, in_the_way, in_the_way, False, False]

    def test_a_name_is_claimed_once(self, make: Make) -> None:
        assert [make().claim(name) for name in ("claims/x", "claims/x", "claims/y")] == [True, False, True]

    def test_a_record_is_held_by_one_until_it_lets_go(self, store: Store, make: Make) -> None:
        name = f"{store.saves}/1"
        held = hold(store, name, b"one")
        held.append(b"two")
        assert make().read(name).endswith(b"one\ntwo\n")
        assert make().is_held(name)
        other = make()
        with other.lock(5):
            assert other.try_hold(name, Scope("a test")) is None
        held.release()
        taken = take_over(other, name)
        assert not make().is_held(name) or not store.has_leases
        taken.remove()
        assert make().children(store.saves) == []
        for end in (held.remove, held.release, taken.remove, taken.release):
            end()  # once more is no error

    def test_the_control_directory_goes_with_everything_shardkeep_puts_there(self, store: Store, make: Make) -> None:
        put(store, "data", b"1")
        with store.lock(5):
            store.claim(f"{store.control}/claims/x")
            hold(store, f"{store.saves}/1", b"").release()
            store.remove_control()
        assert make().children(store.control) == make().children(store.saves) == []
        assert make().entries()[1] == ["data"]
        store.remove_if_empty()
        assert make().read("data") == b"1"
        store.remove(["data"])
        store.remove_if_empty()
        assert make().identity("") is None

    def test_a_lock_is_held_by_one_and_can_be_had_again(self, store: Store, make: Make) -> None:
        for _ in range(2):
            with store.lock(5):
                assert store.children("") == [store.control]
                with pytest.raises(ConflictError, match="lock"), make().lock(0):
                    pass
        with pytest.raises(ZeroDivisionError, match="division"), store.lock(5):
            _ = 1 // 0
        with store.lock(5):
            pass

    def test_free_space_is_a_number_or_unknown(self, store: Store) -> None:
        free = store.free_bytes()
        assert free is None or free > 0


class EditableStoreTests(StoreTests):
    """Asked of stores whose files can be written in parts and linked."""

    @pytest.fixture
    def editable(self, make: Callable[[], EditableStore]) -> EditableStore:
        return make()

    def test_a_file_can_be_written_in_any_order(self, editable: EditableStore) -> None:
        with editable.create("a/b", 100) as file:
            file.write(3, [memoryview(b"45"), memoryview(b"6")])
            file.write(0, [memoryview(b"123")])
        assert editable.read("a/b") == b"123456"

    def test_create_takes_no_file_that_is_there(self, editable: EditableStore) -> None:
        put(editable, "a", b"old")
        with pytest.raises(FileExistsError, match="/a"):
            editable.create("a", 100)
        assert editable.read("a") == b"old"

    def test_a_file_can_have_a_second_name(self, editable: EditableStore) -> None:
        put(editable, "a", b"1")
        put(editable, "c/b", b"old")
        editable.link("a", "c/b")
        editable.link("a", "d/e")
        editable.remove(["a"])
        assert (editable.read("c/b"), editable.read("d/e")) == (b"1", b"1")

    def test_what_it_gives_to_write_to_has_every_method(self, editable: EditableStore) -> None:
        with editable.create("a", 100) as new:
            assert_has_methods(base.NewFile, new)
