"""What the writer of a run notes about the run itself: how its steps are named, and which of them stay."""

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, cast

from shardkeep.runs.keep import Keep
from shardkeep.runs.steps import StepName

Keeping: TypeAlias = Keep | Literal["recorded"] | None  # None: all; "recorded": as the index of the run says

_NEW_RUN = Keep(last=3)


@dataclass(frozen=True)
class Rules:
    """`name`: how the steps of a run are named. `keep`: which of them stay; None for all."""

    name: str
    keep: Keep | None


def encode_rules(rules: Rules) -> dict[str, Any]:
    """Rules as JSON.

    >>> encode_rules(Rules("step_{}", Keep(last=3, within="12 h")))
    {'name': 'step_{}', 'keep': {'last': 3, 'within': '12 h'}}
    """
    kept = None if rules.keep is None else {k: v for k, v in asdict(rules.keep).items() if v is not None}
    if kept and isinstance(kept.get("within"), datetime.timedelta):
        kept["within"] = f"{kept['within'].total_seconds():f} s"
    return {"name": rules.name, "keep": kept}


def recorded_keep(found: object) -> Keep | None:
    """Which steps of a run stay by the rules in its index; `Keep(last=3)` if it has none.

    Rules that this version does not understand keep every step: what a newer one wants to keep must not be deleted.
    """
    if found is None:
        return _NEW_RUN
    rules = decode_rules(found)
    return None if rules is None else rules.keep


def decode_rules(found: Any) -> Rules | None:
    """Rules from JSON; None if that does not hold any that this version understands."""
    if not isinstance(found, Mapping):
        return None
    document = cast(Mapping[str, Any], found)
    try:
        keep = document["keep"]
        return Rules(StepName(document["name"]).pattern, None if keep is None else Keep(**keep))
    except (KeyError, TypeError, ValueError):
        return None
