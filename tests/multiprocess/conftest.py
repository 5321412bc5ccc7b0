"""Clusters that many tests use; those of four processes only where they are asked for (`-m processes4`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from multiprocess.cluster import Kept, kept_cluster


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "processes4: needs four processes; run with -m processes4")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "processes4" in str(config.option.markexpr):
        return
    left_out = [item for item in items if item.get_closest_marker("processes4")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


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
