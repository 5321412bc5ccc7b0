"""Several processes, one checkpoint: what they must agree on, and how their parts are put together.

Each process notes what it has written in its own record in the store, and the leader reads it there. So the leader
also finds out whether it sees the files of the others: a checkpoint is never committed with holes.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from shardkeep.errors import StorageError
from shardkeep.layouts.plan import StagedArray, StagedLeaf, WrittenPart
from shardkeep.model.digests import digest
from shardkeep.model.document import decode_files, encode_files
from shardkeep.model.leafrecords import encode_origin
from shardkeep.model.perprocess import PerProcess, PerProcessRows
from shardkeep.model.tree import Leaf, name_leaf
from shardkeep.model.values import JsonObject, encode
from shardkeep.processes.agreement import SAME
from shardkeep.processes.operation import LEADER, Operation
from shardkeep.runtime.collector import collector
from shardkeep.runtime.crew import run_tasks
from shardkeep.saving.rows import settle_rows, unsettled_lengths
from shardkeep.saving.snapshot import Snapshot
from shardkeep.saving.transfer import AnyShard, Arriving
from shardkeep.stores.base import Store
from shardkeep.targets.transaction import Transaction

_PER_PROCESS = "a PerProcess value"
_ALL = slice(None)


def agreement_lines(snapshot: Snapshot, prefix: str = "", leaves: slice = _ALL) -> list[str]:
    """Lines for each leaf. Processes whose lines are equal can save the tree together.

    Args:
        snapshot: The snapshot of a tree, or of several that are saved together.
        prefix: The prefix of the tree, if there are several.
        leaves: The leaves of the tree in the snapshot.
    """
    lines = [_agreement_line(leaf, snapshot, name_leaf(leaf.path, prefix)) for leaf in snapshot.leaves[leaves]]
    for leaf in snapshot.leaves[leaves]:
        if isinstance(leaf, StagedArray) and leaf.shares and not leaf.common:
            # Who writes it depends on all other leaves too. Of all its pieces, there is only a digest.
            lines.append(f"writers of {name_leaf(leaf.path, prefix)}: digest {leaf.shares.writers.digest}")
    return lines


def outline(leaves: Sequence[Leaf]) -> list[str]:
    """A line for each leaf whose data the processes send to each other: these must agree before they start."""
    lines: list[str] = []
    for leaf in leaves:
        if isinstance(leaf.value, PerProcess):
            lines.append(f"leaf {name_leaf(leaf.path)}: {_PER_PROCESS}")
        elif isinstance(leaf.value, jax.Array | np.ndarray):
            spread = isinstance(leaf.value, jax.Array) and not leaf.value.is_fully_addressable
            where = "sharded over processes" if spread else SAME
            lines.append(f"leaf {name_leaf(leaf.path)}: {leaf.value.dtype}{list(leaf.value.shape)}; {where}")
    return lines


def _agreement_line(leaf: StagedLeaf, snapshot: Snapshot, name: str) -> str:
    name = f"leaf {name}: "
    if not isinstance(leaf, StagedArray):
        text = json.dumps(encode(leaf.value))
        return f"{name}{leaf.value!r:.60}; {SAME} (digest {digest(text.encode())[:12]})"
    if isinstance(leaf.origin, PerProcessRows):
        return name + _PER_PROCESS
    what = f"{leaf.spec.dtype.name}{list(leaf.spec.shape)}, {leaf.origin.kind}"
    if more := encode_origin(leaf.origin):
        what += f" {json.dumps(more, sort_keys=True)}"
    if leaf.shares and not leaf.common:
        return f"{name}{what}; sharded over processes (layout {'×'.join(map(str, leaf.shares.counts)) or 1})"
    layout = repr([(region.start, region.shape) for region in leaf.held])
    held = range(leaf.first_held, leaf.first_held + len(leaf.held))
    contents = [_digest(snapshot.shards[number]) for number in held]
    both = layout + "".join(contents)  # different arrays, cut in different ways, can have the same bytes
    return f"{name}{what}; {SAME} (contents {digest(both.encode())[:12]})"


def _digest(shard: AnyShard) -> str:
    """The digest of a shard. One that has to go in batches is not yet in host memory, and does not stay there."""
    data = shard.glance() if isinstance(shard, Arriving) else shard.data
    return digest(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def settle(operation: Operation, snapshot: Snapshot) -> Snapshot:
    """The snapshot with every `PerProcess` leaf in its place. Only after `compare`: all have the same leaves."""
    lengths = unsettled_lengths(snapshot.leaves) if operation.size > 1 else ()
    if not lengths:
        return snapshot
    shards = list(snapshot.shards)
    leaves = settle_rows(snapshot.leaves, shards, operation.share(operation.gather(lengths)), operation.index)
    return replace(snapshot, leaves=tuple(leaves), shards=tuple(shards))


def hand_in(
    operation: Operation, transaction: Transaction, parts: Sequence[WrittenPart], checksums: Mapping[str, str]
) -> tuple[dict[int, Sequence[WrittenPart]], dict[str, str]]:
    """What each process has written, with a part of each tree, and checksums: for the leader, else nothing."""
    if operation.size == 1:
        return {LEADER: parts}, dict(checksums)
    if not operation.leads:
        transaction.note({"written": list(map(_encode_part, parts)), "checksums": dict(checksums)})
        transaction.attempted = True  # from here on the leader may commit
    operation.gather(None)
    if not operation.leads:
        return {}, {}
    store, read = transaction.target.store, dict[int, tuple[Sequence[WrittenPart], Mapping[str, str]]]()

    def read_one(process: int) -> None:
        read[process] = _read_parts(store, transaction, process)

    tasks = (partial(read_one, process) for process in range(operation.size) if process != LEADER)
    with collector.paused():
        run_tasks(tasks, store.traits.documents_at_once)
    everyones = {LEADER: parts, **{process: read[process][0] for process in sorted(read)}}
    return everyones, {**checksums, **{key: text for _, more in read.values() for key, text in more.items()}}


def names_of_others(everyones: Mapping[int, Sequence[WrittenPart]]) -> dict[str, tuple[int, int]]:
    """The files that processes other than the leader have written: the size of each, and the process."""
    found: dict[str, tuple[int, int]] = {}
    for process, parts in everyones.items():
        if process != LEADER:
            files = [file for part in parts for file in (*part.files, part.table_file) if file is not None]
            found |= {file.name: (file.size, process) for file in files}
    return found


def _encode_part(part: WrittenPart) -> JsonObject:
    """What a process notes of its part of a tree. A table that goes into the manifest is noted as it is."""
    table = None if part.table_file is None else encode_files([part.table_file])[0]
    inside = "" if part.table_file else base64.b64encode(part.table).decode()
    return {"files": encode_files(part.files), "table": inside, "table_file": table}


def _decode_part(told: Any) -> WrittenPart:
    table = None if told["table_file"] is None else decode_files([told["table_file"]], series=False)[0]
    inside = base64.b64decode(told["table"], validate=True)
    return WrittenPart(decode_files(told["files"]), inside, table)


def _read_parts(
    store: Store, transaction: Transaction, process: int
) -> tuple[Sequence[WrittenPart], Mapping[str, str]]:
    """What a process noted in its record. Whether its files are there, the commit looks at for all at once."""
    try:
        document = store.read(f"{store.saves}/{transaction.plan.save_id}.{process}").splitlines()
        told: dict[str, Any] = json.loads(document[-1])
        parts = list(map(_decode_part, told["written"]))
        if len(parts) != len(transaction.plan.trees):
            raise ValueError("its record has another number of trees")
        return parts, told["checksums"]
    except (FileNotFoundError, IndexError, KeyError, TypeError, ValueError) as error:
        raise unshared(transaction.name, process, str(error)) from error


def unshared(name: str, process: int, what: str) -> StorageError:
    """The error for processes that do not share their storage."""
    return StorageError(
        f"saving {name}: processes {LEADER} and {process} do not see the same files ({what}). "
        "All processes must save to the same shared directory or bucket. Nothing was committed"
    )
