"""`AsyncCheckpointManager`: its settings, and everything about saving."""

import asyncio
import datetime
import hashlib
import json
import logging
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import shardkeep
from dtypes import JAX
from shardkeep import PendingSave
from shardkeep.runtime import progress
from shardkeep.runtime.budget import Claim, budget
from shardkeep.runtime.scopes import Scope
from shardkeep.serialization import AsyncCheckpointManager
from support import Dense, Keyed, Point, Unkeyed, assert_same, bits, mesh_of, run_python

P = PartitionSpec
Log = Callable[[], list[str]]
MESH = mesh_of(8)

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "tensorstore": ({}, "c"),
    "zstd": ({"enable_compression": True}, "c"),
    "safetensors directory": ({"use_tensorstore": False}, "c"),
    "safetensors file": ({"use_tensorstore": False}, "c.safetensors"),
}
forms = pytest.mark.parametrize("form", FORMS)
saves = pytest.mark.parametrize("save", ["save", "save_async", "save_pytree"])


def save_by(manager: AsyncCheckpointManager, save: str, tree: Any, path: Any, **arguments: Any) -> Any:
    """Save in one of the three ways, and wait."""
    if save == "save_pytree":
        arguments = {"prefix": "p", **arguments}
        for documented, own in (("float_dtype", "dtype"), ("metadata", "extras")):
            if documented in arguments:
                arguments[own] = arguments.pop(documented)
    result = getattr(manager, save)(tree, path, **arguments)
    if isinstance(result, PendingSave):
        result.wait()
        return result.path
    return result


def pieces(path: Path) -> int:
    """In how many pieces an array is stored."""
    return len(shardkeep.inspect(path).leaves["w"].pieces)


def layout(path: Path, key: str = "w") -> Any:
    """The sharding a leaf was saved with; None if it lay on one device or was replicated."""
    sharding = shardkeep.inspect(path).leaves[key].sharding
    return None if sharding is None else [list(axes) if isinstance(axes, tuple) else axes for axes in sharding.spec]


def on_one_device(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: on_one_device(v) if isinstance(v, dict) else jnp.asarray(np.asarray(v)) for k, v in tree.items()}


LARGE = (8, 300_000)  # beyond what is stored whole whatever its sharding


def sharded(shape: tuple[int, ...] = (8, 4), spec: Any = P("a")) -> jax.Array:
    return jax.device_put(jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape), NamedSharding(MESH, spec))


# --- what saves have in common


@saves
@forms
def test_what_was_saved_is_loaded_and_the_path_is_returned(save: str, form: str, tmp_path: Path) -> None:
    settings, name = FORMS[form]
    manager = AsyncCheckpointManager(**settings)
    tree = {"w": sharded(LARGE), "layers": [{"b": jnp.ones(3, jnp.bfloat16)}], "step": 7}
    assert save_by(manager, save, tree, str(tmp_path / name), mesh=MESH) == str(tmp_path / name)
    loaded, _ = manager.load(tmp_path / name, None)
    assert_same(loaded, {"w": jnp.asarray(np.asarray(tree["w"])), "layers": {"0": tree["layers"][0]}, "step": 7})
    assert shardkeep.verify(tmp_path / name).ok


@saves
def test_any_kind_of_path_is_taken(save: str, any_path: Callable[[Any], Any], tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    result = save_by(manager, save, {"w": jnp.ones(2)}, any_path(tmp_path / "c"), mesh=MESH)
    assert result in (str(tmp_path / "c"), f"file://{tmp_path / 'c'}")
    assert (tmp_path / "c" / "manifest.json").exists()
    assert_same(manager.load(any_path(tmp_path / "c"), None)[0], {"w": jnp.ones(2)})


@saves
@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x"])
def test_a_url_that_cannot_be_served_writes_nothing_anywhere(
    save: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_credentials: None
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(shardkeep.AccessError, match="no credentials"):
        save_by(AsyncCheckpointManager(), save, {"w": jnp.ones(2)}, url, mesh=MESH)
    assert list(tmp_path.iterdir()) == []


@saves
def test_a_save_without_a_mesh_is_one_warning_and_arrays_keep_their_sharding(
    save: str, tmp_path: Path, logged: Log
) -> None:
    manager = AsyncCheckpointManager()
    more = {"cpu_offload": False} if save == "save_pytree" else {}
    save_by(manager, save, {"w": sharded(LARGE)}, tmp_path / "c", **more)
    (message,) = logged()
    assert "no mesh was passed" in message
    assert pieces(tmp_path / "c") == 8
    assert layout(tmp_path / "c") == ["a"]
    save_by(manager, save, {"w": sharded()}, tmp_path / "d", mesh=MESH, **more)
    assert logged() == []


def test_without_a_mesh_a_gather_goes_to_the_cpu(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    manager.save({"w": sharded()}, tmp_path / "c", do_all_gather=True, float_dtype="fp32")
    assert layout(tmp_path / "c") is None
    assert_same(manager.load(tmp_path / "c", None)[0]["w"], jnp.asarray(np.asarray(sharded())))


@saves
def test_saves_are_quiet_unless_verbose(
    save: str, tmp_path: Path, logged: Log, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verbose is a progress bar and a summary line with bytes, seconds and speed; loads have them too."""
    monkeypatch.setattr(progress, "DELAY", 0)
    manager = AsyncCheckpointManager()
    capfd.readouterr()

    def both(path: Path) -> tuple[str, str]:
        save_by(manager, save, {"w": jnp.ones(1 << 19)}, path, mesh=MESH)
        manager.wait_until_finished()
        save_log, save_bar = " ".join(logged()), capfd.readouterr().err
        manager.load(path, None)
        return save_log + " | " + " ".join(logged()), save_bar + capfd.readouterr().err

    assert both(tmp_path / "quiet") == (" | ", "")
    manager.verbose = True
    text, bars = both(tmp_path / "verbose")
    assert "saved " in text.split("|")[0]
    assert "loaded " in text.split("|")[1]
    for line in text.split("|"):
        assert "bytes" in line
        assert " s (" in line
        assert re.search(r"[GMk]B/s", line)
    assert "saving" in bars
    assert "loading" in bars


@saves
def test_disabled_saves_write_nothing_and_say_so_once(save: str, tmp_path: Path, logged: Log) -> None:
    manager = AsyncCheckpointManager(enable=False)
    called: list[str] = []
    more = {} if save == "save_pytree" else {"callback": called.append}
    assert save_by(manager, save, {"w": jnp.ones(2)}, tmp_path / "c", **more) == str(tmp_path / "c")
    (message,) = logged()
    assert "nothing was written" in message
    assert called == []
    assert list(tmp_path.iterdir()) == []
    manager.enable = None
    save_by(manager, save, {"w": jnp.ones(2)}, tmp_path / "c", mesh=MESH)
    manager.enable = False
    assert_same(manager.load(tmp_path / "c", None)[0], {"w": jnp.ones(2)})
    manager.enable = True
    assert save_by(manager, save, {"w": jnp.zeros(2)}, tmp_path / "c", mesh=MESH)
    assert_same(manager.load(tmp_path / "c", None)[0], {"w": jnp.zeros(2)})


FLOATS = {
    "f": jnp.float32([0.1, 0.2]),
    "h": jnp.float16([1.5]),
    "n": np.float64([0.1]),
    "i": jnp.arange(3),
    "c": jnp.ones(2, jnp.complex64),
    "x": 0.1,
    "m": jnp.array([True]),
}
DTYPES = {"f": "float32", "h": "float16", "n": "float64", "i": "int32", "c": "complex64", "m": "bool"}


def _dtypes(path: Path) -> dict[str, Any]:
    return {key: leaf.dtype for key, leaf in shardkeep.inspect(path).leaves.items() if leaf.shape is not None}


@saves
def test_a_save_that_names_no_dtype_keeps_every_dtype(save: str, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    save_by(manager, save, FLOATS, tmp_path / "c", mesh=MESH)
    assert _dtypes(tmp_path / "c") == DTYPES


@saves
def test_the_managers_dtype_counts_when_a_gather_is_asked_for(save: str, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    for name, expected in ((jnp.bfloat16, "bfloat16"), ("fp16", "float16"), (None, None)):
        manager.float_dtype = name
        save_by(manager, save, FLOATS, tmp_path / "c", mesh=MESH, do_all_gather=True)
        floats = {} if expected is None else dict.fromkeys("fhn", expected)
        assert _dtypes(tmp_path / "c") == {**DTYPES, **floats}


@saves
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("fp64", "float64"),
        ("fp8", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e5m2"),
        (np.dtype("float16"), "float16"),
        (np.float32, "float32"),
        (jnp.bfloat16, "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_a_saves_own_dtype_always_casts_floats_and_only_floats(
    save: str, dtype: Any, name: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_by(AsyncCheckpointManager(), save, FLOATS, tmp_path / "c", mesh=MESH, float_dtype=dtype)
    assert _dtypes(tmp_path / "c") == {**DTYPES, **dict.fromkeys("fhn", name)}
    stored = shardkeep.load(tmp_path / "c")
    assert stored["x"] == 0.1
    assert bits(stored["n"]) == bits(np.float64([0.1]).astype(jnp.dtype(name)))


@saves
@pytest.mark.parametrize("dtype", ["nonsense", 17, "int8", object()])
def test_an_unknown_dtype_is_a_value_error_before_anything_is_written(save: str, dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype"):
        save_by(AsyncCheckpointManager(), save, FLOATS, tmp_path / "c", mesh=MESH, float_dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_gather_functions_are_applied_and_missing_ones_allowed(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    tree = {"a": {"w": sharded()}, "b": sharded()}
    for gather_fns, expected in ((None, ["a"]), (False, ["a"]), (True, None)):
        path = tmp_path / str(gather_fns)
        manager.save(tree, path, MESH, gather_fns=gather_fns)
        assert layout(path, "a/w") == layout(path, "b") == expected
    for number, functions in enumerate(({"a": {"w": lambda x: x * 2}}, {"a.w": lambda x: x * 2})):
        manager.save(tree, tmp_path / f"some{number}", MESH, gather_fns=functions)
        loaded, _ = manager.load(tmp_path / f"some{number}", None)
        assert_same(loaded["a"]["w"], jnp.asarray(np.asarray(sharded() * 2)))
        assert_same(loaded["b"], jnp.asarray(np.asarray(sharded())))


@saves
def test_a_gather_stores_each_array_in_one_piece(save: str, tmp_path: Path) -> None:
    more = {"cpu_offload": False} if save == "save_pytree" else {}
    tree = {"w": sharded(LARGE)}
    for gather, count in ((False, 8), (True, 1)):
        path = tmp_path / str(gather)
        save_by(AsyncCheckpointManager(), save, tree, path, mesh=MESH, do_all_gather=gather, **more)
        assert pieces(path) == count


@saves
def test_offloading_takes_arrays_to_host_memory_before_they_are_written(save: str, tmp_path: Path) -> None:
    """So what is stored is one piece on the host, not a piece for each device."""
    tree = {"w": sharded(LARGE)}
    for offload, count in ((False, 8), (True, 1)):
        path = tmp_path / str(offload)
        save_by(AsyncCheckpointManager(), save, tree, path, mesh=MESH, cpu_offload=offload)
        assert pieces(path) == count
        assert_same(AsyncCheckpointManager().load(path, None)[0], on_one_device(tree))


def test_offloading_waits_for_room_in_the_memory_budget(tmp_path: Path, logged: Log) -> None:
    shardkeep.set_memory_budget(1 << 20)
    try:
        with Scope("a test") as scope:
            claim = scope.add(Claim(budget, scope))
            claim.take(1 << 20, "another save")
            threading.Timer(0.3, claim.release).start()
            save = threading.Thread(
                target=AsyncCheckpointManager().save,
                args=({"w": sharded()}, tmp_path / "2", MESH),
                kwargs={"cpu_offload": True},
            )
            save.start()  # on another thread: on this one it would not wait for what this one holds
            save.join()
    finally:
        shardkeep.set_memory_budget(None)
    assert "moving w to the host is waiting for memory" in " ".join(logged())


@saves
def test_metadata_comes_back_and_is_checked_before_anything_is_written(save: str, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager()
    given = {"epoch": 3, "loss": 0.25, "tags": ["a", None], "nested": {"x": True}}
    save_by(manager, save, {"w": jnp.ones(2)}, tmp_path / "c", mesh=MESH, metadata=given)
    assert manager.load(tmp_path / "c", None)[1]["custom_metadata"] == given
    for wrong in ({"a": jnp.ones(2)}, {"a": object()}, {(3,): "x"}, {"a": {"b": 1j}}):
        with pytest.raises(ValueError, match="metadata"):
            save_by(manager, save, {"w": jnp.ones(2)}, tmp_path / "d", mesh=MESH, metadata=wrong)
    assert not (tmp_path / "d").exists()


def test_the_callback_gets_the_path_after_the_commit(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    seen: list[Any] = []

    def callback(path: str) -> None:
        seen.append((path, shardkeep.exists(path)))

    manager.save({"w": jnp.ones(2)}, tmp_path / "a", MESH, callback=callback)
    manager.save_async({"w": jnp.ones(2)}, tmp_path / "b", MESH, callback=callback).wait()
    assert seen == [(str(tmp_path / "a"), True), (str(tmp_path / "b"), True)]


@saves
def test_no_callback_when_a_save_fails(save: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    called: list[str] = []
    more = {} if save == "save_pytree" else {"callback": called.append}
    with pytest.raises(NotADirectoryError, match="file"):
        save_by(AsyncCheckpointManager(), save, {"w": jnp.ones(2)}, tmp_path / "file", mesh=MESH, **more)
    assert called == []


@saves
@forms
def test_a_tree_of_the_same_prefix_is_replaced(save: str, form: str, tmp_path: Path) -> None:
    """With another shape, dtype, sharding and structure, and nothing of the old one stays on the disk."""
    settings, name = FORMS[form]
    manager = AsyncCheckpointManager(**settings)
    for tree in ({"w": jnp.ones(4), "old": sharded()}, {"w": sharded()}, {"new": {"w": jnp.ones((3, 3), jnp.int8)}}):
        save_by(manager, save, tree, tmp_path / name, mesh=MESH)
        assert_same(manager.load(tmp_path / name, None)[0], on_one_device(tree))
    assert [p for p in tmp_path.rglob("*") if p.name == "old" or p.suffix == ".tmp"] == []
    chunks = {p.stat().st_ino for p in tmp_path.rglob("0.0")}  # one file, that has a clean name as well
    assert len(chunks) == (name == "c" and manager.use_tensorstore)
    assert len([p for p in tmp_path.rglob("*.safetensors") if p.is_file()]) == (not manager.use_tensorstore)


# --- prefixes


@pytest.mark.parametrize("form", [form for form in FORMS if form != "safetensors file"])
def test_trees_of_several_prefixes_and_none_share_a_directory(form: str, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(**FORMS[form][0])
    trees = {None: {"w": jnp.ones(1)}, "a": {"w": jnp.ones(2)}, "b": {"w": jnp.ones(3)}}
    for prefix, tree in trees.items():
        manager.save(tree, tmp_path, MESH, prefix=prefix, metadata={"for": prefix})
    for prefix, tree in trees.items():
        loaded, metadata = manager.load(tmp_path, None, prefix=prefix)
        assert_same(loaded, tree)
        assert metadata["custom_metadata"] == {"for": prefix}


def test_a_safetensors_file_holds_one_tree_and_remembers_its_prefix(tmp_path: Path) -> None:
    manager, path = AsyncCheckpointManager(use_tensorstore=False), tmp_path / "m.safetensors"
    manager.save({"w": jnp.ones(2)}, path, MESH, prefix="a")
    assert_same(manager.load(path, None, prefix="a")[0], {"w": jnp.ones(2)})
    assert_same(manager.load(path, None)[0], {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="no tree with prefix 'b'; it has 'a'"):
        manager.load(path, None, prefix="b")
    with pytest.raises(ValueError, match="holds the tree with prefix 'a'"):
        manager.save({"w": jnp.ones(2)}, path, MESH, prefix="b")
    assert_same(manager.load(path, None)[0], {"w": jnp.ones(2)})


@pytest.mark.parametrize("tensorstore", [True, False])
def test_a_prefix_nests_with_dots_or_slashes(tensorstore: bool, tmp_path: Path) -> None:
    """Also one inside another, with a key of the outer tree that looks like the inner one."""
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    manager.save({"b": {"w": jnp.ones(1)}}, tmp_path, MESH, prefix="a")
    manager.save({"w": jnp.ones(2)}, tmp_path, MESH, prefix="a.b")
    manager.save({"w": jnp.ones(3)}, tmp_path, MESH, prefix="a/b/c")
    assert_same(manager.load(tmp_path, None, prefix="a")[0], {"b": {"w": jnp.ones(1)}})
    for same in ("a.b", "a/b"):
        assert_same(manager.load(tmp_path, None, prefix=same)[0], {"w": jnp.ones(2)})
    assert_same(manager.load(tmp_path, None, prefix="a.b/c")[0], {"w": jnp.ones(3)})
    assert len(shardkeep.inspect(tmp_path).prefixes) == 3


@saves
@pytest.mark.parametrize("prefix", ["..", "../x", "a/../b", "/abs", "a\0b", "a\nb", "a//b", ".", "a.", 3, "~x", "\x7f"])
def test_a_prefix_that_could_leave_the_checkpoint_is_refused_before_any_write(
    save: str, prefix: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="prefix"):
        save_by(AsyncCheckpointManager(), save, {"w": jnp.ones(2)}, tmp_path / "c", mesh=MESH, prefix=prefix)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prefix", ["", None, 3, b"x"])
def test_save_pytree_wants_a_prefix(prefix: Any, tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    with pytest.raises(ValueError, match="needs a prefix"):
        manager.save_pytree({"w": jnp.ones(2)}, tmp_path / "c", MESH, prefix=prefix)
    assert list(tmp_path.iterdir()) == []


# --- formats


def test_use_tensorstore_chooses_the_format_and_the_name_only_among_safetensors(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(4.0)}
    manager = AsyncCheckpointManager()
    manager.save(tree, tmp_path / "a.safetensors", MESH)
    assert (tmp_path / "a.safetensors" / "w" / ".zarray").exists()
    manager.use_tensorstore = False
    manager.save(tree, tmp_path / "b.safetensors", MESH)
    assert_same(safetensors.numpy.load_file(tmp_path / "b.safetensors"), {"w": np.arange(4, dtype=np.float32)})
    manager.save(tree, tmp_path / "c", MESH)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    assert_same(safetensors.numpy.load_file(file), {"w": np.arange(4, dtype=np.float32)})
    for name in ("a.safetensors", "b.safetensors", "c"):
        assert_same(manager.load(tmp_path / name, None)[0], tree)


@pytest.mark.parametrize("name", ["c", "c.safetensors"])
@pytest.mark.parametrize("tensorstore", [True, False])
def test_save_pytree_makes_a_directory_with_data_below_the_prefix(name: str, tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    manager.save_pytree({"w": jnp.ones(2)}, tmp_path / name, MESH, prefix="state")
    files = {str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*") if p.is_file()}
    data = {f for f in files if f.startswith("state/")}
    assert any(f.endswith(".safetensors") for f in data) is not tensorstore
    documents = {"manifest.json", "tensorstore_index.json", "checkpoint_metadata.json", ".zgroup"}
    beside = {f for f in files - data if not f.startswith(".shardkeep/")}
    assert beside == (documents if tensorstore else {"manifest.json"})
    tree, _ = manager.load_pytree(tmp_path / name, None, prefix="state")
    assert_same(tree, {"w": jnp.ones(2)})


def test_write_index_false_keeps_a_tree_out_of_eformers_index(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    for write_index in (True, False):
        prefix = f"index_{write_index}"
        manager.save_pytree({"w": jnp.ones(2)}, tmp_path, MESH, prefix=prefix, write_index=write_index)
        assert_same(manager.load_pytree(tmp_path, None, prefix=prefix)[0], {"w": jnp.ones(2)})
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    assert list(index["prefixes"]) == ["index_True"]


def test_eformers_index_lists_only_what_eformer_reads_rightly(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    """No keys that it would take for one, no types it has no name for, no prefix whose directory has another name."""
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(3)}, "c.d": jnp.ones(1), "a/b": jnp.ones(1), "n": 3}
    manager.save({**tree, "u": jnp.ones(2, jnp.uint4), "k": jax.random.key(0)}, tmp_path, MESH)
    manager.save({"w": jnp.ones(2)}, tmp_path, MESH, prefix="plain")
    manager.save({"w": jnp.ones(2)}, tmp_path, MESH, prefix="odd:name")
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    assert [entry["path"] for entry in index["arrays"]] == ["c.d"]
    assert index["prefixes"] == {"plain": [{"path": "plain/w", "shape": [2], "dtype": "float32"}]}
    assert_same(manager.load(tmp_path, None, prefix="odd:name")[0], {"w": jnp.ones(2)})
    manager.save({"w": jnp.zeros(3)}, tmp_path, MESH, prefix="plain")
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    assert index["prefixes"] == {"plain": [{"path": "plain/w", "shape": [3], "dtype": "float32"}]}


def test_compression_is_zstd_on_the_chunks(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    tree = {"w": jnp.zeros((256, 256))}
    for compressed in (False, True):
        manager.enable_compression = compressed
        manager.save(tree, tmp_path / str(compressed), MESH)
        described = json.loads((tmp_path / str(compressed) / "w" / ".zarray").read_text())
        assert described["compressor"] == ({"id": "zstd", "level": 1} if compressed else None)
        size = (tmp_path / str(compressed) / "w" / "0.0").stat().st_size
        assert (size < 1000) is compressed
        assert_same(manager.load(tmp_path / str(compressed), None)[0], tree)


# --- buckets: not served yet


def test_a_relative_path_lies_in_the_bucket_and_an_absolute_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_credentials: None
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = AsyncCheckpointManager(gcs_bucket="bucket")
    with pytest.raises(shardkeep.AccessError, match="gs://bucket"):
        manager.save({"w": jnp.ones(2)}, "runs/1", MESH)
    with pytest.raises(shardkeep.AccessError, match="gs://bucket"):
        manager.load("runs/1", None)
    with pytest.raises(shardkeep.AccessError, match="gs://bucket"):
        manager.save_pytree({"w": jnp.ones(2)}, "runs/1", MESH, prefix="p")
    assert list(tmp_path.iterdir()) == []
    manager.save({"w": jnp.ones(2)}, tmp_path / "c", MESH)
    manager.gcs_bucket = None
    manager.save({"w": jnp.ones(2)}, "runs/1", MESH)
    assert (tmp_path / "runs/1/manifest.json").exists()


# --- validation


STORED = {
    "f": jnp.float32([0.1]),
    "sharded": sharded(),
    "b": jnp.ones(3, jnp.bfloat16),
    "i4": jnp.array([-8, 7], jnp.int4),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "big": np.arange(3, dtype=">f4"),
    "zero": jnp.zeros((0, 3)),
    "scalar": jnp.int32(3),
}


@saves
@forms
def test_validation_records_the_sha256_of_each_array_as_stored(save: str, form: str, tmp_path: Path) -> None:
    settings, name = FORMS[form]
    manager = AsyncCheckpointManager(enable_validation=True, **settings)
    keys = {"key": jax.random.key(1), "n": 3}
    save_by(manager, save, {**STORED, **keys}, tmp_path / name, mesh=MESH)
    _, metadata = manager.load(tmp_path / name, None, validate=True)
    expected = {k: AsyncCheckpointManager.compute_checksum(_native(v)) for k, v in STORED.items()}
    expected["key"] = AsyncCheckpointManager.compute_checksum(jax.random.key_data(keys["key"]))
    assert metadata["checksum"] == expected
    manager.enable_validation = False
    save_by(manager, save, STORED, tmp_path / f"plain-{name}", mesh=MESH)
    assert manager.load(tmp_path / f"plain-{name}", None)[1]["checksum"] == {}


def _native(array: Any) -> Any:
    return array.astype(array.dtype.newbyteorder("=")) if isinstance(array, np.ndarray) else array


def test_the_checksum_is_that_of_the_array_after_the_cast(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(enable_validation=True)
    manager.save({"w": jnp.float32([0.1])}, tmp_path, MESH, float_dtype="bf16")
    _, metadata = manager.load(tmp_path, None)
    assert metadata["checksum"]["w"] == manager.compute_checksum(jnp.bfloat16([0.1]))


def test_colliding_keys_have_a_checksum_each(tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(enable_validation=True)
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(3)}}
    manager.save(tree, tmp_path, MESH)
    loaded, metadata = manager.load(tmp_path, None)
    assert_same(loaded, tree)
    assert len(metadata["checksum"]) == len(metadata["array_metadata"]) == 2


def test_compute_checksum_is_sha256_of_the_c_order_bytes() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    expected = hashlib.sha256(array.tobytes()).hexdigest()
    for form in (array, jnp.asarray(array), np.asfortranarray(array), array.T.copy().T):
        assert AsyncCheckpointManager.compute_checksum(form) == expected


# --- metadata of a save


@forms
def test_a_save_fills_in_time_framework_and_arrays(form: str, tmp_path: Path) -> None:
    settings, name = FORMS[form]
    manager = AsyncCheckpointManager(**settings)
    before = datetime.datetime.now(datetime.UTC)
    manager.save({"a": {"w": jnp.ones((2, 3), jnp.bfloat16)}, "n": 3}, tmp_path / name, MESH, metadata={"x": 1})
    _, metadata = manager.load(tmp_path / name, None)
    assert set(metadata) == {
        "version",
        "timestamp",
        "checksum",
        "array_metadata",
        "framework_version",
        "custom_metadata",
    }
    assert before <= datetime.datetime.fromisoformat(metadata["timestamp"]) <= datetime.datetime.now(datetime.UTC)
    assert metadata["timestamp"].endswith("+00:00")
    assert metadata["version"] == shardkeep.__version__
    assert metadata["framework_version"] == jax.__version__
    assert metadata["array_metadata"] == {"a.w": {"shape": [2, 3], "dtype": "bfloat16"}}
    assert metadata["custom_metadata"] == {"x": 1}


def test_other_saves_have_such_metadata_too(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    shardkeep.save(tmp_path / "c", {"w": jnp.ones(2)}, metadata={"x": 1})
    _, metadata = manager.load(tmp_path / "c", None)
    assert metadata["custom_metadata"] == {"x": 1}
    assert metadata["array_metadata"] == {"w": {"shape": [2], "dtype": "float32"}}
    assert metadata["timestamp"] == shardkeep.inspect(tmp_path / "c").tree().created


# --- structures


def _tree() -> dict[str, Any]:
    return {
        "dict": {7: jnp.ones(1), 2.5: 1, True: 2, None: 3, b"x": 4, ("t", 1): 5, "s": 6},
        "list": [jnp.arange(2), (jnp.zeros(0), []), ()],
        "point": Point(jnp.ones(2), {"deep": jnp.int32(3)}),
        "dense": Dense(jnp.ones((2, 2)), None),
        "keyed": Keyed(jnp.ones(1), 2, tag=["plain", 1]),
        "unkeyed": Unkeyed([jnp.ones(1), jnp.ones(2)], tag={"n": 1}),
        "none": None,
        "empty": {},
        "values": {"i": 10**40, "f": 0.1, "c": 1 + 2j, "b": True, "s": "é", "y": b"\0", "np": np.float32(1)},
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 3),
    }


@pytest.mark.parametrize("tensorstore", [True, False])
def test_save_pytree_and_load_pytree_keep_the_structure_itself(tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    tree = _tree()
    manager.save_pytree(tree, tmp_path, MESH, prefix="p", extras={"step": 1})
    loaded, extras = manager.load_pytree(tmp_path, None, prefix="p")
    assert_same(loaded, tree)
    assert extras == {"step": 1}


@pytest.mark.parametrize("tree", [{}, [], (), None, {"a": {}}, jnp.ones(2), Point(1, None), 3])
@pytest.mark.parametrize("tensorstore", [True, False])
def test_empty_trees_and_bare_leaves_are_trees(tree: Any, tensorstore: bool, tmp_path: Path) -> None:
    manager = AsyncCheckpointManager(use_tensorstore=tensorstore)
    manager.save_pytree(tree, tmp_path, MESH, prefix="p")
    assert_same(manager.load_pytree(tmp_path, None, prefix="p")[0], tree)
    assert isinstance(manager.load(tmp_path, None)[0], dict)


@forms
def test_every_dtype_and_shape_comes_back_bit_for_bit(form: str, tmp_path: Path) -> None:
    settings, name = FORMS[form]
    manager = AsyncCheckpointManager(enable_validation=True, **settings)
    tree = {
        d: [jnp.ones(shape).astype(d) for shape in ((), (0,), (3,), (8, 2))]
        + [jax.device_put(jnp.ones((8, 2)).astype(d), NamedSharding(MESH, P("a")))]
        for d in JAX
    }
    manager.save(tree, tmp_path / name, MESH)
    loaded, _ = manager.load(tmp_path / name, None)
    for dtype, arrays in tree.items():
        for number, array in enumerate(arrays):
            assert_same(loaded[dtype][str(number)], jnp.asarray(np.asarray(array)))


# --- background saves


def test_save_async_returns_after_the_snapshot(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    """The caller may change or donate everything at once."""
    opened = threading.Event()
    array, donated = np.arange(5), jnp.arange(5)
    pending = manager.save_async({"n": array, "d": donated}, tmp_path, MESH, callback=lambda _: opened.wait(60))
    assert isinstance(pending, PendingSave)
    assert not pending.done()
    array[:] = 0
    donated.delete()
    opened.set()
    assert pending.wait().nbytes > 0
    assert_same(shardkeep.load(tmp_path), {"n": np.arange(5), "d": jnp.arange(5)})


@pytest.mark.parametrize("drain", ["wait_until_finished", "close", "with"])
def test_pending_saves_are_drained_and_what_failed_is_raised(drain: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    manager = AsyncCheckpointManager()
    opened = threading.Event()

    def run() -> None:
        with manager if drain == "with" else nullcontext():
            manager.save_async({"w": jnp.ones(2)}, tmp_path / "file" / "below", MESH)
            manager.save_async({"w": jnp.ones(2)}, tmp_path / "good", MESH, callback=lambda _: opened.wait(60))
            threading.Timer(0.2, opened.set).start()
        if drain != "with":
            getattr(manager, drain)()

    with pytest.raises(NotADirectoryError, match="file"):
        run()
    assert opened.is_set()
    assert shardkeep.exists(tmp_path / "good")
    manager.wait_until_finished()


def test_a_failure_is_not_raised_by_the_next_save(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    (tmp_path / "file").write_text("")
    failed = manager.save_async({"w": jnp.ones(2)}, tmp_path / "file" / "below", MESH)
    while not failed.done():
        pass
    manager.save({"w": jnp.ones(2)}, tmp_path / "a", MESH)
    manager.save_async({"w": jnp.ones(2)}, tmp_path / "b", MESH).wait()
    with pytest.raises(NotADirectoryError, match="file"):
        manager.wait_until_finished()


def test_the_global_manager_is_always_the_same_and_jaxs_own(manager: AsyncCheckpointManager) -> None:
    found = manager.global_manager
    assert isinstance(found, GlobalAsyncCheckpointManager)
    assert manager.global_manager is found
    manager.wait_until_finished()


def test_importing_the_package_does_not_import_tensorstore() -> None:
    printed = run_python(
        "import sys, shardkeep.serialization as s; m = s.AsyncCheckpointManager()\n"
        "print('tensorstore' in sys.modules); m.global_manager; print('tensorstore' in sys.modules)"
    )
    assert printed.split() == ["False", "True"]


def test_everything_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def main() -> Any:
        with AsyncCheckpointManager() as manager:
            manager.save({"w": jnp.ones(2)}, tmp_path / "a", MESH)
            manager.save_async({"w": jnp.ones(2)}, tmp_path / "b", MESH)
            manager.save_pytree({"w": jnp.ones(2)}, tmp_path / "c", MESH, prefix="p")
            manager.wait_until_finished()
            found = [manager.load(tmp_path / name, MESH)[0] for name in "abc"]
            return [*found, manager.load_pytree(tmp_path / "c", MESH, prefix="p")[0]]

    for loaded in asyncio.run(main()):
        assert_same(loaded, {"w": jnp.ones(2)})


# --- paths


def test_is_tensorstore_looks_at_what_is_there(tmp_path: Path) -> None:
    """Also by the name of the index; and it never raises."""
    manager = AsyncCheckpointManager()
    manager.save({"w": jnp.ones(2)}, tmp_path / "ts", MESH)
    manager.use_tensorstore = False
    manager.save({"w": jnp.ones(2)}, tmp_path / "st", MESH)
    manager.save({"w": jnp.ones(2)}, tmp_path / "m.safetensors", MESH)
    is_tensorstore = AsyncCheckpointManager.is_tensorstore
    assert is_tensorstore(tmp_path / "ts")
    assert is_tensorstore(str(tmp_path / "ts" / "tensorstore_index.json"))
    (tmp_path / "text").write_text("x")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tensorstore_index.json").write_text("{")
    for absent in ("st", "m.safetensors", "absent", "absent/tensorstore_index.json", "text", "bad", "text/x", ""):
        assert not is_tensorstore(tmp_path / absent), absent
    for odd in ("gs://b/x", "s3://b/tensorstore_index.json", "", "a\0b", "file://host/x"):
        assert not is_tensorstore(odd), odd


def test_safe_loadpath_strips_the_index_and_is_safe_for_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_path: Callable[[Any], Any]
) -> None:
    safe = AsyncCheckpointManager.safe_loadpath
    (tmp_path / "c").mkdir()
    found = safe(any_path(f"{tmp_path}/c/tensorstore_index.json"))
    assert str(found).endswith(f"{tmp_path}/c")
    assert found.exists()
    assert not (found / "x").exists()
    assert str(found / "x" / "y") == f"{found}/x/y"
    assert str(safe("gs://b/x/tensorstore_index.json")) == "gs://b/x"
    assert str(safe("gs://b/x") / "y") == "gs://b/x/y"
    assert str(safe("/tensorstore_index.json")) == "/"
    assert str(safe("/x/my_tensorstore_index.json")) == "/x/my_tensorstore_index.json"
    monkeypatch.chdir(tmp_path)
    assert str(safe("tensorstore_index.json")) == "."


def test_a_save_logs_below_warning_by_default(tmp_path: Path, manager: AsyncCheckpointManager, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    manager.save({"w": jnp.ones(2)}, tmp_path, MESH)
    manager.load(tmp_path, MESH)
    assert [r for r in caplog.records if r.name.startswith("shardkeep")] == []


def test_loaded_arrays_are_on_one_device_without_a_mesh(tmp_path: Path, manager: AsyncCheckpointManager) -> None:
    manager.save({"w": sharded()}, tmp_path, MESH)
    assert manager.load(tmp_path, None)[0]["w"].sharding == SingleDeviceSharding(jax.devices()[0])
