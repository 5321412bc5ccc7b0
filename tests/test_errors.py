"""The exception tree: each error is shardkeep's and the builtin its users know, and survives pickling."""

import builtins
import copy
import errno
import inspect
import os
import pickle
import re

import pytest

import shardkeep
from shardkeep import errors
from shardkeep.errors import ShardkeepError, StorageError, storage_error

ERRORS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, ShardkeepError)]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Names, parents and the builtins in parentheses."""
    assert errors.__doc__
    parents: list[str] = []
    drawn = set()
    for line in errors.__doc__.splitlines():
        found = re.match(r"(?P<lines>[│├└─ ]*)(?P<name>\w+Error)\b(?:\s+\((?P<builtins>[\w, ]+)\))?", line)
        if not found:
            continue
        depth = len(found["lines"]) // 4
        parents[depth:] = [found["name"]]
        kind = getattr(errors, found["name"])
        drawn.add(kind)
        if depth:
            assert issubclass(kind, getattr(errors, parents[depth - 1])), line
        for name in (found["builtins"] or "").replace(" ", "").split(","):
            if name:
                assert issubclass(kind, getattr(builtins, name)), line
    assert drawn == set(ERRORS)


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_is_public_documented_and_shows_its_message(kind: type[ShardkeepError]) -> None:
    assert getattr(shardkeep, kind.__name__) is kind
    assert kind.__doc__
    error = kind("line one\nline two 'quoted'")
    assert str(error) == "line one\nline two 'quoted'"


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_pickling_and_copying(kind: type[ShardkeepError]) -> None:
    """Errors cross process pools."""
    error = kind("what happened")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == "what happened"


@pytest.mark.parametrize(
    ("code", "kind", "builtin"),
    [
        (errno.EACCES, shardkeep.AccessError, PermissionError),
        (errno.EPERM, shardkeep.AccessError, PermissionError),
        (errno.EROFS, shardkeep.AccessError, PermissionError),
        (errno.ENOTDIR, shardkeep.NotADirectoryPathError, NotADirectoryError),
        (errno.ENOSPC, shardkeep.NotEnoughSpaceError, OSError),
        (errno.EDQUOT, shardkeep.NotEnoughSpaceError, OSError),
        (errno.EIO, StorageError, OSError),
        (errno.ENAMETOOLONG, StorageError, OSError),
        (None, StorageError, OSError),
    ],
)
def test_what_the_system_said_becomes_a_typed_error(code: int | None, kind: type, builtin: type) -> None:
    given = OSError(code, os.strerror(code), "/some/file") if code else OSError("odd")
    error = storage_error(given, "saving to /x", "Nothing was committed")
    assert type(error) is kind
    assert isinstance(error, builtin)
    assert error.errno == code
    assert "saving to /x" in str(error)
    assert "Nothing was committed" in str(error)
    assert ("/some/file" in str(error)) == (code is not None)
    assert (os.strerror(code) if code else "odd") in str(error)
