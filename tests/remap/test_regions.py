"""Any region of anything that rules make is put together from disjoint parts of the stored arrays."""

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from remap.changing import Change, Tree, changes, nested
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import NATIVE, SavedSharding, StoredArray
from shardkeep.model.manifest import Tree as SavedTree
from shardkeep.model.tree import flatten
from shardkeep.remap.changes import remap_tree
from shardkeep.remap.expressions import Called, DerivedArray, Stacked, StoredSource, Transposed, sharding_of, sources_of
from shardkeep.remap.moving import change_into, changed, window_of
from shardkeep.remap.regions import Gap, StridedView, assembly, inverse_axes, regions_read, reshaped, strides_of


def saved_tree(tree: Tree) -> SavedTree:
    skeleton, leaves = flatten(nested(tree))
    stored = [StoredArray(leaf.path, ArraySpec(leaf.value.shape, leaf.value.dtype), (), NATIVE) for leaf in leaves]
    return SavedTree("id", "safetensors", skeleton, tuple(stored), (), {}, "")


def evaluate(expression: Any, region: Region, tree: Tree) -> np.ndarray:
    """A region of an expression, put together by its parts; each element exactly once."""
    found = np.zeros(region.shape, expression.dtype)
    count = np.zeros(region.shape, np.int64)
    for part in assembly(expression, region):
        shape = part.shape if isinstance(part, Gap) else part.region.shape
        window = window_of(found, part.window.offset, shape, part.window.strides)
        window_of(count, part.window.offset, shape, part.window.strides)[...] += 1
        if isinstance(part, Gap):
            window[...] = changed(np.full(shape, part.value, part.dtype), part.functions, window.dtype)
            continue
        if isinstance(part.source, Called):
            call = part.source
            whole = np.asarray(call.function(evaluate(call.of, Region.whole(call.of.shape), tree)))
        else:
            whole = tree[part.source.key]
        change_into(window, whole[part.region.slices], part.functions)
    assert (count == 1).all()
    return found


@st.composite
def regions(draw: Any, shape: tuple[int, ...]) -> Region:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Region(start, tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))


@settings(max_examples=400)
@given(changed=changes(), data=st.data())
def test_any_region_is_what_numpy_has_there(changed: tuple[Tree, Change], data: Any) -> None:
    tree, change = changed
    for leaf in remap_tree(saved_tree(tree), change.rules).tree.leaves:
        assert leaf.shape == change.tree[leaf.key].shape
        if isinstance(leaf, DerivedArray):
            region = data.draw(regions(leaf.shape))
            assert np.array_equal(evaluate(leaf.expression, region, tree), change.tree[leaf.key][region.slices])


@st.composite
def shapes_of_one_size(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), max_size=5))
    found: list[tuple[int, ...]] = []
    for _ in range(2):
        order = draw(st.permutations(factors))
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        found.append(tuple(math.prod(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)))
    return found[0], found[1]


@settings(max_examples=400)
@given(shapes=shapes_of_one_size(), data=st.data())
def test_a_region_of_a_reshaped_array_is_made_of_boxes(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], data: Any
) -> None:
    old, new = shapes
    values = np.arange(math.prod(old)).reshape(old)
    region = data.draw(regions(new))
    found = np.full(region.shape, -1)
    if region.size:
        for box, window in reshaped(old, new, region, StridedView(0, strides_of(region.shape))):
            window_of(found, window.offset, box.shape, window.strides)[...] = values[box.slices]
    assert np.array_equal(found, values.reshape(new)[region.slices])


def test_dimensions_that_stay_are_not_cut() -> None:
    """A kernel that is reshaped to heads is read in as many parts as there are ranges in it, not element by element."""
    heads = Region((0, 4, 0), (1024, 2, 64))
    assert len(list(reshaped((1024, 1024), (1024, 16, 64), heads, StridedView(0, strides_of(heads.shape))))) == 1
    columns = Region((0, 0, 16), (1024, 16, 8))
    assert len(list(reshaped((1024, 1024), (1024, 16, 64), columns, StridedView(0, strides_of(columns.shape))))) == 16
    odd = Region((0, 0), (4, 6))
    assert len(list(reshaped((6, 4), (4, 6), odd, StridedView(0, strides_of(odd.shape))))) == 1


def stored(path: str, sharding: Any = None) -> StoredArray:
    from shardkeep.model.leaves import JaxArray

    return StoredArray((path,), ArraySpec((4, 6), np.dtype(np.float32)), (), JaxArray(sharding))


def test_the_saved_sharding_follows_the_axes() -> None:
    sharding = SavedSharding(("a",), (("a", 2), ("b", 2)))
    stack = Stacked((StoredSource(stored("0", sharding)), StoredSource(stored("1", sharding))), 1)
    found = sharding_of(Transposed(stack, (2, 0, 1)))
    assert found is not None
    assert found.spec == (None, "a", None)
    assert inverse_axes((2, 0, 1)) == (1, 2, 0)


def test_what_is_read_is_listed_by_stored_array() -> None:
    stack = Stacked((StoredSource(stored("0")), StoredSource(stored("1"))), 0)
    found = regions_read(stack, [Region((1, 0, 0), (1, 4, 3)), Region((1, 0, 3), (1, 4, 3))])
    assert [(leaf.key, some) for leaf, some in found] == [("1", [Region((0, 0), (4, 3)), Region((0, 3), (4, 3))])]
    assert [leaf.key for leaf in sources_of(stack)] == ["0", "1"]
