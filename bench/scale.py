"""The cost of saving and loading one checkpoint with 16 to 10,000 processes, without the data.

    python bench/scale.py            # about seven minutes; writes scale.md and scale.json in bench/results, and a plot
    python bench/scale.py --quick    # 16 to 256 processes, one round; prints the table

These parts are shardkeep's own: the assignment, the plans, the tables of pieces, the comparison between processes, the
operation and its waiting, the records, the commit to a bucket, the manifest, and the plan of a load. `standins.py`
replaces the devices, the coordination service (in memory, counts requests), the bucket (in memory, 50 ms a request,
3,500 requests a second) and the data: files have names and sizes, and digests of nothing. One machine cannot run
thousands of processes. It runs process 0, and one other process as an example. The record of the example, with the
names changed, stands for the records of the others; processes whose pieces the example loads are planned one by one.
With up to 256 processes, all of them take part in the operation, each in a thread.

The bytes of the manifest are divided by the pieces in the tables, which are those of the example for most processes.
They should be at most 60 per piece, not counting the digests of its second and later blocks of 4 MiB (16 bytes each).
The manifest also has an entry for each leaf: its key, dtype, shape, grid and sharding. Where arrays have only a few
pieces, as with replicas and few processes, these entries take more bytes than the pieces, so one row leaves them out.

Seconds of the leader's records and commit are those of a clock, as they are spent waiting for the bucket. The others
are those of the processor, so other programs on the machine change them little. All are medians of five interleaved
rounds, each of which measures every job in a new process.

The slope of a row is the exponent of the number of processes, from the third column to the last, where the data of a
process stays the same: 0 is constant, 1 is proportional.
"""

import argparse
import json
import math
import pickle
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from standins import Array, Cloud, CloudBucket, Service, mesh_of, transformer

from shardkeep.layouts.assembly import assemble, part_of
from shardkeep.layouts.plan import Draft, SavePlan, StagedArray, StagedLeaf, WrittenFile, WrittenPart, plan_save
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.loading.plan import plan_read
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.digests import block_count
from shardkeep.model.document import decode_manifest
from shardkeep.model.leaves import StoredArray
from shardkeep.model.manifest import DataFile
from shardkeep.model.tree import flatten, nest
from shardkeep.processes.agreement import compare
from shardkeep.processes.assignment import share_out
from shardkeep.processes.group import Group
from shardkeep.processes.operation import LEADER, Operation
from shardkeep.runtime.collector import collector
from shardkeep.saving.multiprocess import _encode_part, agreement_lines, hand_in, names_of_others
from shardkeep.saving.snapshot import Snapshot, _origin_of
from shardkeep.stores.bucket.store import OBJECT_LIMIT, BucketStore
from shardkeep.targets.directory import Directory
from shardkeep.targets.running import now, record_lines
from shardkeep.targets.transaction import Transaction

RESULTS = Path(__file__).parent / "results"
SAVE_ID = "5" * 32
LATENCY = 0.05  # seconds of a request to the bucket
MOST_THREADS = 256  # processes that take part in an operation, each in a thread
DIGEST = "0" * 32
ROUNDS = 5
_MEDIANS = ("first", "again", "plan", "lines", "coordination", "records", "commit", "sent", "decode", "load")

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """So many processes, in groups of replicas, and a tree."""

    processes: int
    replicas: int
    blocks: int
    width: int

    def arrays(self) -> dict[str, Array]:
        """The arrays by their keys, in the order of a tree."""
        found = transformer(mesh_of(self.processes, self.replicas), self.blocks, self.width)
        _, leaves = flatten(tree_of(found))
        return {"/".join(leaf.path): leaf.value for leaf in leaves}


def tree_of(leaves: dict[str, Any]) -> Any:
    return nest([(tuple(key.split("/")), leaf) for key, leaf in leaves.items()])


@dataclass
class Row:
    """What one job costs. Seconds are of one process; the leader's are of process 0."""

    processes: int
    replicas: int
    parameters: int
    pieces: int  # of all processes
    own: int  # of one
    first: float  # seconds: the assignment, in the stall of the first save
    again: float  # seconds: the same in each later one
    plan: float
    lines: float  # what the processes compare
    coordination: float  # requests of one process to the coordination service, from the beginning to the end
    records: float  # seconds: reading what the others handed in
    commit: float  # seconds: from then to the end
    requests: Counter[str]  # to the bucket, by the leader, from the moment that all have handed in
    sent: float  # of `coordination`: what a process sets, without the waits
    files: int
    document: bytes  # manifest.json
    leaves: int
    of_leaves: int  # bytes of `leaves` and `structure` in it, which do not depend on the number of pieces
    tables: int  # bytes of all tables in files
    rows: int  # pieces in all tables: not `pieces`, as the tables of the example stand for others
    digests: int  # in all tables
    decode: float  # seconds: manifest.json
    load: float  # seconds: planning a load onto the same mesh, with the tables
    tables_read: Counter[str]  # bytes of tables that one process reads for it, by file
    pieces_read: int  # bytes of pieces
    share: int  # bytes that its devices hold

    @property
    def root(self) -> int:
        """The bytes of manifest.json."""
        return len(self.document)

    @property
    def further(self) -> float:
        """The bytes of digests beyond the first of each piece, on average."""
        return 16 * (self.digests - self.rows) / self.rows

    @property
    def read(self) -> int:
        """The bytes that one process reads: manifest, tables, pieces."""
        return self.root + self.tables_read.total() + self.pieces_read


def timed(work: Callable[[], T], rounds: int = 1, clock: Callable[[], float] = time.thread_time) -> tuple[float, T]:
    """The median of the seconds that it takes, and what it gives. By default those of the processor."""
    found: list[float] = []
    for _ in range(rounds):
        started = clock()
        result = work()
        found.append(clock() - started)
    return statistics.median(found), result


def staged(arrays: dict[str, Array], shares: Sequence[Any], process: int) -> list[StagedLeaf]:
    """The leaves as a process stages them, without the data."""
    leaves: list[StagedLeaf] = []
    for (key, array), own in zip(arrays.items(), shares, strict=True):
        spec, origin = ArraySpec(array.shape, array.dtype), _origin_of(array.sharding)
        leaves.append(StagedArray(tuple(key.split("/")), spec, origin, own.of(process), shares=own))
    return leaves


def planned(
    job: Job, arrays: dict[str, Array], shares: Sequence[Any], process: int, limit: int | None = OBJECT_LIMIT
) -> SavePlan:
    """What a process plans to write, in files of this size. None: those of a disk."""
    skeleton, _ = flatten(tree_of(arrays))
    draft = Draft(SAVE_ID, "", skeleton, {}, now(), process=process, processes=job.processes)
    return plan_save(SafetensorsLayout(limit), staged(arrays, shares, process), [draft])


def written(plan: SavePlan) -> WrittenPart:
    """What a process has written, with digests of nothing."""
    (tree,) = plan.trees
    files = [
        WrittenFile(file.size or 0, DIGEST, tuple([(DIGEST,) * block_count(piece.nbytes) for piece in file.pieces]))
        for file in tree.files
    ]
    return part_of(tree, files)


def as_if_by(part: WrittenPart, process: int, example: int) -> WrittenPart:
    """The part of another process, with the same files under its own names."""
    ours, theirs = f"-{example:05d}", f"-{process:05d}"

    def renamed(file: DataFile) -> DataFile:
        start, number = file.name.removesuffix(".pieces").rsplit("-", 1)
        if file.name.endswith(".pieces"):
            return replace_name(file, f"{start}{theirs}.pieces")
        return replace_name(file, f"{start.removesuffix(ours)}{theirs}-{number}")

    table = part.table_file and renamed(part.table_file)
    return replace(part, files=tuple(map(renamed, part.files)), table_file=table)


def replace_name(file: DataFile, name: str) -> DataFile:
    return DataFile(name, file.size, file.header_length, file.header_digest)


def count_coordination(processes: int, lines: list[str]) -> Counter[str]:
    """The requests of all processes to the coordination service in one operation: what a save sends and waits for."""
    service = Service()
    groups = [Group(service, i, processes) for i in range(processes)]

    def take_part(group: Group) -> None:
        with Operation("saving to x", group) as operation:
            compare(operation, lines)
            operation.share([SAVE_ID, "", [""]])
            operation.gather(None)
            operation.share([0, 0])

    threads = [threading.Thread(target=take_part, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    return service.requests


def commit(
    job: Job, plan: SavePlan, parts: dict[int, WrittenPart], cloud: Cloud, bucket: CloudBucket, latency: float
) -> tuple[float, float, bytes]:
    """The leader's part of a commit, as all have handed in: seconds for the records, for the rest, and the manifest."""
    store = BucketStore(bucket, "run/step_1", ".shardkeep")
    target = Directory(store, SafetensorsLayout(OBJECT_LIMIT))
    transaction = Transaction(target)
    plan = transaction.begin(plan, overwrite=False)
    start = "run/step_1/"
    cloud.declare_all(
        {
            start + file.name: file.size
            for part in parts.values()
            for file in (*part.files, part.table_file)
            if file is not None
        }
    )
    for process, part in parts.items():
        if process != LEADER:
            names = record_lines([file.name for file in part.files], plan.created)
            note = {"written": [_encode_part(part)], "checksums": {}}
            document = b'{"owner": "x", "renewed": 1}\n' + names + b"\n" + json_line(note)
            cloud.declare(f"{start}{store.saves}/{SAVE_ID}.{process}", len(document), document)
    operation = Operation("saving")  # alone: what it sends is counted elsewhere
    operation.size = job.processes
    cloud.requests.clear()
    cloud.seconds = latency
    records, (everyones, _) = timed(
        lambda: hand_in(operation, transaction, [parts[LEADER]], {}), clock=time.perf_counter
    )

    def finish() -> None:
        with collector.paused():
            tree = assemble(plan.trees[0], {process: found for process, (found,) in everyones.items()})
            others = names_of_others(everyones)
        transaction.commit({"": tree}, others)

    seconds, _ = timed(finish, clock=time.perf_counter)
    cloud.seconds = 0.0
    return records, seconds, cloud.objects[f"{start}manifest.json"].data


def json_line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def plan_load(
    arrays: dict[str, Array], document: bytes, tables: dict[str, bytes], process: int
) -> tuple[float, float, Counter[str], int, int]:
    """Seconds to decode the manifest and to plan the load of what a process holds; tables and bytes it reads, holds."""
    read: Counter[str] = Counter()

    def read_table(file: DataFile) -> bytes:
        read[file.name] = file.size
        return tables[file.name]

    with collector.paused():
        decode, manifest = timed(lambda: decode_manifest(document, "run", "manifest.json", read_table))
    devices = [d for d in next(iter(arrays.values())).sharding.mesh.devices.flat if d.process_index == process]
    regions: list[list[Region]] = []
    for array in arrays.values():
        indices = array.sharding.devices_indices_map(array.shape)
        regions.append(list(dict.fromkeys(Region.from_index(indices[device], array.shape) for device in devices)))

    def plan() -> int:
        found = 0
        for number, (leaf, own) in enumerate(zip(manifest.tree().leaves, regions, strict=True)):
            assert isinstance(leaf, StoredArray)
            found += sum(fetch.piece.length for fetch in plan_read(number, leaf, own))
        return found

    seconds, pieces = timed(plan)
    sizes = zip(arrays.values(), regions, strict=True)
    share = sum(region.size * array.dtype.itemsize for array, own in sizes for region in own)
    return decode, seconds, read, pieces, share


def measure(job: Job, seconds: float = LATENCY) -> Row:
    """One row. `seconds`: of a request to the bucket."""
    arrays = job.arrays()
    example = 1

    def assign() -> Sequence[Any]:
        shares = share_out(list(arrays.values()), job.processes, gathered=False)
        for own in shares:
            own.of(example)
        return shares

    first, shares = timed(assign)
    again, _ = timed(assign, 3)
    plan_seconds, plan = timed(lambda: planned(job, arrays, shares, example), 3)
    lines_seconds, lines = timed(lambda: agreement_lines(Snapshot(tuple(staged(arrays, shares, example)), ())), 3)
    part = written(plan)
    leads = planned(job, arrays, shares, LEADER)
    # Those that write what the devices of the example hold: its replicas, and who writes what is not sharded.
    near = set(range(example, job.processes, job.processes // job.replicas))
    near |= {int(own.writers.numbers[0]) for own in shares if len(own) == 1}
    parts = {LEADER: written(leads)}
    for process in range(1, job.processes):
        if process in near and process != example:
            parts[process] = written(planned(job, arrays, shares, process))
        else:
            parts[process] = part if process == example else as_if_by(part, process, example)
    tables = {part.table_file.name: part.table for part in parts.values() if part.table_file}
    counts = [struct.unpack_from("<QQ", part.table, 16) for part in parts.values() if part.table]
    cloud = Cloud()
    with cloud.in_place() as bucket:
        records, rest, document = commit(job, leads, parts, cloud, bucket, seconds)
    decode, load, read, pieces_read, share = plan_load(arrays, document, tables, example)
    (tree,) = json.loads(document)["trees"].values()
    of_leaves = sum(len(json.dumps(tree[name], separators=(",", ":"))) for name in ("leaves", "structure"))
    requests = count_coordination(min(job.processes, MOST_THREADS), lines)
    return Row(
        processes=job.processes,
        replicas=job.replicas,
        parameters=sum(math.prod(array.shape) for array in arrays.values()) // 3,
        pieces=sum(map(len, shares)),
        own=sum(len(file.pieces) for file in plan.files),
        first=first,
        again=again,
        plan=plan_seconds,
        lines=lines_seconds,
        coordination=requests.total() / min(job.processes, MOST_THREADS),
        records=records,
        commit=rest,
        requests=cloud.requests,
        sent=requests["set"] / min(job.processes, MOST_THREADS),
        files=sum(len(part.files) + bool(part.table_file) for part in parts.values()),
        document=document,
        leaves=len(tree["leaves"]),
        of_leaves=of_leaves,
        tables=sum(map(len, tables.values())),
        rows=sum(pieces for pieces, _ in counts),
        digests=sum(digests for _, digests in counts),
        decode=decode,
        load=load,
        tables_read=read,
        pieces_read=pieces_read,
        share=share,
    )


COLUMNS: dict[str, Callable[[Row], float]] = {
    "pieces of a process": lambda row: row.own,
    "assignment, first (s)": lambda row: row.first,
    "assignment, later (s)": lambda row: row.again,
    "plan (s)": lambda row: row.plan,
    "compared (s)": lambda row: row.lines,
    "coordination, requests of a process": lambda row: row.coordination,
    "records (s)": lambda row: row.records,
    "commit (s)": lambda row: row.commit,
    "requests of the leader": lambda row: row.requests.total(),
    "manifest.json (bytes)": lambda row: row.root,
    "all of the manifest (bytes a piece)": lambda row: (row.root + row.tables) / row.rows,
    "… without the digests of later blocks": lambda row: (row.root + row.tables) / row.rows - row.further,
    "… and without the leaves": lambda row: (row.root + row.tables - row.of_leaves) / row.rows - row.further,
    "leaves (bytes a leaf)": lambda row: row.of_leaves / row.leaves,
    "decoding (s)": lambda row: row.decode,
    "plan of a load (s)": lambda row: row.load,
    "read for it / held (bytes)": lambda row: row.read / row.share,
}


def slope(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    """The exponent of the number of processes, from the third row to the last."""
    some = rows[min(2, len(rows) - 2) :]
    ratio = max(value(some[-1]), 1e-9) / max(value(some[0]), 1e-9)
    return math.log(ratio) / math.log(some[-1].processes / some[0].processes)


def table(title: str, rows: Sequence[Row]) -> str:
    head = ["", *(f"{row.processes:,}" for row in rows), "slope"]
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines.append("| parameters | " + " | ".join(f"{row.parameters / 1e9:,.1f} G" for row in rows) + " | |")
    for name, value in COLUMNS.items():
        shown = " | ".join(f"{value(row):,.3g}" if value(row) < 1000 else f"{value(row):,.0f}" for row in rows)
        lines.append(f"| {name} | {shown} | {slope(rows, value):.2f} |")
    kinds = sorted({kind for row in rows for kind in row.requests})
    lines += [f"| … {kind} | " + " | ".join(str(row.requests[kind]) for row in rows) + " | |" for kind in kinds]
    return "\n".join(lines)


def rounded(value: float) -> float:
    """Three digits, or all of a larger number."""
    return float(f"{value:.3g}") if value < 1000 else round(value)


def write(found: dict[str, list[Row]], text: str) -> None:
    """The results, and the plot of them."""
    import report

    (RESULTS / "scale.md").write_text(f"{(__doc__ or '').strip()}\n\n{text}\n")
    trees = [
        {
            "title": title,
            "processes": [row.processes for row in rows],
            "columns": {name: [rounded(value(row)) for row in rows] for name, value in COLUMNS.items()},
        }
        for title, rows in found.items()
    ]
    report.SCALING.write_text(report.compact({"latency": LATENCY, "trees": trees}))
    report.redraw()


def jobs(quick: bool) -> dict[str, list[Job]]:
    """Trees that grow with the cluster, to 10¹² parameters: the data of a process and the number of leaves stay."""
    sizes = (16, 64, 256) if quick else (16, 64, 256, 1024, 4096, 10_000)
    blocks = 4 if quick else 100

    def job(processes: int, replicas: int) -> Job:
        return Job(processes, replicas, blocks, round(math.sqrt(processes) * 224))  # 20 × width² for each block

    return {
        "3,000 arrays, sharded over all processes": [job(n, 1) for n in sizes],
        "3,000 arrays, 16 groups of replicas": [job(n, 16) for n in sizes],
    }


def measure_apart(job: Job) -> Row:
    """The row of a job, measured in a new process, where nothing is in a cache."""
    with tempfile.NamedTemporaryFile() as result:
        program = f"import pickle, scale; pickle.dump(scale.measure(scale.{job!r}), open({result.name!r}, 'wb'))"
        subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True, timeout=600)
        return pickle.load(result)


def median(rows: Sequence[Row]) -> Row:
    """One row for several rounds of a job. Numbers of requests are those of the first."""
    return replace(rows[0], **{name: statistics.median(getattr(row, name) for row in rows) for name in _MEDIANS})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 to 256 processes, small trees, one round")
    quick = parser.parse_args().quick
    rounds = [(title, job) for title, some in jobs(quick).items() for job in some] * (1 if quick else ROUNDS)
    measured: dict[str, dict[Job, list[Row]]] = {}
    for number, (title, job) in enumerate(rounds, 1):
        measured.setdefault(title, {}).setdefault(job, []).append(measure_apart(job))
        print(f"{number} of {len(rounds)}: {title}, {job.processes:,} processes", file=sys.stderr)
    found = {title: list(map(median, some.values())) for title, some in measured.items()}
    text = "\n\n".join(table(title, rows) for title, rows in found.items())
    print(text)
    if not quick:
        write(found, text)


if __name__ == "__main__":
    main()
