"""How pieces become files. A Format only lays out: one writer and one reader serve them all."""

from collections.abc import Sequence
from typing import Protocol

from shardkeep.arrays import ArraySpec, Region
from shardkeep.planning import FilePlan, LeafPlan, PiecePlan


class Format(Protocol):
    """A way to arrange pieces in files that other programs can read."""

    name: str
    compression: str | None
    whole: int
    """Arrays of up to so many bytes, if one process holds all of them, are stored as one piece."""

    def split(self, spec: ArraySpec, region: Region) -> list[Region]:
        """The regions a held shard is stored as."""
        ...

    def lay_out(
        self, leaves: Sequence[LeafPlan], pieces: Sequence[PiecePlan], directory: str, save_id: str
    ) -> list[FilePlan]:
        """The files to write below `directory`, with every piece in its place."""
        ...
