"""What a checkpoint holds: its trees, with their files and leaves. `document` has the JSON of it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardkeep.errors import PrefixError, counted
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.keys import KeyTable
from shardkeep.model.lazy import cached_property
from shardkeep.model.leaves import StoredArray, StoredLeaf
from shardkeep.model.markup import Cell, Code, Gauge, Html, facts, line, panel, table
from shardkeep.model.metadata import without_notes
from shardkeep.model.naming import clean_name, is_table
from shardkeep.model.summaries import MOST_SHOWN, brief, cut, human, rows_of
from shardkeep.model.tree import Skeleton, flatten, name_leaf, nest
from shardkeep.model.values import is_unicode

MANIFEST = "manifest.json"
OURS = "shardkeep"  # the source of trees that shardkeep saved
_MOST_TREES = 4  # that are shown
_MOST_ROWS = 24  # leaves in a notebook
_MOST_METADATA = 8  # entries


@fast_dataclass
class DataFile:
    """A file of the checkpoint: its name, its size, and the digest of the bytes in it that belong to no piece."""

    name: str
    size: int
    header_length: int = 0
    header_digest: str | None = None


@dataclass(frozen=True, repr=False)
class Tree:
    """One saved tree of a checkpoint, as returned by `inspect(path).tree(prefix)`.

    Attributes:
        format: How it is stored: "safetensors", "zarr", or "foreign" if another program wrote it.
        compression: "zstd" or None.
        created: When it was saved, in ISO 8601 format and UTC; empty if another program wrote it without recording the
            time.
        metadata: The metadata it was saved with. In a step of a run, `shardkeep_run` is what the `Run` recorded.
        leaves: A tuple of `StoredLeaf`s, in the order of the tree.
        nbytes: The uncompressed size of its arrays.
        save_id: The id of the save that wrote it.
        step: The training step that was passed to `save`, or None.
        source: What wrote it: "shardkeep", or the format of another program, for example "orbax".

    Other attributes are internal and may change.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.zeros(3)}, prefix="ema", metadata={"step": 1})
    >>> tree = shardkeep.inspect(tmp / "step_1").tree("ema")
    >>> tree.format, tree.nbytes, len(tree.leaves), tree.metadata
    ('safetensors', 24, 1, {'step': 1})
    """

    save_id: str
    format: str
    skeleton: Skeleton
    leaves: tuple[StoredLeaf, ...]
    files: tuple[DataFile, ...]
    metadata: Mapping[str, Any]
    created: str
    compression: str | None = None
    indexed: bool = True  # whether indexes for other programs may list it
    published: bool = False  # whether its files also have clean names, without the save's id, for other programs
    step: int | None = None  # the training step, if the save recorded one
    source: str = OURS  # what wrote it: shardkeep, or the kind of another program's checkpoint

    @property
    def nbytes(self) -> int:
        """The size of its arrays, uncompressed."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def arrays(self) -> list[StoredArray]:
        """Its leaves that are arrays."""
        return [leaf for leaf in self.leaves if isinstance(leaf, StoredArray)]

    @cached_property
    def clean_names(self) -> dict[str, str]:
        """The clean names of its files with data, each with the name that the manifest has."""
        names = [file.name for file in self.files if not is_table(file.name)] if self.published else []
        return {clean_name(name, self.save_id): name for name in names}

    @cached_property
    def names(self) -> set[str]:
        """The names of its files, clean names included."""
        return {file.name for file in self.files}.union(self.clean_names)

    def __dir__(self) -> list[str]:
        return ["compression", "created", "format", "leaves", "metadata", "nbytes", "save_id", "source", "step"]

    def __repr__(self) -> str:
        return "\n".join([f"<Tree: {_title(self)}>", *rows_of(self.leaves)])

    def _repr_html_(self) -> str:
        return panel("Tree", "", _parts(self, _MOST_ROWS))


@dataclass(frozen=True, repr=False)
class Manifest:
    """The contents of a checkpoint, as returned by `inspect`. Printing it shows the first leaves of each tree.

    Notebooks show it as tables.

    Attributes:
        path: The path or URL of the checkpoint.
        trees: A dict from prefixes to `Tree`s. The tree saved without a prefix has the key "".
        save_id: The id of the last committed save.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"w": np.zeros((2, 3), np.float32), "step": 1}, metadata={"loss": 0.5})
    >>> manifest = shardkeep.inspect(tmp / "step_1")
    >>> manifest.prefixes, list(manifest.leaves), manifest.nbytes, manifest.metadata, manifest.source
    ([''], ['w', 'step'], 24, {'loss': 0.5}, 'shardkeep')
    """

    path: str
    save_id: str
    trees: Mapping[str, Tree]

    @property
    def prefixes(self) -> list[str]:
        """The prefixes of its trees; "" for a tree saved without one."""
        return list(self.trees)

    @property
    def leaves(self) -> dict[str, StoredLeaf]:
        """All leaves by key. If there are several trees, keys begin with the prefix and a slash."""
        several = len(self.trees) > 1
        return KeyTable(
            (f"{prefix}/{leaf.key}" if several and prefix else leaf.key, leaf)
            for prefix, tree in self.trees.items()
            for leaf in tree.leaves
        )

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that was saved with the tree that `load(path)` would return."""
        return without_notes(self.tree().metadata)

    @property
    def step(self) -> int | None:
        """The recorded step of the tree that `load(path)` would return; with several prefixes, the highest step."""
        if "" in self.trees or len(self.trees) == 1:
            return self.tree().step
        return max((tree.step for tree in self.trees.values() if tree.step is not None), default=None)

    @property
    def source(self) -> str:
        """What wrote the checkpoint: "shardkeep", or the format of another program, for example "orbax" or "eformer".

        If the directory holds trees of several kinds, all of them, separated by commas.
        """
        return ", ".join(dict.fromkeys(tree.source for tree in self.trees.values())) or OURS

    @property
    def nbytes(self) -> int:
        """The uncompressed size of all arrays."""
        return sum(tree.nbytes for tree in self.trees.values())

    @property
    def stored_bytes(self) -> int:
        """The size of all data files. With compression, it is usually smaller than `nbytes`."""
        return sum({file.name: file.size for tree in self.trees.values() for file in tree.files}.values())

    def tree(self, prefix: str | None = None) -> Tree:
        """Return one tree of the checkpoint.

        Args:
            prefix: The prefix it was saved with. None means the tree without a prefix, or the only one.

        Raises:
            PrefixError: There is no such tree, or there are several and `prefix` is None.
        """
        if prefix is None:
            if "" in self.trees or len(self.trees) == 1:
                return self.trees.get("") or next(iter(self.trees.values()))
            raise PrefixError(f"{self.path} contains several trees; pass prefix= one of {self._listed()}")
        name = check_prefix(prefix)
        found = self.trees.get(name) or self._below(name)
        if found is None:
            raise PrefixError(f"{self.path} has no tree with prefix {prefix!r}; it has {self._listed()}")
        return found

    def _below(self, prefix: str) -> Tree | None:
        """In another program's tree without prefixes, a prefix is a path: the leaves below it."""
        tree = self.trees.get("")
        if tree is None or tree.format != "foreign":
            return None
        start = tuple(prefix.split("."))
        inside = [leaf for leaf in tree.leaves if leaf.path[: len(start)] == start and len(leaf.path) > len(start)]
        if not inside:
            return None
        skeleton, found = flatten(nest([(leaf.path[len(start) :], leaf) for leaf in inside]))
        return replace(tree, skeleton=skeleton, leaves=tuple(replace(f.value, path=f.path) for f in found))

    def _listed(self) -> str:
        return ", ".join(repr(p) if p else "(no prefix)" for p in self.trees) or "none"

    def __repr__(self) -> str:
        count = sum(len(tree.leaves) for tree in self.trees.values())
        lines = [f"<Manifest {self.path}: {counted(count, 'leaf', 'leaves')}, {self.nbytes:,} bytes>"]
        shown = list(self.trees.items())[:_MOST_TREES]
        for prefix, tree in shown:
            lines += [f"  {cut(prefix, 48) or '(no prefix)'}: {_title(tree)}"]
            lines += rows_of(tree.leaves, max((MOST_SHOWN + 1) // len(shown) - 1, 2))
        if len(self.trees) > len(shown):
            lines.append(f"  … and {counted(len(self.trees) - len(shown), 'more tree')}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        shown = list(self.trees.items())[:_MOST_TREES]
        parts: list[Html] = []
        for prefix, tree in shown:
            if prefix or len(self.trees) > 1:
                parts.append(line(prefix or "(no prefix)", heading=True))
            parts += _parts(tree, max(_MOST_ROWS // len(shown), 4))
        if len(self.trees) > len(shown):
            parts.append(line(f"… and {counted(len(self.trees) - len(shown), 'more tree')}"))
        return panel("Manifest", Code(self.path), parts)


def _parts(tree: Tree, most: int) -> list[Html]:
    """What a tree shows in a notebook."""
    stored = tree.format + (f", {tree.compression}" if tree.compression else "")
    passed = without_notes(tree.metadata)
    metadata = [f"{cut(str(key), 40)}={brief(value)}" for key, value in list(passed.items())[:_MOST_METADATA]]
    if len(passed) > len(metadata):
        metadata.append(f"… and {len(passed) - len(metadata):,} more")
    about: list[tuple[str, Cell | None]] = [
        ("format", stored if tree.source == OURS else f"{stored} ({tree.source})"),
        ("saved", tree.created),
        ("step", None if tree.step is None else f"{tree.step:,}"),
        ("metadata", ", ".join(metadata)),
        ("size", f"{human(tree.nbytes)} in {counted(len(tree.leaves), 'leaf', 'leaves')}"),
    ]
    shown = tree.leaves[:most]
    sharded = any(isinstance(leaf, StoredArray) and leaf.sharding is not None for leaf in shown)
    largest = max((leaf.nbytes for leaf in tree.leaves), default=0) or 1
    rows = [_cells(leaf, largest, sharded) for leaf in shown]
    head = ["leaf", "array or value", *(["sharding"] if sharded else []), "size"]
    parts = [facts(about), *([table(head, rows)] if rows else [])]
    more = len(tree.leaves) - len(shown)
    return [*parts, line(f"… and {counted(more, 'more leaf', 'more leaves')}")] if more else parts


def _cells(leaf: StoredLeaf, largest: int, sharded: bool) -> list[Cell]:
    is_array = isinstance(leaf, StoredArray)
    sharding = str(leaf.sharding) if is_array and leaf.sharding is not None else ""
    size: Cell = Gauge(human(leaf.nbytes), leaf.nbytes / largest) if is_array else ""
    return [Code(cut(name_leaf(leaf.path), 60)), Code(cut(leaf.form, 60)), *([Code(sharding)] if sharded else []), size]


def _title(tree: Tree) -> str:
    when = f", saved {tree.created}" if tree.created else ""
    return f"{tree.format}, {counted(len(tree.leaves), 'leaf', 'leaves')}, {tree.nbytes:,} bytes{when}"


def check_prefix(prefix: object) -> str:
    """The prefix as it is recorded; `PrefixError` for one that could leave the checkpoint or be ambiguous.

    >>> check_prefix("model/encoder")
    'model.encoder'
    """
    if not isinstance(prefix, str):
        raise PrefixError(f"a prefix must be a string, not {prefix!r}")
    if (
        not is_unicode(prefix)
        or prefix.startswith("/")
        or any(ord(c) < 32 or ord(c) == 127 for c in prefix)
        or len(prefix) > 500
    ):
        raise PrefixError(
            f"prefix {prefix[:80]!r} must be a relative name of at most 500 characters without control characters"
        )
    parts = re.split(r"[/.]", prefix)
    if prefix and ("" in parts or parts[0].startswith("~") or os.path.isabs(prefix)):
        raise PrefixError(f"prefix {prefix!r} must not contain an empty part or '..', or start with '~'")
    return ".".join(parts)
