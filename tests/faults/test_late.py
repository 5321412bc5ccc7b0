"""Requests to a bucket that arrive after their sender was taken for dead: a sample of what `make faults` does.

The points mostly wait, so all of them run together; a test for each tells what became of it.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from faults.late import Point, check, points, short_leases

OVERWRITES: list[dict[str, Any]] = [
    # A cleaner removed the files that the manifest or the index names.
    {"form": "tensorstore", "request": "put of the document", "meanwhile": "clean", "dies": True},
    {"form": "several files", "request": "put of the document", "meanwhile": "clean", "dies": True},
    # The names in the request are those of a newer save.
    {"form": "several files", "request": "delete of data", "meanwhile": "save", "dies": False},
    # A newer file is in the place of the one that was to be replaced.
    {"form": "one file", "request": "put of the document", "meanwhile": "save", "dies": False, "waiting": True},
]
FIRST: list[dict[str, Any]] = [
    {"form": "safetensors", "request": "put of the document", "meanwhile": "clean", "dies": True},
    {"form": "tensorstore", "request": "later put of data", "meanwhile": "delete", "dies": False},
    {"form": "one file", "request": "put of the document", "meanwhile": "several", "dies": False},
]
SCHEMES: Any = ("gs", "s3")
CHOSEN = [Point(scheme, **p) for scheme in SCHEMES for p in OVERWRITES]
CHOSEN += [Point(scheme, first=True, **p) for scheme, p in zip(SCHEMES * 2, FIRST, strict=False)]


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[Point, "Future[None]"]]:
    with short_leases(), ThreadPoolExecutor(len(CHOSEN)) as pool:
        yield {point: pool.submit(check, point) for point in CHOSEN}


@pytest.mark.parametrize("point", CHOSEN, ids=lambda point: point.name)
def test_a_late_request_damages_nothing(point: Point, ended: dict[Point, "Future[None]"]) -> None:
    ended[point].result()


def test_every_kind_of_request_is_made_late_on_both_servers() -> None:
    made = list(points())
    assert {point.scheme for point in made} == {"gs", "s3"}
    assert len({point.request for point in made if point.scheme == "gs"}) == 14
    assert {point.meanwhile for point in made} >= {"save", "other", "clean", "delete"}
    assert {point.dies for point in made} == {True, False}
    assert len(set(made)) == len(made)
