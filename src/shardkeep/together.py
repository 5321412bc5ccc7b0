"""Several processes, one checkpoint: what they must have in common, and how their parts come together.

What a process has written it notes in its own record in the store, where the leader reads it. So the leader also finds
out whether it sees what the others see: a checkpoint is never committed with holes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardkeep.commit import Turn
from shardkeep.digests import digest
from shardkeep.errors import ProcessError, StorageError
from shardkeep.planning import LeafPlan, SavePlan, WrittenFile
from shardkeep.processes import LEADER, Operation
from shardkeep.staging import Snapshot
from shardkeep.stores.base import Store
from shardkeep.values import encode


def compare(operation: Operation, lines: Sequence[str]) -> None:
    """`ProcessError` naming the first difference, on every process, unless all of them bring the same lines."""
    brought = operation.gather(digest("\n".join(lines).encode("utf-8", "surrogatepass")))
    if operation.share(len(set(brought)) == 1):
        return
    short = [digest(line.encode("utf-8", "surrogatepass"))[:12] for line in lines]
    listed = operation.gather(short)
    at = operation.share(_first_difference(listed) if operation.leads else None)
    told = operation.gather(lines[at] if at < len(lines) else "(nothing)")
    if operation.leads:
        different = next(i for i, line in enumerate(told) if line != told[LEADER])
        raise ProcessError(
            f"{operation.what}: the processes do not ask for the same; nothing was done\n"
            f"  process {LEADER}: {told[LEADER]}\n  process {different}: {told[different]}"
        )
    operation.share()


def _first_difference(listed: Sequence[Sequence[str]]) -> int:
    longest = max(map(len, listed))
    return next(i for i in range(longest) if len({line[i] if i < len(line) else "" for line in listed}) > 1)


def describe(snapshot: Snapshot) -> list[str]:
    """A line for each leaf: where two processes' lines are the same, they may save it together."""
    return [_describe(leaf, snapshot) for leaf in snapshot.leaves]


def _describe(leaf: LeafPlan, snapshot: Snapshot) -> str:
    name = f"leaf {leaf.key or '(the tree itself)'}: "
    if leaf.spec is None:
        text = json.dumps(encode(leaf.value))
        return f"{name}{leaf.value!r:.60} ({digest(text.encode())[:12]})"
    what = f"{leaf.spec.dtype.name}{list(leaf.spec.shape)}, {leaf.kind}"
    if not leaf.common:
        layout = repr([(region.start, region.shape, writer) for region, writer in leaf.shares])
        return f"{name}{what}, spread over processes (layout {digest(layout.encode())[:12]})"
    held = range(leaf.first_held, leaf.first_held + len(leaf.held))
    contents = [digest(np.ascontiguousarray(snapshot.shards[i].data).reshape(-1).view(np.uint8).data) for i in held]
    return f"{name}{what}, of each process (contents {digest(''.join(contents).encode())[:12]})"


def hand_in(
    operation: Operation, turn: Turn, written: Sequence[WrittenFile], checksums: Mapping[str, str]
) -> tuple[list[WrittenFile], dict[str, str]]:
    """Everyone's written files, in the order of the plan, and checksums, for the leader; nothing for the others."""
    if not operation.leads:
        told = [[file.size, file.header_digest, file.digests] for file in written]
        turn.held.append(json.dumps({"written": told, "checksums": dict(checksums)}).encode())
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
        turn.held.release()
        turn.closed = True
    return total


def _read_part(store: Store, plan: SavePlan, process: int, name: str) -> tuple[list[WrittenFile], Mapping[str, str]]:
    """What a process noted in its record, its files found and of their size."""
    files = plan.files_of(process)
    try:
        document = store.read(f"{store.saves}/{plan.save_id}.{process}").splitlines()
        told: dict[str, Any] = json.loads(document[-1])
        part = [WrittenFile(size, header, tuple(map(tuple, digests))) for size, header, digests in told["written"]]
        lost = next((f.name for f, w in zip(files, part, strict=True) if store.size(f.name) != w.size), None)
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
