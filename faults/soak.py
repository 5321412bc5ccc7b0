"""A soak: a real training is killed, stopped and damaged, again and again, while an evaluator reads its steps.

`make soak` runs it for 30 minutes and prints a table. After every restart

- the losses equal those of an undisturbed training, bit for bit,
- the run continues with the newest step that was committed and not damaged, or with the one that was being saved,
- so at most one interval is lost, one more for a save in flight, and one more for each step that was damaged,
- nothing is lost after SIGTERM,

and the evaluator never loses a step that it holds.
"""

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from faults.spawner import Child, Spawner
from faults.training import EVERY, KEEP
from shardkeep.runs.reading import ReadableRun

_FASTEST = 50  # steps a second, restarts included, for the length of the undisturbed training
_PATIENCE = 600.0  # seconds for the undisturbed training
_MOST_STEPS = 6 * EVERY  # between two disturbances


@dataclass(frozen=True)
class Disturbance:
    """What happens to one training process.

    `steps`: how many it makes before it is ended. `pause`: the seconds of a step: if they are few, a save is nearly
    always in flight. `early`: it is ended so many seconds after its start instead, ready
    or not. `stops`: by SIGTERM instead of SIGKILL. `damages`: its newest step is damaged then. `evaluator_dies`: the
    evaluator was killed before.
    """

    steps: int = 1
    pause: float = 0.001
    early: float | None = None
    stops: bool = False
    damages: bool = False
    evaluator_dies: bool = False


def disturbances(dice: random.Random, seconds: float) -> Iterator[Disturbance]:
    """Disturbances of all kinds, for so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        early = dice.uniform(0, 1.5) if dice.random() < 0.15 else None
        yield Disturbance(
            steps=dice.randrange(1, _MOST_STEPS),
            pause=dice.choice((0.001, 0.02)),
            early=early,
            stops=early is None and dice.random() < 0.4,
            damages=dice.random() < 0.3,
            evaluator_dies=dice.random() < 0.15,
        )


@dataclass
class Counts:
    """What happened."""

    killed: int = 0
    killed_early: int = 0
    stopped: int = 0
    damaged: int = 0
    skipped: int = 0
    evaluators_killed: int = 0
    evaluated: int = 0
    steps: int = 0
    repeated: int = 0
    most_lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))
    problems: list[str] = field(default_factory=list[str])

    def table(self) -> str:
        rows = {
            "training processes killed (SIGKILL)": self.killed,
            "of these, during startup": self.killed_early,
            "training processes stopped (SIGTERM)": self.stopped,
            "newest checkpoints damaged": self.damaged,
            "damaged steps skipped by a resume": self.skipped,
            "evaluators killed": self.evaluators_killed,
            "steps evaluated while retention ran": self.evaluated,
            "training steps": self.steps,
            "of these, repeated after a restart": self.repeated,
            **{f"most steps lost {kind} (save_every={EVERY})": lost for kind, lost in self.most_lost.items()},
            "losses that differ, steps lost unnecessarily, other problems": len(self.problems),
        }
        width = max(map(len, rows))
        return "\n".join(f"| {name:<{width}} | {value:>7,} |" for name, value in rows.items())


_KINDS = ("after SIGTERM", "in a kill with no save in flight", "in a kill with a save in flight", "after damage")


class Saves:
    """Which steps were saved, as far as the training has told. One that is committed must be resumed from."""

    def __init__(self) -> None:
        self._committed: list[int] = []
        self.in_flight: int | None = None
        self.damaged: set[int] = set()  # since the last restart

    def begun(self, step: int) -> None:
        """A save has begun, so the one before is committed."""
        self.committed()
        self.in_flight = step

    def committed(self) -> None:
        """The save in flight is committed."""
        self._committed += [] if self.in_flight is None else [self.in_flight]
        self.in_flight = None

    @property
    def newest(self) -> int:
        """The newest step that is committed and not damaged: the least that the training may be resumed from."""
        return self.newest_without(self.damaged)

    def newest_without(self, damaged: set[int]) -> int:
        """The newest step that was committed, apart from some."""
        return max((step for step in self._committed if step not in damaged), default=0)

    @property
    def missing(self) -> set[int]:
        """The newer ones: those that are damaged, and the one that was being saved."""
        return self.damaged | ({self.in_flight} - {None})

    def resumed(self, step: int) -> None:
        """The run continues with this step: what comes after it is replaced."""
        self._committed = [*(one for one in self._committed if one < step), *([step] if step else [])]
        self.in_flight = None
        self.damaged.clear()


class Soak:
    """One run that is disturbed.

    Args:
        room: A directory to work in.
        spawner: Starts its processes.
        seed: Of the dice that choose what is damaged.
        most: How many steps the training can make.
    """

    def __init__(self, room: Path, spawner: Spawner, seed: int, most: int) -> None:
        self._run, self._log, self._told = room / "run", room / "losses", room / "evaluated"
        self._spawner, self._dice = spawner, random.Random(seed)
        self._expected: list[str] = spawner.start("losses", total=most).wait(_PATIENCE).value
        self.counts = Counts()
        self._read = 0  # bytes of the log
        self._step = 0  # the last step that was made
        self._saves = Saves()
        self._ever_damaged: set[int] = set()
        self._was_stopped = False  # by SIGTERM, since the last step
        self._has_resumed = False  # the training that runs now
        self._evaluator: Child | None = None
        self._log.touch()
        self._told.touch()

    @property
    def is_over(self) -> bool:
        """Whether something is wrong, or the undisturbed training ends soon."""
        return bool(self.counts.problems) or self._step > len(self._expected) - 200

    def disturb(self, how: Disturbance) -> None:
        """Start the training, let it make some steps, end it, and perhaps damage its newest step."""
        self._evaluate(how.evaluator_dies)
        self._has_resumed = False
        arguments = {"path": str(self._run), "log": str(self._log), "pause": how.pause}
        trainer = self._spawner.start("train", program=True, **arguments)
        if how.early is None:
            self._await_steps(trainer, how.steps)
        else:
            time.sleep(how.early)
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer.pid, signal.SIGTERM if how.stops else signal.SIGKILL)
        outcome = trainer.wait()
        self._follow()
        if outcome.code or (how.stops and not self._was_stopped):
            self._problem(f"the training ended with {outcome.code or outcome.signal}: {outcome.log[-800:]}")
        self.counts.stopped += how.stops
        self.counts.killed += not how.stops
        self.counts.killed_early += how.early is not None
        if how.damages:
            self._damage()

    def _await_steps(self, trainer: Child, number: int) -> None:
        goal, until = -1, time.monotonic() + 60
        while time.monotonic() < until and not trainer.ended(0):
            self._follow()
            if goal < 0 and self._has_resumed:
                goal = self._step + number
            if 0 <= goal <= self._step:
                return
            time.sleep(0.002)
        self._problem("the training did not go on")

    def _follow(self) -> None:
        """Read what the training has told since, and check it."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode().splitlines():
            kind, number, *rest = [*line.split(" "), ""]
            if kind == "resumed":
                self._check_resumed(int(number), {int(n) for n in rest[0].split(",") if n})
            elif kind == "step":
                self.counts.steps += 1
                self._step, self._was_stopped = int(number), False
                if rest[0] != self._expected[self._step - 1]:
                    self._problem(f"step {number}: loss {rest[0]}, not {self._expected[self._step - 1]}")
            elif kind == "saving":
                self._saves.begun(int(number))
            elif kind in ("saved", "stopped"):
                self._saves.committed()
                self._was_stopped = kind == "stopped"

    def _check_resumed(self, step: int, skipped: set[int]) -> None:
        self._has_resumed = True
        saves, lost = self._saves, self._step - step
        allowed = EVERY * (len(saves.missing) + (not self._was_stopped))
        if not saves.newest <= step <= self._step or lost > allowed:
            self._problem(
                f"resumed at {step} after step {self._step}: {lost} steps are lost, and {allowed} may be; step "
                f"{saves.newest} was committed, {saves.in_flight} was being saved; skipped {sorted(skipped)}"
            )
        if skipped - self._ever_damaged:
            self._problem(f"skipped {sorted(skipped)}, of which only {sorted(self._ever_damaged)} were ever damaged")
        undamaged = 0 if self._was_stopped else 1 if saves.in_flight is None else 2
        kind = _KINDS[3 if saves.damaged else undamaged]
        self.counts.most_lost[kind] = max(self.counts.most_lost[kind], lost)
        self.counts.repeated += max(lost, 0)
        self.counts.skipped += len(skipped & saves.damaged)
        self._step = step
        saves.resumed(step)

    def _damage(self) -> None:
        """Change the newest usable step, if retention must have left another one to fall back to."""
        damaged = self._saves.damaged
        usable = [step for step in ReadableRun(self._run).steps() if step.is_usable and step.number not in damaged]
        if len(usable) < 2 or len(damaged) >= (KEEP.last or 0) - 1:
            return
        # After a fall-back only one of the last steps is left, until others are saved: the next older one may be far.
        if usable[-2].number < self._saves.newest_without({*damaged, usable[-1].number}):
            return
        path = Path(usable[-1].path)
        victim = self._dice.choice([*path.glob("*.safetensors"), *path.glob("*/*.safetensors"), path / "manifest.json"])
        how = self._dice.choice(["flip", "cut", "remove"])
        data = bytearray(victim.read_bytes())
        if how == "flip":
            data[self._dice.randrange(len(data))] ^= 1 << self._dice.randrange(8)
        elif how == "cut":
            data = data[: self._dice.randrange(len(data))]
        victim.unlink()
        if how != "remove":
            victim.write_bytes(data)
        damaged.add(usable[-1].number)
        self._ever_damaged.add(usable[-1].number)
        self.counts.damaged += 1

    def _evaluate(self, dies: bool) -> None:
        """Keep an evaluator running; if it dies, another one takes over."""
        if self._evaluator is not None and not self._evaluator.ended(0):
            if not dies:
                return
            self._evaluator.kill()
            self.counts.evaluators_killed += 1
        self._end_evaluator()
        arguments = {"path": str(self._run), "log": str(self._told), "seconds": 600}
        self._evaluator = self._spawner.start("evaluate", program=True, **arguments)

    def _end_evaluator(self) -> None:
        if self._evaluator is not None:
            self._evaluator.kill()
            outcome = self._evaluator.wait()
            if outcome.code:
                self._problem(f"the evaluator failed: {outcome.log[-800:]}")
            self._evaluator = None

    def _problem(self, text: str) -> None:
        self.counts.problems.append(text)

    def close(self) -> Counts:
        """End the evaluator, and look at what it has told."""
        self._end_evaluator()
        for line in self._told.read_text().splitlines():
            kind, number = line.split(" ")[:2]
            self.counts.evaluated += kind == "evaluated"
            if kind == "failed" and int(number) not in self._ever_damaged:
                self._problem(f"the evaluator: {line}")
        return self.counts


def soak(room: Path, spawner: Spawner, disturbing: Iterable[Disturbance], most: int, seed: int = 1) -> Counts:
    """Disturb a training that makes at most so many steps."""
    made = Soak(room, spawner, seed, most)
    for how in disturbing:
        made.disturb(how)
        if made.is_over:
            break
    return made.close()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    seconds = 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="shardkeep-soak-") as room, Spawner("faults.training") as spawner:
        disturbing = disturbances(random.Random(given.seed), seconds)
        counts = soak(Path(room), spawner, disturbing, int(seconds * _FASTEST), given.seed)
    print(counts.table())
    for problem in counts.problems:
        print(problem)
    raise SystemExit(bool(counts.problems))


if __name__ == "__main__":
    _main()
