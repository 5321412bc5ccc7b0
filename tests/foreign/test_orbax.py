"""Orbax's checkpoints: every layout that it writes, bit for bit what it would restore, and refused where damaged."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from foreign.conformance import DirectoryReaderTests
from shardkeep.cli.main import main
from support import assert_same, bits, every_dtype, mesh_of, pattern

P = PartitionSpec
FIXTURES = Path(__file__).parents[1] / "fixtures" / "orbax"
_UNSIGNED = {1: np.uint8, 2: np.uint16}


def expected_of(name: str) -> dict[tuple[str, ...], Any]:
    """What a fixture must load to, by path: what Orbax was given when it wrote it."""
    told = json.loads((FIXTURES / name / "expected.json").read_text())["leaves"]
    stored = np.load(FIXTURES / name / "expected.npz")
    found: dict[tuple[str, ...], Any] = {}
    for leaf in told.values():
        path = tuple(part.strip("[].").strip("'") for part in leaf["keypath"])
        kind = leaf["kind"]
        if "npz" in leaf:
            data = stored[leaf["npz"]]
            dtype = np.dtype(getattr(ml_dtypes, leaf["dtype"], leaf["dtype"]))
            data = data.view(dtype) if data.dtype != dtype else data
            found[path] = jax.random.wrap_key_data(data, impl=leaf["impl"]) if kind == "prng_key" else data
        elif kind in ("int", "bool", "float", "str"):
            found[path] = {"int": int, "bool": bool, "float": float, "str": str}[kind](leaf["value"])
        else:
            found[path] = {"empty_dict": {}, "empty_list": []}.get(kind)
    return found


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[int(name)] if isinstance(tree, list | tuple) else tree[name]
    return tree


def assert_loaded(tree: Any, expected: dict[tuple[str, ...], Any]) -> None:
    assert expected
    for path, value in expected.items():
        found = at(tree, path)
        if isinstance(value, np.ndarray):
            assert (found.dtype, found.shape) == (value.dtype, value.shape), path
            assert bits(found) == bits(value), path
        elif hasattr(value, "dtype"):
            assert_same(found, value)
        else:
            assert type(found) is type(value), path
            assert found == value, path


STEPS = {
    "manager_root": {"0": "step_0", "10": "step_10", "20": "step_20"},
    "manager_composite": {"ckpt_000001": "step_1", "ckpt_000003": "step_3"},
    "v1_training_root": {"0": "step_0", "2": "step_2"},
}
TREES = [path.name for path in sorted(FIXTURES.iterdir()) if path.name not in STEPS]


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_loaded_as_orbax_was_given_it(name: str) -> None:
    path = FIXTURES / name / "ckpt"
    assert shardkeep.inspect(path).source == "orbax"
    tree = shardkeep.load(path)
    assert_loaded(tree, expected_of(name))
    assert shardkeep.exists(path)
    assert shardkeep.verify(path).ok


@pytest.mark.parametrize(("name", "step"), [(name, step) for name, steps in STEPS.items() for step in steps])
def test_a_step_is_loaded_as_orbax_was_given_it(name: str, step: str) -> None:
    path = FIXTURES / name / "ckpt" / step
    wanted = {p[1:]: value for p, value in expected_of(name).items() if p[0] == STEPS[name][step]}
    manifest = shardkeep.inspect(path)
    if name == "manager_composite":
        tree: Any = {prefix: shardkeep.load(path, prefix=prefix) for prefix in manifest.prefixes}
        assert list(tree) == ["arr", "cfg", "nprng", "rng", "state"]
        assert_same(tree["arr"], np.arange(4))
        state = np.random.RandomState(int(step[-1])).get_state()
        assert_same(tree["nprng"][1], state[1])
        assert [tree["nprng"][0], *tree["nprng"][2:]] == [state[0], *state[2:]]
    else:
        tree = shardkeep.load(path)
    assert_loaded(tree, wanted)
    assert shardkeep.verify(path).ok


def test_lists_and_dicts_are_told_apart() -> None:
    tree = shardkeep.load(FIXTURES / "std_default_mixed" / "ckpt")
    assert type(tree["list"]) is type(tree["tuple"]) is list
    assert type(tree["nested"]) is dict
    assert "0" in tree["nested"]
    assert tree["opt_state"][0] is None


def test_what_was_saved_from_numpy_is_loaded_to_numpy() -> None:
    manifest = shardkeep.inspect(FIXTURES / "std_default_mixed" / "ckpt")
    kinds = {key: leaf.kind for key, leaf in manifest.leaves.items()}
    assert {kinds[key] for key in ("np_f64", "np_i64")} == {"numpy"}
    assert {kinds[key] for key in ("key_typed", "key_rbg", "key_typed_batch")} == {"prng"}
    assert {kinds[key] for key in ("f32", "key_legacy")} == {"jax"}
    assert {kinds[key] for key in ("py_int", "py_bool", "py_float")} == {"value"}


def test_shardings_are_kept_on_another_mesh() -> None:
    """On a mesh with the same axes a leaf is sharded as it was saved; nobody has to name the shardings."""
    path = FIXTURES / "sharded8_default" / "ckpt"
    leaves = shardkeep.inspect(path).leaves
    assert leaves["grid"].sharding.spec == ("data", "model")
    assert dict(leaves["grid"].sharding.mesh) == {"data": 4, "model": 2}
    assert leaves["joint"].sharding.spec == (("data", "model"),)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    tree = shardkeep.load(path, mesh=mesh, include="grid|joint|partial|f1_last")
    assert tree["grid"].sharding == NamedSharding(mesh, P("data", "model"))
    assert tree["joint"].sharding == NamedSharding(mesh, P(("data", "model")))
    assert tree["f1_last"].sharding == NamedSharding(mesh, P(None, None, "model"))
    wanted = expected_of("sharded8_default")
    for key, array in tree.items():
        assert bits(np.asarray(array)) == bits(wanted[(key,)])


class Layout:
    """A layout of arrays as TensorStore writes it."""

    def __init__(self, driver: str, database: bool, compressed: bool = True, inline: int = 0, **more: Any) -> None:
        self.driver, self.database, self.compressed, self.inline, self.more = driver, database, compressed, inline, more

    def spec(self, path: Path, name: str, chunks: Sequence[int]) -> dict[str, Any]:
        if self.database:
            config = {"max_inline_value_bytes": self.inline, "max_decoded_node_bytes": self.more.get("node", 1 << 20)}
            base = f"file://{path}/"
            place: Any = {"driver": "ocdbt", "base": base, "path": f"{name}/", "config": config}
        else:
            place = {"driver": "file", "path": f"{path}/{name}/"}
        if self.driver == "zarr":
            compressor = {"id": "zstd", "level": 1} if self.compressed else None
            metadata: Any = {"chunks": list(chunks), "compressor": compressor}
        else:
            codecs: Any = [{"name": "zstd"}] if self.compressed else []
            inner = self.more.get("inner", lambda shape: shape)(chunks)
            metadata = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}}}
            if self.more.get("sharded", True):
                codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": list(inner), "codecs": codecs}}]
            metadata["codecs"] = codecs
        return {"driver": self.driver, "kvstore": place, "metadata": metadata, "store_data_equal_to_fill_value": True}

    def write(self, path: Path, name: str, array: np.ndarray, chunks: Sequence[int] | None = None) -> None:
        spec = self.spec(path, name, chunks or [max(n, 1) for n in array.shape])
        if not self.more.get("strict", True):
            del spec["store_data_equal_to_fill_value"]
        more = {"dtype": array.dtype.name, "shape": array.shape, "create": True}
        made = tensorstore.open(spec, **more).result()
        made.write(array).result()


def describe(path: Path, names: Sequence[str], driver: str, database: bool, strict: bool = True) -> None:
    """The documents that Orbax writes beside arrays."""
    listed = {
        str(tuple(name.split("."))): {
            "key_metadata": [{"key": key, "key_type": 2} for key in name.split(".")],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for name in names
    }
    described = {"tree_metadata": listed, "use_ocdbt": database, "use_zarr3": driver == "zarr3"}
    described["store_array_data_equal_to_fill_value"] = strict
    (path / "_METADATA").write_text(json.dumps(described))
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": "x", "commit_timestamp_nsecs": 10**18}))


def only_one(shape: Sequence[int]) -> Sequence[int]:
    return [1] * len(shape)


LAYOUTS = {
    "database, zarr 2": Layout("zarr", True),
    "database, zarr 2, not compressed": Layout("zarr", True, compressed=False),
    "database, zarr 3": Layout("zarr3", True),
    "database, zarr 3, inner chunks": Layout("zarr3", True, inner=only_one),
    "database, values in nodes": Layout("zarr", True, inline=1000),
    "database, zarr 3, values in nodes": Layout("zarr3", True, inline=1000),
    "directories, zarr 2": Layout("zarr", False),
    "directories, zarr 2, not compressed": Layout("zarr", False, compressed=False),
    "directories, zarr 3": Layout("zarr3", False),
    "directories, zarr 3, not sharded": Layout("zarr3", False, sharded=False),
    "directories, zarr 3, not compressed": Layout("zarr3", False, compressed=False),
}


def referenced(path: Path) -> dict[str, int]:
    """The files that the newest version of a database refers to, and up to where, as TensorStore shows it."""
    base = tensorstore.KvStore.open(f"file://{path}/").result()
    found: dict[str, int] = {}
    pending = [tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]]
    while pending:
        location = pending.pop()
        kind, _, name, offset, length = location.split(":")
        found[name] = max(found.get(name, 0), int(offset) + int(length))
        if kind == "btreenode":
            for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
                pending += [entry["location"]] if "location" in entry else []
                pending += [entry["indirect_value"]] if "indirect_value" in entry else []
    return dict(sorted(found.items()))


class OrbaxTests(DirectoryReaderTests):
    """One layout, through everything that reads a checkpoint."""

    name = "orbax"
    dtypes: ClassVar[Sequence[str]] = [name for name in every_dtype() if hasattr(tensorstore, name)]
    layout: Layout

    @property
    def knows_sizes(self) -> bool:
        indexed = self.layout.driver == "zarr3" and self.layout.more.get("sharded", True)
        return self.layout.database or not self.layout.compressed or indexed

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        for key, array in arrays.items():
            self.layout.write(path, key, array)
        describe(path, list(arrays), self.layout.driver, self.layout.database)
        return path

    def data_files(self, path: Path) -> list[Path]:
        if self.layout.database:
            return [path / name for name, end in referenced(path).items() if (path / name).stat().st_size == end]
        return sorted(
            file for file in path.glob("*/**/*") if file.is_file() and file.name not in (".zarray", "zarr.json")
        )

    def documents(self, path: Path) -> list[Path]:
        if self.layout.database:
            return [path / "_METADATA", path / "manifest.ocdbt"]
        return [path / "_METADATA", path / "b" / (".zarray" if self.layout.driver == "zarr" else "zarr.json")]

    def point_outside(self, path: Path, outside: Path) -> None:
        file = self.data_files(path)[-1]
        file.unlink()
        file.symlink_to(outside)


for _name, _layout in LAYOUTS.items():
    _class = "Test" + re.sub(r"\W+", "_", _name).title()
    globals()[_class] = type(_class, (OrbaxTests,), {"layout": _layout})
del OrbaxTests


class TestManager:
    """The directory of a CheckpointManager, as a run."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(FIXTURES / "manager_root" / "ckpt", tmp_path / "run"))

    @staticmethod
    def kernel(step: int) -> np.ndarray:
        return expected_of("manager_root")[(f"step_{step}", "params", "dense", "kernel")]

    def test_the_newest_step_is_found(self, root: Path) -> None:
        assert shardkeep.latest(root) == str(root / "20")
        (root / "20" / "default" / "manifest.ocdbt").unlink()
        shutil.copytree(root / "10", root / "30.orbax-checkpoint-tmp-17")
        assert shardkeep.latest(root) == str(root / "10")

    def test_its_steps_have_their_metrics(self, root: Path) -> None:
        run = shardkeep.Run(root, name="{}", keep=shardkeep.Keep(best=1, metric="loss", mode="min"))
        assert [(s.number, s.source, s.metadata["note"]) for s in run.steps()] == [
            (0, "orbax", "s0"),
            (10, "orbax", "s10"),
            (20, "orbax", "s20"),
        ]
        assert [s.metrics["loss"] for s in run.steps()] == pytest.approx([1, 1 / 11, 1 / 21])
        assert run.best().number == 20
        assert_same(np.asarray(run.load(10)["params"]["dense"]["kernel"]), self.kernel(10))

    def test_a_run_begins_with_its_weights(self, root: Path, tmp_path: Path) -> None:
        with shardkeep.Run(tmp_path / "mine") as run:
            state, step = run.resume(jax.tree.map(np.asarray, shardkeep.load(root / "20")), init_from=root)
            assert (step, run.resumed.init_from) == (0, str(root / "20"))
        assert_same(np.asarray(state["params"]["dense"]["kernel"]), self.kernel(20))

    def test_a_run_continues_in_it(self, root: Path) -> None:
        """And leaves the steps that are there as they are, whatever `keep` says."""
        with shardkeep.Run(root, name="{}", keep=shardkeep.Keep(last=1)) as run:
            state, step = run.resume(jax.tree.map(np.asarray, shardkeep.load(root / "20")))
            assert step == 20
            assert_same(np.asarray(state["params"]["dense"]["kernel"]), self.kernel(20))
            run.save(30, {**state, "step": 30})
            run.save(40, {**state, "step": 40})
            run.wait()
            assert [(s.number, s.source) for s in run.steps()] == [
                *((n, "orbax") for n in (0, 10, 20)),
                (40, "shardkeep"),
            ]
        assert shardkeep.latest(root) == str(root / "40")

    def test_it_is_resumed_only_by_the_names_that_it_has(self, root: Path) -> None:
        with (
            pytest.raises(shardkeep.CheckpointExistsError, match=r"open the run with name='\{\}'"),
            shardkeep.Run(root) as run,
        ):
            run.resume({"w": np.zeros(3)})

    def test_the_command_line_knows_its_steps(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ls", "--json", str(root)]) == 0
        listed = json.loads(capsys.readouterr().out)["steps"]
        assert [(s["step"], s["kind"], s["state"]) for s in listed] == [(n, "orbax", "complete") for n in (0, 10, 20)]
        assert listed[1]["metrics"]["loss"] == pytest.approx(1 / 11)
        assert main(["ls", str(root)]) == 0
        assert re.search(r"^ *20 .*complete.*loss=0\.047619.*orbax$", capsys.readouterr().out, re.MULTILINE)
        for which, step in (("latest", 20), ("10", 10), ("best", 20)):
            more = ["--metric", "loss", "--mode", "min"] if which == "best" else []
            assert main(["inspect", "--json", f"{root}@{which}", *more]) == 0
            assert json.loads(capsys.readouterr().out)["trees"][0]["metadata"]["note"] == f"s{step}"

    def test_steps_with_other_names_are_known_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        root = FIXTURES / "manager_composite" / "ckpt"
        assert shardkeep.latest(root) == str(root / "ckpt_000003")
        assert main(["inspect", "--json", f"{root}@1"]) == 0
        assert {tree["prefix"] for tree in json.loads(capsys.readouterr().out)["trees"]} == {
            *("arr", "cfg", "nprng", "rng", "state")
        }
        assert main(["ls", "--json", str(root)]) == 0
        listed = json.loads(capsys.readouterr().out)["checkpoints"]
        assert [(c["name"], c["kind"]) for c in listed] == [("ckpt_000001", "orbax"), ("ckpt_000003", "orbax")]


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("std_default_mixed/ckpt", ""),
        ("no_ocdbt_zarr2/ckpt", ""),
        ("no_ocdbt_zarr3/ckpt", ""),
        ("v1_save/ckpt", "state"),
        ("manager_root/ckpt/20", "default"),
    ],
)
def test_a_tree_without_its_description_is_damaged(name: str, tree: str, tmp_path: Path) -> None:
    """Without `_METADATA`, strings, lists and empty nodes would be lost without a word."""
    path = tmp_path / "run" / "20"
    lost = Path(shutil.copytree(FIXTURES / name, path)) / tree / "_METADATA"
    lost.unlink()
    with pytest.raises(shardkeep.MissingDataError, match=f"^{re.escape(str(lost))} is missing"):
        shardkeep.load(path)
    assert not shardkeep.exists(path)
    assert shardkeep.latest(tmp_path / "run") is None
    assert [problem.file for problem in shardkeep.verify(path).problems] == [str(lost)]


@pytest.mark.parametrize("item", ["arr", "cfg", "nprng", "rng", "state"])
def test_an_item_that_lost_its_files_is_damaged(item: str, tmp_path: Path) -> None:
    path = tmp_path / "3"
    shutil.copytree(FIXTURES / "manager_composite" / "ckpt" / "ckpt_000003", path)
    shutil.rmtree(path / item)
    assert item not in shardkeep.inspect(path).trees, "an item may be removed as a whole"
    (path / item).mkdir()
    with pytest.raises(shardkeep.MissingDataError, match=rf"contains no data, .* lists the item '{item}'") as caught:
        shardkeep.load(path, prefix="arr")
    assert caught.value.file == str(path / item)


class TestUnfinished:
    """What Orbax would not take for a checkpoint is not loaded either."""

    def test_processes_that_were_not_merged(self, tmp_path: Path) -> None:
        made = Path(shutil.copytree(FIXTURES / "std_default" / "ckpt", tmp_path / "made"))
        (made / "manifest.ocdbt").unlink()
        with pytest.raises(shardkeep.errors.IncompleteCheckpointError, match=r"made is an unfinished Orbax checkpoint"):
            shardkeep.load(made)
        assert not shardkeep.exists(made)

    def test_an_item_that_was_not_renamed(self, tmp_path: Path) -> None:
        made = Path(shutil.copytree(FIXTURES / "manager_root" / "ckpt" / "10", tmp_path / "10"))
        (made / "default").rename(made / "default.orbax-checkpoint-tmp-1")
        with pytest.raises(shardkeep.errors.IncompleteCheckpointError, match="contains default.orbax-checkpoint-tmp-1"):
            shardkeep.load(made)
        assert shardkeep.latest(tmp_path) is None

    def test_a_save_beside_it(self, tmp_path: Path) -> None:
        shutil.copytree(FIXTURES / "std_default" / "ckpt", tmp_path / "10")
        shutil.copytree(FIXTURES / "std_default" / "ckpt", tmp_path / "20.orbax-checkpoint-tmp-17")
        assert shardkeep.latest(tmp_path) == str(tmp_path / "10")


class TestWhatIsNotStored:
    """A chunk that is not there is damage, unless the checkpoint says that fill values are not stored."""

    ARRAY = np.concatenate([np.zeros((2, 6), np.float32), pattern("float32", (2, 6))])

    def write(self, path: Path, layout: Layout, strict: bool) -> None:
        layout.write(path, "w", self.ARRAY, (1, 3))
        describe(path, ["w"], layout.driver, layout.database, strict)

    @pytest.mark.parametrize("database", [True, False])
    def test_it_has_the_fill_value(self, database: bool, tmp_path: Path) -> None:
        self.write(tmp_path, Layout("zarr3", database, sharded=False, strict=False), strict=False)
        assert_same(shardkeep.load(tmp_path), {"w": jax.numpy.asarray(self.ARRAY)})
        report = shardkeep.verify(tmp_path)
        assert (report.ok, report.unchecked) == (True, 1)
        assert shardkeep.exists(tmp_path)

    @pytest.mark.parametrize("database", [True, False])
    def test_it_is_missing_if_all_are_stored(self, database: bool, tmp_path: Path) -> None:
        self.write(tmp_path, Layout("zarr3", database, sharded=False, strict=False), strict=True)
        with pytest.raises(shardkeep.MissingDataError, match="leaf 'w': 4 of 8 chunks are missing"):
            shardkeep.load(tmp_path)
        assert not shardkeep.verify(tmp_path).ok
        assert not shardkeep.exists(tmp_path)
        assert list(shardkeep.inspect(tmp_path).leaves) == ["w"]

    @pytest.mark.parametrize("said", [False, None])
    def test_an_array_without_a_fill_value(self, said: bool | None, tmp_path: Path, caplog: Any) -> None:
        """zarr version 2 as TensorStore writes it: only a checkpoint that says so can leave chunks out."""
        self.write(tmp_path, Layout("zarr", False, strict=False), strict=False)
        described = json.loads((tmp_path / "_METADATA").read_text())
        if said is None:
            del described["store_array_data_equal_to_fill_value"]
        (tmp_path / "_METADATA").write_text(json.dumps(described))
        assert_same(shardkeep.load(tmp_path), {"w": jax.numpy.asarray(self.ARRAY)})
        (tmp_path / "w" / "2.0").unlink()
        if said is None:
            with pytest.raises(shardkeep.MissingDataError, match="leaf 'w': 1 of 8 chunks is missing"):
                shardkeep.load(tmp_path)
            return
        expected = self.ARRAY.copy()
        expected[2, :3] = 0
        assert_same(shardkeep.load(tmp_path), {"w": jax.numpy.asarray(expected)})
        assert "leaf 'w': 1 of 8 chunks is missing" in caplog.text
        assert shardkeep.verify(tmp_path).unchecked == 1

    def test_another_fill_value(self, tmp_path: Path) -> None:
        self.write(tmp_path, Layout("zarr", False), strict=False)
        described = json.loads((tmp_path / "w" / ".zarray").read_text())
        (tmp_path / "w" / ".zarray").write_text(json.dumps(described | {"fill_value": 2.5}))
        (tmp_path / "w" / "0.0").unlink()
        expected = self.ARRAY.copy()
        expected[0, :3] = 2.5
        assert_same(shardkeep.load(tmp_path), {"w": jax.numpy.asarray(expected)})


class TestOtherChunks:
    """What is not stored as its bytes are in memory, or not evenly, is put together region by region."""

    @pytest.mark.parametrize("database", [True, False])
    @pytest.mark.parametrize("driver", ["zarr", "zarr3"])
    def test_chunks_beyond_the_edge(self, driver: str, database: bool, tmp_path: Path) -> None:
        array = pattern("bfloat16", (7, 5))
        Layout(driver, database, inner=only_one).write(tmp_path, "w", array, (3, 2))
        describe(tmp_path, ["w"], driver, database)
        assert_same(shardkeep.load(tmp_path), {"w": jax.numpy.asarray(array)})
        sharding = NamedSharding(mesh_of(7), P("a"))
        assert_same(np.asarray(shardkeep.load(tmp_path, shardings=sharding)["w"]), array)

    CODECS: ClassVar[dict[str, Any]] = {
        "gzip": {"compressor": {"id": "gzip", "level": 1}},
        "blosc": {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}},
        "Fortran order": {"order": "F"},
        "big-endian": {"dtype": ">f4"},
    }

    @pytest.mark.parametrize("database", [True, False])
    @pytest.mark.parametrize("codec", CODECS)
    def test_other_codecs_are_read_by_tensorstore(self, codec: str, database: bool, tmp_path: Path) -> None:
        array = pattern("float32", (7, 5))
        spec = Layout("zarr", database).spec(tmp_path, "w", (3, 2))
        spec["metadata"] |= self.CODECS[codec]
        dtype = {} if "dtype" in spec["metadata"] else {"dtype": "float32"}
        tensorstore.open(spec, shape=array.shape, create=True, **dtype).result().write(array).result()
        describe(tmp_path, ["w"], "zarr", database)
        assert_same(shardkeep.load(tmp_path), {"w": jax.numpy.asarray(array)})
        assert shardkeep.verify(tmp_path).ok

    def test_names_with_slashes_and_percent_signs(self, tmp_path: Path) -> None:
        for name in ("a/b", "50%", "%2F", "...", "ä"):
            Layout("zarr", True, inline=1000).write(tmp_path, name, np.full(3, len(name), np.float32))
        (tmp_path / "_METADATA").write_text(
            json.dumps(
                {
                    "tree_metadata": {
                        name: {
                            "key_metadata": [{"key": name, "key_type": 2}],
                            "value_metadata": {"value_type": "jax.Array"},
                        }
                        for name in ("a/b", "50%", "%2F", "...", "ä")
                    }
                }
            )
        )
        found = shardkeep.load(tmp_path)
        assert {name: float(array[0]) for name, array in found.items()} == {
            name: len(name) for name in ("a/b", "50%", "%2F", "...", "ä")
        }
        shardkeep.save(tmp_path, {"x": 1}, prefix="ours")
        assert_same(shardkeep.load(tmp_path, prefix=""), found)


def test_a_tree_of_ours_beside_it_keeps_all_that_is_known_of_it(tmp_path: Path) -> None:
    """Keys, shardings and NumPy arrays, which our manifest then records."""
    for name in ("std_default_mixed", "sharded8_default"):
        made = Path(shutil.copytree(FIXTURES / name / "ckpt", tmp_path / name))
        before = shardkeep.inspect(made).tree("")
        shardkeep.save(made, {"x": 1}, prefix="ours")
        after = shardkeep.inspect(made).tree("")
        assert [(leaf.key, leaf.kind) for leaf in after.leaves] == [(leaf.key, leaf.kind) for leaf in before.leaves]
        assert [leaf.sharding for leaf in after.arrays] == [leaf.sharding for leaf in before.arrays]
        assert (after.source, after.created) == ("orbax", before.created)
        assert_loaded(shardkeep.load(made, prefix=""), expected_of(name))
