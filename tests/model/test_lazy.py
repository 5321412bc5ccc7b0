"""Properties that are computed once, also in a child that is forked meanwhile."""

import os
import signal
import threading

import pytest

from shardkeep.model.lazy import cached_property


class Slow:
    """Computes its property while another thread forks."""

    inside, go = threading.Event(), threading.Event()

    def __init__(self, waits: bool) -> None:
        self.waits = waits

    @cached_property
    def value(self) -> int:
        if self.waits:
            self.inside.set()
            assert self.go.wait(60)
        return 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_child_that_is_forked_while_another_thread_computes_the_property_computes_it() -> None:
    slow = Slow(waits=True)
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert slow.inside.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(Slow(waits=False).value)
    Slow.go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert slow.value == 5


def test_it_is_computed_once() -> None:
    counted: list[int] = []

    class Counted:
        @cached_property
        def value(self) -> int:
            """What it is."""
            counted.append(1)
            return len(counted)

    one = Counted()
    assert (one.value, one.value, counted) == (1, 1, [1])
    assert Counted.value.__doc__ == "What it is."
