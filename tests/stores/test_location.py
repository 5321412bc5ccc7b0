"""From a path or URL to a place: every way to write one, and what is asked of it before there is a store."""

import contextlib
import dataclasses
import ntpath
import os
import re
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from buckets.fixtures import Place, _alone, gcs, place  # noqa: F401
from shardkeep.cli.main import main
from shardkeep.eformer.manager import AsyncCheckpointManager
from shardkeep.errors import PathError
from shardkeep.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves
from shardkeep.serialization.sharding_utils import create_sharding_tree_from_index
from shardkeep.stores.bucket.store import BucketStore
from shardkeep.stores.local.store import LocalStore
from shardkeep.stores.location import Location, anywhere, exists, is_directory, is_file, location, store_at
from support import run_python


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
        assert location(form) == Location(expected)
    assert location(f"{scheme}://bucket") == location(f"{scheme}://bucket/") == Location(f"{scheme}://bucket")


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
        assert str(location(form)) == expected
        assert isinstance(store_at(location(form)), LocalStore)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("gs://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("gs://bucket//run", "contains an empty part"),
        ("gs://bucket/a/../b", r"contains an empty part, '\.' or '\.\.'"),
        ("s3://bucket/./b", r"contains an empty part, '\.' or '\.\.'"),
        ("file://host/run", "names the host 'host'"),
        ("http://bucket/run", "unknown URL scheme; use a local path, file://, gs:// or s3://"),
        ("GS://bucket/run", "unknown URL scheme"),
        ("az://bucket/run", "unknown URL scheme"),
        ("", "not a path: '' is empty"),
        ("a\0b", "contains a NUL character"),
        ("gs://bucket/a\0b", "contains a NUL character"),
        (b"run", r"the path must be a str or os\.PathLike, not bytes \(b'run'\); use os\.fsdecode"),
        (bytearray(b"run"), r"not a bytearray \(bytearray\(b'run'\)\)"),
        ("/", r"'/' is the root directory; pass another directory"),
        ("//", "is the root directory"),
        ("///", "is the root directory"),
        ("/tmp/..", "is the root directory"),
        ("/..", "is the root directory"),
        (Path("/"), "is the root directory"),
        ("file:///", "is the root directory"),
        ("file:///tmp/..", "is the root directory"),
    ],
)
def test_what_is_no_place(path: Any, why: str) -> None:
    with pytest.raises(PathError, match=why):
        location(path)


def test_a_link_to_the_root_directory_is_the_root_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all").symlink_to("/")
    for path in (tmp_path / "all", tmp_path / "all" / "tmp" / ".."):
        with pytest.raises(PathError, match="is the root directory"):
            location(path)
    monkeypatch.chdir("/")
    with pytest.raises(PathError, match=r"'\.' is the root directory"):
        location(".")


@pytest.mark.parametrize("path", ["", "a\0b", "http://host/run", b"run", "/", "gs://bucket/../run"])
def test_every_public_function_refuses_it_before_anything_is_done(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    tree = {"w": np.ones(3)}
    manager = AsyncCheckpointManager()
    calls: list[Callable[[], Any]] = [
        lambda: shardkeep.save(path, tree),
        lambda: shardkeep.save(path, tree, format="zarr"),
        lambda: shardkeep.save_async(path, tree),
        lambda: shardkeep.load(path),
        lambda: shardkeep.inspect(path),
        lambda: shardkeep.exists(path),
        lambda: shardkeep.latest(path),
        lambda: shardkeep.verify(path),
        lambda: shardkeep.delete(path),
        lambda: manager.save(tree, path),
        lambda: manager.save_async(tree, path),
        lambda: manager.save_pytree(tree, path, prefix="model"),
        lambda: manager.load(path, None),
        lambda: manager.load_pytree(path, "", prefix="model"),
        lambda: manager.load_tree_parallel(path),
        lambda: tree_serialize_leaves(path, tree),
        lambda: tree_deserialize_leaves(path, None),
    ]
    started = time.monotonic()
    for call in calls:
        with pytest.raises(PathError, match=r"path|root|scheme|part"):
            call()
    assert not manager.is_tensorstore(path)
    assert time.monotonic() - started < 5, "nobody walked the disk"
    assert list(here.iterdir()) == []


class Point(NamedTuple):
    x: Any


@dataclasses.dataclass
class Config:
    rate: float = 0.1


@jax.tree_util.register_pytree_node_class
class Model:
    """A tree that has a text of its own."""

    def __str__(self) -> str:
        return "Model"

    def tree_flatten(self) -> Any:
        return (), None

    @classmethod
    def tree_unflatten(cls, *_: Any) -> Any:
        return cls()


NO_PATHS: dict[str, Any] = {
    "dict": {"w": np.ones(3)},
    "empty dict": {},
    "list": [np.ones(3)],
    "tuple": (1, 2),
    "set": {"a"},
    "namedtuple": Point(1),
    "generator": (name for name in "ab"),
    "None": None,
    "int": 5,
    "float": 0.5,
    "bool": True,
    "numpy scalar": np.int32(5),
    "numpy array": np.ones(3),
    "array of text": np.array("gs://bucket/run"),
    "jax array": jnp.ones(3),
    "shape": jax.ShapeDtypeStruct((3,), np.float32),
    "bytes": b"run",
    "memoryview": memoryview(b"run"),
    "object": object(),
    "class": Config,
    "dataclass": Config(),
    "registered tree": Model(),
    "function": len,
}


@pytest.mark.parametrize("kind", NO_PATHS)
def test_what_is_no_path_is_a_type_error_that_shows_the_order(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped arguments would make a directory called after a dict; None one called None."""
    path = NO_PATHS[kind]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    manager = AsyncCheckpointManager()
    calls: dict[str, Callable[[], Any]] = {
        "save(path, tree)": lambda: shardkeep.save(path, "run"),
        "save_async(path, tree)": lambda: shardkeep.save_async(path, "run"),
        "load(path)": lambda: shardkeep.load(path),
        "inspect(path)": lambda: shardkeep.inspect(path),
        "exists(path)": lambda: shardkeep.exists(path),
        "latest(path)": lambda: shardkeep.latest(path),
        "verify(path)": lambda: shardkeep.verify(path),
        "delete(path)": lambda: shardkeep.delete(path),
        "save(tree, path)": lambda: manager.save("run", path),
        "save_async(tree, path)": lambda: manager.save_async("run", path),
        "save_pytree(pytree, path)": lambda: manager.save_pytree("run", path, prefix="model"),
        "load(path, mesh)": lambda: manager.load(path, None),
        "load_pytree(path, mesh)": lambda: manager.load_pytree(path, "", prefix="model"),
        "load_tree_parallel(path)": lambda: manager.load_tree_parallel(path),
        "safe_loadpath(path)": lambda: manager.safe_loadpath(path),
        "tree_serialize_leaves(checkpoint_dir, pytree)": lambda: tree_serialize_leaves(path, "run"),
        "tree_deserialize_leaves(checkpoint_dir, mesh)": lambda: tree_deserialize_leaves(path, None),
        "create_sharding_tree_from_index(checkpoint_dir, mesh)": lambda: create_sharding_tree_from_index(path),
    }
    for call, make in calls.items():
        with pytest.raises(shardkeep.PathTypeError, match=re.escape(f"{call}: ")) as raised:
            make()
        assert isinstance(raised.value, TypeError)
        assert isinstance(raised.value, shardkeep.PathError)
        assert len(str(raised.value)) < 300, "an array is not printed"
    assert not manager.is_tensorstore(path)
    assert list(here.iterdir()) == []


def test_the_message_for_swapped_arguments_says_which_comes_first(tmp_path: Path) -> None:
    tree = {"w": np.ones(3)}
    first = r"^save\(path, tree\): the path comes first; got a dict as path \(did you swap the arguments\?\)$"
    with pytest.raises(TypeError, match=first):
        shardkeep.save(tree, tmp_path / "run")
    second = r"^save\(tree, path\): the path comes second; got a dict as path \(did you swap the arguments\?\)$"
    with pytest.raises(TypeError, match=second):
        AsyncCheckpointManager().save(tmp_path / "run", tree)
    with pytest.raises(TypeError, match=r"^load\(path\): None is not a path; latest\(\) returns None when there is no"):
        shardkeep.load(shardkeep.latest(tmp_path))
    with pytest.raises(TypeError, match=r"got an array as path"):
        shardkeep.save(jnp.ones(3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_manager_that_saves_nothing_still_refuses_what_is_no_path() -> None:
    with pytest.raises(shardkeep.PathTypeError, match=r"save\(tree, path\): .* swap"):
        AsyncCheckpointManager(enable=False).save("run", {"w": np.ones(3)})


class Posix(Shown):
    """Such as eFormer's path class for local files: not an os.PathLike."""

    def as_posix(self) -> str:
        return self.text


def test_path_objects_of_other_libraries_are_paths(tmp_path: Path) -> None:
    """By as_posix() or by a URL; the documented API takes anything whose text is a path."""
    forms: list[Any] = [Posix(f"{tmp_path}/run"), Shown(f"file://{tmp_path}/run")]
    with contextlib.suppress(ImportError):
        from etils import epath

        forms.append(epath.Path(tmp_path) / "run")
    for form in [*forms, AsyncCheckpointManager.safe_loadpath(f"{tmp_path}/run")]:
        shardkeep.save(form, {"w": np.ones(3)}, overwrite=True)
        assert shardkeep.exists(form)
        assert shardkeep.latest(form) == str(tmp_path / "run")
        shardkeep.delete(form)
    with pytest.raises(shardkeep.PathTypeError, match="got a Shown as path"):
        shardkeep.save(Shown(f"{tmp_path}/run"), {"w": np.ones(3)})
    assert AsyncCheckpointManager().save({"w": np.ones(3)}, Shown(f"{tmp_path}/run")) == f"{tmp_path}/run"
    assert sorted(tree_deserialize_leaves(Shown(f"{tmp_path}/run"), None)) == ["w"]


def test_a_load_path_is_joined_with_names_only() -> None:
    loaded = AsyncCheckpointManager.safe_loadpath("gs://bucket/run")
    assert str(loaded / "step" / 100) == "gs://bucket/run/step/100"
    assert os.fspath(loaded) == "gs://bucket/run"
    for name in (None, {"w": 1}, b"x"):
        with pytest.raises(shardkeep.PathTypeError, match="LoadPath / name"):
            loaded / name


def test_the_manager_takes_no_empty_path_for_a_whole_bucket() -> None:
    with pytest.raises(PathError, match="is empty"):
        AsyncCheckpointManager(gcs_bucket="bucket").save({"w": np.ones(3)}, "")


@pytest.mark.parametrize("path", ["", "http://host/run", "/"])
@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "stats", "clean"])
def test_the_command_line_says_so_in_one_line(command: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, path]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "Traceback" not in told
    assert "path" in told or "root directory" in told


# obstore is imported first: Python 3.13.0 cannot import extension modules without a working directory.
GONE = """
import os, tempfile
import obstore
gone = tempfile.mkdtemp()
os.chdir(gone)
os.rmdir(gone)
"""


def test_without_a_working_directory_a_relative_path_is_refused_and_others_work(tmp_path: Path) -> None:
    code = f"""{GONE}
def told(call, *arguments):
    try:
        return call(*arguments)
    except shardkeep.PathError as error:
        return error

for call in (shardkeep.exists, shardkeep.latest, shardkeep.load, shardkeep.inspect, shardkeep.verify, shardkeep.delete):
    print(told(call, "run"))
print(told(shardkeep.save, "run", {{"w": np.ones(3)}}))
print(told(shardkeep.save_async, "run", {{"w": np.ones(3)}}))
shardkeep.save_async({str(tmp_path / "run")!r}, {{"w": np.ones(3)}}).wait()
print(shardkeep.latest({str(tmp_path)!r}), shardkeep.load("file://{tmp_path}/run")["w"])
shardkeep.delete({str(tmp_path / "run")!r})
"""
    lines = run_python(code).splitlines()
    why = "'run' is a relative path, and the working directory no longer exists; pass an absolute path"
    assert lines == [why] * 8 + [f"{tmp_path / 'run'} [1. 1. 1.]"]


def test_urls_are_read_without_a_working_directory(place: Place) -> None:
    """They never look at it."""
    for name in ("1", "2", "other/model.safetensors"):
        shardkeep.save(f"{place.url}/run/{name}", {"w": np.ones(3)})
    code = f"""{GONE}
url = {place.url!r} + "/run"
for name in ("1", "2", "other/model.safetensors"):
    assert shardkeep.exists(f"{{url}}/{{name}}") and shardkeep.verify(f"{{url}}/{{name}}").ok
    assert (shardkeep.load(f"{{url}}/{{name}}")["w"] == 1).all()
print(shardkeep.latest(url), shardkeep.inspect(url + "/1").leaves["w"].shape)
shardkeep.delete(url + "/1")
print(shardkeep.exists(url + "/1"), os.path.exists(gone))
"""
    assert run_python(code, timeout=60) == f"{place.url}/run/other (3,)\nFalse False\n"


def test_urls_are_saved_to_without_a_working_directory(place: Place) -> None:
    code = f"""{GONE}
url = {place.url!r} + "/run"
shardkeep.save(url + "/1", {{"w": np.ones(3)}})
shardkeep.save_async(url + "/2", {{"w": np.ones(3)}}, format="zarr").wait()
shardkeep.save_async(url + "/other/model.safetensors", {{"w": np.ones(3)}}).wait()
print(shardkeep.latest(url))
"""
    assert run_python(code, timeout=60) == f"{place.url}/run/other\n"


def test_names_are_taken_as_they_are() -> None:
    """Nothing in the name of an object is special: no query, no fragment, no percent code."""
    for name in ("a?b=c", "a#b", "a%20b", "a+b", "ü", "~", "a:b", "*"):
        assert str(location(f"gs://bucket/{name}")) == f"gs://bucket/{name}"


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
    assert str(location(url)) == url
    assert location(location(url)) == location(url)


def test_the_key_file_goes_along() -> None:
    found = Location("gs://bucket/a/b.safetensors", "key.json")
    assert (found.parent, found.name) == (Location("gs://bucket/a", "key.json"), "b.safetensors")
    other = found.parent.parent / "c"
    assert other == found.parent.with_name("c") == other.resolve() == Location("gs://bucket/c", "key.json")
    store = store_at(other)
    assert isinstance(store, BucketStore)
    assert (store.bucket.key_file, store.bucket.name, store.url) == ("key.json", "bucket", "gs://bucket/c")


@pytest.mark.parametrize(
    ("text", "scheme", "name", "parent"),
    [
        ("gs://bucket/a/b", "gs", "b", "gs://bucket/a"),
        ("s3://bucket/a", "s3", "a", "s3://bucket"),
        ("s3://bucket", "s3", "bucket", "s3://bucket"),
        ("/a/b", "", "b", "/a"),
        ("/a", "", "a", "/"),
        ("/", "", "", "/"),
    ],
)
def test_the_parts_of_a_location(text: str, scheme: str, name: str, parent: str) -> None:
    found = Location(text)
    assert (found.scheme, found.is_url, found.name) == (scheme, scheme != "", name)
    assert str(found.parent) == parent
    assert found.is_bucket == (text == "s3://bucket")
    assert str(found / "x" / "y") == f"{text.rstrip('/')}/x/y"
    with pytest.raises(dataclasses.FrozenInstanceError, match="text"):
        found.text = "/x"  # type: ignore[misc]


def test_a_location_without_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert location(tmp_path / "link" / "run").resolve() == location(tmp_path.resolve() / "real" / "run")


def test_what_is_there(place: Place) -> None:
    place.put("a/b/c", b"1")
    asked = ["", "a", "a/b", "a/b/c", "a/b/c/d", "a/b2", "x"]
    found = {name: location(f"{place.url}/{name}") for name in asked}
    assert [name for name in asked if is_directory(found[name])] == ["", "a", "a/b"]
    assert [name for name in asked if is_file(found[name])] == ["a/b/c"]
    assert [name for name in asked if exists(found[name])] == ["", "a", "a/b", "a/b/c"]


def test_a_bucket_is_a_directory_and_no_file(gcs: Place) -> None:
    assert not is_directory(Location("gs://bucket"))
    assert not exists(Location("gs://bucket"))
    gcs.put("x", b"")
    assert is_directory(Location("gs://bucket"))
    assert exists(Location("gs://bucket"))
    assert not is_file(Location("gs://bucket"))


def test_whether_something_is_there_costs_one_page(gcs: Place) -> None:
    """However many objects there are."""
    for number in range(2500):
        gcs.server.buckets.put("bucket", f"{gcs.prefix}/{number}", b"")
    is_directory(location(gcs.url))
    gcs.server.reset()
    assert is_directory(location(gcs.url))
    assert gcs.server.count() == 1


def test_local_places_do_not_import_the_client() -> None:
    assert run_python("import sys; shardkeep.exists('/nonexistent'); print('obstore' in sys.modules)") == "False\n"


def test_every_reader_says_where_none_may_come_from() -> None:
    for read in (shardkeep.load, shardkeep.abstract, shardkeep.inspect, shardkeep.verify, shardkeep.delete):
        with pytest.raises(TypeError, match=rf"{read.__name__}\(path\): None is not .*; latest\(\) returns None"):
            read(None)


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


def test_a_path_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "path", ntpath)
    for path in ("C:\\runs\\step_1", "C:/runs/step_1", "file:///C:/runs/step_1"):
        found = anywhere(path)
        names = found.text, found.name, found.parent.text, (found / "x").text
        assert names == ("C:/runs/step_1", "step_1", "C:/runs", "C:/runs/step_1/x")
