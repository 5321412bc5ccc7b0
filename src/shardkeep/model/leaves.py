"""Saved leaves: plain values, and arrays with a record of what they were when they were saved.

A manifest has thousands of them, and a few shardings and origins that they share.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal, TypeAlias, final

from shardkeep.errors import counted
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.markup import Cell, Code, facts, panel
from shardkeep.model.perprocess import PerProcessRows
from shardkeep.model.summaries import brief, cut, human
from shardkeep.model.tree import Path, name_leaf, show_key
from shardkeep.model.values import show

Axes: TypeAlias = str | tuple[str, ...] | None  # the mesh axes that one dimension of an array is split over
ByteOrder: TypeAlias = Literal["<", ">"]


@final
@fast_dataclass
class SavedSharding:
    """The named sharding of a saved array: to show it, and to load onto another mesh with the same axis names."""

    spec: tuple[Axes, ...]
    mesh: tuple[tuple[str, int], ...]  # the name and the size of each axis

    def __str__(self) -> str:
        spec = ", ".join("+".join(axes) if isinstance(axes, tuple) else str(axes) for axes in self.spec)
        return f"P({spec}) on {' '.join(f'{axis}={size}' for axis, size in self.mesh)}"


@final
@fast_dataclass
class JaxArray:
    """The origin of an array that was a `jax.Array`, or that another program wrote into a safetensors file."""

    sharding: SavedSharding | None = None
    kind: ClassVar = "jax"


@final
@fast_dataclass
class NumpyArray:
    """The origin of an array that was a `numpy.ndarray`. Its byte order is recorded if it was not the machine's own."""

    order: ByteOrder | None = None
    kind: ClassVar = "numpy"


@final
@fast_dataclass
class PrngKeys:
    """The origin of an array that was typed PRNG keys. Their data is stored, which has one more axis."""

    impl: str
    kind: ClassVar = "prng"


@final
@fast_dataclass
class ForeignArray:
    """The origin of an array that another program wrote. It stays where it is, and has no pieces.

    The kind says which reader in `foreign/registry.py` reads it; `directory` is its place in the checkpoint. `was`:
    what the array was for that program, if it says so.
    """

    directory: str
    kind: str = "zarr"
    was: "JaxArray | NumpyArray | PrngKeys | None" = None


Origin: TypeAlias = JaxArray | NumpyArray | PrngKeys | PerProcessRows | ForeignArray
UNSHARDED = JaxArray()
UNREADABLE = "unreadable"  # the kind of foreign arrays that are there, but hold something that is not read
NATIVE = NumpyArray()


@final
@fast_dataclass
class Piece:
    """One stored Region. `length` is the number of its raw bytes, `stored` that in the file if it is compressed."""

    region: Region
    file: int
    offset: int
    length: int
    digests: tuple[str, ...] | None
    stored: int | None = None


@fast_dataclass
class StoredLeaf:
    """A saved leaf, either an array or a plain value. For example, `inspect(path).leaves["layers/0/w"]`.

    Attributes:
        key: The path of the leaf in the tree, joined with `/`.
        path: The same path as a tuple of names.
        kind: What the leaf was when it was saved: "jax" (a `jax.Array`), "numpy" (a `numpy.ndarray`), "prng" (typed
            PRNG keys, stored as their key data), "per_process" (a `PerProcess` value of each process), "zarr" (an
            array written by another program), "unreadable" (a leaf of another program that cannot be read) or "value"
            (a plain Python or NumPy value).
        shape: The shape of an array; None for a plain value.
        dtype: The name of an array's dtype, for example "bfloat16"; None for a plain value.
        nbytes: The uncompressed size of an array; 0 for a plain value.
        value: A plain value; None for an array.
        processes: The number of processes that saved a `PerProcess` leaf; None for any other leaf.

    Other attributes are internal and may change.

    >>> import numpy as np, shardkeep
    >>> _ = shardkeep.save(tmp / "step_1", {"layers": [{"w": np.zeros((2, 3), np.float32)}], "step": 1})
    >>> shardkeep.inspect(tmp / "step_1").leaves["layers/0/w"]
    <StoredLeaf layers/0/w: float32[2, 3], 24 bytes in 1 piece>
    """

    path: Path

    @property
    def key(self) -> str:
        """The path of the leaf in the tree, joined with `/`."""
        return show_key(self.path)

    @property
    def kind(self) -> str:
        """What the leaf was when it was saved."""
        return "value"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of an array; None for a plain value."""
        return None

    @property
    def dtype(self) -> str | None:
        """The name of an array's dtype; None for a plain value."""
        return None

    @property
    def nbytes(self) -> int:
        """The uncompressed size of an array; 0 for a plain value."""
        return 0

    @property
    def value(self) -> Any:
        """A plain value; None for an array."""
        return None

    @property
    def processes(self) -> int | None:
        """The number of processes that saved a `PerProcess` leaf; None for any other leaf."""
        return None

    def __dir__(self) -> list[str]:
        return ["dtype", "key", "kind", "nbytes", "path", "processes", "shape", "value"]

    def __repr__(self) -> str:
        return f"<StoredLeaf {self.row}>"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Cell | None]] = [("kind", self.kind), ("value", Code(self.form))]
        return panel("StoredLeaf", Code(name_leaf(self.path)), [facts(rows)])

    @property
    def row(self) -> str:
        """The leaf in one line, however long its name and its value are."""
        return f"{cut(name_leaf(self.path), 48)}: {self._summary()}"

    @property
    def form(self) -> str:
        """The dtype and the shape of an array; a plain value itself, in a few words."""
        return brief(self.value)

    def _summary(self) -> str:
        value = self.value
        start = value[:40] if isinstance(value, str | bytes) else value  # the `repr` of all of it may be gigabytes
        return cut(show(start), 30)


@final
@fast_dataclass
class StoredValue(StoredLeaf):
    """A saved plain value: a `StoredLeaf`, with its attributes."""

    value: Any = field()


@fast_dataclass
class StoredArray(StoredLeaf):
    """A saved array: a `StoredLeaf`, with its attributes."""

    spec: ArraySpec
    pieces: Sequence[Piece]  # a tuple, or `StoredPieces`, which are decoded when they are needed
    origin: Origin

    @property
    def was(self) -> Origin:
        """What the array was when it was saved, whichever program saved it and wherever it is."""
        origin = self.origin
        return (origin.was or origin) if isinstance(origin, ForeignArray) else origin

    @property
    def kind(self) -> str:
        return self.was.kind

    @property
    def unreadable(self) -> str | None:
        """Why it cannot be read; None for an array that can, unless it is damaged."""
        origin = self.origin
        if not isinstance(origin, ForeignArray) or origin.kind != UNREADABLE:
            return None
        return origin.directory.partition("\0")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype.name

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def processes(self) -> int | None:
        origin = self.origin
        return len(origin.lengths) if isinstance(origin, PerProcessRows) else None

    @property
    def form(self) -> str:
        return f"{self.logical_dtype}{list(self.logical_shape)}"

    def _repr_html_(self) -> str:
        sharding = None if self.sharding is None else Code(str(self.sharding))
        rows: list[tuple[str, Cell | None]] = [
            ("kind", self.kind),
            ("array", Code(self.form)),
            ("unreadable", self.unreadable),
            ("size", human(self.nbytes)),
            ("pieces", f"{len(self.pieces):,}" if self.pieces else None),
            ("sharding", sharding),
        ]
        return panel("StoredLeaf", Code(name_leaf(self.path)), [facts(rows)])

    def _summary(self) -> str:
        if self.unreadable is not None:
            return cut(f"unreadable: {self.unreadable}", 80)
        if self.processes is not None:
            return f"PerProcess of {counted(self.processes, 'process', 'processes')}, {self.nbytes:,} bytes"
        pieces = f" in {counted(len(self.pieces), 'piece')}" if self.pieces else ""
        return f"{cut(f'{self.dtype}{list(self.shape)}', 40)}, {self.nbytes:,} bytes{pieces}"

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape that the user knows: of PRNG keys and values of processes, not that of their data."""
        match self.was:
            case PrngKeys():
                return self.spec.shape[:-1]
            case PerProcessRows(lengths):
                return (len(lengths),)
            case _:
                return self.spec.shape

    @property
    def logical_dtype(self) -> str:
        """The dtype that the user knows: of PRNG keys and values of processes, not that of their data."""
        match self.was:
            case PrngKeys(impl):
                return f"key<{impl}>"
            case PerProcessRows():
                return "PerProcess"
            case _:
                return self.spec.dtype.name if self.unreadable is None else UNREADABLE

    @property
    def holds_numbers(self) -> bool:
        """Whether its elements mean something by themselves, unlike those of PRNG keys and encoded values."""
        return not isinstance(self.was, PrngKeys | PerProcessRows)

    @property
    def sharding(self) -> SavedSharding | None:
        """The named sharding that the array had, if it had one."""
        was = self.was
        return was.sharding if isinstance(was, JaxArray) else None
