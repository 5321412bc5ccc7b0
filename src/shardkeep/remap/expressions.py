"""What rules make of stored arrays, as expressions: their shapes and dtypes are known before anything is read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from shardkeep.model.arrays import Array, DType, Region
from shardkeep.model.fastclass import fast_dataclass
from shardkeep.model.leaves import Axes, SavedSharding, StoredArray

Function: TypeAlias = Callable[[Array], object]  # a function of the user's: of an array, to an array
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Expression:
    """An array that is made of others."""

    shape: Shape = field(init=False)
    dtype: DType = field(init=False)

    @property
    def operands(self) -> "Sequence[Expression]":
        """The arrays that it is made of."""
        return ()

    def _set(self, shape: Sequence[int], dtype: DType) -> None:
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", dtype)


@dataclass(frozen=True, eq=False)
class StoredSource(Expression):
    """A stored array."""

    leaf: StoredArray

    def __post_init__(self) -> None:
        self._set(self.leaf.spec.shape, self.leaf.spec.dtype)


@dataclass(frozen=True, eq=False)
class Filled(Expression):
    """An array of one value; None: the values that the template has there."""

    of_shape: Shape
    of_dtype: DType
    value: float | None

    def __post_init__(self) -> None:
        self._set(self.of_shape, self.of_dtype)


@dataclass(frozen=True, eq=False)
class Stacked(Expression):
    """Arrays of one shape along a new axis."""

    parts: tuple[Expression, ...]
    axis: int

    def __post_init__(self) -> None:
        shape = self.parts[0].shape
        self._set((*shape[: self.axis], len(self.parts), *shape[self.axis :]), self.parts[0].dtype)

    @property
    def operands(self) -> Sequence[Expression]:
        return self.parts


@dataclass(frozen=True, eq=False)
class Joined(Expression):
    """Arrays one after another along an axis."""

    parts: tuple[Expression, ...]
    axis: int

    def __post_init__(self) -> None:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        self._set(shape, self.parts[0].dtype)

    @property
    def operands(self) -> Sequence[Expression]:
        return self.parts


@dataclass(frozen=True, eq=False)
class Sliced(Expression):
    """A range of an array along an axis. With `drop`, it is one index, and the axis goes."""

    of: Expression
    axis: int
    start: int
    size: int
    drop: bool = False

    def __post_init__(self) -> None:
        shape = self.of.shape
        self._set((*shape[: self.axis], *(() if self.drop else (self.size,)), *shape[self.axis + 1 :]), self.of.dtype)

    @property
    def operands(self) -> Sequence[Expression]:
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Transposed(Expression):
    """An array with its axes in another order."""

    of: Expression
    axes: Shape

    def __post_init__(self) -> None:
        self._set([self.of.shape[axis] for axis in self.axes], self.of.dtype)

    @property
    def operands(self) -> Sequence[Expression]:
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Reshaped(Expression):
    """An array with another shape, the elements in the same order."""

    of: Expression
    to: Shape

    def __post_init__(self) -> None:
        self._set(self.to, self.of.dtype)

    @property
    def operands(self) -> Sequence[Expression]:
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Changed(Expression):
    """What a function makes of each element."""

    of: Expression
    function: Function
    to: DType

    def __post_init__(self) -> None:
        self._set(self.of.shape, self.to)

    @property
    def operands(self) -> Sequence[Expression]:
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Called(Expression):
    """What a function makes of a whole array. `rule` is shown in errors."""

    of: Expression
    function: Function
    to_shape: Shape
    to_dtype: DType
    rule: str = ""

    def __post_init__(self) -> None:
        self._set(self.to_shape, self.to_dtype)

    @property
    def operands(self) -> Sequence[Expression]:
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Unsized(Expression):
    """An array that gets the size that the template has along an axis. Until that is known, it has its own."""

    of: Expression
    axis: int
    fill: float | None

    def __post_init__(self) -> None:
        self._set(self.of.shape, self.of.dtype)

    @property
    def operands(self) -> Sequence[Expression]:
        return (self.of,)

    def sized(self, size: int) -> Expression:
        return resized(self.of, self.axis, size, self.fill)


@fast_dataclass
class DerivedArray(StoredArray):
    """An array that rules make of stored ones: a `StoredArray` without pieces of its own."""

    expression: Expression


def resized(of: Expression, axis: int, size: int, fill: float | None) -> Expression:
    """An array cut, or filled up, to a size along an axis."""
    more = size - of.shape[axis]
    if more <= 0:
        return Sliced(of, axis, 0, size) if more else of
    shape = tuple(more if i == axis else n for i, n in enumerate(of.shape))
    return Joined((of, Filled(shape, of.dtype, fill)), axis)


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression, and all that it is made of."""
    yield expression
    for operand in expression.operands:
        yield from walk(operand)


def made_alike(one: Expression, other: Expression) -> bool:
    """Whether two arrays are made of the same ones in the same way."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Filled):
        return False
    if isinstance(one, StoredSource):
        return isinstance(other, StoredSource) and one.leaf is other.leaf
    return (
        _how(one) == _how(other)
        and len(one.operands) == len(other.operands)
        and all(map(made_alike, one.operands, other.operands))
    )


def _how(expression: Expression) -> list[object]:
    names = ("shape", "dtype", "axis", "start", "size", "drop", "axes", "function")
    return [getattr(expression, name, None) for name in names]


def sources_of(expression: Expression) -> list[StoredArray]:
    """The stored arrays that it is made of, each once."""
    found = (each.leaf for each in walk(expression) if isinstance(each, StoredSource))
    return list({leaf.path: leaf for leaf in found}.values())


def keeps_values(expression: Expression) -> bool:
    """Whether some of its elements are those that the template has."""
    return any(isinstance(each, Filled) and each.value is None for each in walk(expression))


def result_of(function: Function, data: Array, shape: Shape, dtype: DType, what: str) -> Array:
    """What a function of the user's makes of an array. `ValueError` if it is not what was planned."""
    result: Array = np.asarray(function(data))
    if result.shape != shape or result.dtype != dtype:
        raise ValueError(
            f"{what}: the function returned {result.dtype.name}{list(result.shape)} for "
            f"{data.dtype.name}{list(data.shape)}, but {dtype.name}{list(shape)} was expected; declare "
            "the result with shape= and dtype="
        )
    return result


def sharding_of(expression: Expression) -> SavedSharding | None:
    """The sharding that the arrays had when they were saved, as far as the axes are still there."""
    match expression:
        case StoredSource():
            return expression.leaf.sharding
        case Stacked():
            inner, axis = sharding_of(expression.parts[0]), expression.axis
            return _moved(
                inner, len(expression.shape) - 1, [*range(axis), None, *range(axis, len(expression.shape) - 1)]
            )
        case Sliced():
            inner, rank = sharding_of(expression.of), len(expression.of.shape)
            return _moved(inner, rank, [i for i in range(rank) if not (expression.drop and i == expression.axis)])
        case Transposed():
            return _moved(sharding_of(expression.of), len(expression.shape), expression.axes)
        case Joined() | Changed() | Unsized():
            return sharding_of(expression.operands[0])
        case _:
            return None


def _moved(sharding: SavedSharding | None, rank: int, axes: Sequence[int | None]) -> SavedSharding | None:
    """A sharding whose dimensions are those of another one, by number; None is a new one."""
    if sharding is None:
        return None
    spec: list[Axes] = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    return SavedSharding(tuple(None if axis is None else spec[axis] for axis in axes), sharding.mesh)


def whole_of(expression: Expression) -> Region:
    """All of an array."""
    return Region.whole(expression.shape)
