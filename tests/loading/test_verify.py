"""Bit rot: whatever is changed on disk is an error that names the place, or changes nothing that is loaded."""

import itertools
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from faults.spawner import Spawner
from faults.states import make
from support import FORMATS, assert_same, mesh_of, save_as

FLIPS = int(os.environ.get("SHARDKEEP_FLIPS", "60"))  # for each kind; a soak takes more


def _tree() -> Any:
    random_ = np.random.default_rng(0)
    return {
        "spread": jax.device_put(
            random_.standard_normal((256, 1100)).astype(np.float32), NamedSharding(mesh_of(8), PartitionSpec("a"))
        ),
        "layers": [{"w": random_.standard_normal((17, 9)), "b": jnp.ones(3, jnp.bfloat16)} for _ in range(2)],
        "empty": np.zeros((0, 3)),
        "none": None,
        "step": 12345,
        "rate": 0.125,
        "name": "a name",
        "key": jax.random.key(7),
        "fp8": jnp.arange(16, dtype=jnp.float32).astype(jnp.float8_e4m3fn),
        "wide": np.arange(5, dtype=np.complex128),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each kind, alone in a directory."""
    paths = {}
    for kind in FORMATS:
        room = tmp_path_factory.mktemp(kind)
        paths[kind] = save_as(kind, room / "run", _tree(), metadata={"loss": 0.5})
    return paths


def _files(path: Path) -> list[Path]:
    """Every file that says or holds something (not the lock, the claims and what only other programs read)."""
    root = path if path.is_dir() else path.parent
    ignored = {"tensorstore_index.json", "checkpoint_metadata.json", ".zgroup"}
    return sorted(p for p in root.rglob("*") if p.is_file() and ".shardkeep" not in p.parts and p.name not in ignored)


def _loads_right(path: Path, **arguments: Any) -> str:
    """The error a load gives, "" if it gives exactly what was saved; anything else fails."""
    try:
        tree = shardkeep.load(path, **arguments)
        metadata = dict(shardkeep.inspect(path).metadata)
    except shardkeep.ShardkeepError as error:
        return str(error) or repr(error)
    assert_same(tree, _tree())
    assert metadata == {"loss": 0.5}
    return ""


def _verify_finds(path: Path) -> str:
    """What verify says is wrong; "" if nothing."""
    try:
        report = shardkeep.verify(path)
    except shardkeep.ShardkeepError as error:
        return str(error)
    assert report.ok == (not report.problems)
    return "" if report.ok else str(report)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_untouched_checkpoint_verifies(saved: dict[str, Path], kind: str) -> None:
    report = shardkeep.verify(saved[kind])
    assert report.ok, str(report)
    assert report.unchecked == 0
    assert report.files == sum(len(t.files) for t in shardkeep.inspect(saved[kind]).trees.values())
    assert report.nbytes == sum(f.stat().st_size for f in _files(saved[kind]) if ".json" not in f.name)
    assert _loads_right(saved[kind]) == ""


@pytest.mark.parametrize("kind", FORMATS)
def test_every_flipped_bit_is_found(saved: dict[str, Path], kind: str) -> None:
    """Single bits over every file, more at their starts: verify finds each; a load is right or tells."""
    path = saved[kind]
    dice = random.Random(kind)
    files = _files(path)
    for number in range(FLIPS):
        file = files[number % len(files)]
        original = file.read_bytes()
        if not original:
            continue
        at = dice.randrange(min(len(original), 1500 if number % 3 == 0 else len(original)))
        bit = 1 << dice.randrange(8)
        file.write_bytes(original[:at] + bytes([original[at] ^ bit]) + original[at + 1 :])
        try:
            what = f"{file.name}, byte {at} of {len(original)}, bit {bit}: {original[max(at - 20, 0) : at + 20]!r}"
            assert _verify_finds(path), f"verify does not see it: {what}"
            told = _loads_right(path, mmap=bool(number % 2))
            assert not told or file.name in told or "leaf" in told, f"the error names nothing: {told} ({what})"
        finally:
            file.write_bytes(original)
    assert _verify_finds(path) == ""


@pytest.mark.parametrize("kind", ["exchange", "shards"])
def test_no_flip_in_an_exchange_header_makes_it_look_foreign(saved: dict[str, Path], kind: str) -> None:
    """Our mark is a few bytes: losing it must not mean a load without structure and digests."""
    path = saved[kind]
    file = path if path.exists() else path.with_name(path.name + ".index.json")
    original = file.read_bytes()
    starts = [original.find(word) for word in (b"metadata", b'"shardkeep"', b'"digest"', b'"weight_map"', b'"format"')]
    for at in sorted({i for start in starts if start >= 0 for i in range(start, start + 14)}):
        for bit in (1, 2, 4, 32):
            file.write_bytes(original[:at] + bytes([original[at] ^ bit]) + original[at + 1 :])
            try:
                assert _loads_right(path), f"bit {bit} of byte {at}: {original[at - 10 : at + 10]!r}"
            finally:
                file.write_bytes(original)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_byte_of_a_manifest_is_covered(saved: dict[str, Path], kind: str) -> None:
    """Each byte of the document that says what is there, zeroed, and a bit flipped in a sample of them."""
    path = saved[kind]
    file = {"exchange": path, "shards": path.with_name(path.name + ".index.json")}.get(kind, path / "manifest.json")
    original = file.read_bytes()
    length = len(original) if file.suffix == ".json" else 8 + int.from_bytes(original[:8], "little")
    for at in range(0, length, max(length // 120, 1)):
        file.write_bytes(original[:at] + bytes([original[at] ^ 0x10]) + original[at + 1 :])
        try:
            with pytest.raises(shardkeep.ShardkeepError, match=r"(?s).+"):
                shardkeep.load(path)
            assert _verify_finds(path)
        finally:
            file.write_bytes(original)


def _damages(original: bytes) -> dict[str, bytes]:
    size = len(original)
    page = size // 2 // 4096 * 4096
    return {
        "cut to nothing": b"",
        "cut by one byte": original[:-1],
        "cut in half": original[: size // 2],
        "one byte longer": original + b"\0",
        "a zeroed page": original[:page] + b"\0" * len(original[page : page + 4096]) + original[page + 4096 :],
        "all zeros": b"\0" * size,
        "all ones": b"\xff" * size,
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_cut_and_zeroed_files_are_found(saved: dict[str, Path], kind: str) -> None:
    path = saved[kind]
    for file in _files(path)[:8]:
        original = file.read_bytes()
        for name, damaged in _damages(original).items():
            if damaged == original:
                continue
            file.write_bytes(damaged)
            try:
                assert _verify_finds(path), f"{file.name} {name}: verify does not see it"
                told = _loads_right(path)
                assert not told or file.name in told or "leaf" in told, f"{file.name} {name}: {told}"
            finally:
                file.write_bytes(original)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_missing_file_is_named(saved: dict[str, Path], kind: str) -> None:
    path = saved[kind]
    data = [f for f in _files(path) if f.name not in ("manifest.json", path.name, path.name + ".index.json")]
    for file in data[:8]:
        aside = file.with_name(file.name + ".aside")
        file.rename(aside)
        try:
            assert file.name in _verify_finds(path)
            if file.name == ".zarray":  # readers of zarr need it, we do not
                assert _loads_right(path) == ""
                continue
            with pytest.raises(FileNotFoundError, match=f"{re.escape(str(file))} is missing") as caught:
                shardkeep.load(path)
            assert isinstance(caught.value, shardkeep.MissingDataError)
        finally:
            aside.rename(file)


@pytest.mark.parametrize("kind", ["tensorstore", "zstd", "shards"])
def test_swapped_files_are_found(saved: dict[str, Path], kind: str) -> None:
    """Two files of equal size in each other's place: only digests can tell."""
    path = saved[kind]
    by_size: dict[int, list[Path]] = {}
    for file in _files(path):
        by_size.setdefault(file.stat().st_size, []).append(file)
    swaps = [(a, b) for same in by_size.values() for a, b in itertools.pairwise(same)]
    swaps = [(a, b) for a, b in swaps if a.read_bytes() != b.read_bytes()][:6]
    assert swaps
    for a, b in swaps:
        first, second = a.read_bytes(), b.read_bytes()
        a.write_bytes(second)
        b.write_bytes(first)
        try:
            assert _verify_finds(path), f"{a} and {b}"
            _loads_right(path)
        finally:
            a.write_bytes(first)
            b.write_bytes(second)


def test_a_file_from_another_save_is_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shardkeep.save(tmp_path / name, {"w": np.full(1000, ord(name))}, format="zarr")
    shutil.copy(tmp_path / "b" / "w" / "0", tmp_path / "a" / "w" / "0")
    with pytest.raises(shardkeep.IntegrityError, match=r"leaf 'w': .*w/0 is damaged"):
        shardkeep.load(tmp_path / "a")


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange"])
def test_a_manifest_from_another_save_is_found(tmp_path: Path, kind: str) -> None:
    paths = [save_as(kind, tmp_path / name / "run", {"w": np.full(1000, i)}) for i, name in enumerate("ab")]
    if kind == "exchange":
        first, second = (p.read_bytes() for p in paths)
        length = 8 + int.from_bytes(first[:8], "little")
        assert length == 8 + int.from_bytes(second[:8], "little")
        paths[0].write_bytes(second[:length] + first[length:])
    else:
        shutil.copy(paths[1] / "manifest.json", paths[0] / "manifest.json")
    with pytest.raises(shardkeep.IntegrityError, match="leaf 'w'"):
        shardkeep.load(paths[0])
    assert not shardkeep.verify(paths[0])


def test_damage_names_every_leaf_it_touches_and_no_other(tmp_path: Path) -> None:
    tree = {"a": np.arange(1000.0), "b": np.arange(2000.0), "c": np.arange(3000.0)}
    shardkeep.save(tmp_path / "run", tree)
    (data,) = (tmp_path / "run").glob("*.safetensors")
    piece = shardkeep.inspect(tmp_path / "run").leaves["b"].pieces[0]
    raw = bytearray(data.read_bytes())
    raw[piece.offset + 100] ^= 1
    data.write_bytes(raw)
    report = shardkeep.verify(tmp_path / "run")
    assert [(p.leaf, p.file) for p in report.problems] == [("b", str(data))]
    loaded = shardkeep.load(tmp_path / "run", include="^(a|c)$")
    assert np.array_equal(loaded["a"], tree["a"])
    with pytest.raises(shardkeep.IntegrityError, match=f"leaf 'b': {data} is damaged between bytes"):
        shardkeep.load(tmp_path / "run")
    assert shardkeep.load(tmp_path / "run", verify=False)["a"].shape == (1000,)


def test_damage_in_one_block_is_found_in_a_partial_read(tmp_path: Path) -> None:
    """Reading some rows checks the blocks they lie in, and only those."""
    array = jnp.arange(6 << 20, dtype=jnp.float32).reshape(6, 1 << 20)
    shardkeep.save(tmp_path / "run", {"w": array})
    (data,) = (tmp_path / "run").glob("*.safetensors")
    piece = shardkeep.inspect(tmp_path / "run").leaves["w"].pieces[0]
    with open(data, "r+b") as file:
        file.seek(piece.offset + 5 * (4 << 20) + 17)
        file.write(b"\x55")
    with pytest.raises(shardkeep.IntegrityError, match="leaf 'w'"):
        shardkeep.load(tmp_path / "run")
    for mmap in (True, False):
        with pytest.raises(shardkeep.IntegrityError, match="leaf 'w'"):
            shardkeep.load(
                tmp_path / "run",
                shardings=NamedSharding(mesh_of(2), PartitionSpec("a")),
                mmap=mmap,  # type: ignore[arg-type]
            )


def test_verify_takes_one_prefix_or_all(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones(10)}, prefix="a")
    shardkeep.save(tmp_path / "run", {"w": np.ones(20)}, prefix="b")
    (data,) = (tmp_path / "run" / "b").glob("*.safetensors")
    data.unlink()
    assert shardkeep.verify(tmp_path / "run", prefix="a").ok
    assert not shardkeep.verify(tmp_path / "run", prefix="b").ok
    assert not shardkeep.verify(tmp_path / "run").ok
    with pytest.raises(shardkeep.PrefixError, match="'c'"):
        shardkeep.verify(tmp_path / "run", prefix="c")


def test_verify_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint"):
        shardkeep.verify(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["run", "model.safetensors"])
def test_verify_beside_a_writer_reports_no_damage(tmp_path: Path, spawner: Spawner, name: str) -> None:
    """A checkpoint that is replaced meanwhile is looked at again, not called damaged."""
    path = tmp_path / name
    shardkeep.save(path, make("plain", 0))
    checking = spawner.start("verify_until", path=str(path), last=40)
    writing = spawner.start("save_often", path=str(path), kind="plain", first=1, count=40)
    written = writing.wait()
    assert written.ok, written
    outcome = checking.wait()
    assert outcome.ok, outcome
    assert outcome.value["reports"] > 3


@pytest.mark.parametrize("what", ["truncated", "missing", "longer"])
def test_an_incomplete_file_is_one_problem_however_many_leaves_it_holds(tmp_path: Path, what: str) -> None:
    shardkeep.save(tmp_path / "run", {"layers": [{"w": np.ones(100), "b": np.ones(9)} for _ in range(10)]})
    (data,) = (tmp_path / "run").glob("*.safetensors")
    size = data.stat().st_size
    if what == "missing":
        data.unlink()
    else:
        os.truncate(data, size - 1 if what == "truncated" else size + 1)
    (problem,) = shardkeep.verify(tmp_path / "run").problems
    reason = {
        "truncated": f"is truncated: it has {size - 1:,} of {size:,} bytes",
        "missing": "is missing",
        "longer": f"has {size + 1:,} bytes instead of {size:,}",
    }[what]
    assert str(problem).count(str(data)) == 1
    assert problem.message.startswith(f"{data} {reason}; 20 leaves are affected: 'layers/")
    assert problem.message.count("'layers/") == 5
    assert (problem.leaf, problem.file) == (None, str(data))
    assert problem.message.endswith(", …")


def test_a_file_of_one_leaf_names_the_leaf(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"a": np.ones(100), "b": np.ones(100)}, format="zarr")
    os.truncate(tmp_path / "run" / "b" / "0", 7)
    (tmp_path / "run" / "a" / ".zarray").unlink()
    problems = shardkeep.verify(tmp_path / "run").problems
    assert [(problem.leaf, problem.message) for problem in problems] == [
        (None, f"{tmp_path / 'run/a/.zarray'} is missing"),
        ("b", f"leaf 'b': {tmp_path / 'run/b/0'} is truncated: it has 7 of 800 bytes"),
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_no_problem_names_its_file_twice(saved: dict[str, Path], kind: str) -> None:
    path = saved[kind]
    for file in _files(path)[:6]:
        original = file.read_bytes()
        for damaged in _damages(original).values():
            file.write_bytes(damaged)
            try:
                problems = shardkeep.verify(path).problems
                assert all(problem.message.count(problem.file) <= 1 for problem in problems), problems
                assert all(Path(problem.file).exists() for problem in problems), problems
                assert len({problem.message for problem in problems}) == len(problems)
            finally:
                file.write_bytes(original)
