"""What grows with the number of processes, and what does not: counts of `bench/scale.py`, for 16 to 256 processes."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SIZES = (16, 64, 256)


@pytest.fixture(scope="module")
def scale() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import scale

        yield scale
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module", params=[1, 16], ids=["sharded", "replicas"])
def rows(scale: ModuleType, request: pytest.FixtureRequest) -> list[object]:
    """The same data for each process, two blocks of ten arrays, three times; requests that take no time."""
    return [scale.measure(scale.Job(n, request.param, 2, 64 * round(n**0.5)), seconds=0.0) for n in SIZES]


def test_a_process_plans_its_own_pieces(rows: list[object]) -> None:
    """As many however many processes there are, but for the arrays that one process writes whole."""
    own = [row.own for row in rows]
    whole = 2 * 2 * 3
    assert max(own) - min(own) <= whole
    for row in rows:
        assert 0 < row.own <= row.pieces / row.processes + whole


def test_the_leader_asks_once_for_each_record_and_lists_all_files_together(rows: list[object]) -> None:
    """One response lists 1,000 names. Nothing else depends on the number of processes."""
    rest: list[dict[str, int]] = []
    for row in rows:
        requests = dict(row.requests)
        assert requests.pop("get") == row.processes - 1 + 1, "each record, and the manifest"
        assert requests.pop("list") <= -(-row.files // 1000) + 3
        rest.append(requests)
    assert rest == [rest[0]] * len(rows)


def test_a_process_sends_the_coordination_service_as_much_however_many_there_are(rows: list[object]) -> None:
    assert max(row.sent for row in rows) <= min(row.sent for row in rows) + 1


def test_a_load_reads_the_tables_of_those_that_wrote_what_it_holds(rows: list[object]) -> None:
    """Its replicas, and the few that write small arrays whole; and of the data what it holds."""
    for row in rows:
        assert len(row.tables_read) <= row.replicas + 2 * 2 * 3
        assert row.pieces_read == row.share


def test_nothing_is_decoded_to_look_at_it(scale: ModuleType, rows: list[object]) -> None:
    for row in rows:
        manifest = scale.decode_manifest(row.document, "run", "manifest.json", _refuse)
        assert len(manifest.tree().files) == row.files
        assert sum(len(leaf.pieces) for leaf in manifest.tree().arrays) == row.pieces


def _refuse(_: object) -> bytes:
    raise AssertionError("a table was read")


def test_the_second_save_of_a_tree_assigns_nothing(scale: ModuleType) -> None:
    from shardkeep.processes import assignment

    arrays = list(scale.Job(64, 4, 2, 128).arrays().values())
    first = scale.share_out(arrays, 64, gathered=False)
    before = assignment._shared_out.cache_info()
    again = scale.share_out([replace(array) for array in arrays], 64, gathered=False)
    assert assignment._shared_out.cache_info().hits == before.hits + 1
    assert all(one is other for one, other in zip(first, again, strict=True))
