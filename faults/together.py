"""Two JAX processes that save together, one of them killed at a file system call."""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import shardkeep
from faults.pool import each, room
from faults.result import Result
from faults.spawner import Fault, Outcome, Spawner
from faults.sweep import Violation, left_overs
from multiprocess.cluster import free_port
from multiprocess.inside import differences, values_of

_TOO_MANY = 400  # more calls than any process makes


@dataclass(frozen=True)
class _Series:
    """One process dies at every `every`-th of its calls, from the `first`."""

    victim: int
    format: str
    first: int
    every: int

    @property
    def name(self) -> str:
        return f"process {self.victim}, {self.format}"


def run(quick: bool) -> Result:
    parts = 1 if quick else 4
    series = [
        _Series(victim, format, 1 + part, 64 if quick else parts)
        for part in range(parts)
        for format in ("tensorstore", "safetensors")
        for victim in (0, 1)
    ]
    how = "two JAX processes overwrite a checkpoint; one of them gets SIGKILL, at each of its calls; both formats"
    return each("one of two processes is killed", how, _check, series, workers=4)


def _check(spawner: Spawner, series: _Series) -> int:
    points = 0
    broken: list[str] = []
    with room() as place:
        _save(spawner, place / "prepared", series.format, 0)
        for at in range(series.first, _TOO_MANY, series.every):
            here = place / f"at-{at}"
            shutil.copytree(place / "prepared", here)
            outcomes = _save(spawner, here, series.format, 1, series.victim, Fault(str(here), "torn", at))
            if outcomes[series.victim].signal != signal.SIGKILL:
                break  # it does not make so many calls
            points += 1
            try:
                _check_place(here, series, outcomes)
            except Exception as error:  # noqa: BLE001  (whatever goes wrong is the finding)
                broken.append(f"call {at}: {type(error).__name__}: {error}")
            shutil.rmtree(here)
    if broken:
        raise Violation(f"{series.name}: {len(broken)} promises broken", tuple(broken), points)
    return points


def _save(
    spawner: Spawner, place: Path, format: str, number: int, victim: int = -1, fault: Fault | None = None
) -> list[Outcome]:
    place.mkdir(exist_ok=True)
    port = free_port()
    children = [
        spawner.start(
            "save_together",
            fault if index == victim else None,
            index=index,
            port=port,
            path=str(place / "run"),
            number=number,
            format=format,
        )
        for index in (0, 1)
    ]
    return [child.wait(60) for child in children]


def _check_place(place: Path, series: _Series, outcomes: list[Outcome]) -> None:
    """The old state or the new one, whole; who survived told the truth; the next save works and leaves nothing."""
    path = place / "run"
    tree = shardkeep.load(path)
    number = tree["step"]
    if number not in (0, 1) or (wrong := differences(tree, values_of(number))):
        raise Violation(f"neither the old state nor the new one is there: {wrong}")
    if not shardkeep.verify(path).ok:
        raise Violation(f"it loads, but {shardkeep.verify(path)}")
    other = outcomes[1 - series.victim]
    text = other.message.lower()
    if other.ok and number != 1:
        raise Violation("the other process reported success, and the old state is there")
    if other.error and "ShardkeepError" not in other.bases:
        raise Violation(f"the other process raised {other.error}: {other.message}")
    if "nothing was committed" in text and number == 1:
        raise Violation(f"committed, and the other process says it is not: {other.message}")
    shardkeep.save(path, values_of(2), overwrite=True, format=series.format)  # type: ignore[arg-type]
    if wrong := differences(shardkeep.load(path), values_of(2)):
        raise Violation(f"the next save did not load back: {wrong}")
    if extra := left_overs(path):
        raise Violation(f"left over after the next save: {sorted(extra)}")
