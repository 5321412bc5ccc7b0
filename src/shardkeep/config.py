"""Every setting that users can change, in one place, with the reason for its default.

Settings are environment variables, read by `read` when a call needs them, so that a program can set them at any time
before the call. docs/configuration.md explains them. Other numbers are constants of the modules that use them.
"""

import os
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Setting(NamedTuple, Generic[Value]):
    """A setting that an environment variable changes.

    Attributes:
        variable: The name of the environment variable.
        default: The value if the variable is not set.
        parse: The value that a text stands for. Raises ValueError if it stands for none.
        allowed: What the variable may contain, for the error message.
        reason: Why the default is what it is.
    """

    variable: str
    default: Value
    parse: Callable[[str], Value]
    allowed: str
    reason: str


def read(setting: Setting[Value]) -> Value:
    """The current value of a setting. Raises ValueError if its variable contains something that is not allowed."""
    text = os.environ.get(setting.variable)
    if text is None:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError:
        raise ValueError(f"{setting.variable} must be {setting.allowed}, not {text!r}") from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:  # NaN too
        raise ValueError
    return seconds


def _finite_seconds(text: str) -> float:
    seconds = _seconds(text)
    if seconds == float("inf"):
        raise ValueError
    return seconds


def _bytes(text: str) -> int | None:
    if not text:
        return None
    nbytes = int(text)
    if nbytes <= 0:
        raise ValueError
    return nbytes


def _staging(text: str) -> str:
    if text not in ("auto", "always", "never"):
        raise ValueError
    return text


def _warm(text: str) -> str:
    if text not in ("auto", "never"):
        raise ValueError
    return text


MEMORY_BUDGET = Setting[int | None](
    "SHARDKEEP_MEMORY_BUDGET",
    None,
    _bytes,
    "a number of bytes greater than 0",
    "None stands for half of the memory that is free when the limit is first needed: a snapshot is as large as the "
    "state, and the training loop needs memory too.",
)
PINNED_HOST = Setting(
    "SHARDKEEP_PINNED_HOST",
    "auto",
    _staging,
    "auto, always or never",
    "auto stands for GPUs only: there a copy into pinned memory is several times as fast as one into ordinary memory, "
    "and save_async need not wait for it. On TPUs it was found to be slower.",
)
LEASE = Setting(
    "SHARDKEEP_LEASE",
    60.0,
    _finite_seconds,
    "a finite number of seconds greater than 0",
    "A lease is renewed every quarter of this time, so three renewals may fail before a save that is alive is taken "
    "for dead; and the next save waits no longer than this for the lock of one that died.",
)
PROCESS_SILENCE = Setting(
    "SHARDKEEP_PROCESS_SILENCE",
    20.0,
    _seconds,
    "a number of seconds greater than 0",
    "Heartbeats come every two seconds. A process that compiles or collects garbage misses some, but hardly ten.",
)
PROCESS_DEADLINE = Setting(
    "SHARDKEEP_PROCESS_DEADLINE",
    300.0,
    _seconds,
    "a number of seconds greater than 0",
    "Processes of one job reach the same call within a step, but the first step may compile for minutes.",
)
WARM = Setting(
    "SHARDKEEP_WARM",
    "auto",
    _warm,
    "auto or never",
    "auto stands for checkpoints on a local disk that fit into the available memory four times: a program that is "
    "started again then loads from memory, and neither the save nor the program waits for it.",
)
DEBUG = Setting(
    "SHARDKEEP_DEBUG",
    False,
    bool,
    "anything; if it is not empty, tracebacks are printed",
    "The message says what to do; the traceback is for whoever looks for a bug in shardkeep.",
)

SETTINGS = (MEMORY_BUDGET, PINNED_HOST, LEASE, PROCESS_SILENCE, PROCESS_DEADLINE, WARM, DEBUG)
