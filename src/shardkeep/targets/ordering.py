"""Which checkpoint in a directory is the newest: by recorded step, by the number in its name, or by time of save.

The rule, for the checkpoints in one directory:

1. Checkpoints with a recorded step are ordered by it.
2. Where the recorded step is the last number of the name, that number stands for the step in all names of the same
   shape: those that differ only in numbers (`step_100` and `step_200`, `ckpt-0.25-step10` and `ckpt-0.19-step20`).
3. Checkpoints without a recorded step whose names differ in nothing but the last number are ordered by that number.
4. Between these groups, and for all other names, the time of the save decides; also where a step or a number appears
   twice. If even that is the same, names in natural order (9 before 10).

Manifests are read only where they can matter. Of names of one shape, the three with the highest last numbers are read.
If those that have a recorded step have the number in their name, or the names differ only in the last number and none
of the three has a step, the names decide about the rest. Otherwise all manifests of that shape are read.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

LOOKED_AT = 3  # manifests that are read to find out what the numbers in names of one shape mean

# Fractions, versions, dates with dots, and 1e-5 are no steps: each of them is one number, and not an integer.
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+][0-9]+|[0-9]{1,4000}")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint tells about itself: its recorded step, if any, and when it was saved (a timestamp)."""

    step: int | None = None
    time: float = float("-inf")


Look = Callable[[Sequence[str]], Mapping[str, Saved | None]]


@dataclass(frozen=True)
class _Name:
    """A checkpoint's name. Those of one family differ only in the last number, those of one shape only in numbers."""

    entry: str
    number: int
    family: str
    shape: str


def _parse(entry: str, text: str) -> _Name:
    numbers = list(_NUMBER.finditer(text))
    if not numbers or not numbers[-1][0].isdigit():
        return _Name(entry, -1, text, text)
    last = numbers[-1]
    family = f"{text[: last.start()]}#{text[last.end() :]}"
    return _Name(entry, int(last[0]), family, _NUMBER.sub("#", text))


def newest_first(names: Mapping[str, str], look: Look) -> Iterator[str]:
    """The checkpoints in a directory from the newest to the oldest, as the rule above orders them.

    Args:
        names: What may be a checkpoint: its entry in the directory → the name that is compared.
        look: Reads some entries; gives None for one that is not a checkpoint.

    >>> saved = {"step_9": Saved(time=2.0), "step_10": Saved(time=1.0), "eval": Saved(time=3.0)}
    >>> list(newest_first({name: name for name in saved}, lambda some: {name: saved[name] for name in some}))
    ['eval', 'step_10', 'step_9']
    """
    sorting = _Sorting(look)
    sorting.add_all(_grouped([_parse(entry, text) for entry, text in names.items()], lambda name: name.shape))
    yield from sorting.merged()


@dataclass
class _Sorting:
    """Puts names into groups that a number orders: one of steps, and one for each family without them."""

    look: Look
    seen: dict[str, Saved | None] = field(default_factory=dict[str, Saved | None])
    groups: list[list[tuple[int, str]]] = field(default_factory=lambda: [[]])  # (number, entry); the first one is steps

    def read(self, entries: Sequence[str]) -> None:
        if new := [entry for entry in entries if entry not in self.seen]:
            self.seen.update(self.look(new))

    def add_all(self, groups: Sequence[Sequence[_Name]]) -> None:
        """Sort in names of several shapes, or of several families."""
        self.read([name.entry for names in groups for name in _highest(names)[:LOOKED_AT]])
        for names in groups:
            self._add(names)

    def _add(self, names: Sequence[_Name]) -> None:
        """Sort in names of one shape, reading as few of them as possible."""
        stepped = [(name, saved.step) for name, saved in self._looked_at(names) if saved.step is not None]
        families = _grouped(names, lambda name: name.family)
        if stepped and all(name.number == step for name, step in stepped):
            self.groups[0] += [(name.number, name.entry) for name in names]
        elif stepped:  # the numbers are something else
            self.read([name.entry for name in names])
            for family in families:
                self._add_read(family)
        elif len(families) > 1:
            self.add_all(families)
        else:
            self.groups.append([(name.number, name.entry) for name in names])

    def _looked_at(self, names: Sequence[_Name]) -> list[tuple[_Name, Saved]]:
        """The checkpoints among the names with the highest numbers, as many as are looked at."""
        found: list[tuple[_Name, Saved]] = []
        for name in _highest(names):
            self.read([name.entry])
            saved = self.seen[name.entry]
            if saved is not None:
                found.append((name, saved))
            if len(found) == LOOKED_AT:
                break
        return found

    def _add_read(self, family: Sequence[_Name]) -> None:
        """Sort in names that were all read: by their recorded steps, and those without one by their numbers."""
        saved = {name: self.seen[name.entry] for name in family}
        steps = {name: found.step for name, found in saved.items() if found is not None}
        self.groups[0] += [(step, name.entry) for name, step in steps.items() if step is not None]
        self.groups.append([(name.number, name.entry) for name, step in steps.items() if step is None])

    def merged(self) -> Iterator[str]:
        """All entries: of the groups' newest ones, always the one that was saved last."""
        rest = [deque(self._ordered(group)) for group in self.groups if group]
        while len(rest) > 1:
            self.read([group[0] for group in rest])
            others = [group for group in rest if self.seen[group[0]] is None]
            for group in others:  # they do not begin with a checkpoint
                group.popleft()
            if not others:
                yield max(rest, key=lambda group: self._by_time(group[0])).popleft()
            rest = [group for group in rest if group]
        for group in rest:
            yield from group

    def _ordered(self, group: Sequence[tuple[int, str]]) -> list[str]:
        """A group by number, the highest first. Where several have one number, the time of the save decides."""
        found: list[str] = []
        for _, equal in groupby(sorted(group, reverse=True), lambda item: item[0]):
            entries = [entry for _, entry in equal]
            if len(entries) > 1:
                self.read(entries)
                entries.sort(key=self._by_time, reverse=True)
            found += entries
        return found

    def _by_time(self, entry: str) -> tuple[float, list[tuple[int, int, str]]]:
        saved = self.seen.get(entry)
        return (float("-inf") if saved is None else saved.time, _natural(entry))


def _highest(names: Sequence[_Name]) -> list[_Name]:
    """The names with the highest numbers first."""
    return sorted(names, key=lambda name: (name.number, _natural(name.entry)), reverse=True)


def _grouped(names: Iterable[_Name], key: Callable[[_Name], str]) -> list[list[_Name]]:
    found: dict[str, list[_Name]] = {}
    for name in names:
        found.setdefault(key(name), []).append(name)
    return list(found.values())


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A sorting key by which step_9 comes before step_10, and names end the order where all else is equal."""
    parts = re.split("([0-9]{1,4000})", text)
    return [(1, int(part), part) if i % 2 else (0, 0, part) for i, part in enumerate(parts)]
