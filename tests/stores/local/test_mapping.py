"""Files as memory: the bytes of the file, without a descriptor, as long as anyone looks, and no more than is good."""

import mmap
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkeep
from shardkeep.stores.local.mapping import LocalFile, Pages
from shardkeep.stores.local.mounts import mount_of
from shardkeep.stores.local.newfile import DIRECT
from shardkeep.stores.local.store import LocalStore
from support import assert_same, cached_pages, run_python


def opened(path: Path, data: bytes) -> LocalFile:
    path.write_bytes(data)
    return LocalStore(str(path.parent)).open(path.name)


@pytest.mark.parametrize(("offset", "length"), [(0, 10_000), (1, 9_999), (4_096, 10), (5_000, 5_000), (9_999, 1)])
def test_a_mapping_is_that_part_of_the_file(tmp_path: Path, offset: int, length: int) -> None:
    data = np.random.default_rng(0).bytes(10_000)
    with opened(tmp_path / "f", data) as file:
        mapping = file.map(offset, length)
    mapping.bring_in(0, length)
    assert mapping.data.tobytes() == data[offset : offset + length]
    assert not mapping.data.flags.writeable


def test_what_lies_behind_the_end_is_no_part_of_it(tmp_path: Path) -> None:
    with opened(tmp_path / "f", bytes(100)) as file, pytest.raises(EOFError, match="ends before byte 101"):
        file.map(1, 100)


def test_pages_stay_as_long_as_any_array_of_them(tmp_path: Path) -> None:
    before = len(Pages.addresses)
    with opened(tmp_path / "f", b"a" * 100_000) as file:
        part = file.map(0, 100_000).data[50_000:].view(np.uint16).reshape(5, -1)[2:]
    (tmp_path / "f").unlink()
    assert len(Pages.addresses) == before + 1
    assert (part == 0x6161).all()
    del part
    assert len(Pages.addresses) == before


def test_a_file_that_became_shorter_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with opened(tmp_path / "f", bytes(100_000)) as file:
        mapping = file.map(0, 100_000)
    os.truncate(tmp_path / "f", 10)
    with pytest.raises(OSError, match="Input/output error"):
        mapping.bring_in(50_000, 100_000)


MANY_FILES = """
import os, resource
from shardkeep.cli.main import main
os.chdir(os.environ["HERE"])
tree = {f"w{i}": jnp.full((520, 512), i, jnp.float32) for i in range(200)}
shardkeep.save("run", tree, format="zarr")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
loaded = shardkeep.load("run")
assert all((np.asarray(loaded[name]) == np.asarray(value)).all() for name, value in tree.items())
print(len(os.listdir("/proc/self/fd")))
assert main(["convert", "run", "copy", "--format", "safetensors"]) == 0
"""


def test_more_mapped_files_than_a_process_may_have_open(tmp_path: Path) -> None:
    assert int(run_python(MANY_FILES, HERE=str(tmp_path)).split()[0]) < 30


def test_files_beyond_what_should_be_mapped_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {f"w{i}": jnp.full((520, 512), i, jnp.float32) for i in range(20)}
    shardkeep.save(tmp_path / "run", tree, format="zarr")
    before = len(Pages.addresses)
    monkeypatch.setattr(Pages, "most", before + 5)
    loaded = jax.block_until_ready(shardkeep.load(tmp_path / "run"))
    assert len(Pages.addresses) == before + 5
    assert_same(loaded, tree)


def test_a_large_file_is_not_in_the_page_cache_when_it_is_saved_and_is_after_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pages at the ends of its parts would keep the kernel from reading it in huge ones."""
    path = tmp_path / "run"
    if mount_of(str(tmp_path)).kind not in DIRECT:
        pytest.skip("files are not written past the page cache here")
    state = {f"w{i}": jnp.arange(3_000_001, dtype=jnp.float32) + i for i in range(3)}  # no whole pages
    monkeypatch.setenv("SHARDKEEP_WARM", "never")
    shardkeep.save(path, state)
    (file,) = path.glob("*.safetensors")
    assert cached_pages(file) == 0
    assert_same(shardkeep.load(path), state)
    assert cached_pages(file) > 2 * 12_000_004 // mmap.PAGESIZE


def test_a_small_file_stays_in_the_page_cache(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": jnp.arange(1000)})
    (file,) = (tmp_path / "run").glob("*.safetensors")
    assert cached_pages(file) > 0


def _huge(file: Path) -> list[int]:
    """Bytes of each part of a mapped file that is asked for in huge pages."""
    found: list[int] = []
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        flags = re.search("VmFlags:(.*)", part)
        if part.split("\n")[0].endswith(str(file)) and flags is not None and " hg" in flags[1]:
            found.append(int(re.findall(r"Size: +(\d+)", part)[0]) << 10)
    return found


def test_only_what_is_read_in_one_go_is_read_in_huge_pages(tmp_path: Path) -> None:
    """Around a small part of a large file nothing else has to be read."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    path = tmp_path / "run"
    small = {f"small{i}": jnp.full((64 << 10,), i, jnp.float32) for i in range(4)}
    shardkeep.save(path, {**small, "large": jnp.ones((4 << 20,), jnp.float32)})
    (file,) = path.glob("*.safetensors")
    few = shardkeep.load(path, include="small[02]")
    assert_same(few["small2"], small["small2"])
    assert _huge(file) == []
    del few
    everything = shardkeep.load(path)
    assert sum(_huge(file)) >= 17 << 20
    assert_same(everything["small3"], small["small3"])
