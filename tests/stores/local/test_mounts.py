"""Which file systems share their locks between hosts, by what the kernel tells of their mounts."""

from pathlib import Path

import pytest

from shardkeep.stores.local.mounts import Mount, mount_of


@pytest.mark.parametrize(
    ("kind", "options", "shares"),
    [
        ("ext4", "rw,relatime", True),
        ("overlay", "rw", True),
        ("", "", True),  # not Linux: as ever
        ("nfs4", "rw,vers=4.2,local_lock=none", True),
        ("nfs", "rw,vers=3,local_lock=none", True),
        ("nfs", "rw,vers=3,nolock,local_lock=all", False),
        ("nfs4", "rw,local_lock=flock", False),
        ("nfs", "rw,vers=3,local_lock=posix", True),  # flock is not concerned
        ("lustre", "rw,flock,lazystatfs", True),
        ("lustre", "rw,localflock", False),
        ("lustre", "rw,lazystatfs", False),  # flock raises ENOSYS
        ("ceph", "rw", True),
        ("cifs", "rw,vers=3.1.1", True),
        ("cifs", "rw,nobrl", False),
        ("beegfs", "rw", False),
        ("fuse.gcsfuse", "rw", False),
        ("fuse", "rw", False),
        ("virtiofs", "rw", False),
        ("unheard of", "rw", False),
    ],
)
def test_locks_are_trusted_only_where_they_are_known_to_be_shared(kind: str, options: str, shares: bool) -> None:
    assert Mount(kind, frozenset(options.split(","))).shares_locks == shares


def test_the_mount_of_a_directory_is_the_innermost_one(tmp_path: Path) -> None:
    assert mount_of("/proc/self").kind == "proc"
    assert mount_of(str(tmp_path / "not" / "there")) == mount_of(str(tmp_path))
    assert "rw" in mount_of(str(tmp_path)).options
