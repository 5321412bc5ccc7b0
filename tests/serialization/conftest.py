"""What the tests of the documented API share."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkeep.serialization import AsyncCheckpointManager

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eformer"


@pytest.fixture
def manager() -> AsyncCheckpointManager:
    return AsyncCheckpointManager()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What shardkeep has logged since the last time this was called, from warnings up."""
    caplog.set_level(logging.WARNING, logger="shardkeep")

    def take() -> list[str]:
        messages = [r.getMessage() for r in caplog.records if r.name == "shardkeep"]
        caplog.clear()
        return messages

    return take


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of eFormer's checkpoints that may be written to."""

    def copy(name: str) -> Path:
        target = tmp_path / name.replace("/", "-")
        shutil.copytree(FIXTURES / name, target)
        return target

    return copy


class OnlyText:
    """A path object that is no `os.PathLike`: only `str()` tells where it leads."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)


class OnlyFspath:
    """A path object whose `str()` says nothing."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


WAYS = {"str": str, "Path": Path, "str()": OnlyText, "fspath": OnlyFspath, "file://": lambda p: f"file://{p}"}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def any_path(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Each way a path may be written."""
    return request.param


@pytest.fixture
def without_credentials(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has told who we are to a bucket, and no machine's own service is asked."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
