"""Rules for loading a checkpoint into a model that changed, and the region arithmetic behind them."""

from shardkeep.remap.functions import (
    apply,
    copy,
    drop,
    from_json,
    fuse,
    rename,
    reshape,
    resize,
    split,
    stack,
    to_json,
    transpose,
    unstack,
    within,
)
from shardkeep.remap.rules import Rule

__all__ = [
    "Rule",
    "apply",
    "copy",
    "drop",
    "from_json",
    "fuse",
    "rename",
    "reshape",
    "resize",
    "split",
    "stack",
    "to_json",
    "transpose",
    "unstack",
    "within",
]
