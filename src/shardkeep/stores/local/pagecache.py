"""What the page cache holds of a local file: parts are brought in, files are sent out."""

import errno
import os
from contextlib import suppress

from shardkeep import system
from shardkeep.runtime.hostmemory import aligned_empty
from shardkeep.stores.local.descriptors import Descriptor
from shardkeep.stores.local.mapping import LocalFile, Pages

_ROOM = 1 << 20  # bytes of memory to read into, where the kernel cannot read a mapping in


def bring_in(path: str, start: int, length: int) -> int:
    """Read a part of a file into the page cache, in the pages that a load maps; returns its bytes, 0 after the end.

    Nothing stays open or mapped. `OSError` if the disk cannot read it.

    Args:
        path: The file.
        start: Where the part begins, a multiple of the size of a huge page.
        length: How many bytes it has; fewer are read at the end of the file.
    """
    with LocalFile(path, os.O_RDONLY | system.NONBLOCK) as file:
        length = max(min(length, os.fstat(file.number).st_size - start), 0)
        if length == 0:
            return 0
        pages = Pages(file.number, start, length)
        pages.make_huge(0, length)
        code = pages.populate(0, length)
        if code == errno.EINVAL:  # Linux before 5.14
            room = aligned_empty(_ROOM)
            for at in range(start, start + length, _ROOM):
                file.read_into(at, room[: min(_ROOM, start + length - at)])
        elif code:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
    return length


def send_out(path: str) -> None:
    """Let a file leave the page cache, but for pages that are mapped or not on the disk yet."""
    if system.fadvise is None:
        return
    with suppress(OSError), Descriptor(path, os.O_RDONLY | system.NONBLOCK) as file:
        system.fadvise(file.number, 0, 0, system.DONTNEED)
