"""Power cuts: what had reached the disk at one instant of a save, mounted again and looked at.

An ext4 image lies on an XFS that can clone files. While a save runs on the image, clones of it are taken: each holds
what the file system had sent to the disk by then, and nothing that was still in memory. A clone is mounted (its journal
is replayed), and must hold the old state or the new one; once `save` has returned, the new one.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from faults import runs
from faults.disks import clone, cloning, disk, make_disk, missing
from faults.pool import each, room
from faults.result import Result
from faults.spawner import CHANGES, Child, Fault, Spawner
from faults.sweep import SCENARIOS, Scenario, Violation, check_index, check_next_save, check_state

_NAMES = (
    "first, safetensors",
    "first, tensorstore",
    "overwrite, safetensors",
    "overwrite, tensorstore",
    "overwrite, zstd",
    "fewer leaves again, tensorstore",
    "one prefix of two, tensorstore",
    "async, safetensors",
    "exchange, first single",
    "exchange, first several",
    "exchange, single to single",
    "exchange, several to several",
    "exchange, single to several",
    "exchange, several to single",
    "delete, safetensors",
    "delete, tensorstore",
)
_FREE = ("overwrite, safetensors", "overwrite, tensorstore", "first, safetensors", "first, tensorstore")
RUNS = {
    action: Scenario(f"a run: {action}", (action, {}), None, before=(("prepare", {}),))
    for action in ("train", "go_back")
}
_CALL = "before every system call that changes files, and after the last one"
_TIME = "at random moments, also during calls"


@dataclass(frozen=True)
class Cut:
    """What had reached the disk at one moment; `returned`: the save was done."""

    image: Path
    moment: str
    returned: bool = False


def run(quick: bool) -> list[Result]:
    how = "the ext4 image is cloned (reflink) {}, and each clone is mounted"
    fault = "the power is cut"
    if why := missing("mkfs.xfs", "mkfs.ext4"):
        return [Result(fault, how.format(_CALL), 0, (), f"left out: {why}")]
    names = ["overwrite, safetensors"] if quick else list(_NAMES)
    with room(memory=False) as place, cloning(place) as images:

        def at_calls(spawner: Spawner, name: str) -> int:
            scenario = SCENARIOS[name]
            return _check(scenario, images / name, stepped_cuts(scenario, images / name, spawner))

        def at_times(spawner: Spawner, name: str) -> int:
            scenario = _larger(SCENARIOS[name])
            return _check(scenario, images / f"{name}, free", free_cuts(scenario, images / f"{name}, free", spawner))

        def of_runs(spawner: Spawner, action: str) -> int:
            cuts = stepped_cuts(RUNS[action], images / action, spawner)
            return _check(RUNS[action], images / action, cuts, check_run_cut)

        some = ["train"] if quick else list(RUNS)
        return [
            each(fault, f"{how.format(_CALL)}; {len(names)} scenarios", at_calls, names),
            each(f"{fault} while a program uses `Run`", how.format(_CALL), of_runs, some, actions="faults.runs"),
            each(fault, f"{how.format(_TIME)}; larger states", at_times, [] if quick else _FREE),
        ]


def _larger(scenario: Scenario) -> Scenario:
    """The same with states of 5 MiB, so that much of the time passes in writes and syncs."""
    action, arguments = scenario.step
    before = tuple((act, {**more, "kind": "wide"}) for act, more in scenario.before)
    old = ("wide", scenario.old[1]) if scenario.old else None
    new = ("wide", scenario.new[1]) if scenario.new else None
    return replace(scenario, step=(action, {**arguments, "kind": "wide"}), before=before, old=old, new=new)


def _prepare(scenario: Scenario, place: Path, spawner: Spawner) -> Path:
    """An image that holds the old state, safely unmounted."""
    place.mkdir()
    image = make_disk(place / "disk.img")
    with disk(image, place / "disk") as here:
        for action, arguments in scenario.before:
            outcome = spawner.run(action, path=str(here / scenario.target), **arguments)
            assert outcome.ok, outcome
    return image


def stepped_cuts(scenario: Scenario, place: Path, spawner: Spawner) -> Iterator[Cut]:
    """The save stops before every call; a clone is taken at each."""
    image = _prepare(scenario, place, spawner)
    cuts: list[Cut] = []
    with disk(image, place / "disk") as here:
        pause = place / "pause"
        fault = Fault(str(here), "step", 1, calls=CHANGES, pause=str(pause))
        action, arguments = scenario.step
        child = spawner.start(action, fault, path=str(here / scenario.target), **arguments)
        for call in range(1, 1000):
            if not _comes_to(child, Path(f"{pause}.{call}.reached")):
                break
            cuts.append(Cut(place / f"{call}.img", f"before call {call}"))
            clone(image, cuts[-1].image)
            Path(f"{pause}.{call}.go").touch()
        outcome = child.wait()
        assert outcome.ok, outcome
        cuts.append(Cut(place / "end.img", "after the return", returned=True))
        clone(image, cuts[-1].image)
    yield from cuts


def _comes_to(child: Child, mark: Path) -> bool:
    deadline = time.monotonic() + 60
    while not mark.exists():
        if child.ended(0.001) and not mark.exists():
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"{mark.name} never came")
    return True


def free_cuts(scenario: Scenario, place: Path, spawner: Spawner, most: int = 24) -> Iterator[Cut]:
    """The save runs as it does; clones are taken one after another meanwhile, and once it has returned.

    The last ones are kept: before them the process gets ready.
    """
    image = _prepare(scenario, place, spawner)
    cuts: list[Cut] = []
    done = threading.Event()

    def take() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            cut = Cut(place / f"{number}.img", f"moment {number}")
            clone(image, cut.image)
            cuts.append(cut)
            if len(cuts) > most:
                cuts.pop(0).image.unlink()
            time.sleep(0.001)

    with disk(image, place / "disk") as here:
        action, arguments = scenario.step
        taker = threading.Thread(target=take)
        taker.start()
        try:
            outcome = spawner.run(action, path=str(here / scenario.target), **arguments)
            assert outcome.ok, outcome
            returned = Cut(place / "end.img", "after the return", returned=True)
            clone(image, returned.image)
        finally:
            done.set()
            taker.join()
    yield from [*cuts, returned]


def _check(
    scenario: Scenario, place: Path, cuts: Iterator[Cut], check: "Callable[[Scenario, Cut, Path], None] | None" = None
) -> int:
    points = 0
    broken: list[str] = []
    for cut in cuts:
        points += 1
        try:
            (check or check_cut)(scenario, cut, place / "looked at")
        except Exception as error:  # noqa: BLE001  (whatever goes wrong is the finding)
            broken.append(f"{cut.moment}: {type(error).__name__}: {error}")
        with contextlib.suppress(FileNotFoundError):
            cut.image.unlink()
    if broken:
        raise Violation(f"{scenario.name}: {len(broken)} promises broken", tuple(broken), points)
    return points


def check_cut(scenario: Scenario, cut: Cut, at: Path) -> None:
    """The old state or the new one is there, the new one if the save had returned; the next save works."""
    with disk(cut.image, at) as here:
        state = check_state(scenario, here)
        if cut.returned and state != "new":
            raise Violation("the save had returned, and the old state is there")
        check_index(scenario, here / scenario.target, needed=cut.returned)
        check_next_save(scenario, here, directories=True)


def check_run_cut(scenario: Scenario, cut: Cut, at: Path) -> None:
    """The run can be resumed from the newest step that was committed, and everything is in order after the next one."""
    action, _ = scenario.step
    newest = runs.NEXT if action == "train" else runs.NEWEST
    with disk(cut.image, at) as here:
        found = runs.check(here / scenario.target, least=newest if cut.returned else newest - 1)
    if found:
        raise Violation(f"{len(found)} promises broken", tuple(found))
