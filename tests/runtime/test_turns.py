"""Places in a line: those with one key go one after another, in the order in which they entered."""

import threading
from collections.abc import Sequence

from shardkeep.runtime.scopes import Scope
from shardkeep.runtime.turns import Turn


class Noted(Turn):
    """A place that notes for whom it has waited."""

    waited_for: Sequence[Turn] = ()

    def _look(self, ahead: Sequence[Turn]) -> None:
        self.waited_for = ahead


def test_a_place_waits_for_those_before_it_with_its_key() -> None:
    with Scope("a test") as scope:
        first, other, second = (scope.add(Noted(key, scope)) for key in ("a", "b", "a"))
        for place in (first, other, second):
            place.enter()
        first.wait()
        other.wait()
        waiting = threading.Thread(target=second.wait)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        first.release()
        waiting.join(60)
        assert not waiting.is_alive()
        assert second.waited_for == [first]
        assert Noted.line == [other, second]


def test_places_may_be_left_in_any_order() -> None:
    """As by a call that is interrupted while it waits: the third one goes on waiting for the first."""
    with Scope("a test") as scope:
        first, second, third = (scope.add(Noted("a", scope)) for _ in range(3))
        for place in (first, second, third):
            place.enter()
        waiting = threading.Thread(target=third.wait)
        waiting.start()
        second.release()
        waiting.join(0.05)
        assert waiting.is_alive()
        first.release()
        waiting.join(60)
        assert not waiting.is_alive()


def test_one_that_is_passed_over_keeps_nobody_waiting_and_stays_in_the_line() -> None:
    with Scope("a test") as scope:
        first, second = (scope.add(Noted("a", scope)) for _ in range(2))
        first.enter()
        second.enter()
        first.pass_over()
        second.wait()
        assert not first.is_for("a")
        assert Noted.line == [first, second]


def test_releasing_is_harmless_twice_and_before_it_has_entered() -> None:
    with Scope("a test") as scope:
        place = Noted("a", scope)
        place.release()
        place.enter()
        for _ in range(2):
            place.release()
        assert Noted.line == []
