"""Zarr arrays of other programs: read in any layout, and refused by name where a chunk is not what it should be."""

import json
import re
import time
import tracemalloc
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.foreign.grids import Grid
from shardkeep.foreign.zarr import ZarrReader, describe, file_names
from shardkeep.model.arrays import ArraySpec, Region, dtype_from_name
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.stores.local.store import LocalStore
from support import assert_same, pattern, run_python

CODECS: dict[str, Any] = {
    "none": None,
    "zstd": numcodecs.Zstd(),
    "blosc": numcodecs.Blosc(),
    "gzip": numcodecs.GZip(),
    "zlib": numcodecs.Zlib(),
    "bz2": numcodecs.BZ2(),
}
DATA = np.arange(1, 36, dtype=np.float32).reshape(5, 7)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


def write(store: LocalStore, data: np.ndarray, chunks: tuple[int, ...], codec: str = "none", **more: Any) -> Path:
    """An array at `w` as zarr-python writes it."""
    path = Path(store.locate("w"))
    separator = more.pop("separator", ".")
    encoding: Any = {"name": "v2", "separator": separator}
    made = zarr.create_array(
        path,
        shape=data.shape,
        chunks=chunks,
        dtype=data.dtype,
        zarr_format=2,
        compressors=CODECS[codec],
        chunk_key_encoding=encoding,
        **{"fill_value": 0, "filters": None, **more},
    )
    made[...] = data
    return path


def change(path: Path, **changes: Any) -> None:
    document = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(json.dumps({**document, **changes}))


def leaf(shape: tuple[int, ...] = DATA.shape, dtype: Any = "float32") -> StoredArray:
    return StoredArray(("enc", "w"), ArraySpec(shape, np.dtype(dtype)), (), ForeignArray("w"))


def read(store: LocalStore, described: StoredArray, *regions: Region) -> list[Any]:
    assert described.shape is not None
    wanted = regions or (Region.whole(described.shape),)
    reader = ZarrReader(store, described)
    return [reader.read(region) for region in wanted]


def check(store: LocalStore, described: StoredArray) -> None:
    ZarrReader(store, described).check()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("order", "separator"), [("C", "."), ("F", "/")])
def test_any_layout_is_read_whole_and_in_part(codec: str, order: str, separator: str, store: LocalStore) -> None:
    write(store, DATA, (2, 3), codec, order=order, separator=separator)
    whole, part, none = read(store, leaf(), Region.whole((5, 7)), Region((1, 2), (3, 5)), Region((2, 7), (1, 0)))
    assert_same(whole, DATA)
    assert_same(part, DATA[1:4, 2:7].copy())
    assert none.shape == (1, 0)
    assert whole.flags.c_contiguous
    assert whole.flags.writeable
    check(store, leaf())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("separator", [".", "/"])
def test_what_is_in_a_bucket_is_fetched_and_then_decoded(codec: str, separator: str, store: LocalStore) -> None:
    """To the reader a bucket is a store without local paths."""
    path = write(store, DATA, (2, 3), codec, separator=separator)
    store.traits = replace(store.traits, has_paths=False)  # type: ignore[misc]
    assert_same(read(store, leaf(), Region((1, 2), (3, 5)))[0], DATA[1:4, 2:7].copy())
    check(store, leaf())
    (path / separator.join("22")).write_bytes(b"x")
    assert_same(read(store, leaf(), Region((0, 0), (4, 7)))[0], DATA[:4])
    for look in (read, check):
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'enc/w': "):
            look(store, leaf())


def test_an_array_is_the_callers_own_to_write_to(store: LocalStore) -> None:
    write(store, DATA, (5, 7))
    whole, again, part = read(store, leaf(), Region.whole((5, 7)), Region.whole((5, 7)), Region((1, 2), (3, 5)))
    for array in (whole, again, part):
        assert array.flags.writeable
        assert array.flags.owndata  # nothing of TensorStore's, which may keep what it has read
    whole[...] = 0
    assert_same(again, DATA)
    assert_same(part, DATA[1:4, 2:7].copy())
    assert_same(read(store, leaf())[0], DATA)


@pytest.mark.parametrize("name", ["bool", "int8", "uint64", "float16", "complex64", "datetime64[ns]"])
def test_dtypes_are_described_in_native_byte_order(name: str, store: LocalStore) -> None:
    dtype = np.dtype(name)
    path = write(store, np.ones((2, 3), np.uint8), (2, 3))
    change(path, dtype=dtype.newbyteorder(">").str)
    assert_same(describe(store, "w").spec.dtype.str, dtype.str)


def test_big_endian_data_are_swapped(store: LocalStore) -> None:
    write(store, DATA.astype(">f4"), (5, 7))
    assert_same(read(store, leaf())[0], DATA)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_dtypes_zarr_has_no_name_for_go_by_tensorstores(name: str, store: LocalStore) -> None:
    data = pattern(dtype_from_name(name), (4, 3))
    path = write(store, data.view(f"u{data.dtype.itemsize}"), (4, 3))
    change(path, dtype=name, fill_value=None)
    assert_same(read(store, leaf((4, 3), data.dtype))[0], data)


def test_a_scalar_has_one_chunk_and_an_empty_array_none(store: LocalStore) -> None:
    path = write(store, np.array(2.5, np.float32), ())
    assert file_names(store, "w", describe(store, "w")) == ["w/.zarray", "w/0"]
    assert_same(read(store, leaf(()))[0], np.array(2.5, np.float32))
    change(path, shape=[3, 0], chunks=[3, 1])
    assert file_names(store, "w", describe(store, "w")) == ["w/.zarray"]
    assert_same(read(store, leaf((3, 0)))[0], np.zeros((3, 0), np.float32))


@given(st.data())
def test_the_chunks_of_a_region_are_those_that_meet_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    chunks = tuple(data.draw(st.integers(1, n + 2)) for n in shape)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    region = Region(start, tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)))
    numbers = np.empty(shape, object)
    for index in np.ndindex(*shape):
        numbers[index] = "/".join(str(i // c) for i, c in zip(index, chunks, strict=True)) or "0"
    array = Grid(ArraySpec(shape, np.dtype("u1")), chunks, None, "/")
    found = array.chunk_names(region)
    assert len(set(found)) == len(found)
    assert set(found) == set(numbers[region.slices].ravel().tolist() if shape else ["0"])


@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("linked", [False, True])
def test_many_chunks_are_found_by_listing(
    separator: str, linked: bool, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(store, DATA, (2, 3), separator=separator)
    asked = file_names(store, "w", describe(store, "w"))
    if linked:
        (path / "1").symlink_to(".") if separator == "." else (path / "0" / "x").symlink_to(".")
    for name in ("x", "00", "3", "3.0", "0.3", "0.00", "0.0.0", "-1", "\u0660.0", "0."):
        if not (path / name).exists():
            (path / name).mkdir() if separator == "/" else (path / name).write_text("")
    monkeypatch.setattr("shardkeep.foreign.zarr._MANY", 0)
    assert sorted(file_names(store, "w", describe(store, "w"))) == sorted(asked)
    assert_same(read(store, leaf(), Region((1, 2), (3, 5)))[0], DATA[1:4, 2:7].copy())
    check(store, leaf())
    (path / separator.join("12")).unlink()
    with pytest.raises(shardkeep.MissingDataError, match=rf"1 of 9 chunks is missing: .*w/1{re.escape(separator)}2\. "):
        read(store, leaf())


def test_links_from_a_directory_to_itself_are_not_followed_for_ever(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them the directories of all the 3**30 chunks are there."""
    path = write(store, np.ones(1, np.uint8), (1,))
    (path / "0").unlink()
    change(path, shape=[3] * 30, chunks=[1] * 30, dimension_separator="/")
    for number in range(3):
        (path / str(number)).symlink_to(".")
    monkeypatch.setattr("shardkeep.foreign.zarr._MOST", 10_000)
    with pytest.raises(shardkeep.IntegrityError, match=r"/w contains more than 10,000 chunks of one array"):
        file_names(store, "w", describe(store, "w"))


def test_a_part_needs_only_its_own_chunks(store: LocalStore) -> None:
    path = write(store, DATA, (2, 7))
    (path / "2.0").unlink()
    assert_same(read(store, leaf(), Region((0, 0), (4, 7)))[0], DATA[:4])
    with pytest.raises(shardkeep.MissingDataError, match=r"leaf 'enc/w': 1 of 2 chunks is missing.*w/2\.0\. The save"):
        read(store, leaf(), Region((3, 0), (2, 7)))


@pytest.mark.parametrize("fill", [0, 7, None])
def test_a_missing_chunk_is_never_taken_for_its_fill_value(fill: Any, store: LocalStore) -> None:
    """zarr leaves out chunks that are all fill; a save cut short leaves out others, and nothing tells which."""
    path = write(store, DATA, (2, 3), separator="/", fill_value=fill)
    (path / "1" / "2").unlink()
    for look in (read, check):
        with pytest.raises(shardkeep.MissingDataError, match=r"leaf 'enc/w': 1 of 9 chunks is missing.*w/1/2"):
            look(store, leaf())
    assert "w/1/2" not in file_names(store, "w", describe(store, "w"))
    assert len(file_names(store, "w", describe(store, "w"))) == 9


def test_data_that_were_replaced_are_read_anew(store: LocalStore) -> None:
    path = write(store, DATA, (5, 7))
    read(store, leaf())
    (path / "0.0").write_bytes((DATA + 1).tobytes())
    assert_same(read(store, leaf())[0], DATA + 1)


WHOLE = DATA.tobytes()
DAMAGED: dict[str, tuple[str, bytes]] = {
    "short": ("none", WHOLE[:-1]),
    "long": ("none", WHOLE + b"x"),
    "empty": ("none", b""),
    "zstd: short": ("zstd", zstandard.compress(WHOLE[:-1])),
    "zstd: long": ("zstd", zstandard.compress(WHOLE + b"x")),
    "zstd: two frames": ("zstd", zstandard.compress(WHOLE) + zstandard.compress(b"x")),
    "zstd: cut": ("zstd", zstandard.compress(WHOLE)[:-1]),
    "zstd: empty": ("zstd", b""),
    "zstd: something else": ("zstd", WHOLE),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_chunk_of_another_size_is_damaged(what: str, store: LocalStore) -> None:
    codec, content = DAMAGED[what]
    path = write(store, DATA, (5, 7), codec)
    (path / "0.0").write_bytes(content)
    for look in (read, check):
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'enc/w': .*w/0\.0 is damaged: .* exactly 140 bytes"):
            look(store, leaf())


@pytest.mark.parametrize("codec", ["blosc", "gzip", "zlib", "bz2"])
@pytest.mark.parametrize("content", [b"", b"rubbish" * 9, "short", "long"])
def test_a_chunk_that_cannot_be_decoded_names_its_leaf(codec: str, content: Any, store: LocalStore) -> None:
    path = write(store, DATA, (5, 7), codec)
    if isinstance(content, str):
        content = CODECS[codec].encode(WHOLE[:-4] if content == "short" else WHOLE + b"1234")
    (path / "0.0").write_bytes(content)
    for look in (read, check):
        with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'enc/w': TensorStore cannot read .*/w: "):
            look(store, leaf())


def test_a_bomb_is_decoded_no_further_than_the_chunk_should_go(store: LocalStore) -> None:
    path = write(store, DATA, (5, 7), "zstd")
    (path / "0.0").write_bytes(zstandard.compress(bytes(64 << 20)) * 2000)  # 125 GiB
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(shardkeep.IntegrityError, match="exactly 140 bytes"):
            check(store, leaf())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20  # the file itself is 12 MiB
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [5, -7]},
        {"shape": [5.0, 7]},
        {"shape": [True, 7]},
        {"shape": [5]},
        {"chunks": [5, 0]},
        {"chunks": [5, -1]},
        {"chunks": [5, "7"]},
        {"shape": [2**31, 2**31], "chunks": [1, 1]},
        {"shape": [0, 2**62], "chunks": [1, 1]},
        {"shape": [1] * 33, "chunks": [1] * 33},
        {"dimension_separator": "x"},
        {"dimension_separator": None},
    ],
    ids=str,
)
def test_an_impossible_array_is_refused_by_name(changes: dict[str, Any], store: LocalStore) -> None:
    change(write(store, DATA, (5, 7)), **changes)
    with pytest.raises(shardkeep.IntegrityError, match=r"w/\.zarray does not describe a valid array"):
        describe(store, "w")


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        '{"shape": 3}',
        '{"shape": [1], "chunks": [1]}',
        '{"shape": [1], "chunks": [1], "dtype": [["a", "<f4"]]}',
        '{"shape": [1], "chunks": [1], "dtype": "|O"}',
        '{"shape": [1], "chunks": [1], "dtype": "<U3"}',
        '{"shape": [1], "chunks": [1], "dtype": "<f4,<f4"}',
        '{"shape": [1], "chunks": [1], "dtype": "float128"}',
        '{"shape": [1], "chunks": [1], "dtype": ""}',
        '{"shape": [1], "chunks": [1], "dtype": "<f4", "compressor": {"level": 1}}',
        '{"shape": [1], "chunks": [1], "dtype": "<f4", "compressor": "zstd"}',
        "\xff",
    ],
    ids=lambda text: text[:60],
)
def test_what_is_no_description_is_refused_by_name(document: str, store: LocalStore) -> None:
    path = write(store, DATA, (5, 7))
    (path / ".zarray").write_bytes(document.encode("latin-1"))
    with pytest.raises(shardkeep.IntegrityError, match=r"w/\.zarray is not a valid \.zarray file: "):
        describe(store, "w")


def test_an_array_of_zarr_version_3_is_not_taken_for_one_of_2(store: LocalStore) -> None:
    zarr.create_array(Path(store.locate("w")), shape=(2,), dtype="f4", zarr_format=3)
    with pytest.raises(shardkeep.MissingDataError, match=r"w/\.zarray is missing"):
        describe(store, "w")


@pytest.mark.parametrize("described", [leaf((7, 5)), leaf(dtype="int32"), leaf((35,))], ids=str)
def test_another_array_than_the_index_says_is_refused(described: StoredArray, store: LocalStore) -> None:
    write(store, DATA, (5, 7))
    says = rf"describes float32\[5, 7\], but the manifest says {described.dtype}\["
    for look in (read, check):
        with pytest.raises(shardkeep.IntegrityError, match=rf"leaf 'enc/w': .*/w/\.zarray {says}"):
            look(store, described)


UNREADABLE = {
    "version 3": {"zarr_format": 3},
    "a filter": {"filters": [{"id": "delta", "dtype": "<f4"}]},
    "an unknown order": {"order": "Z"},
    "an unknown codec": {"compressor": {"id": "mine"}},
    "an impossible fill value": {"fill_value": "much"},
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_tensorstore_cannot_read_is_an_error_of_ours(what: str, store: LocalStore) -> None:
    change(write(store, DATA, (5, 7)), **UNREADABLE[what])
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'enc/w': TensorStore cannot read .*/w: "):
        read(store, leaf())


@pytest.mark.parametrize("what", [*UNREADABLE, "a chunk cut short"])
def test_what_cannot_be_read_is_not_called_sound(what: str, store: LocalStore) -> None:
    """`verify` would say that all is well, and no load could read it."""
    path = write(store, DATA, (5, 7), "zlib" if what == "a chunk cut short" else "none")
    if what in UNREADABLE:
        change(path, **UNREADABLE[what])
    else:
        (path / "0.0").write_bytes(zlib.compress(WHOLE)[:-9])
    with pytest.raises(shardkeep.IntegrityError, match="w"):
        check(store, leaf())


@pytest.mark.parametrize("dtype", ["<(1,,2)f4", "<f4,(1"])
def test_a_dtype_that_numpy_cannot_parse_is_refused_by_name(dtype: str, store: LocalStore) -> None:
    change(write(store, DATA, (5, 7)), dtype=dtype)
    with pytest.raises(shardkeep.IntegrityError, match=r"w/\.zarray is not a valid \.zarray file"):
        describe(store, "w")


@pytest.mark.parametrize("look", ["file_names", "read", "check"])
def test_more_chunks_than_any_disk_holds_are_refused(look: str, store: LocalStore) -> None:
    """With fewer (2**30, say) nothing is raised: names are made for minutes, until memory runs out."""
    change(write(store, np.ones(1, np.uint8), (1,)), shape=[2**60])
    described = leaf((2**60,), "uint8")
    if look == "file_names":
        with suppress(shardkeep.IntegrityError):
            assert file_names(store, "w", describe(store, "w")) == ["w/.zarray", "w/0"]
    else:
        with pytest.raises(shardkeep.IntegrityError, match="w"):
            check(store, described) if look == "check" else read(store, described, Region((0,), (2**60,)))


@pytest.mark.parametrize("linked", ["chunk", "directory of chunks"])
def test_a_link_that_leads_out_of_the_checkpoint_is_not_followed(linked: str, store: LocalStore) -> None:
    """As everywhere else: a checkpoint from a stranger must not show what lies beside it."""
    inside = LocalStore(store.locate("checkpoint"))
    path = write(inside, DATA, (5, 7), separator="/")
    name = "0/0" if linked == "chunk" else "0"
    (path / name).rename(store.locate("secret"))
    (path / name).symlink_to(store.locate("secret"))
    with pytest.raises(shardkeep.IntegrityError, match="leads out of"):
        read(inside, leaf())


def test_a_directory_in_place_of_a_chunk_is_not_read_as_zeros(store: LocalStore) -> None:
    (empty := Path(store.locate("empty"))).mkdir()
    size = empty.stat().st_size or pytest.skip("directories have no size here")
    path = write(store, np.ones(size, np.uint8), (size,))
    (path / "0").unlink()
    (path / "0").mkdir()
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'enc/w'"):
        read(store, leaf((size,), "uint8"))


def test_a_chunk_larger_than_memory_does_not_end_the_program(store: LocalStore) -> None:
    """Of other codecs than zstd the size is believed, and the memory taken before anything is decoded."""
    path = write(store, np.ones(6, np.uint8), (6,), "zlib")
    change(path, chunks=[2**60])
    (path.parent / "tensorstore_index.json").write_text('{"format": "tensorstore", "arrays": [{"path": "w"}]}')
    printed = run_python(
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        f"try: shardkeep.load({str(path.parent)!r})\n"
        "except shardkeep.IntegrityError: print('refused')"
    )
    assert printed == "refused\n"
