"""Several processes, one checkpoint: what they must have in common, and how their parts come together.

What a process has written it notes in its own record in the store, where the leader reads it. So the leader also finds
out whether it sees what the others see: a checkpoint is never committed with holes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardkeep.commit import Turn
from shardkeep.digests import digest
from shardkeep.errors import ProcessError, StorageError
from shardkeep.planning import LeafPlan, SavePlan, WrittenFile
from shardkeep.processes import LEADER, Operation
from shardkeep.staging import Snapshot
from shardkeep.stores.base import Store
from shardkeep.tree import Leaf
from shardkeep.values import encode

_SHOWN = 200


def compare(operation: Operation, lines: Sequence[str]) -> None:
    """`ProcessError` naming the first difference, on every process, unless all of them bring the same lines.

    A line begins with what it is about ("path …", "leaf a.b: …"): lines about the same are held against each other.
    """
    brought = operation.gather(_digest("\n".join(lines)))
    if operation.share(len(set(brought)) == 1):
        return
    about: dict[str, str] = {}
    ranks: dict[str, bool] = {}
    for line in lines:
        name = _digest(line.partition(": " if line.startswith(("leaf ", "writers of ")) else " ")[0])[:12]
        about[name] = f"{about[name]}\n{line}" if name in about else line
        ranks[name] = _says_less(line)
    listed = operation.gather([[name, _digest(line)[:12], ranks[name]] for name, line in about.items()])
    name = operation.share(_first_difference(listed) if operation.leads else None)
    told = operation.gather(about.get(name, "(nothing)"))
    if operation.leads:
        different = next(i for i, line in enumerate(told) if line != told[LEADER])
        ours, theirs = _where_they_part(told[LEADER], told[different])
        raise ProcessError(
            f"{operation.what}: the processes do not ask for the same; nothing was done\n"
            f"  process {LEADER}: {ours}\n  process {different}: {theirs}"
        )
    operation.share()


def _digest(text: str) -> str:
    return digest(text.encode("utf-8", "surrogatepass"))


def _says_less(line: str) -> bool:
    """Where leaves differ, these do too."""
    return line.startswith(("metadata ", "structure ", "writers of "))


def _first_difference(listed: Sequence[Sequence[tuple[str, str, bool]]]) -> str:
    """The name that does not stand for the same everywhere; of several the one that comes first anywhere."""
    found = [{name: line for name, line, _ in lines} for lines in listed]
    places = [
        (says_less, at, process, name)
        for process, lines in enumerate(listed)
        for at, (name, _, says_less) in enumerate(lines)
    ]
    return next(name for *_, name in sorted(places) if len({lines.get(name, "") for lines in found}) > 1)


def _where_they_part(a: str, b: str) -> tuple[str, str]:
    """Two long lines from a little before they become different; how they begin is kept."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return _cut_out(a, at), _cut_out(b, at)


def _cut_out(line: str, at: int) -> str:
    start = line[: at - _SHOWN // 4].partition(" ")[0] + " …" if at > _SHOWN else ""
    rest = line[at - _SHOWN // 4 :] if start else line
    return start + (rest if len(rest) <= 2 * _SHOWN else rest[: 2 * _SHOWN] + "…")


def describe(snapshot: Snapshot) -> list[str]:
    """Lines for each leaf: where two processes' lines are the same, they may save it together."""
    lines = [_describe(leaf, snapshot) for leaf in snapshot.leaves]
    for leaf in snapshot.leaves:
        if not leaf.common:  # who writes it depends on all the others too
            lines.append(f"writers of {leaf.key}: {''.join(f'{writer} ' for _, writer in leaf.shares)}")
    return lines


def outline(leaves: Sequence[Leaf]) -> list[str]:
    """A line for each array: what must be the same before the processes begin to send each other their parts of it."""
    lines: list[str] = []
    for leaf in leaves:
        if isinstance(leaf.value, jax.Array | np.ndarray):
            spread = isinstance(leaf.value, jax.Array) and not leaf.value.is_fully_addressable
            where = "spread over processes" if spread else "of each process"
            lines.append(f"leaf {leaf.key or '(the tree itself)'}: {leaf.value.dtype}{list(leaf.value.shape)}, {where}")
    return lines


def _describe(leaf: LeafPlan, snapshot: Snapshot) -> str:
    name = f"leaf {leaf.key or '(the tree itself)'}: "
    if leaf.spec is None:
        text = json.dumps(encode(leaf.value))
        return f"{name}{leaf.value!r:.60} ({digest(text.encode())[:12]})"
    what = f"{leaf.spec.dtype.name}{list(leaf.spec.shape)}, {leaf.kind}"
    if leaf.extra:
        what += f" {json.dumps(leaf.extra, sort_keys=True)}"
    regions = leaf.held if leaf.common else [region for region, _ in leaf.shares]
    layout = repr([(region.start, region.shape) for region in regions])
    if not leaf.common:
        return f"{name}{what}, spread over processes (layout {digest(layout.encode())[:12]})"
    held = range(leaf.first_held, leaf.first_held + len(leaf.held))
    contents = [digest(np.ascontiguousarray(snapshot.shards[i].data).reshape(-1).view(np.uint8).data) for i in held]
    both = layout + "".join(contents)  # different arrays, differently cut, may come to the same bytes
    return f"{name}{what}, of each process (contents {digest(both.encode())[:12]})"


def hand_in(
    operation: Operation, turn: Turn, written: Sequence[WrittenFile], checksums: Mapping[str, str]
) -> tuple[list[WrittenFile], dict[str, str]]:
    """Everyone's written files, in the order of the plan, and checksums, for the leader; nothing for the others."""
    if not operation.leads:
        told = [[file.size, file.header_digest, file.digests] for file in written]
        turn.note({"written": told, "checksums": dict(checksums)})
        turn.attempted = True  # from here on the leader may commit
    operation.gather(len(written))
    if not operation.leads:
        return [], {}
    parts = {LEADER: iter(written)}
    everyones = dict(checksums)
    for process in range(operation.size):
        if process != LEADER:
            part, more = _read_part(turn.target.store, turn.plan, process, turn.name)
            parts[process] = iter(part)
            everyones.update(more)
    return [next(parts[file.writer]) for file in turn.plan.files], everyones


def close(operation: Operation, turn: Turn, total: list[int]) -> list[int]:
    """After the commit: everyone knows of it, and what it came to (bytes, files)."""
    total = operation.share(total)
    if not operation.leads:
        turn.close()
    return total


def _read_part(store: Store, plan: SavePlan, process: int, name: str) -> tuple[list[WrittenFile], Mapping[str, str]]:
    """What a process noted in its record, its files found and of their size."""
    files = plan.files_of(process)
    try:
        document = store.read(f"{store.saves}/{plan.save_id}.{process}").splitlines()
        told: dict[str, Any] = json.loads(document[-1])
        part = [WrittenFile(size, header, tuple(map(tuple, digests))) for size, header, digests in told["written"]]
        there = store.sizes(file.name for file in files)
        lost = next((f.name for f, w in zip(files, part, strict=True) if there[f.name] != w.size), None)
    except (FileNotFoundError, IndexError, KeyError, TypeError, ValueError) as error:
        raise unshared(name, process, str(error)) from error
    if lost is not None:
        raise unshared(name, process, f"{store.locate(lost)} is not there, or not whole")
    return part, told["checksums"]


def unshared(name: str, process: int, what: str) -> StorageError:
    """The error for processes that do not see the same files."""
    return StorageError(
        f"saving {name}: processes {LEADER} and {process} do not see the same files ({what}). "
        "All processes must save to the same shared directory or bucket. Nothing was committed"
    )
