"""A reader of the format in another language, written from docs/format.md: it sees what shardkeep sees.

`examples/reader` needs Node.js and two packages of npm. They are installed once for each environment, below its prefix.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from shardkeep.model.arrays import NARROW
from shardkeep.model.digests import BLOCK, seal
from shardkeep.model.leaves import StoredValue
from shardkeep.model.tree import flatten
from support import FORMATS, mesh_of, save_as

EXAMPLE = Path(__file__).parents[1] / "examples" / "reader"
GOLDEN = Path(__file__).parent / "golden"
RIGHT = "every digest is right"

Read = Callable[..., list[list[str]]]


def _install(npm: str) -> Path:
    """Where the packages are that package.json names."""
    package = (EXAMPLE / "package.json").read_bytes()
    home = Path(sys.prefix) / "npm" / hashlib.sha256(package).hexdigest()[:16]
    if home.is_dir():
        return home
    home.parent.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=home.parent))
    (made / "package.json").write_bytes(package)
    quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=30000"]
    done = subprocess.run(
        [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", *quick],
        cwd=made, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        with contextlib.suppress(OSError):  # another test run was first
            made.rename(home)
    shutil.rmtree(made, ignore_errors=True)
    if home.is_dir():
        return home
    problem = next((line for line in done.stderr.splitlines() if "error" in line), "")
    pytest.skip(f"npm cannot install the packages of examples/reader: {problem}")


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """What the reader prints about each path: its lines, without the path. The last one is the verdict."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node.js and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    if int(version.lstrip("v").partition(".")[0]) < 18:
        pytest.skip(f"Node.js is too old: {version}")
    home = tmp_path_factory.mktemp("reader")
    shutil.copy(EXAMPLE / "reader.mjs", home)
    (home / "node_modules").symlink_to(_install(npm) / "node_modules")

    def run(*paths: Path) -> list[list[str]]:
        done = subprocess.run(
            [node, str(home / "reader.mjs"), *map(str, paths)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", timeout=120, check=False,
        )  # fmt: skip
        places = [f"{path}\n" for path in paths]
        assert done.stdout.startswith(places[0]), done.stdout
        starts = [done.stdout.index(place) for place in places]
        parts = [
            done.stdout[a:b].removesuffix("\n").split("\n")[1:]
            for a, b in zip(starts, [*starts[1:], None], strict=True)
        ]
        assert done.returncode == (0 if all(part[-1] == RIGHT for part in parts) else 1)
        return parts

    return run


def _shown_text(text: str) -> str:
    if re.search("[\ud800-\udfff]", text):
        return f"text({base64.b64encode(text.encode('utf-8', 'surrogatepass')).decode()})"
    return json.dumps(text, ensure_ascii=False)


def _shown_float(value: float) -> str:
    return repr(value) if value == value else f"nan:{struct.pack('>d', value).hex()}"


def _shown(value: Any) -> str:
    """A plain value as the reader prints it."""
    if isinstance(value, np.generic):
        return f"numpy({value.dtype.name}, {value.tobytes().hex()})"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, complex):
        return f"complex({_shown_float(value.real)}, {_shown_float(value.imag)})"
    if isinstance(value, bytes):
        return f"bytes({base64.b64encode(value).decode()})"
    return (
        _shown_text(value)
        if isinstance(value, str)
        else _shown_float(value)
        if isinstance(value, float)
        else str(value)
    )


def _stored(array: Any) -> bytes:
    """The elements of an array as the format stores them."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    raw = np.ascontiguousarray(host, host.dtype.newbyteorder("<") if host.dtype.kind != "V" else None).tobytes()
    if host.dtype not in NARROW:
        return raw
    bits = int(re.findall(r"\d+", host.dtype.name)[0])
    return bytes(byte & ((1 << bits) - 1) for byte in raw)


def _expected(path: Path) -> Iterator[str]:
    """The lines about a checkpoint, from what shardkeep says of it."""
    for prefix, tree in shardkeep.inspect(path).trees.items():
        name = {"zarr": "tensorstore"}.get(tree.format, tree.format)
        yield f'tree "{prefix}", {name}, {tree.compression or "not compressed"}, {tree.created}'
        loaded = shardkeep.load(path, prefix=prefix, per_process="all")
        values = {leaf.path: leaf.value for leaf in flatten(loaded)[1]}
        for leaf in tree.leaves:
            key = ".".join(part.replace("\\", "\\\\").replace(".", "\\.") for part in leaf.path)
            if isinstance(leaf, StoredValue):
                yield f"  {_shown_text(key)} = {_shown(leaf.value)}"
                continue
            shape = ",".join(map(str, leaf.shape))
            start = f"  {_shown_text(key)}: {leaf.kind} {leaf.dtype}[{shape}] "
            yield start + ("" if leaf.kind == "per_process" else xxhash.xxh3_128_hexdigest(_stored(values[leaf.path])))
    yield RIGHT


def _check(read: Read, paths: list[Path]) -> None:
    for path, printed in zip(paths, read(*paths), strict=True):
        for line, expected in zip(printed, _expected(path), strict=True):
            found = line[: len(expected)] if ": per_process " in line else line
            assert found == expected, path


def test_it_is_short() -> None:
    assert len((EXAMPLE / "reader.mjs").read_text().splitlines()) <= 200


def test_it_prints_what_shardkeep_inspects_and_the_digests_of_what_it_loads(read: Read, tmp_path: Path) -> None:
    split = NamedSharding(mesh_of(2, 2), PartitionSpec("a", "b"))
    uneven = jax.device_put(
        jnp.arange(48, dtype=jnp.bfloat16).reshape(8, 6), NamedSharding(mesh_of(2), PartitionSpec("a"))
    )
    tree = {
        "long": np.arange(BLOCK // 4 + 100, dtype=np.float32),
        "split": jax.device_put(jnp.arange(1 << 20, dtype=jnp.int32).reshape(1024, 1024), split),
        "uneven": [uneven, (np.arange(3, dtype=">u2"), jax.random.key(3))],
        "data": shardkeep.PerProcess({"offset": 5}),
        "values": [1, -(2**70), 0.1, True, "é\n\u2028", b"\0", 1j, np.float16(2)],
    }
    paths = [save_as(kind, tmp_path / kind, tree) for kind in FORMATS]
    shardkeep.save(tmp_path / "trees", tree, trees={"ema.slow": {"w": np.ones(3)}, "ema.fast": {}}, format="zarr")
    _check(read, [*paths, tmp_path / "trees"])


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_it_reads_the_golden_checkpoints(read: Read, version: str) -> None:
    names = {name.partition("#")[0] for name in json.loads((GOLDEN / version / "expected.json").read_text())}
    _check(read, [GOLDEN / version / name for name in sorted(names)])


def _damaged(original: Path, name: str, content: bytes, home: Path) -> Path:
    """A copy of a checkpoint directory in which a file has other content."""
    copy = home / f"{len(list(home.iterdir()))}."
    shutil.copytree(original, copy, copy_function=os.link)
    (copy / name).unlink()
    (copy / name).write_bytes(content)
    return copy


def _flips(content: bytes) -> Iterator[bytes]:
    """The content with one bit flipped: at both ends, and in between."""
    for at in {0, 150 % len(content), len(content) // 2, len(content) - 1}:
        yield content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _all_found(read: Read, damaged: dict[Path, str]) -> None:
    for (path, what), printed in zip(damaged.items(), read(*damaged), strict=True):
        assert printed[-1].startswith("error: "), f"{what} in {path}: {printed[-1]}"


@pytest.mark.parametrize("source", ["tensorstore", "zstd", "safetensors", "tables/two/zarr", "tables/two/safetensors"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_flipped_bit_in_any_file_is_found(read: Read, version: str, source: str, tmp_path: Path) -> None:
    """In the manifest, in tables, in the descriptions of arrays and in data."""
    original = GOLDEN / version / source
    if not original.exists():
        assert (version, source[:6]) == ("v1", "tables")
        return
    tree = json.loads((original / "manifest.json").read_bytes())["trees"][""]
    names = [name for name, size, *_ in tree["files"] if size]
    assert any(name.endswith(".pieces") for name in names) == source.startswith("tables")
    names = ["manifest.json", *names[:: max(len(names) // 10, 1)]]
    damaged = {
        _damaged(original, name, content, tmp_path): name
        for name in names
        for content in _flips((original / name).read_bytes())
    }
    _all_found(read, damaged)


@pytest.mark.parametrize("kind", ["exchange", "shards"])
def test_a_flipped_bit_in_exchange_files_is_found(read: Read, kind: str, tmp_path: Path) -> None:
    original = save_as(kind, tmp_path / "right" / "model", {"w": np.arange(40.0), "v": np.ones(30)})
    assert read(original)[0][-1] == RIGHT
    damaged = {}
    names = [path.name for path in original.parent.iterdir() if path.is_file()]
    assert len(names) == (1 if kind == "exchange" else 3)
    (tmp_path / "damaged").mkdir()
    for name in names:
        for content in _flips((original.parent / name).read_bytes()):
            damaged[_damaged(original.parent, name, content, tmp_path / "damaged") / original.name] = name
    _all_found(read, damaged)


def test_a_wrong_table_in_a_sealed_manifest_is_found(read: Read, tmp_path: Path) -> None:
    """Each byte of a table says where pieces are, or what their digests are. Some bytes of each column are tried."""
    original = GOLDEN / "v2" / "safetensors"
    body = json.loads((original / "manifest.json").read_bytes())
    (entry,) = body["trees"][""]["tables"]
    table = base64.b64decode(entry["data"])
    damaged = {}
    for at in range(0, len(table), 13):
        entry["data"] = base64.b64encode(table[:at] + bytes([table[at] ^ 1]) + table[at + 1 :]).decode()
        text = json.dumps({**body, "digest": "0" * 32}, separators=(",", ":"))
        damaged[_damaged(original, "manifest.json", seal(text.encode()), tmp_path)] = f"byte {at}"
    _all_found(read, damaged)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shardkeep": 3}, "version 3"),
        ({"block": 5}, "another kind"),
        ({"trees": {"": {"format": "other"}}}, "format that this program does not read"),
    ],
)
def test_it_refuses_what_it_does_not_know(read: Read, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "run", {"w": np.ones(3)})
    manifest = tmp_path / "run" / "manifest.json"
    body = {**json.loads(manifest.read_bytes()), **change}
    if "trees" in change:
        body["trees"] = {"": {**json.loads(manifest.read_bytes())["trees"][""], **change["trees"][""]}}
    manifest.write_bytes(seal(json.dumps({**body, "digest": "0" * 32}, separators=(",", ":")).encode()))
    assert said in read(tmp_path / "run")[0][-1]
