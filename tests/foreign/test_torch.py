"""PyTorch's files, alone and in parts, as real torch wrote them (tests/fixtures/torch) and as anyone may."""

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from buckets.fixtures import Place, _alone, place  # noqa: F401
from foreign.conformance import FileReaderTests
from foreign.torchfiles import Call, Global, Pickle, StorageId, Strided, encode_torch, zipped
from shardkeep.foreign.torch import TorchReader
from shardkeep.model.tree import flatten
from support import assert_same, mesh_of, pattern

P = PartitionSpec
ORDERED = Global("collections", "OrderedDict")


class TestTorch(FileReaderTests):
    name = "torch"
    dtypes = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64")
    dtypes += ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        (path / "w.pt").write_bytes(encode_torch(arrays))
        return path / "w.pt"


class TestTorchCompressed(TestTorch):
    """Nobody writes such files, but nothing forbids them."""

    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        (path / "w.pth").write_bytes(encode_torch(arrays, deflate=True))
        return path / "w.pth"


class TestTorchOfTheOtherOrder(TestTorch):
    def write(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        turned = {key: _swapped(array) for key, array in arrays.items()}
        (path / "w.pt").write_bytes(encode_torch(turned, notes={"byteorder": b"big"}))
        return path / "w.pt"


def _swapped(array: np.ndarray) -> np.ndarray:
    unit = array.itemsize // (2 if array.dtype.kind == "c" else 1)
    return array.reshape(-1).view(f"u{unit}").byteswap().view(array.dtype).reshape(array.shape)


def put(path: Path, tree: Any, **options: Any) -> Path:
    path.write_bytes(encode_torch(tree, **options))
    return path


FIXTURES = Path(__file__).parents[1] / "fixtures" / "torch"
EXPECTED: dict[str, dict[str, list[Any]]] = json.loads((FIXTURES / "expected.json").read_text())


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def leaves_of(path: Path, **options: Any) -> dict[str, Any]:
    """What `load` gives, by key."""
    return {leaf.key: leaf.value for leaf in flatten(shardkeep.load(path, **options))[1]}


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "dcp"])
@pytest.mark.parametrize("mmap", [True, False])
def test_what_torch_wrote_is_loaded_bit_for_bit(name: str, mmap: bool) -> None:
    found = leaves_of(FIXTURES / name, mmap=mmap)
    arrays = {key: np.asarray(found[key]) for key in found if isinstance(found[key], jax.Array | np.ndarray)}
    described = {key: [array.dtype.name, list(array.shape), array.tobytes().hex()] for key, array in arrays.items()}
    assert described == EXPECTED[name]
    report = shardkeep.verify(FIXTURES / name)
    assert (report.ok, report.unchecked) == (True, len(arrays))
    assert shardkeep.exists(FIXTURES / name)
    assert shardkeep.inspect(FIXTURES / name).source == "torch"


def test_containers_and_plain_values_are_as_they_were() -> None:
    found = shardkeep.load(FIXTURES / "trained.pt")
    del found["optimizer"]["state"]
    assert found["optimizer"]["param_groups"][1]["params"] == [2, 3]
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert found["scheduler"]["base_lrs"] == [0.001, 0.0001]
    values = {key: found[key] for key in ("epoch", "best", "done", "name", "nothing", "bytes", "complex", "long")}
    assert values == {
        "epoch": 3,
        "best": 0.25,
        "done": False,
        "name": "run ü",
        "nothing": None,
        "bytes": b"\0\xff",
        "complex": 1 + 2j,
        "long": 1 << 70,
    }
    assert_same(found["score"], np.float64(2.5))
    assert (found["dtype"], found["device"], found["size"]) == ("torch.bfloat16", "cpu", (2, 3))
    assert_same(found["losses"], (1.5, [2.5, {"last": jnp.float32(3.5)}]))


def test_the_state_of_an_optimizer_has_its_numbers_as_keys() -> None:
    state = shardkeep.load(FIXTURES / "trained.pt", include="^optimizer/state")["optimizer"]["state"]
    assert list(state) == [0, 1, 2, 3]
    assert_same(state[3]["step"], jnp.float32(1))


def test_what_is_not_known_becomes_a_stand_in() -> None:
    found = shardkeep.load(FIXTURES / "unknown.pt")
    assert_same(found["w"], jnp.ones(2))
    assert found["halves"] == shardkeep.OpaqueNode("torch:Tensor", {"dtype": "torch.complex32", "shape": (2,)})
    assert found["quantized"].class_name == "torch._utils:_rebuild_qtensor"
    assert found["module"].class_name == "torch.nn.modules.linear:Linear"
    assert found["module"]["_parameters"]["weight"].shape == (1, 2)
    assert found["set"].class_name == "builtins:set"
    keys = shardkeep.inspect(FIXTURES / "unknown.pt").leaves
    assert keys["halves/dtype"].value == "torch.complex32"
    args = shardkeep.load(FIXTURES / "trained.pt", include="^args")["args"]
    assert args == shardkeep.OpaqueNode("argparse:Namespace", {"lr": 0.1, "layers": [1, 2]})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("legacy.pt", r"before version 1\.6, which is not a zip archive; load it with torch and save it again"),
        ("program.pt", r"TorchScript program, which torch\.jit\.save wrote"),
    ],
)
def test_other_forms_of_torch_are_refused_in_words(name: str, message: str) -> None:
    for read in (shardkeep.load, shardkeep.inspect):
        with pytest.raises(shardkeep.CheckpointNotFoundError, match=message):
            read(FIXTURES / name)
    assert not shardkeep.exists(FIXTURES / name)


def test_files_that_only_have_the_name_are_refused_in_words(tmp_path: Path) -> None:
    made = {
        "plain.pt": (b"\x80\x02}q\x00.", "it is a pickle, but not in an archive"),
        "old.pt": (bytes(257) + b"ustar" + bytes(250), "it is a tar archive: the format of torch 0.1"),
        "text.ckpt": (b"hello", "has the name of a PyTorch file, but is not a zip archive"),
        "zip.pth": (zipped({"a": b"1"}, "x"), "has the name of a PyTorch file, but is not a zip archive"),
    }
    for name, (data, message) in made.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(shardkeep.CheckpointNotFoundError, match=message):
            shardkeep.load(tmp_path / name)
    (tmp_path / "zip.zip").write_bytes(made["zip.pth"][0])
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="shardkeep cannot read this kind of file"):
        shardkeep.load(tmp_path / "zip.zip")


@pytest.mark.parametrize(
    "name", ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]
)
def test_partitions_of_zero_are_refused_and_ranks_of_models_are_read(name: str, tmp_path: Path) -> None:
    put(tmp_path / name, {"w": np.ones(2, np.float32)})
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"a partition of DeepSpeed's ZeRO .* zero_to_fp32\.py"):
        shardkeep.load(tmp_path / name)
    put(tmp_path / "mp_rank_00_model_states.pt", {"module": {"a.w": np.ones(2, np.float32)}})
    assert_same(shardkeep.load(tmp_path / "mp_rank_00_model_states.pt"), {"module": {"a": {"w": jnp.ones(2)}}})
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="no checkpoint at|several checkpoints"):
        shardkeep.load(tmp_path)


class TestParts:
    """Several files that are one checkpoint, as transformers writes them."""

    FOLDER = FIXTURES / "parts"

    def test_every_name_of_it_finds_all_of_it(self) -> None:
        expected = shardkeep.load(self.FOLDER)
        assert list(expected["model"]["layers"]) == ["0", "1", "2", "3"]
        for name in (
            "pytorch_model.bin.index.json",
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
        ):
            assert_same(shardkeep.load(self.FOLDER / name), expected)
        assert shardkeep.latest(self.FOLDER) == str(self.FOLDER)

    def copied(self, path: Path) -> Path:
        path = path / "folder"
        path.mkdir()
        for file in self.FOLDER.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        return path

    def test_without_an_index_the_names_tell(self, tmp_path: Path) -> None:
        folder = self.copied(tmp_path)
        (folder / "pytorch_model.bin.index.json").unlink()
        (folder / "training_args.bin").unlink()
        assert_same(shardkeep.load(folder), shardkeep.load(self.FOLDER))
        (folder / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(shardkeep.MissingDataError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
            shardkeep.load(folder)

    def test_a_part_that_is_missing_is_damage(self, tmp_path: Path) -> None:
        folder = self.copied(tmp_path)
        (folder / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(shardkeep.MissingDataError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
            shardkeep.load(folder)
        assert not shardkeep.exists(folder)
        assert not shardkeep.verify(folder).ok

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (b"{", "is not an index of PyTorch files"),
            (b'{"weight_map": []}', "is not an index of PyTorch files"),
            (b'{"weight_map": {"w": "../training_args.bin"}}', "points outside the checkpoint"),
            (b'{"weight_map": {"w": "training_args.bin"}}', "does not hold a dict of tensors"),
            (b'{"weight_map": {"w": "pytorch_model-00001-of-00002.bin"}}', "says that 'w' is in .*, but it is not"),
        ],
    )
    def test_an_index_that_lies_is_damage(self, index: bytes, message: str, tmp_path: Path) -> None:
        folder = self.copied(tmp_path)
        (folder / "pytorch_model.bin.index.json").write_bytes(index)
        with pytest.raises(shardkeep.IntegrityError, match=message):
            shardkeep.load(folder)

    def test_an_adapter_folder_is_loaded_as_its_weights(self) -> None:
        found = shardkeep.load(FIXTURES / "adapter")
        assert_same(found["base_model"]["model"]["q_proj"]["lora_A"]["weight"], jnp.ones((2, 4)))


def test_tensors_in_order_are_pieces_that_begin_on_64_bytes() -> None:
    """So that they are mapped, and JAX uses them as they are."""
    leaves = shardkeep.inspect(FIXTURES / "views.pt").leaves
    kinds = {key: leaf.kind for key, leaf in leaves.items()}
    strided = {
        "transposed",
        "column",
        "inner",
        "permuted",
        "expanded",
        "windows",
        "conjugated",
        "imaginary",
        "channels_last",
    }
    assert {key for key, kind in kinds.items() if kind == "torch"} == strided
    assert leaves["base"].pieces[0].offset % 64 == 0
    assert leaves["row"].pieces[0].offset == leaves["base"].pieces[0].offset + 2 * 12 * 4


@pytest.mark.parametrize("key", ["transposed", "inner", "permuted", "expanded", "windows", "base"])
def test_each_device_gets_its_region_of_a_strided_tensor(key: str) -> None:
    whole = np.asarray(leaves_of(FIXTURES / "views.pt", include=f"^{key}$")[key])
    names = ["a" if n % 2 == 0 else None for n in whole.shape]
    spec = P(*(name if names.index("a") == axis else None for axis, name in enumerate(names))) if "a" in names else P()
    found = shardkeep.load(FIXTURES / "views.pt", include=f"^{key}$", shardings=NamedSharding(mesh_of(2), spec))[key]
    assert_same(np.asarray(found), whole)


def test_a_large_strided_tensor_is_read_in_parts(tmp_path: Path) -> None:
    base = pattern("float32", (1200, 2000))
    tree = {"t": Strided(base, 0, (2000, 1200), (1, 2000)), "step": Strided(base, 7, (600, 500), (4000, 3))}
    found = shardkeep.load(put(tmp_path / "w.pt", tree))
    assert_same(np.asarray(found["t"]), np.ascontiguousarray(base.T))
    assert_same(np.asarray(found["step"]), np.ascontiguousarray(base[::2, 7:1507:3]))
    part = shardkeep.load(tmp_path / "w.pt", include="^t$", shardings=NamedSharding(mesh_of(4), P(None, "a")))["t"]
    assert_same(np.asarray(part), np.ascontiguousarray(base.T))


class TestDamage:
    def test_a_changed_byte_is_found_by_the_crc_of_its_entry(self, tmp_path: Path) -> None:
        path = put(tmp_path / "w.pt", {"a": np.arange(99), "b": {"c": np.arange(9.0)}})
        (piece,) = shardkeep.inspect(path).leaves["b/c"].pieces
        document = bytearray(path.read_bytes())
        document[piece.offset + 3] ^= 1
        path.write_bytes(document)
        (problem,) = shardkeep.verify(path).problems
        assert (problem.leaf, problem.file) == ("b/c", str(path))
        assert "'archive/data/1' does not match its CRC" in problem.message

    def test_a_changed_pickle_is_found_when_it_is_read(self, tmp_path: Path) -> None:
        path = put(tmp_path / "w.pt", {"a": np.arange(99)})
        document = path.read_bytes()
        path.write_bytes(document.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
        with pytest.raises(shardkeep.IntegrityError, match="does not match its CRC"):
            shardkeep.load(path)

    def test_an_entry_that_is_missing_or_has_another_size_is_damage(self, tmp_path: Path) -> None:
        written = Pickle()
        data = written.dumps({"w": np.arange(4.0)})
        (tmp_path / "w.pt").write_bytes(zipped({"data.pkl": data}, "x"))
        with pytest.raises(shardkeep.MissingDataError, match="lacks the entry 'data/0'"):
            shardkeep.load(tmp_path / "w.pt")
        (tmp_path / "w.pt").write_bytes(zipped({"data.pkl": data, "data/0": bytes(31)}, "x"))
        with pytest.raises(shardkeep.IntegrityError, match="'data/0' has 31 bytes, and its tensors need 32"):
            shardkeep.load(tmp_path / "w.pt")

    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            (Strided(np.arange(4.0), 1, (4,), (1,)), "reaches beyond its storage"),
            (Strided(np.arange(4.0), 0, (2, 2), (3, 1)), "reaches beyond its storage"),
            (Strided(np.arange(4.0), 0, (2, 2), (2,)), "does not have one stride per axis"),
            (Strided(np.arange(4.0), 0, (2,), (-1,)), "not a tuple of numbers"),
            (Strided(np.arange(4.0), -1, (2,), (1,)), "not a tuple of numbers"),
            (Strided(np.arange(4.0), 0, (1 << 61, 4), (0, 0)), r"the shape .* is not valid"),
            (Strided(np.arange(4), 0, (2,), (1,), {"conj": True}), "conjugated or negated"),
            (Strided(np.arange(4.0), 0, (1 << 40,), (0,)), "do not match tensors of"),
        ],
    )
    def test_a_tensor_that_cannot_be_is_damage(self, tensor: Strided, message: str, tmp_path: Path) -> None:
        with pytest.raises(shardkeep.IntegrityError, match=message):
            shardkeep.load(put(tmp_path / "w.pt", {"w": tensor}))

    def test_entries_that_overlap_or_have_one_name_are_damage(self, tmp_path: Path) -> None:
        document = put(tmp_path / "w.pt", {"a": np.arange(9), "b": np.arange(9)}).read_bytes()
        first, second = (document.index(b"PK\x01\x02", document.index(b"PK\x01\x02")), 0)
        entries = [at for at in range(len(document)) if document[at : at + 4] == b"PK\x01\x02"]
        first, second = (
            at
            for at in entries
            if b"data/" in document[at + 46 : at + 64] and b".data" not in document[at + 46 : at + 66]
        )
        moved = bytearray(document)
        moved[second + 42 : second + 46] = document[first + 42 : first + 46]  # its header is where that of the first is
        (tmp_path / "w.pt").write_bytes(moved)
        with pytest.raises(shardkeep.IntegrityError, match="is damaged|overlaps"):
            shardkeep.load(tmp_path / "w.pt")
        (tmp_path / "w.pt").write_bytes(document.replace(b"archive/data/1", b"archive/data/0"))
        with pytest.raises(shardkeep.IntegrityError, match="the same name"):
            shardkeep.load(tmp_path / "w.pt")

    def test_a_compressed_bomb_takes_no_more_memory_than_the_file_justifies(self, tmp_path: Path) -> None:
        """An entry that says that it has 2^40 bytes, and a pickle of zeros that would have 2^30."""
        path = put(tmp_path / "w.pt", {"w": np.arange(9)}, deflate=True)
        document = path.read_bytes()
        at = document.index(b"archive/data/0", document.index(b"PK\x01\x02")) - 46
        path.write_bytes(document[: at + 24] + struct.pack("<L", 0xFFFFFFF0) + document[at + 28 :])
        with pytest.raises(shardkeep.IntegrityError, match="cannot have 4,294,967,280 bytes"):
            shardkeep.load(path)
        path.write_bytes(zipped({"data.pkl": bytes(80 << 20)}, "x", deflate=True))
        with pytest.raises(shardkeep.IntegrityError, match="more than the limit of"):
            shardkeep.load(path)

    def test_names_of_entries_are_no_paths(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(bytes(32))
        written = Pickle()
        kind = Global("torch", "DoubleStorage")
        args = (StorageId(kind, "../../secret", 4), 0, (4,), (1,), False, Call(ORDERED))
        data = written.dumps({"w": Call(Global("torch._utils", "_rebuild_tensor_v2"), args)})
        (tmp_path / "w.pt").write_bytes(zipped({"data.pkl": data}, "x"))
        with pytest.raises(shardkeep.MissingDataError, match="lacks the entry"):
            shardkeep.load(tmp_path / "w.pt")
        (tmp_path / "w.pt").write_bytes(zipped({"data.pkl": written.dumps({"a": 1})}, ".."))
        assert shardkeep.load(tmp_path / "w.pt") == {"a": 1}

    def test_long_archives_have_long_numbers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beyond 4 GiB zip files have other records, which Python writes for small files too if it is told to."""
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
        tree = {"a": pattern("float32", (9, 7)), "b": pattern("bfloat16", (5,))}
        path = put(tmp_path / "w.pt", tree)
        assert b"PK\x06\x06" in path.read_bytes()
        assert_same(shardkeep.load(path), jax.tree.map(jnp.asarray, tree))
        assert shardkeep.verify(path).ok


class TestNothingIsRun:
    """A pickle can ask for any call. None is made: what asks for one stays a description."""

    def test_calls_become_stand_ins(self, tmp_path: Path) -> None:
        mark = tmp_path / "run"
        calls = [
            Call(Global("os", "system"), (f"touch {mark}",)),
            Call(Global("builtins", "exec"), (f"open({str(mark)!r}, 'w')",)),
            Call(Global("pathlib", "Path.touch"), (str(mark),), {"a": 1}),
            Call(Global("torch._utils", "_rebuild_from_type_v2"), (Global("os", "system"), 1, (f"touch {mark}",), 2)),
        ]
        found = shardkeep.load(put(tmp_path / "w.pt", {"calls": calls, "w": np.arange(3, dtype=np.int32)}))
        assert not mark.exists()
        assert [each.class_name for each in found["calls"][:3]] == ["os:system", "builtins:exec", "pathlib:Path.touch"]
        assert_same(found["w"], jnp.arange(3))
        assert main_inspects(tmp_path / "w.pt")

    def test_what_repeats_itself_without_end_is_refused(self, tmp_path: Path) -> None:
        """Forty levels of a list of two times the same list would have 2^40 leaves."""
        doubled = b"\x80\x02]" + b"q\x00]" + b"".join(b"q%c(h%ch%ce]" % (i + 1, i, i) for i in range(40))
        doubled = doubled[:-1] + b"."
        (tmp_path / "w.pt").write_bytes(zipped({"data.pkl": doubled}, "x"))
        with pytest.raises(shardkeep.IntegrityError, match="repeats itself too often"):
            shardkeep.load(tmp_path / "w.pt")

    def test_a_list_that_contains_itself_ends(self, tmp_path: Path) -> None:
        (tmp_path / "w.pt").write_bytes(zipped({"data.pkl": b"\x80\x02]q\x00h\x00a."}, "x"))
        assert shardkeep.load(tmp_path / "w.pt") == [shardkeep.OpaqueNode("builtins:list", {})]

    def test_what_is_nested_too_deeply_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "w.pt").write_bytes(zipped({"data.pkl": b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."}, "x"))
        with pytest.raises(shardkeep.IntegrityError, match="nested too deeply"):
            shardkeep.load(tmp_path / "w.pt")

    def test_objects_as_keys_are_kept_beside_their_values(self, tmp_path: Path) -> None:
        pairs = b"\x80\x02}(cenum\nE\n(K\x01tRK\x02u."
        (tmp_path / "w.pt").write_bytes(zipped({"data.pkl": pairs}, "x"))
        found = shardkeep.load(tmp_path / "w.pt")
        assert found == shardkeep.OpaqueNode(
            "builtins:dict", {"items": [(shardkeep.OpaqueNode("enum:E", {"args": (1,)}), 2)]}
        )


def main_inspects(path: Path) -> bool:
    from shardkeep.cli.main import main

    return main(["inspect", str(path)]) == 0


def test_names_with_very_many_dots_make_no_levels(tmp_path: Path) -> None:
    found = shardkeep.load(put(tmp_path / "w.pt", {"." * 1000: np.ones(1, np.float32), "a.b": np.ones(1, np.float32)}))
    assert list(found) == ["." * 1000, "a.b"]


def test_files_among_names() -> None:
    names = ["a.pt", "b.pth", "c.ckpt", "vocab.bin", ".hidden.pt", "pytorch_model.bin", "m-00001-of-00002.bin"]
    names += ["m-00002-of-00002.bin", "n.bin.index.json", "n-00001-of-00001.bin", "x.pt2", "notes.txt"]
    assert TorchReader().among(names) == [
        "a.pt",
        "b.pth",
        "c.ckpt",
        "m-00001-of-00002.bin",
        "n.bin.index.json",
        "pytorch_model.bin",
    ]


def test_it_is_read_from_a_bucket(place: Place) -> None:
    for name in ("views.pt", "trained.pt"):
        place.put(name, (FIXTURES / name).read_bytes())
        assert_same(shardkeep.load(f"{place.url}/{name}"), shardkeep.load(FIXTURES / name))
        assert shardkeep.verify(f"{place.url}/{name}").ok
    place.upload(FIXTURES / "parts", "parts")
    assert_same(shardkeep.load(f"{place.url}/parts"), shardkeep.load(FIXTURES / "parts"))
