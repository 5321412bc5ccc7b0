"""Sweeps: one action, disturbed at its first, second, … file system call, and what must hold after each.

`python -m faults.sweep` (with `tests` on the path) disturbs every call of every scenario; the tests take a sample.
"""

import argparse
import contextlib
import errno
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

import shardkeep
from faults.spawner import CHANGES, Fault, Outcome, Spawner
from faults.states import make, same
from shardkeep.foreign.eformer import TENSORSTORE_INDEX
from shardkeep.stores.local.store import LocalStore
from shardkeep.targets import publishing
from shardkeep.targets.cleanup import clean_up
from shardkeep.targets.directory import Directory

Step = tuple[str, dict[str, Any]]  # an action of faults.states, and its arguments


@dataclass(frozen=True)
class Scenario:
    """Steps that lead to the old state, and the step that is disturbed, which leads to the new one.

    `old` and `new` are (kind, number) of what loads with `prefix`, None where there is nothing. `others` are trees
    of other prefixes that must stay, whatever happens. `together` are the further trees of the old state and of the
    new one, committed with them, by prefix. `again` are the arguments of the save that follows, which has the further
    trees of the new state. `killed_at`: the step was tried once before and killed at that call.
    """

    name: str
    step: Step
    new: tuple[str, int] | None
    old: tuple[str, int] | None = None
    before: tuple[Step, ...] = ()
    target: str = "run"
    prefix: str | None = None
    others: dict[str, tuple[str, int]] = field(default_factory=dict)
    together: tuple[dict[str, tuple[str, int]], dict[str, tuple[str, int]]] = ({}, {})
    again: dict[str, Any] = field(default_factory=dict)
    killed_at: int = 0


def _saves(
    name: str,
    *numbers: tuple[str, int],
    act: str = "save",
    target: str = "run",
    last: dict[str, Any] | None = None,
    **arguments: Any,
) -> Scenario:
    """Saves one after another to one target; the last is the one disturbed, and may have arguments of its own."""
    *before, end = numbers
    steps = [("save", {"kind": k, "number": n, "overwrite": True, **arguments}) for k, n in before]
    step = (act, {"kind": end[0], "number": end[1], "overwrite": True, **(arguments if last is None else last)})
    old = before[-1] if before else None
    return Scenario(name, step, end, old, tuple(steps), target, arguments.get("prefix"), again=arguments)


def _copied(scenario: Scenario) -> Scenario:
    """The same on a file system without hard links."""
    action, arguments = scenario.step
    return replace(scenario, step=(action, {**arguments, "linkless": True}))


def _second_prefix(format: str) -> Scenario:
    first: Step = ("save", {"kind": "plain", "number": 1, "prefix": "model", "format": format})
    step: Step = ("save", {"kind": "fewer", "number": 2, "prefix": "optimizer", "format": format})
    again = {"prefix": "optimizer", "format": format}
    others = {"model": ("plain", 1)}
    return Scenario(
        f"second prefix, {format}", step, ("fewer", 2), None, (first,), "run", "optimizer", others, again=again
    )


def _replaced_prefix(format: str) -> Scenario:
    steps = tuple(
        ("save", {"kind": "plain", "number": n, "prefix": p, "format": format})
        for n, p in ((1, "model"), (2, "optimizer"))
    )
    step: Step = ("save", {"kind": "other", "number": 3, "prefix": "model", "format": format, "overwrite": True})
    again = {"prefix": "model", "format": format}
    others = {"optimizer": ("plain", 2)}
    return Scenario(
        f"one prefix of two, {format}", step, ("other", 3), ("plain", 1), steps, "run", "model", others, again=again
    )


def _several_trees(name: str, **arguments: Any) -> Scenario:
    """Two trees, replaced together by others of other shapes and one more, beside one that stays."""
    first = {"kind": "plain", "number": 1, "trees": {"ema": "fewer"}, **arguments}
    beside = {"kind": "fewer", "number": 7, "prefix": "beside", **arguments}
    step = {"kind": "other", "number": 2, "trees": {"ema": "plain", "data": "fewer"}, "overwrite": True, **arguments}
    return Scenario(
        f"several trees, {name}",
        ("save", step),
        ("other", 2),
        ("plain", 1),
        (("save", first), ("save", beside)),
        others={"beside": ("fewer", 7)},
        together=({"ema": ("fewer", 1)}, {"ema": ("plain", 2), "data": ("fewer", 2)}),
        again=arguments,
    )


def _between(name: str, old: dict[str, Any], new: dict[str, Any]) -> Scenario:
    """Exchange files that go from one number of shards to another."""
    first: Step = ("save", {"kind": "plain", "number": 1, **old})
    step: Step = ("save", {"kind": "plain", "number": 2, "overwrite": True, **new})
    return Scenario(name, step, ("plain", 2), ("plain", 1), (first,), "model.safetensors", again=new)


def _delete(name: str, target: str = "run", **arguments: Any) -> Scenario:
    first: Step = ("save", {"kind": "plain", "number": 1, **arguments})
    return Scenario(name, ("delete", {}), None, ("plain", 1), (first,), target, again=arguments)


_ZARR = {"format": "zarr"}
_SEVERAL = {"max_shard_size": 400}
_FILE = "model.safetensors"
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        _saves("first, safetensors", ("plain", 1)),
        _saves("first, tensorstore", ("plain", 1), **_ZARR),
        _saves("first of many files", ("many", 1), **_ZARR),
        _saves("first in parts", ("large", 1)),
        _saves("overwrite, safetensors", ("plain", 1), ("plain", 2)),
        _saves("overwrite, tensorstore", ("plain", 1), ("plain", 2), **_ZARR),
        _saves("overwrite twice, tensorstore", ("plain", 1), ("plain", 2), ("plain", 3), **_ZARR),
        _saves("overwrite, zstd", ("plain", 1), ("plain", 2), compression="zstd", **_ZARR),
        _saves("fewer leaves, safetensors", ("plain", 1), ("fewer", 2)),
        _saves("fewer leaves, tensorstore", ("plain", 1), ("fewer", 2), **_ZARR),
        _saves("other shapes, tensorstore", ("plain", 1), ("other", 2), **_ZARR),
        _saves("fewer leaves again, tensorstore", ("plain", 1), ("plain", 2), ("fewer", 3), **_ZARR),
        _saves("other format, from tensorstore", ("plain", 1), ("plain", 2), last={}, **_ZARR),
        _copied(_saves("overwrite without links, tensorstore", ("plain", 1), ("plain", 2), **_ZARR)),
        _second_prefix("safetensors"),
        _second_prefix("tensorstore"),
        _replaced_prefix("safetensors"),
        _replaced_prefix("tensorstore"),
        _several_trees("safetensors"),
        _several_trees("tensorstore", **_ZARR),
        _saves("async, safetensors", ("sharded", 1), ("sharded", 2), act="save_async"),
        _saves("async, tensorstore", ("sharded", 1), ("sharded", 2), act="save_async", **_ZARR),
        _saves("exchange, first single", ("plain", 1), target=_FILE),
        _saves("exchange, first several", ("plain", 1), target=_FILE, **_SEVERAL),
        _between("exchange, single to single", {}, {}),
        _between("exchange, several to several", _SEVERAL, _SEVERAL),
        _between("exchange, single to several", {}, _SEVERAL),
        _between("exchange, several to single", _SEVERAL, {}),
        _delete("delete, safetensors"),
        _delete("delete, tensorstore", **_ZARR),
        _delete("delete, exchange single", _FILE),
        _delete("delete, exchange several", _FILE, **_SEVERAL),
        replace(_saves("after a dead save, safetensors", ("plain", 1), ("plain", 2)), killed_at=13),
        replace(_saves("after a dead save, tensorstore", ("plain", 1), ("plain", 2), **_ZARR), killed_at=40),
        replace(
            _between("exchange, after a dead save", _SEVERAL, _SEVERAL),
            name="exchange, after a dead save",
            killed_at=20,
        ),
    )
}


class Violation(AssertionError):
    """A promise did not hold after a fault; all that were `found` broken, at so many `points`."""

    def __init__(self, message: str, found: tuple[str, ...] = (), points: int = 1) -> None:
        super().__init__("\n".join([message, *found]))
        self.found = found or (message,)
        self.points = points


def sweep(
    scenario: Scenario,
    every_k: int = 1,
    *,
    mode: str = "torn",
    first: int = 1,
    code: int = errno.EIO,
    again: bool = False,
    calls: str = CHANGES,
    room: Path,
    spawner: Spawner,
) -> int:
    """Disturb every `every_k`-th call of the scenario's step. Tells how many struck, or a `Violation` all that broke.

    `mode`: "torn" (half of a write, then SIGKILL), "kill", "interrupt" (SIGINT after the call), or "fail" with `code`;
    the last two once, or (`again`) at every call from then on.
    """
    prepared = room / "prepared"
    prepared.mkdir(parents=True)
    for action, arguments in scenario.before:
        outcome = spawner.run(action, path=str(prepared / scenario.target), **arguments)
        assert outcome.ok, outcome
    if scenario.killed_at:
        action, arguments = scenario.step
        fault = Fault(str(prepared), "kill", scenario.killed_at)
        assert spawner.run(action, fault, path=str(prepared / scenario.target), **arguments).signal
    total = _run(
        scenario, prepared, room / "counted", Fault(str(room / "counted"), "count", calls=calls), spawner
    ).calls
    assert total, "the shim counts nothing: is it preloaded?"
    violations: list[str] = []
    struck = 0
    for at in range(first, total + 2, every_k):  # one beyond the last: nothing happens
        place = room / f"at-{at}"
        outcome = _run(scenario, prepared, place, Fault(str(place), mode, at, code, again, calls), spawner)
        struck += not outcome.ok
        try:
            state = check_state(scenario, place)
            check_told(scenario, outcome, state, mode)
            check_index(scenario, place / scenario.target)
            if scenario.target == "run" and at % 2:
                check_clean(scenario, place)
            check_next_save(scenario, place, directories=mode != "fail")
        except Exception as error:  # noqa: BLE001  (whatever goes wrong is the finding)
            said = f"; the process said: {outcome.error} {outcome.message}" if outcome.error else ""
            violations.append(f"{mode} at call {at} of {total}: {type(error).__name__}: {error}{said}")
        shutil.rmtree(place)
    shutil.rmtree(room)
    if violations:
        raise Violation(f"{scenario.name}: {len(violations)} promises broken", tuple(violations), struck)
    return struck


def _run(scenario: Scenario, prepared: Path, place: Path, fault: Fault, spawner: Spawner) -> Outcome:
    shutil.copytree(prepared, place)
    action, arguments = scenario.step
    return spawner.run(action, fault, path=str(place / scenario.target), **arguments)


def check_state(scenario: Scenario, place: Path) -> str:
    """Whole or not at all: gives "old" or "new"; other prefixes are as they were."""
    path = place / scenario.target
    for prefix, (kind, number) in scenario.others.items():
        if not same(shardkeep.load(path, prefix=prefix), make(kind, number)):
            raise Violation(f"the tree of prefix {prefix!r} changed")
    try:
        tree = shardkeep.load(path, prefix=scenario.prefix)
    except (shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError) as error:
        if isinstance(error, shardkeep.MissingDataError):
            raise
        found = None
    except shardkeep.PrefixError:
        found = None
    else:
        if not shardkeep.verify(path).ok:
            raise Violation(f"it loads, but {shardkeep.verify(path)}")
        found = next((s for s in (scenario.old, scenario.new) if s and same(tree, make(*s))), ("mix", 0))
    if found not in (scenario.old, scenario.new):
        raise Violation(f"neither the old state nor the new one is there, but {found}")
    is_new = found == scenario.new
    if found is not None:
        _check_together(scenario, path, scenario.together[is_new])
    return "new" if is_new else "old"


def _check_together(scenario: Scenario, path: Path, further: dict[str, tuple[str, int]]) -> None:
    """The further trees of one commit are there, and no others."""
    for prefix, state in further.items():
        if not same(shardkeep.load(path, prefix=prefix), make(*state)):
            raise Violation(f"the tree of prefix {prefix!r} is not of the same save as the main tree")
    prefixes = set(shardkeep.inspect(path).prefixes)
    if prefixes != {scenario.prefix or "", *further, *scenario.others}:
        raise Violation(f"there are trees with the prefixes {sorted(prefixes)}")


def check_told(scenario: Scenario, outcome: Outcome, state: str, mode: str) -> None:
    """A process that lived to tell must have told the truth."""
    if outcome.signal:
        return
    if outcome.ok:
        if state != "new":
            raise Violation("it reported success, and the old state is there")
        return
    if mode == "interrupt":
        return
    if "ShardkeepError" not in outcome.bases:
        raise Violation("an error that is not shardkeep's")
    text = outcome.message.lower()
    committed = "is committed and in place" in text
    refused = any(part in text for part in ("nothing was committed", "not committed", "nothing was written"))
    if (committed and state == "old") or (refused and state == "new"):
        raise Violation(f"the error tells something else than what is there ({state})")
    if not (committed or refused or "unknown" in text) and scenario.new is not None:
        raise Violation("the error does not tell whether the save was committed")


def check_next_save(scenario: Scenario, place: Path, directories: bool) -> None:
    """The next save works, and nothing of the disturbed one is left beside it; empty `directories` count if asked."""
    path = place / scenario.target
    further = dict.fromkeys(scenario.together[1], ("plain", 99))
    trees = {prefix: make(*state) for prefix, state in further.items()}
    shardkeep.save(path, make("plain", 99), overwrite=True, trees=trees, **scenario.again)
    _check_together(scenario, path, further)
    if not same(shardkeep.load(path, prefix=scenario.prefix), make("plain", 99)):
        raise Violation("the next save did not load back")
    if not shardkeep.verify(path).ok:
        raise Violation(f"the next save does not verify: {shardkeep.verify(path)}")
    for prefix, (kind, number) in scenario.others.items():
        if not same(shardkeep.load(path, prefix=prefix), make(kind, number)):
            raise Violation(f"the next save changed the tree of prefix {prefix!r}")
    extra = {name for name in left_overs(path) if directories or not name.endswith("/")}
    if extra:
        raise Violation(f"left over after the next save: {sorted(extra)}")
    if not path.name.endswith(".safetensors"):
        check_index(scenario, path, needed=True)


def check_clean(scenario: Scenario, place: Path) -> None:
    """`shardkeep clean` removes and completes what a dead save left, and changes nothing that is committed."""
    before = check_state(scenario, place)
    if clean(path := place / scenario.target) and check_state(scenario, place) != before:
        raise Violation("a clean-up changed the state")
    if Directory(LocalStore(str(path))).read_if_any() is not None:
        check_index(scenario, path, needed=True)


def clean(path: Path) -> bool:
    """Remove what dead saves have left, as `shardkeep clean` does. False if none has ever saved there."""
    store = LocalStore(str(path))
    if not store.children(store.control):
        return False
    target = Directory(store)
    with store.lock(20):
        clean_up(target, target.read_if_any())
    return True


def check_index(scenario: Scenario, path: Path, needed: bool = False) -> None:
    """eFormer's index lists one committed state of each tree and nothing else, or there is none.

    `needed`: it is there if a tree can be listed, and is that of the manifest.
    """
    if path.name.endswith(".safetensors"):
        return
    file = path / TENSORSTORE_INDEX
    listed = None
    if file.exists():
        index = json.loads(file.read_text())
        listed = {"": index["arrays"]} if "arrays" in index else {}
        listed |= index["prefixes"]
    with contextlib.suppress(shardkeep.CheckpointNotFoundError, shardkeep.IncompleteCheckpointError):
        manifest = shardkeep.inspect(path)
        wanted = {p for p, tree in manifest.trees.items() if tree.format == "zarr"}
        if needed and wanted and (listed is None or set(listed) != wanted or index["shardkeep"] != manifest.save_id):
            raise Violation(f"the index lists {listed}, and should list the trees {wanted}")
        if needed and not wanted and listed is not None:
            raise Violation(f"there is an index of {listed}, and no tree for it")
    for prefix, entries in (listed or {}).items():
        _check_listed(scenario, path, prefix, entries)


def _check_listed(scenario: Scenario, path: Path, prefix: str, entries: list[dict[str, Any]]) -> None:
    """What the index lists of a tree is all of one state, as a reader of zarr finds it."""
    found = {}
    for entry in entries:
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path / entry["path"])}}
        opened = tensorstore.open(spec, read=True, context=tensorstore.Context()).result()
        data = np.asarray(opened.read().result())
        if [*data.shape] != entry["shape"] or data.dtype.name != entry["dtype"]:
            raise Violation(f"{entry['path']} is not what the index says")
        found[entry["path"].removeprefix(f"{prefix}/" if prefix else "")] = data.tobytes()
    states = [scenario.others[prefix]] if prefix in scenario.others else [scenario.old, scenario.new, ("plain", 99)]
    if any(prefix in further for further in scenario.together):
        states = [*(further.get(prefix) for further in scenario.together), ("plain", 99)]
    wanted = [_arrays(make(*state)) for state in states if state is not None]
    if found not in wanted:
        raise Violation(f"the index lists a mix of trees (prefix {prefix!r})")


def _arrays(tree: Any, path: str = "") -> dict[str, bytes]:
    """The bytes of the arrays in a state, by key."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = [_arrays(value, f"{path}/{key}" if path else str(key)) for key, value in items]
        return {key: data for part in parts for key, data in part.items()}
    return {path: np.asarray(tree).tobytes()} if isinstance(tree, np.ndarray | jax.Array) else {}


def left_overs(path: Path) -> set[str]:
    """Files and empty directories that neither the manifest names nor the lock and the claims explain."""
    manifest = shardkeep.inspect(path)
    is_exchange = path.name.endswith(".safetensors")
    root = path.parent if is_exchange else path
    known = {name for tree in manifest.trees.values() for name in publishing.names_of(tree)}
    known |= {f"{path.name}.index.json"} if is_exchange and len(known) > 1 else set()
    known |= set() if is_exchange else {"manifest.json", ".shardkeep/lock"}
    if any(tree.format == "zarr" for tree in manifest.trees.values()):
        known |= {"tensorstore_index.json", "checkpoint_metadata.json"}  # for eFormer
    extra: set[str] = set()
    for directory, inside, files in os.walk(root):
        here = os.path.relpath(directory, root)
        names = {os.path.normpath(os.path.join(here, name)) for name in files}
        extra |= {n for n in names - known if is_exchange or not n.startswith(".shardkeep/claims/")}
        if not inside and not files and (is_exchange or not here.startswith(".shardkeep")):
            extra.add(here + "/")
    return extra


def _main() -> None:
    parser = argparse.ArgumentParser(description="Disturb every file system call of every scenario.")
    parser.add_argument("--every", type=int, default=1, help="take every k-th call only")
    parser.add_argument("--modes", default="torn,fail,interrupt")
    parser.add_argument("--calls", default=CHANGES, help="count these only")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    options = parser.parse_args()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with Spawner() as spawner, tempfile.TemporaryDirectory(dir=memory) as room:
        for scenario in SCENARIOS.values():
            for mode in options.modes.split(","):
                if options.only not in scenario.name:
                    continue
                try:
                    struck = sweep(
                        scenario,
                        options.every,
                        mode=mode,
                        calls=options.calls,
                        room=Path(room) / "room",
                        spawner=spawner,
                    )
                    print(f"{scenario.name}: {mode}: {struck} faults, all well", flush=True)
                except Violation as violation:
                    print(f"VIOLATION {violation}", flush=True)


if __name__ == "__main__":
    _main()
