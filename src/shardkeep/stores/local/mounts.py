"""The file system that a directory is on, and whether processes on other hosts see the locks that are taken there."""

import os
from pathlib import Path
from typing import NamedTuple

# On these, every process that can see a file is on this host. Without a name: where the system does not tell.
LOCAL = frozenset(
    (
        "",
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "bcachefs", "ramfs", "rootfs"),
        *("jfs", "reiserfs", "nilfs2", "ecryptfs", "vfat", "exfat", "ntfs", "ntfs3", "fuseblk", "hfsplus"),
    )
)
# These share `flock` between hosts, unless an option of the mount says otherwise.
_SHARING = frozenset(("nfs", "nfs4", "lustre", "ceph", "gpfs", "gfs2", "ocfs2", "cifs", "smb3"))
_NOT_SHARING = frozenset(("nolock", "local_lock=flock", "local_lock=all", "localflock", "nobrl"))


class Mount(NamedTuple):
    """A mounted file system. Where the system does not list them, the kind is empty."""

    kind: str
    options: frozenset[str] = frozenset()

    @property
    def shares_locks(self) -> bool:
        """Whether all that can see its files also see the locks on them."""
        if self.kind == "lustre" and "flock" not in self.options:
            return False
        return self.kind in LOCAL or (self.kind in _SHARING and self.options.isdisjoint(_NOT_SHARING))


def mount_of(directory: str) -> Mount:
    """The mount that contains a directory, which need not exist.

    >>> mount_of("/proc").kind
    'proc'
    """
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return Mount("")
    real = os.path.realpath(directory)
    best, found = "", Mount("")
    for line in mounts:
        fields = line.split(" ")
        point = fields[1].replace("\\040", " ")
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= len(best):
            best, found = point, Mount(fields[2], frozenset(fields[3].split(",")))
    return found
