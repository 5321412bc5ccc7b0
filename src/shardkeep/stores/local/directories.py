"""Makes directories, and makes them and their files survive a power cut."""

import ctypes
import errno
import os

from shardkeep.stores.local.descriptors import Descriptor

_MAX_PATH = 4096


def make_directories(path: str, durable: bool = True) -> None:
    """Like `os.makedirs`; with `durable`, the new directories survive a power cut."""
    if len(os.fsencode(path)) >= _MAX_PATH:  # checked before the first levels are created
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", directory) from None
        else:
            if durable:
                sync_path(os.path.dirname(directory))


def sync_path(path: str) -> None:
    """Make a file or a directory survive a power cut."""
    with Descriptor(path, os.O_RDONLY) as opened:
        try:
            os.fsync(opened.number)
        except OSError as error:
            error.filename = error.filename or path
            raise


def sync_file_system(path: str) -> bool:
    """Sync the whole file system of `path` in one call; False where there is no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is None:
        return False
    with Descriptor(path, os.O_RDONLY) as opened:
        if call(opened.number) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    return True
