"""What the tests of buckets share."""

from buckets.fixtures import _alone, both, gcs, place, watched

__all__ = ["_alone", "both", "gcs", "place", "watched"]
