"""Writing: every byte where the plan puts it, its digest with it, and no descriptor left open, whatever happens."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zstandard
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from dtypes import EXTENDED, NUMPY, dtype_of
from shardkeep.layouts.codecs import ZSTD
from shardkeep.layouts.plan import Draft, FilePlan, PiecePlan, SavePlan, TreePlan, WrittenFile
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.model.arrays import Array, Region
from shardkeep.model.digests import BLOCK, digest
from shardkeep.model.tree import Skeleton
from shardkeep.runtime.crew import Crew
from shardkeep.runtime.hostmemory import PAGE, Shard, aligned_empty, lay_out
from shardkeep.runtime.scopes import Scope
from shardkeep.saving import write as writing
from shardkeep.saving.snapshot import Snapshot
from shardkeep.saving.write import NewFiles, gather, write_files
from shardkeep.stores.local.mounts import mount_of
from shardkeep.stores.local.newfile import DIRECT, LocalNewFile
from shardkeep.stores.local.store import LocalStore
from support import FORMATS, assert_same, bits, cached_pages, crew_of, mesh_of, pattern, save_as


def _piece(array: np.ndarray, number: int, offset: int) -> PiecePlan:
    whole = Region.whole(array.shape)
    return PiecePlan(number, whole, array.nbytes, ((number, whole),), name=f"w{number}", offset=offset)


def _write(
    root: Path,
    plans: list[FilePlan],
    arrays: list[np.ndarray],
    stable: bool = True,
    progress: Callable[[int], None] = lambda _: None,
    memory: Array | None = None,
) -> list[WrittenFile]:
    snapshot = Snapshot((), tuple(Shard(array, stable) for array in arrays), memory)
    with Scope("a test") as scope:
        opened, crew = scope.add(NewFiles()), scope.add(Crew())
        return write_files(LocalStore(str(root)), _plan(*plans), snapshot, crew, opened, progress)


def _plan(*files: FilePlan) -> SavePlan:
    draft = Draft("0" * 32, "", Skeleton(None), {}, "")
    return SavePlan(draft.save_id, draft.created, (TreePlan(draft, SafetensorsLayout(), (), files),))


def _descriptors(below: Path) -> list[str]:
    """The files open below a directory: others may be closed by the garbage collector at any time."""
    opened: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in opened if name.startswith(str(below))]


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, (17 << 20) + 3, (33 << 20) + 1])
def test_a_file_is_its_header_and_its_pieces(tmp_path: Path, nbytes: int, stable: bool) -> None:
    """Below and above the size that is written in parts by several threads."""
    arrays = [pattern(np.uint8, (nbytes,), 1), pattern(np.uint8, (100,), 2)]
    header = b"h" * 100
    pieces = (_piece(arrays[0], 0, 100), _piece(arrays[1], 1, 100 + nbytes))
    told: list[int] = []
    plan = FilePlan("a/file", header, pieces, 200 + nbytes)
    (written,) = _write(tmp_path, [plan], arrays, stable, told.append)
    assert (tmp_path / "a" / "file").read_bytes() == header + bits(arrays[0]) + bits(arrays[1])
    assert written.size == 200 + nbytes
    assert written.header_digest == digest(header)
    raw = bits(arrays[0])
    assert written.digests[0] == tuple(digest(raw[i : i + BLOCK]) for i in range(0, nbytes, BLOCK))
    assert written.digests[1] == (digest(bits(arrays[1])),)
    assert sum(told) == nbytes + 100


@pytest.mark.parametrize("shift", [0, 64])
def test_what_lies_in_memory_as_in_the_file_is_written_from_there(
    tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what lies elsewhere, or `shift`ed from the pages of the file, goes through the cache."""
    sizes = [24 << 20, 3 * PAGE, 100, 9 << 20, PAGE + 64, 20 << 20]
    starts, total = lay_out(sizes)
    memory = aligned_empty(total + shift)
    arrays = [memory[shift + start :][:nbytes] for start, nbytes in zip(starts, sizes, strict=True)]
    for number, array in enumerate(arrays):
        array[:] = pattern(np.uint8, (array.size,), number)
    arrays.append(pattern(np.uint8, (17 << 20,), 9))  # elsewhere
    order = [0, 1, 3, 5, 6, 4, 2]
    pieces: list[PiecePlan] = []
    offset = PAGE
    for number in order:
        pieces.append(_piece(arrays[number], number, offset))
        offset += arrays[number].nbytes
    copied: list[int] = []
    write = LocalNewFile.write
    monkeypatch.setattr(
        LocalNewFile,
        "write",
        lambda self, offset, buffers: (
            copied.append(offset) if sum(map(len, buffers)) > PAGE else None,
            write(self, offset, buffers),
        ),
    )
    told: list[int] = []
    plan = FilePlan("file", b"h" * PAGE, tuple(pieces), offset)
    (written,) = _write(tmp_path, [plan], arrays, progress=told.append, memory=memory)
    assert (tmp_path / "file").read_bytes() == b"h" * PAGE + b"".join(bits(arrays[number]) for number in order)
    for number, digests in zip(order, written.digests, strict=True):
        raw = bits(arrays[number])
        assert digests == tuple(digest(raw[i : i + BLOCK]) for i in range(0, len(raw), BLOCK))
    assert sum(told) == sum(array.nbytes for array in arrays)
    assert min(copied) == (PAGE if shift else pieces[order.index(6)].offset)


@pytest.mark.parametrize("before", [True, False])
def test_what_lies_beside_that_memory_is_not_taken_for_a_part_of_it(tmp_path: Path, before: bool) -> None:
    """One part of a file, made of an array outside (at a lower address, or a higher one) and of one inside."""
    third = 6 << 20
    everything = aligned_empty(3 * third)
    everything[:] = pattern(np.uint8, (everything.size,))
    memory = everything[third : 2 * third]
    outside = everything[:third] if before else everything[2 * third :]
    arrays = [outside, memory, outside]
    pieces = tuple(_piece(array, number, PAGE + number * third) for number, array in enumerate(arrays))
    (written,) = _write(tmp_path, [FilePlan("file", b"h" * PAGE, pieces, PAGE + 3 * third)], arrays, memory=memory)
    assert (tmp_path / "file").read_bytes() == b"h" * PAGE + b"".join(map(bits, arrays))
    for array, digests in zip(arrays, written.digests, strict=True):
        assert digests == (digest(bits(array)[:BLOCK]), digest(bits(array)[BLOCK:]))


def test_many_small_files_are_each_their_own(tmp_path: Path) -> None:
    arrays = [np.full(i, i % 256, np.uint8) for i in range(300)]
    plans = [FilePlan(f"d{i % 7}/f{i}", b"", (_piece(a, i, 0),), a.nbytes) for i, a in enumerate(arrays)]
    written = _write(tmp_path, plans, arrays)
    assert [w.size for w in written] == list(range(300))
    for i, array in enumerate(arrays):
        assert (tmp_path / f"d{i % 7}" / f"f{i}").read_bytes() == bits(array)


def test_a_compressed_file_tells_its_size_and_the_digest_of_what_is_in_it(tmp_path: Path) -> None:
    array = np.arange(100_000, dtype=np.int32)
    (written,) = _write(tmp_path, [FilePlan("f", b"", (_piece(array, 0, 0),), None, codec=ZSTD)], [array])
    data = (tmp_path / "f").read_bytes()
    assert written.size == len(data) < array.nbytes
    assert zstandard.decompress(data) == bits(array)
    assert written.digests[0] == (digest(bits(array)),)


def test_a_piece_is_put_together_from_its_shards() -> None:
    array = pattern(ml_dtypes.bfloat16, (6, 10))
    regions = [Region((0, 0), (3, 10)), Region((3, 0), (3, 10))]
    shards = [Shard(np.ascontiguousarray(array[r.slices]), True) for r in regions]
    whole = PiecePlan(0, Region.whole((6, 10)), array.nbytes, tuple(enumerate(regions)))
    assert bits(gather(whole, shards)) == bits(array)
    part = PiecePlan(0, Region((0, 2), (3, 5)), 30, ((0, regions[0]),))
    gathered = gather(part, shards)
    assert gathered.flags.c_contiguous
    assert bits(gathered) == bits(array[0:3, 2:7])


@pytest.mark.parametrize("offset", [0, 64, 100])
@pytest.mark.parametrize("rows", [300, 3000, 5000, 11_000])
def test_what_is_put_together_is_written_and_hashed_as_a_whole(tmp_path: Path, rows: int, offset: int) -> None:
    """In a small file, in a large one, and where it is too large for the room there is for that."""
    host = pattern(np.uint16, (rows, 1000))
    half, shape = rows // 2, (rows, 1000)
    regions = tuple(Region((i * half, j * 250), (half, 250)) for i in range(2) for j in range(4))
    shards = [Shard(np.ascontiguousarray(host[r.slices]), True) for r in regions]
    last = pattern(np.uint8, (100,), 2)
    pieces = (
        PiecePlan(0, Region.whole(shape), host.nbytes, tuple(enumerate(regions)), "w", offset),
        PiecePlan(1, Region.whole((100,)), 100, ((8, Region.whole((100,))),), "v", offset + host.nbytes),
    )
    told: list[int] = []
    plan = FilePlan("file", b"h" * offset, pieces, offset + host.nbytes + 100)
    with crew_of() as crew:
        store = LocalStore(str(tmp_path))
        snapshot = Snapshot((), (*shards, Shard(last, True)))
        (written,) = write_files(store, _plan(plan), snapshot, crew, NewFiles(), told.append)
    assert (tmp_path / "file").read_bytes() == b"h" * offset + bits(host) + bits(last)
    raw = bits(host)
    assert written.digests[0] == tuple(digest(raw[i : i + BLOCK]) for i in range(0, len(raw), BLOCK))
    assert written.digests[1] == (digest(bits(last)),)
    assert sum(told) == len(raw) + 100


def test_a_name_in_use_is_never_written(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"theirs")
    array = np.ones(10, np.uint8)
    with pytest.raises(FileExistsError, match="exists"):
        _write(tmp_path, [FilePlan("f", b"", (_piece(array, 0, 0),), 10)], [array])
    assert (tmp_path / "f").read_bytes() == b"theirs"
    assert _descriptors(tmp_path) == []


@pytest.mark.parametrize("size", [1000, 40 << 20])
def test_an_error_in_the_middle_leaves_no_descriptor_open(tmp_path: Path, size: int) -> None:
    arrays = [np.ones(size, np.uint8) for _ in range(4)]
    plans = [FilePlan(f"f{i}", b"", (_piece(a, i, 0),), size) for i, a in enumerate(arrays)]
    count = 0

    def fail(_: int) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        _write(tmp_path, plans, arrays, progress=fail)
    assert _descriptors(tmp_path) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_on_disk_is_the_c_order_bytes(tmp_path: Path, kind: str) -> None:
    """For every dtype and layout in memory: each piece of the manifest is found at its offset."""
    tree: dict[str, Any] = {}
    for name in [*NUMPY, *EXTENDED]:
        dtype = dtype_of(name)
        tree[name] = pattern(dtype, (5, 7))
        tree[f"{name} F"] = np.asfortranarray(tree[name])
        tree[f"{name} part"] = pattern(dtype, (10, 14))[::2, ::2]
    path = save_as(kind, tmp_path / "run", tree)
    manifest = shardkeep.inspect(path)
    root = path if path.is_dir() else tmp_path
    (stored,) = manifest.trees.values()
    for leaf in stored.leaves:
        (piece,) = leaf.pieces
        raw = (root / stored.files[piece.file].name).read_bytes()
        data = (
            zstandard.decompress(raw) if piece.stored is not None else raw[piece.offset : piece.offset + piece.length]
        )
        assert data == bits(np.ascontiguousarray(tree[leaf.path[0]])), leaf.key
    assert_same(shardkeep.load(path), {name: np.ascontiguousarray(array) for name, array in tree.items()})


@pytest.mark.parametrize("format", ["safetensors", "tensorstore"])
def test_each_shard_of_a_large_array_is_a_piece(tmp_path: Path, format: Any) -> None:
    array = jax.device_put(
        jnp.arange(1 << 22, dtype=jnp.float32).reshape(2048, 2048),
        NamedSharding(mesh_of(2, 4), PartitionSpec("a", "b")),
    )
    shardkeep.save(tmp_path / "run", {"w": array}, format=format)
    leaf = shardkeep.inspect(tmp_path / "run").leaves["w"]
    assert len(leaf.pieces) == 8
    assert {piece.region.shape for piece in leaf.pieces} == {(1024, 512)}
    if format == "safetensors":
        assert all(piece.offset % 64 == 0 for piece in leaf.pieces)
    assert np.array_equal(np.asarray(shardkeep.load(tmp_path / "run")["w"]), np.asarray(array))


def test_finished_files_are_closed_some_files_later(tmp_path: Path) -> None:
    opened = NewFiles()
    for number in range(40):
        opened.finish(opened.add(LocalNewFile(str(tmp_path / f"f{number}"))))
    assert {*_descriptors(tmp_path)} == {str(tmp_path / f"f{number}") for number in range(8, 40)}
    opened.sync()
    opened.release()
    assert _descriptors(tmp_path) == []


def test_what_many_files_leave_in_the_page_cache_does_not_grow_with_them(tmp_path: Path) -> None:
    """All of it is sent to the disk while more is written, so nearly nothing is left to do for the sync."""
    if mount_of(str(tmp_path)).kind not in DIRECT:
        pytest.skip("what is in the page cache here is not known")
    array = pattern(np.uint8, (1 << 20,))
    plans = [FilePlan(f"f{i}", b"", (_piece(array, 0, 0),), array.nbytes) for i in range(150)]
    _write(tmp_path, plans, [array])
    left = sum(cached_pages(tmp_path / f"f{i}") for i in range(150)) * PAGE
    assert left < 100 << 20
    assert all((tmp_path / f"f{i}").read_bytes() == bits(array) for i in range(150))


@pytest.mark.parametrize("stable", [True, False])
def test_few_rooms_are_kept_for_the_next_save(tmp_path: Path, stable: bool) -> None:
    arrays = [pattern(np.uint8, (9 << 20,), number) for number in range(12)]
    plans = [FilePlan(f"f{i}", b"", (_piece(a, i, 0),), a.nbytes) for i, a in enumerate(arrays)]
    _write(tmp_path, plans, arrays, stable)
    assert len(writing._rooms) <= 2
    assert all((tmp_path / f"f{i}").read_bytes() == bits(a) for i, a in enumerate(arrays))


@pytest.mark.parametrize("format", FORMATS)
def test_small_arrays_of_every_dtype_in_one_large_file(format: str, tmp_path: Path) -> None:
    """Most small pieces are written straight from their memory; which of them can be, depends on the dtype."""
    spread = NamedSharding(mesh_of(8), PartitionSpec(None, "a"))
    tree: dict[str, Any] = {}
    add, narrow = jax.jit(lambda x: x + 1), jax.jit(lambda x: x.astype(jnp.bfloat16))
    for number, name in enumerate((*NUMPY, *EXTENDED)):
        for part in range(12):
            tree[f"{name} {part}"] = pattern(dtype_of(name), (96 + part, 64), 7 * number + part)
        tree[f"{name} transposed"] = pattern(dtype_of(name), (40, 72), number).T
        tree[f"{name} scalar"] = pattern(dtype_of(name), (), number)
        tree[f"{name} empty"] = pattern(dtype_of(name), (0, 3), number)
    for part in range(64):
        array = jnp.asarray(pattern(np.float32, (64, 48), part))
        tree[f"jax {part}"] = add(array)
        tree[f"bfloat16 {part}"] = narrow(array)
        tree[f"columns {part}"] = jax.device_put(array, spread)
    before = {name: np.array(array) for name, array in tree.items()}
    assert sum(array.nbytes for array in before.values()) > 2 * writing._LARGE
    now = save_as(format, tmp_path / "now", tree)
    shardkeep.save_async(tmp_path / "later", tree).wait()
    for path in (now, tmp_path / "later"):
        assert shardkeep.verify(path).ok
        for name, array in shardkeep.load(path).items():
            assert bits(array) == bits(before[name]), name
