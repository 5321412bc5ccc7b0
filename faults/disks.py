"""Small disks made for one test: images with a file system on them, mounted for a while. All of it needs root."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FICLONE = 0x40049409
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_JOURNAL = b"\x02\x00\x00\x00"
# ext4 puts data on the disk at a rename over a file even if nobody asked; here only what was synced is to be there.
STRICT = "noauto_da_alloc,commit=300"


def missing(*tools: str) -> str:
    """What is needed for mounting and is not there; empty if all is."""
    if os.geteuid() != 0:
        return "not root"
    absent = [tool for tool in (*tools, "mount", "umount") if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)}"
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "mounting is not allowed"


@contextmanager
def mounted(what: Path | str, at: Path, *options: str) -> Iterator[Path]:
    """`what` mounted at a directory."""
    at.mkdir(exist_ok=True)
    _run("mount", *options, str(what), str(at))
    try:
        yield at
    finally:
        _run("umount", "-l", str(at))


@contextmanager
def disk(image: Path, at: Path, options: str = STRICT) -> Iterator[Path]:
    """The ext4 file system in an image, mounted."""
    with mounted(image, at, "-o", f"loop,{options}"):
        with suppress(OSError):
            (at / "lost+found").rmdir()  # mkfs made it
        yield at


@contextmanager
def memory_disk(at: Path, size: int) -> Iterator[Path]:
    with mounted("tmpfs", at, "-t", "tmpfs", "-o", f"size={size}"):
        yield at


@contextmanager
def cloning(room: Path) -> Iterator[Path]:
    """A directory on an XFS of its own, where `clone` works."""
    image = room / "xfs.img"
    make_image(image, 2 << 30, "mkfs.xfs", "-q", "-m", "reflink=1")
    with mounted(image, room / "xfs", "-o", "loop") as place:
        yield place


def make_image(image: Path, size: int, *command: str) -> Path:
    """A sparse file of that size with a file system made by the command."""
    with open(image, "xb") as file:
        file.truncate(size)
    _run(*command, str(image))
    return image


def make_disk(image: Path, size: int = 64 << 20) -> Path:
    return make_image(image, size, "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0")


def clone(image: Path, copy: Path) -> None:
    """All that has reached the image by now, at one instant, as after a power cut."""
    with open(image, "rb") as old, open(copy, "xb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())


def pull_out(place: Path) -> None:
    """The mounted ext4 is gone from one moment to the next: every call fails, and nothing more reaches the disk."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, _WITHOUT_JOURNAL)
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
