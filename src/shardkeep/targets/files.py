"""A file, or a set of files, that is another program's checkpoint. It is only read."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardkeep.errors import CheckpointNotFoundError, ShardkeepError
from shardkeep.foreign.recognize import name_foreign
from shardkeep.foreign.registry import checkpoint_files, detect_file, main_files
from shardkeep.model.manifest import Manifest
from shardkeep.stores.base import CONTROL, Store
from shardkeep.stores.location import Location, store_at


@dataclass(frozen=True)
class ForeignFile:
    """A file that another program wrote, or the one that names all files of a set; a `ReadTarget`."""

    store: Store
    name: str
    companions: Sequence[str] = ()

    @property
    def where(self) -> str:
        return self.store.locate(self.name)

    @property
    def documents(self) -> Sequence[str]:
        return (self.name,)

    def read_if_any(self) -> Manifest | None:
        try:
            return detect_file(self.store, self.name) if self.store.size(self.name) is not None else None
        except FileNotFoundError as error:
            if isinstance(error, ShardkeepError):
                raise
            return None  # it was removed meanwhile

    def read(self) -> Manifest:
        found = self.read_if_any()
        if found is not None:
            return found
        what = name_foreign([self.name])
        known = (
            f"it is {what}, which this version of shardkeep cannot read"
            if what
            else "shardkeep cannot read this kind of file"
        )
        raise CheckpointNotFoundError(f"no checkpoint at {self.where}: {known}")


def file_at(place: Location) -> ForeignFile:
    """The file at a place, as another program's checkpoint."""
    return ForeignFile(store_at(place.parent, control=f".{place.name}{CONTROL}", confined=False), place.name)


def file_in(place: Location, store: Store, names: Sequence[str]) -> ForeignFile | None:
    """The file of another program that a directory stands for: one with a usual name, or the only one there.

    One with any other name counts only if there are no subdirectories, which may be what was meant.
    """
    if any(name.startswith(CONTROL) for name in names):
        return None
    usual, found = main_files(names), checkpoint_files(names)
    chosen = usual or found
    if len(chosen) > 1:
        listed = ", ".join(chosen)
        raise CheckpointNotFoundError(
            f"{place} holds several checkpoints of other programs; pass the path of one of them: {listed}"
        )
    if not chosen or (not usual and any(not name.startswith(".") for name in store.entries()[0])):
        return None
    return file_at(place / chosen[0])
