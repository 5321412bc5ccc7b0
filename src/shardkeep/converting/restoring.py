"""A save target that records leaves as the source of a conversion does.

The save sees a list of NumPy arrays. This target gives them back their paths, their kinds (what was a `jax.Array` is
loaded as one again), their attributes, their place in the tree and the pieces they were stored in. So no array has to
be put on a device, and no class of the tree has to be imported.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardkeep.converting.making import Part
from shardkeep.errors import IntegrityError
from shardkeep.layouts.plan import Draft, SavePlan, StagedArray, StagedLeaf, StagedValue
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import NATIVE, UNSHARDED, ForeignArray, NumpyArray, StoredArray, StoredLeaf
from shardkeep.model.manifest import Manifest, Tree
from shardkeep.model.tree import Path
from shardkeep.targets.transaction import Target, Turn


class RestoringTarget:
    """The destination of a converted tree: another target, except for the paths and kinds of leaves."""

    def __init__(self, inner: Target, source: Tree, recorded: Sequence[StoredLeaf], parts: Sequence[Part]) -> None:
        self._inner, self._source = inner, source
        self._recorded, self._parts = recorded, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def check(self, paths: Sequence[Path]) -> None:
        self._inner.check([leaf.path for leaf in self._recorded if isinstance(leaf, StoredArray)])

    def plan(
        self, leaves: Sequence[StagedLeaf], draft: Draft, current: Manifest | None, at: str | None = None
    ) -> SavePlan:
        held: dict[int, list[Region]] = {}
        first: dict[int, int] = {}
        for part, staged in zip(self._parts, leaves, strict=True):
            assert isinstance(staged, StagedArray)
            held.setdefault(part.leaf, []).append(part.region)
            first.setdefault(part.leaf, staged.first_held)  # the parts of a leaf follow each other
        restored = [
            StagedArray(leaf.path, leaf.spec, leaf.origin, tuple(held.get(i, ())), first.get(i, 0))
            if isinstance(leaf, StoredArray)
            else StagedValue(leaf.path, leaf.value)
            for i, leaf in enumerate(self._recorded)
        ]
        return self._inner.plan(restored, replace(draft, skeleton=self._source.skeleton), current, at)

    def finish(self, turn: Turn, tree: Tree) -> Tree:
        self._compare(tree)
        return self._inner.finish(turn, tree)

    def _compare(self, written: Tree) -> None:
        """Before the commit: arrays that were not cast must still have the digests they were saved with."""
        for old, new in zip(self._source.arrays, written.arrays, strict=True):
            if old.spec != new.spec:
                continue
            known = {piece.region: piece.digests for piece in old.pieces if piece.digests is not None}
            for piece in new.pieces:
                if known.get(piece.region, piece.digests) != piece.digests:
                    raise IntegrityError(
                        f"leaf {old.key!r} changed while it was being converted; nothing was committed"
                    )


def recorded_leaf(leaf: StoredLeaf, spec: ArraySpec | None) -> StoredLeaf:
    """A leaf as the conversion records it; an array that another program wrote is recorded as a `jax.Array`."""
    if spec is None or not isinstance(leaf, StoredArray):
        return leaf
    origin = leaf.origin
    if isinstance(origin, ForeignArray):
        origin = UNSHARDED
    elif isinstance(origin, NumpyArray) and spec != leaf.spec:
        origin = NATIVE  # a cast array has the machine's own byte order
    return StoredArray(leaf.path, spec, (), origin)
