"""What a caller asks of a load, as values."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from shardkeep.loading.shardings import Rules
from shardkeep.model.arrays import DType
from shardkeep.model.leaves import StoredLeaf
from shardkeep.model.tree import Leaf
from shardkeep.remap.rules import Rule

# Called with an array, what is stored of it, and the function that `shardings` has for it; returns what is loaded.
Treatment = Callable[[Any, StoredLeaf, Callable[[Any], Any]], Any]

# Gives leaves of the template that the checkpoint does not have their values, all at once.
Filler = Callable[[Sequence[Leaf]], Sequence[object]]


@dataclass(frozen=True)
class Policy:
    """How a load behaves where APIs differ. The defaults are those of `shardkeep.load`.

    Attributes:
        strict_shapes: Whether leaves that do not fit the template are an error. Otherwise they are reshaped, or the
            template's value is used.
        strict_rules: Whether a leaf that neither a rule nor a sharding names is an error, and not only a warning.
        prefix_first: Whether rules are first matched against keys that begin with the prefix.
        all_jax: Whether NumPy leaves are loaded as JAX arrays too.
        in_flight: How many arrays are read at once; None: as many as there are.
        treat: What to do with each placed array, in saved order.
    """

    strict_shapes: bool = True
    strict_rules: bool = False
    prefix_first: bool = False
    all_jax: bool = False
    in_flight: int | None = None
    treat: Treatment | None = None


@dataclass(frozen=True)
class LoadRequest:
    """What a caller asks of a load, with every argument checked."""

    template: object = None
    prefix: str | None = None
    include: re.Pattern[str] | None = None
    mesh: Mesh | None = None
    rules: Rules | None = None
    shardings: object = None
    dtype: DType | None = None
    verify: bool = True
    mmap: bool = True
    verbose: bool = False  # show a progress bar
    per_process: str = "own"  # of each PerProcess leaf: this process's value, or "all" in a list
    broadcast: Literal["auto"] | bool = False  # whether what several processes need is read by one of them
    policy: Policy = Policy()
    remap: tuple[Rule, ...] = ()  # applied to the tree of the checkpoint
    missing: Literal["error", "keep"] | Filler = "error"  # leaves that the checkpoint does not have
    extra: str = "ignore"  # leaves that the template does not have; "error" refuses them


def refuse_function(template: Callable[..., object]) -> None:
    """Refuse a function in place of the tree that it makes. A model that can be called is a tree."""
    if jax.tree_util.all_leaves([template]):
        name = getattr(template, "__name__", repr(template))
        raise TypeError(
            f"template must be a tree, not a function; pass jax.eval_shape({name}) or the result of {name}()"
        )
