"""Records: compared, hashed and shown by their fields, changed by nobody."""

import copy
import dataclasses
import pickle

from shardkeep.model.fastclass import fast_dataclass


@fast_dataclass
class Point:
    x: int
    y: tuple[int, ...] = ()


def test_equal_fields_make_equal_records() -> None:
    assert Point(1, (2,)) == Point(1, (2,)) != Point(1)
    assert {Point(1): "a"}[Point(1)] == "a"
    assert repr(Point(1)) == "Point(x=1, y=())"


def test_a_record_has_no_room_for_more_than_its_fields_and_is_copied_as_a_dataclass() -> None:
    point = Point(1, (2,))
    assert not hasattr(point, "__dict__")
    assert dataclasses.replace(point, x=3) == Point(3, (2,))
    assert copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == point
