"""What the machine itself allows, in a process of its own, as one line of JSON: seconds for so many MiB.

python bench/limits.py MIB DIRECTORY
"""

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

PART = 16 << 20


def on_two_threads(work: Callable[[int], Any], items: Iterable[int]) -> float:
    """Seconds until two threads have worked off all items."""
    remaining = iter(list(items))
    lock = threading.Lock()

    def serve() -> None:
        while True:
            with lock:
                item = next(remaining, None)
            if item is None:
                return
            work(item)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def touched(nbytes: int) -> memoryview:
    """Memory in huge pages, all of it there."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory: Any = np.frombuffer(pages, np.uint8)
    memory.reshape(-1, 256)[:] = np.arange(256, dtype=np.uint8)
    return memoryview(pages)


def write(path: Path, data: memoryview, flags: int) -> float:
    """A new file, written by two threads and durable."""
    os.sync()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    started = time.perf_counter()
    on_two_threads(lambda at: os.pwrite(descriptor, data[at : at + PART], at), range(0, len(data), PART))
    os.fsync(descriptor)
    seconds = time.perf_counter() - started
    os.close(descriptor)
    return seconds


def read(path: Path, data: memoryview) -> float:
    descriptor = os.open(path, os.O_RDONLY)
    seconds = on_two_threads(lambda at: os.preadv(descriptor, [data[at : at + PART]], at), range(0, len(data), PART))
    os.close(descriptor)
    return seconds


def measure(nbytes: int, where: Path) -> dict[str, float]:
    data, other = touched(nbytes), touched(nbytes)
    source, target = np.frombuffer(data, np.uint8), np.frombuffer(other, np.uint8)
    parts = range(0, nbytes, PART)
    found = {"memcpy": on_two_threads(lambda at: np.copyto(target[at : at + PART], source[at : at + PART]), parts)}
    found["pwrite + fsync"] = write(where / "buffered", data, 0)
    found["O_DIRECT + fsync"] = write(where / "direct", data, os.O_DIRECT)
    found["durable"] = min(found["pwrite + fsync"], found["O_DIRECT + fsync"])
    found["read, cached"] = read(where / "buffered", other)
    descriptor = os.open(where / "buffered", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    found["read, cold"] = read(where / "buffered", other)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) << 20, Path(sys.argv[2]))), flush=True)
