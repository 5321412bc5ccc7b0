"""From a path or URL to a place: every way to write one, and what is asked of it before there is a store."""

from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckets.fixtures import Place, _alone, gcs, place  # noqa: F401
from shardkeep.stores.cloud import CloudStore
from shardkeep.stores.local import LocalStore
from shardkeep.stores.places import (
    BucketPath,
    exists,
    is_directory,
    is_file,
    location,
    parent_and_name,
    sibling,
    store_at,
)


class Shown:
    """A path of some library, known only by its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_forms_of_one_place_in_a_bucket(scheme: str) -> None:
    expected = f"{scheme}://bucket/a b/run"
    for form in (
        expected,
        expected + "/",
        Shown(expected),
        PurePosixPath(expected),
        Path(expected),
        f"{scheme}:/bucket/a b/run",
    ):
        assert location(form) == expected
    assert location(f"{scheme}://bucket") == location(f"{scheme}://bucket/") == f"{scheme}://bucket"


def test_forms_of_one_local_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = str(tmp_path / "a run")
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/a%20run"
    forms = [
        expected,
        Path(expected),
        Path("a run"),
        "a run",
        url,
        Shown(url),
        f"file://localhost{tmp_path}/a%20run",
    ]
    for form in [*forms, f"file:{tmp_path}/a%20run", Path(url)]:
        assert location(form) == expected
        assert isinstance(store_at(location(form)), LocalStore)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("gs://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("gs://bucket//run", "has an empty part"),
        ("gs://bucket/a/../b", r"has an empty part, '\.' or '\.\.'"),
        ("s3://bucket/./b", r"has an empty part, '\.' or '\.\.'"),
        ("file://host/run", "names the host 'host'"),
        ("http://bucket/run", "knows local paths, file://, gs:// and s3://"),
        ("GS://bucket/run", "knows local paths"),
        ("az://bucket/run", "knows local paths"),
        ("", "not a path"),
        ("a\0b", "not a path"),
    ],
)
def test_what_is_no_place(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        location(path)


def test_names_are_taken_as_they_are() -> None:
    """Nothing in the name of an object is special: no query, no fragment, no percent code."""
    for name in ("a?b=c", "a#b", "a%20b", "a+b", "ü", "~", "a:b", "*"):
        assert location(f"gs://bucket/{name}") == f"gs://bucket/{name}"


@given(
    st.lists(
        st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1).filter(
            lambda p: p not in (".", "..")
        ),
        min_size=1,
    )
)
def test_a_place_is_its_own_place(parts: list[str]) -> None:
    url = f"s3://bucket/{'/'.join(parts)}"
    assert location(url) == url
    assert location(location(url)) == url


def test_the_key_file_goes_along() -> None:
    given_path = BucketPath("gs://bucket/a/b.safetensors/", "key.json")
    found: Any = location(given_path)
    assert (found, found.key_file) == ("gs://bucket/a/b.safetensors", "key.json")
    parent, name = parent_and_name(found)
    assert isinstance(parent, BucketPath)
    assert (parent, parent.key_file, name) == ("gs://bucket/a", "key.json", "b.safetensors")
    other = sibling(found, "gs://bucket/c")
    assert isinstance(other, BucketPath)
    assert other.key_file == "key.json"
    store = store_at(other)
    assert isinstance(store, CloudStore)
    assert (store.bucket.key_file, store.bucket.name, store.url) == ("key.json", "bucket", "gs://bucket/c")
    assert sibling("/a/b", "/a/c") == "/a/c"


def test_what_is_there(place: Place) -> None:
    place.put("a/b/c", b"1")
    asked = ["", "a", "a/b", "a/b/c", "a/b/c/d", "a/b2", "x"]
    found = {name: location(f"{place.url}/{name}") for name in asked}
    assert [name for name in asked if is_directory(found[name])] == ["", "a", "a/b"]
    assert [name for name in asked if is_file(found[name])] == ["a/b/c"]
    assert [name for name in asked if exists(found[name])] == ["", "a", "a/b", "a/b/c"]


def test_a_bucket_is_a_directory_and_no_file(gcs: Place) -> None:
    assert not is_directory("gs://bucket")
    assert not exists("gs://bucket")
    gcs.put("x", b"")
    assert is_directory("gs://bucket")
    assert exists("gs://bucket")
    assert not is_file("gs://bucket")


def test_whether_something_is_there_costs_one_page(gcs: Place) -> None:
    """However many objects there are."""
    for number in range(2500):
        gcs.server.buckets.put("bucket", f"{gcs.prefix}/{number}", b"")
    is_directory(gcs.url)
    gcs.server.reset()
    assert is_directory(gcs.url)
    assert gcs.server.count() == 1


def test_local_places_do_not_import_the_client() -> None:
    from support import run_python

    assert run_python("import sys; shardkeep.exists('/nonexistent'); print('obstore' in sys.modules)") == "False\n"
