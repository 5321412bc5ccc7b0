"""Something that happens before a chosen line of the sources, and what a call must not leave behind."""

import gc
import opcode
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_CLEAN_UP = {"Scope.close", "Scope.__exit__", "_TaskBatch.end", "SaveJob._give_up", "BackgroundSave._settle"}


@dataclass(frozen=True)
class Point:
    """A line of the sources, reached for the `nth` time in a call, on the calling thread or one of its own."""

    call: str
    file: str
    line: int
    thread: str  # "caller", "save" or "helper"
    nth: int = 1
    does: str = "raise"

    @property
    def name(self) -> str:
        return f"{self.call}, {self.does} at {self.file}:{self.line} ({self.thread}, time {self.nth})"


def leaks(seconds: float = 5.0, but: Collection[str] = ()) -> list[str]:
    """What calls that are over still hold, `but` what was held before, once threads that are ending have ended."""
    from shardkeep.runtime import scopes
    from shardkeep.runtime.budget import budget
    from shardkeep.runtime.collector import collector
    from shardkeep.runtime.save_queue import QueueEntry
    from shardkeep.saving.callbacks import Callback
    from shardkeep.stores.local import locks as local

    def look() -> list[str]:
        found = [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("shardkeep-")]
        found = [name for name in found if not name.endswith(("-calls", "-alive"))]  # of a job of several processes
        found += [f"scope {scope.what!r}" for scope in tuple(scopes._open)]
        found += [f"lock {lock.path}" for lock in tuple(local._locks)]
        found += ["a place in the queue"] * len(QueueEntry.line)
        found += ["a callback's turn"] * len(Callback.line)
        found += [f"{budget.used} bytes of the budget"] if budget.used else []
        found += (
            ["a pause of the collector"] if collector.pauses or not gc.isenabled() or not gc.get_threshold()[0] else []
        )
        return [what for what in found if what not in but]

    until = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.005)
    return found


class Injected(BaseException):
    """What the trace function raises."""


class Tracer:
    """Does something before a line of the sources, the nth time it is reached on that kind of thread."""

    def __init__(self, point: Point | None, action: Callable[[], None] = lambda: None) -> None:
        import shardkeep

        self.root = str(Path(shardkeep.__file__).parent) + os.sep
        self.point, self.action = point, action
        self.seen: dict[tuple[str, int, str], int] = {}
        self.hit = False
        self.in_clean_up = False
        self._caller = threading.current_thread()
        self._lock = threading.Lock()

    def __enter__(self) -> "Tracer":
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self.root) or self.hit:
            return None
        if self.point is None:
            return self.count
        last = max((line for _, _, line in code.co_lines() if line), default=0)
        inside = code.co_filename.endswith("/" + self.point.file) and code.co_firstlineno <= self.point.line <= last
        return self.look if inside else None

    def _kind(self) -> str:
        thread = threading.current_thread()
        return "caller" if thread is self._caller else "save" if thread.name == "shardkeep-save" else "helper"

    def count(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and not cannot_raise(frame):
            key = (frame.f_code.co_filename.removeprefix(self.root), frame.f_lineno, self._kind())
            with self._lock:
                self.seen[key] = self.seen.get(key, 0) + 1
        return self.count

    def look(self, frame: FrameType, event: str, _: object) -> Any:
        point = self.point
        if self.hit or event != "line" or point is None or frame.f_lineno != point.line or cannot_raise(frame):
            return self.look
        if self._kind() != point.thread:
            return self.look
        with self._lock:
            count = self.seen[point.file, point.line, point.thread] = (
                self.seen.get((point.file, point.line, point.thread), 0) + 1
            )
            if count != point.nth:
                return self.look
            self.hit = True
        self.in_clean_up = _is_in_clean_up(frame)
        self.action()
        return self.look


def cannot_raise(frame: FrameType) -> bool:
    """Whether no exception can come up at this point, but from a trace function.

    Signal handlers run between instructions that call or jump. So nothing is raised at the NOP of a `try`, which no
    handler of exceptions covers, and nothing where a `with` block has ended and `__exit__` is called next.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    while code[at] == opcode.opmap["SWAP"]:  # a value that is returned from inside the block
        at += 2
    following = code[at : at + 6]
    leaves_with = following[::2] == bytes([opcode.opmap["LOAD_CONST"]]) * 3 and len(set(following[1::2])) == 1
    return leaves_with or following[:1] == bytes([opcode.opmap["NOP"]])


def _is_in_clean_up(frame: FrameType | None) -> bool:
    while frame is not None:
        if getattr(frame.f_code, "co_qualname", "") in _CLEAN_UP:
            return True
        frame = frame.f_back
    return False
