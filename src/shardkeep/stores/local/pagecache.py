"""What the page cache holds of a local file: parts are brought in, files are sent out."""

import os
from contextlib import suppress

from shardkeep.stores.local.descriptors import Descriptor
from shardkeep.stores.local.mapping import LocalFile


def bring_in(path: str, start: int, length: int) -> int:
    """Read a part of a file into the page cache, in the pages that a load maps; returns its bytes, 0 after the end.

    Nothing stays open or mapped. `OSError` if the disk cannot read it.
    """
    with LocalFile(path, os.O_RDONLY | os.O_NONBLOCK) as file:
        file.size = os.fstat(file.number).st_size
        length = min(length, file.size - start)
        if length > 0:
            file.map(start, length).bring_in(0, length)
    return max(length, 0)


def send_out(path: str) -> None:
    """Let a file leave the page cache, but for pages that are mapped or not on the disk yet."""
    with suppress(OSError), Descriptor(path, os.O_RDONLY | os.O_NONBLOCK) as file:
        os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)
