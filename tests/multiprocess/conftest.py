"""Clusters that many tests use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from multiprocess.cluster import Kept, kept_cluster


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Two processes with two devices each."""
    with kept_cluster(_room(tmp_path_factory), size=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Four processes with two devices each."""
    with kept_cluster(_room(tmp_path_factory), size=4) as cluster:
        yield cluster


def _room(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("cluster") / "room"
