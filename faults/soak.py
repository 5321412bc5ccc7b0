"""A soak: a real training is killed, stopped and damaged, again and again, while an evaluator reads its steps.

`make soak` runs it for 30 minutes and prints a table. After every restart the losses must equal those of an undisturbed
training, bit for bit; at most one interval plus the save in flight may be lost, one interval more for each step that
was damaged; nothing is lost after SIGTERM; and the evaluator never loses a step that it holds.
"""

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from faults.spawner import Child, Spawner
from faults.training import EVERY
from shardkeep.runs.reading import ReadableRun

_FASTEST = 200  # steps a second, for the length of the undisturbed training


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
    most_lost: int = 0
    most_lost_damaged: int = 0
    problems: list[str] = field(default_factory=list[str])

    def table(self) -> str:
        rows = {
            "training processes killed (SIGKILL)": self.killed,
            "of these while they started": self.killed_early,
            "training processes stopped (SIGTERM)": self.stopped,
            "newest checkpoints damaged": self.damaged,
            "damaged steps skipped by a resume": self.skipped,
            "evaluators killed": self.evaluators_killed,
            "steps evaluated while retention ran": self.evaluated,
            "training steps": self.steps,
            "of these made again after a restart": self.repeated,
            f"most steps lost in a kill (save_every={EVERY})": self.most_lost,
            "the same after damage": self.most_lost_damaged,
            "losses that differ, steps lost without need, other problems": len(self.problems),
        }
        width = max(map(len, rows))
        return "\n".join(f"| {name:<{width}} | {value:>7,} |" for name, value in rows.items())


class Soak:
    """One run that is disturbed.

    Args:
        room: A directory to work in.
        spawner: Starts its processes.
        seed: Of the dice.
        most: How many steps the training can make.
    """

    def __init__(self, room: Path, spawner: Spawner, seed: int, most: int) -> None:
        self._run, self._log, self._told = room / "run", room / "losses", room / "evaluated"
        self._spawner, self._dice = spawner, random.Random(seed)
        self._expected: list[str] = spawner.run("losses", total=most).value
        self.counts = Counts()
        self._read = 0  # bytes of the log
        self._step = 0  # the last step that was made
        self._lost_now = 0  # steps damaged since the last restart
        self._was_stopped = False
        self._has_resumed = False  # the training that runs now
        self._damaged: set[int] = set()
        self._evaluator: Child | None = None
        self._log.touch()
        self._told.touch()

    @property
    def is_over(self) -> bool:
        """Whether the undisturbed training ends soon."""
        return self._step > len(self._expected) - 200

    def disturb(self) -> None:
        """Start the training, let it make some steps, end it somehow, and perhaps damage its newest step."""
        self._evaluate()
        self._has_resumed = False
        early = self._dice.random() < 0.15 and self._step > 0
        trainer = self._spawner.start("train", program=True, path=str(self._run), log=str(self._log), pause=0.001)
        if early:
            time.sleep(self._dice.uniform(0, 1.5))
        else:
            self._await_steps(trainer, self._dice.randrange(1, 6 * EVERY))
        polite = self._dice.random() < 0.4 and not early
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer.pid, signal.SIGTERM if polite else signal.SIGKILL)
        outcome = trainer.wait()
        self._follow()
        self._was_stopped = polite
        if polite:
            self.counts.stopped += 1
            if outcome.code or outcome.signal:
                self._problem(f"a stopped training ended with {outcome.code or outcome.signal}: {outcome.log[-800:]}")
        else:
            self.counts.killed += 1
            self.counts.killed_early += early
            if outcome.code:
                self._problem(f"the training failed: {outcome.log[-800:]}")
        if self._dice.random() < 0.3:
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
                self._check_resumed(int(number), [int(n) for n in rest[0].split(",") if n])
            elif kind == "step":
                self.counts.steps += 1
                self._step = int(number)
                if rest[0] != self._expected[self._step - 1]:
                    self._problem(f"step {number}: loss {rest[0]}, not {self._expected[self._step - 1]}")

    def _check_resumed(self, step: int, skipped: list[int]) -> None:
        self._has_resumed = True
        lost = self._step - step
        damaged = self._lost_now > 0 or bool(skipped)
        allowed = 0 if self._was_stopped else 2 * EVERY
        allowed += EVERY * max(self._lost_now, len(skipped))
        if lost > allowed or lost < 0:
            self._problem(f"resumed at {step} after step {self._step}; {allowed} steps may be lost; skipped {skipped}")
        if set(skipped) - self._damaged:
            self._problem(f"skipped {skipped}, of which only {sorted(self._damaged)[-5:]} were damaged")
        if damaged:
            self.counts.most_lost_damaged = max(self.counts.most_lost_damaged, lost)
        else:
            self.counts.most_lost = max(self.counts.most_lost, lost)
        self.counts.repeated += max(lost, 0)
        self.counts.skipped += len(skipped)
        self._step, self._lost_now = step, 0

    def _damage(self) -> None:
        """Change the newest usable step, if there is another one to fall back to."""
        usable = [step for step in ReadableRun(self._run).steps() if step.is_usable]
        usable = [step for step in usable if step.number not in self._damaged]
        if len(usable) < 2:
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
        self._damaged.add(usable[-1].number)
        self._lost_now += 1
        self.counts.damaged += 1

    def _evaluate(self) -> None:
        """Keep an evaluator running; sometimes it is killed, and another one takes over."""
        if self._evaluator is not None and not self._evaluator.ended(0):
            if self._dice.random() > 0.15:
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
            if kind == "failed" and int(number) not in self._damaged:
                self._problem(f"the evaluator: {line}")
        return self.counts


def soak(room: Path, spawner: Spawner, *, rounds: int | None = None, seconds: float = 0.0, seed: int = 1) -> Counts:
    """Disturb a training for a number of rounds, or for a time."""
    most = rounds * 7 * EVERY + 400 if rounds else int(seconds * _FASTEST)
    made = Soak(room, spawner, seed, most)
    until, done = time.monotonic() + seconds, 0
    while (done < rounds if rounds else time.monotonic() < until) and not made.is_over and not made.counts.problems:
        made.disturb()
        done += 1
    return made.close()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="shardkeep-soak-") as room, Spawner("faults.training") as spawner:
        counts = soak(Path(room), spawner, seconds=60 * given.minutes, seed=given.seed)
    print(counts.table())
    for problem in counts.problems:
        print(problem)
    raise SystemExit(bool(counts.problems))


if __name__ == "__main__":
    _main()
