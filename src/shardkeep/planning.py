"""Plans of what is written and read: plain values, made before any byte is written or read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkeep.arrays import ArraySpec, Region
from shardkeep.manifest import DataFile, Piece, StoredLeaf, Tree
from shardkeep.processes import LEADER
from shardkeep.records import record
from shardkeep.sharing import SMALL, Share
from shardkeep.tree import Path, Skeleton, show_key
from shardkeep.workers import collector


@record
class LeafPlan:
    """A leaf as it will be recorded. For an array, `held` are the regions that this process has staged, in order.

    If several processes save together, `shares` says which of them writes which region. `common` means that each of
    them has the complete value, which must be the same on all.
    """

    path: Path
    kind: str
    spec: ArraySpec | None = None
    value: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    held: tuple[Region, ...] = ()
    first_held: int = 0
    shares: tuple[Share, ...] = ()
    common: bool = False

    @property
    def key(self) -> str:
        return show_key(self.path)


@record
class PiecePlan:
    """A Region to store, and the staged shards it consists of: (number of the shard, its region)."""

    leaf: int
    region: Region
    nbytes: int
    sources: tuple[tuple[int, Region], ...]
    name: str = ""
    offset: int = 0
    writer: int = LEADER

    def placed(self, offset: int, name: str) -> "PiecePlan":
        """The same piece with its offset and name. (`dataclasses.replace` takes three times as long.)"""
        return PiecePlan(self.leaf, self.region, self.nbytes, self.sources, name, offset, self.writer)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to write: its header, then its pieces. `size` is None if it depends on compression."""

    name: str
    header: bytes
    pieces: tuple[PiecePlan, ...]
    size: int | None
    writer: int = LEADER


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known about a save when it begins."""

    save_id: str
    prefix: str
    skeleton: Skeleton
    metadata: dict[str, Any]
    created: str
    indexed: bool = True
    step: int | None = None


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Everything a save will write."""

    save_id: str
    format: str
    compression: str | None
    skeleton: Skeleton
    leaves: tuple[LeafPlan, ...]
    files: tuple[FilePlan, ...]
    directory: str = ""

    def files_of(self, writer: int) -> list[FilePlan]:
        """The files that one of the processes writes."""
        return [file for file in self.files if file.writer == writer]

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]

    @property
    def nbytes(self) -> int:
        """An upper bound on the bytes that will be written."""
        return sum(file.size or len(file.header) + sum(p.nbytes for p in file.pieces) for file in self.files)

    @collector.paused()
    def tree(self, written: Sequence["WrittenFile"], draft: Draft) -> Tree:
        """The Tree to commit, once sizes and digests are known."""
        pieces: dict[int, list[Piece]] = {i: [] for i, leaf in enumerate(self.leaves) if leaf.spec}
        files: list[DataFile] = []
        for number, (plan, done) in enumerate(zip(self.files, written, strict=True)):
            loose = done.size if plan.size is None else len(plan.header)
            files.append(DataFile(plan.name, done.size, loose, done.header_digest))
            for piece, digests in zip(plan.pieces, done.digests, strict=True):
                stored = done.size if plan.size is None else None
                pieces[piece.leaf].append(Piece(piece.region, number, piece.offset, piece.nbytes, digests, stored))
        leaves = tuple(
            StoredLeaf(leaf.path, leaf.kind, leaf.spec, tuple(pieces.get(i, ())), leaf.value, leaf.extra)
            for i, leaf in enumerate(self.leaves)
        )
        return Tree(
            save_id=self.save_id,
            format=self.format,
            skeleton=self.skeleton,
            leaves=leaves,
            files=tuple(files),
            metadata=draft.metadata,
            created=draft.created,
            compression=self.compression,
            indexed=draft.indexed,
            step=draft.step,
        )


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What is known about a written file: its size, the digest of its header, the block digests of each piece."""

    size: int
    header_digest: str
    digests: tuple[tuple[str, ...], ...]


def plan_pieces(
    leaves: Sequence[LeafPlan], split: Callable[[ArraySpec, Region], list[Region]], whole: float = SMALL
) -> list[PiecePlan]:
    """The pieces to store: the staged shards, split as the format requires. Arrays up to `whole` bytes stay whole."""
    pieces: list[PiecePlan] = []
    for number, leaf in enumerate(leaves):
        if leaf.spec is None:
            continue
        held = [(leaf.first_held + i, region) for i, region in enumerate(leaf.held)]
        itemsize = leaf.spec.dtype.itemsize
        uneven = len({region.shape for _, region in held}) > 1  # JAX does not do this, and a zarr grid cannot store it
        if leaf.shares:
            for region, writer in leaf.shares:
                sources = tuple((i, r) for i, r in held if r == region or r.intersect(region) is not None)
                for part in split(leaf.spec, region):
                    pieces.append(PiecePlan(number, part, part.size * itemsize, sources, writer=writer))
        elif uneven or leaf.spec.nbytes <= whole:
            region = Region.whole(leaf.spec.shape)
            pieces.append(PiecePlan(number, region, leaf.spec.nbytes, tuple(held)))
        else:
            for shard, region in held:
                for part in split(leaf.spec, region):
                    pieces.append(PiecePlan(number, part, part.size * itemsize, ((shard, region),)))
    return pieces


@record
class Fetch:
    """A piece to read, and where its data goes: (number of the target, the region they have in common)."""

    leaf: int
    piece: Piece
    targets: tuple[tuple[int, Region], ...]
    band: int | None = None  # the bytes to read, if only a band of the piece is read

    @property
    def nbytes(self) -> int:
        """The memory needed to read it."""
        return self.piece.length if self.band is None else self.band

    @property
    def parts(self) -> list[Region]:
        """The parts of the piece that are needed, relative to its start."""
        return list(dict.fromkeys(common.within(self.piece.region) for _, common in self.targets))


def plan_read(number: int, leaf: StoredLeaf, targets: Sequence[Region]) -> list[Fetch]:
    """The pieces, and the parts of them, that fill the target regions. Nothing else is read.

    Targets are equal or disjoint, as the shards of an array are.
    """
    if len(leaf.pieces) == len(targets) == 1 and leaf.pieces[0].region == targets[0] and leaf.pieces[0].length:
        return [Fetch(number, leaf.pieces[0], ((0, targets[0]),))]
    fetches: list[Fetch] = []
    known = {target: i for i, target in enumerate(targets)}
    known = known if len(known) == len(targets) else {}
    for piece in leaf.pieces:
        same = known.get(piece.region) if piece.length else None
        if same is not None:
            hits = [(same, piece.region)]
        else:
            hits = [(i, c) for i, target in enumerate(targets) if (c := piece.region.intersect(target)) is not None]
        if hits:
            fetches.append(Fetch(number, piece, tuple(hits)))
    return fetches


def split_fetch(fetch: Fetch, limit: int) -> list[Fetch]:
    """The bands, along its first axis longer than 1, in which a piece larger than `limit` is read."""
    region = fetch.piece.region
    axis = next((i for i, n in enumerate(region.shape) if n > 1), None)
    if fetch.piece.length <= limit or fetch.piece.stored is not None or axis is None:
        return [fetch]
    row = fetch.piece.length // region.shape[axis]
    step = max(limit // row, 1)
    bands: list[Fetch] = []
    for first in range(0, region.shape[axis], step):
        count = min(step, region.shape[axis] - first)
        start = tuple(a + first if i == axis else a for i, a in enumerate(region.start))
        band = Region(start, tuple(count if i == axis else n for i, n in enumerate(region.shape)))
        hits = tuple((i, c) for i, common in fetch.targets if (c := common.intersect(band)) is not None)
        if hits:
            bands.append(Fetch(fetch.leaf, fetch.piece, hits, count * row))
    return bands


def plan_steps(fetches: Sequence[Fetch], limit: int) -> list[list[Fetch]]:
    """Fetches in order, grouped so that the pieces of a group have at most `limit` bytes (or are a single piece)."""
    steps: list[list[Fetch]] = []
    filled = 0
    for fetch in fetches:
        if not steps or filled + fetch.nbytes > limit:
            steps.append([])
            filled = 0
        steps[-1].append(fetch)
        filled += fetch.nbytes
    return steps
