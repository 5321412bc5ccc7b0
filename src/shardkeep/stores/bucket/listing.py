"""The sizes of the objects of a checkpoint, listed where that saves requests."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from shardkeep.runtime.crew import run_tasks
from shardkeep.stores.bucket.objects import LISTED_AT_ONCE, Objects

FEW = 8  # objects that are requested one by one before all are listed


class SizeListing:
    """Cached sizes of the objects of a checkpoint for readers, listed page by page where that saves requests."""

    def __init__(self, objects: Objects, size: Callable[[str], int | None]) -> None:
        self.sizes: dict[str, int] = {}
        self._objects, self._size_of = objects, size
        self._pages: Iterator[dict[str, int]] | None = None
        self._complete = False
        self._asked = 0
        self._lock = threading.Lock()

    def size(self, name: str) -> int | None:
        """The size of one object. A small checkpoint is listed in one request; in a large one, objects are requested
        one by one until there are too many."""
        if name not in self.sizes and not self._complete:
            with self._lock:
                if self._pages is None:
                    self._read_page()
                elif name not in self.sizes:
                    self._asked += 1
        if name not in self.sizes and self._asked > FEW:
            self.all()
        return self.sizes.get(name) if self._complete else self._size_of(name)

    def all(self) -> dict[str, int]:
        with self._lock:
            while not self._complete:
                self._read_page()
        return self.sizes

    def _read_page(self) -> None:
        def read() -> None:
            if self._pages is None:
                self._pages = self._objects.pages("")
            page = next(self._pages, None)
            self.sizes.update(page or {})
            self._complete = page is None or len(page) < LISTED_AT_ONCE

        try:
            self._objects.asking("", read)
        except BaseException:
            self._pages = None
            raise


def sizes_of(objects: Objects, names: Sequence[str], at_once: int) -> dict[str, int | None]:
    """The sizes of many objects, whose names are given in order: concurrently, as many as one response has in each.

    Objects of other names are listed only where they lie between these.
    """
    found: dict[str, int] = {}

    def look(first: str, last: str) -> None:
        for page in objects.pages("", after=first[:-1]):  # what has this name comes before the first that is wanted
            found.update(page)
            if max(page, default=last) >= last:
                return

    ranges = [names[start : start + LISTED_AT_ONCE] for start in range(0, len(names), LISTED_AT_ONCE)]
    run_tasks((partial(objects.asking, "", partial(look, some[0], some[-1])) for some in ranges), at_once)
    return {name: found.get(name) for name in names}
