"""How pieces become files. A Format only decides the layout; one writer and one reader serve all formats."""

from collections.abc import Sequence
from typing import Protocol

from shardkeep.layouts.plan import FilePlan, PiecePlan, StagedArray
from shardkeep.model.arrays import ArraySpec, Region


class Format(Protocol):
    """A way to lay pieces out in files that other programs can read."""

    name: str
    compression: str | None
    whole: int
    """Arrays of at most this many bytes that one process holds completely are stored as one piece."""

    def split(self, spec: ArraySpec, region: Region) -> list[Region]:
        """The regions that a shard is stored as."""
        ...

    def lay_out(
        self, arrays: Sequence[StagedArray], pieces: Sequence[PiecePlan], directory: str, save_id: str
    ) -> list[FilePlan]:
        """The files to write below `directory`, each with its pieces and their offsets."""
        ...
