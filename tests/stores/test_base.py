"""Every store passes the same suite: a local directory, and a bucket on each of the servers."""

from pathlib import Path

import pytest

from buckets.fixtures import Place, _alone, place  # noqa: F401
from shardkeep.stores.base import is_editable
from shardkeep.stores.bucket import leases
from shardkeep.stores.local.store import LocalStore
from shardkeep.stores.location import Location, location, store_at
from stores.conformance import EditableStoreTests, Make, StoreTests


class TestLocalStore(EditableStoreTests):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        return lambda: LocalStore(str(tmp_path / "store"))


class TestBucketStore(StoreTests):
    @pytest.fixture
    def make(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> Make:
        monkeypatch.setattr(leases, "LEASE", 2.0)
        return lambda: store_at(location(place.url))


def test_the_trait_tells_which_suite_a_store_passes() -> None:
    assert is_editable(LocalStore("/x"))
    assert not is_editable(store_at(Location("gs://bucket/x")))
