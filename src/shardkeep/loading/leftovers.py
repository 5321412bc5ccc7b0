"""The leaves of a checkpoint that a template does not name."""

import re
from collections.abc import Collection, Iterator, Sequence

from shardkeep.errors import TemplateMismatchError, counted
from shardkeep.model.keys import loose_key
from shardkeep.model.leaves import StoredLeaf
from shardkeep.model.manifest import Tree
from shardkeep.model.tree import Path

_SHOWN = 5  # keys that a message lists


def not_named(tree: Tree, used: Collection[Path], refused: Sequence[Path]) -> list[StoredLeaf]:
    """The leaves of a tree that are not used, and not below a place that was left out on purpose."""
    places = {loose_key(path) for path in refused}
    rest = [leaf for leaf in tree.leaves if leaf.path not in used]
    return [leaf for leaf in rest if not (places and any(above in places for above in _ancestors(leaf.path)))]


def refuse_extra(rest: Sequence[StoredLeaf]) -> None:
    """`TemplateMismatchError` if there are leaves that the template does not name."""
    if not rest:
        return
    some = ", ".join(repr(leaf.key) for leaf in rest[:_SHOWN]) + (", …" if len(rest) > _SHOWN else "")
    error = TemplateMismatchError(
        f"{counted(len(rest), 'leaf', 'leaves')} of the checkpoint {'is' if len(rest) == 1 else 'are'} not in the "
        f'template, and extra="error": {some}. Pass extra="ignore", put ... in their places, or leave them out with a '
        f"rule such as remap.drop({re.escape('/'.join(rest[0].path))!r})"
    )
    error.problems = tuple(f"Extra leaf {leaf.key!r}" for leaf in rest)
    raise error


def _ancestors(path: Path) -> Iterator[str]:
    key = loose_key(path)
    while key:
        yield key
        key = key.rpartition("/")[0]
    yield ""
