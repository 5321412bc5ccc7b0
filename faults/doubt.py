"""Writers in each other's way: two first saves at once, and a clean-up beside a save that is alive."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardkeep
from faults.pool import each, room
from faults.result import Result
from faults.spawner import CHANGES, Fault, Outcome, Pause, Spawner
from faults.states import make, same
from faults.sweep import Violation, left_overs

_TARGETS: dict[str, tuple[str, dict[str, Any], int]] = {
    "safetensors": ("run", {}, 24),
    "tensorstore": ("run", {"format": "zarr"}, 80),
    "exchange single": ("model.safetensors", {}, 28),
    "exchange several": ("model.safetensors", {"max_shard_size": 400}, 36),
}
_ANSWERS = {"", "ConflictError", "CheckpointExistsError"}


@dataclass(frozen=True)
class _Point:
    """One save stops before a call while another goes on, as far as it can."""

    kind: str
    overwrite: bool
    call: int

    @property
    def name(self) -> str:
        return f"{self.kind}, overwrite={self.overwrite}, stopped at call {self.call}"


def run(quick: bool) -> Iterator[Result]:
    def points(kinds: tuple[str, ...], overs: tuple[bool, ...]) -> list[_Point]:
        return [
            _Point(kind, over, call)
            for kind in kinds[: 1 if quick else None]
            for over in overs
            for call in range(1, _TARGETS[kind][2], 12 if quick else 3 if kind == "tensorstore" else 1)
        ]

    yield each(
        "two first saves at the same time",
        "two processes; one is paused before its k-th call while the other continues",
        _check_first,
        points(tuple(_TARGETS), (False, True)),
    )
    yield each(
        "a clean-up during another save",
        "a save of one prefix removes the files of a killed save while a save of another prefix is paused before its "
        "k-th call",
        _check_beside,
        points(("safetensors", "tensorstore"), (False,)),
    )
    yield each(
        "a delete during a save",
        "a first save is paused before its k-th call while another process deletes",
        _check_delete,
        points(tuple(_TARGETS), (False,)),
    )


def _meanwhile(
    spawner: Spawner, slow: dict[str, Any], call: int, root: Path, other: Callable[[], Any]
) -> tuple[Outcome, Outcome]:
    """What a save and another action came to, the first stopped before a call until the other is done or stuck."""
    with room() as beside:
        pause = Pause(beside / "pause")
        fault = Fault(str(root), "pause", call, calls=CHANGES, pause=str(pause.path))
        first = spawner.start("save", fault, kind="plain", number=1, **slow)
        while not first.ended(0.005) and not (beside / "pause.reached").exists():
            pass
        second = other()
        second.ended(0.5)  # it may be waiting for the lock that the first holds
        pause.go()
        return first.wait(), second.wait()


def _check_first(spawner: Spawner, point: _Point) -> None:
    """One of them wins; the other is told, or comes second. What is there is whole, and nothing is left over."""
    name, arguments, _ = _TARGETS[point.kind]
    with room() as place:
        path = place / name
        more = {"path": str(path), "overwrite": point.overwrite, **arguments}
        outcomes = _meanwhile(
            spawner, more, point.call, place, lambda: spawner.start("save", kind="plain", number=2, **more)
        )
        told = {outcome.error for outcome in outcomes}
        if not told <= _ANSWERS or any(outcome.signal for outcome in outcomes):
            raise Violation(f"{[(o.error, o.message, o.signal) for o in outcomes]}")
        winners = [number for number, outcome in zip((1, 2), outcomes, strict=True) if outcome.ok]
        if not point.overwrite and len(winners) == 2:
            raise Violation("both say that they saved, and neither was to overwrite the other")
        _check_holds(path, None, *winners)
        _check_tidy(path)


def _check_beside(spawner: Spawner, point: _Point) -> None:
    """The dead save's files go, the live save's stay."""
    name, arguments, _ = _TARGETS[point.kind]
    with room() as place:
        path = place / name
        shardkeep.save(path, make("plain", 0), prefix="a", **arguments)
        dead = {"path": str(path), "prefix": "a", "kind": "plain", "number": 5, "overwrite": True, **arguments}
        if not spawner.run("save", Fault(str(place), "torn", 14), **dead).signal:
            raise Violation("the save that should have died did not")
        slow = {"path": str(path), "prefix": "b", **arguments}
        cleaning = {**dead, "number": 2}
        outcomes = _meanwhile(spawner, slow, point.call, place, lambda: spawner.start("save", **cleaning))
        if not all(outcome.ok for outcome in outcomes):
            raise Violation(f"{[(o.error, o.message, o.signal) for o in outcomes]}")
        _check_holds(path, "a", 2)
        _check_holds(path, "b", 1)
        _check_tidy(path)


def _check_delete(spawner: Spawner, point: _Point) -> None:
    """Either the delete is refused, or there is nothing to delete yet, or the save comes after it."""
    name, arguments, _ = _TARGETS[point.kind]
    with room() as place:
        path = place / name
        slow = {"path": str(path), **arguments}
        saved, deleted = _meanwhile(spawner, slow, point.call, place, lambda: spawner.start("delete", path=str(path)))
        if deleted.error not in {"", "ConflictError", "CheckpointNotFoundError", "IncompleteCheckpointError"}:
            raise Violation(f"the delete raised {deleted.error}: {deleted.message}")
        if saved.error not in {"", "ConflictError"}:
            raise Violation(f"the save raised {saved.error}: {saved.message}")
        if shardkeep.exists(path):
            _check_holds(path, None, 1)
            _check_tidy(path)
        elif deleted.error:
            raise Violation(f"nothing is there: save {saved.error or 'ok'}, delete {deleted.error}: {deleted.message}")


def _check_holds(path: Path, prefix: str | None, *numbers: int) -> None:
    tree = shardkeep.load(path, prefix=prefix)
    if tree["step"] not in numbers or not same(tree, make("plain", tree["step"])):
        raise Violation(f"what is there ({tree['step']}) is none of {numbers}, or a mix")
    if not shardkeep.verify(path).ok:
        raise Violation(f"it loads, but {shardkeep.verify(path)}")


def _check_tidy(path: Path) -> None:
    if extra := left_overs(path):
        raise Violation(f"left over: {sorted(extra)}")
