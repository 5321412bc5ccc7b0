"""Files that other programs wrote: everything the safetensors package writes, alone or in a Hugging Face folder."""

import json
import logging
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep
from dtypes import dtype_of
from shardkeep.cli.main import main
from support import assert_same, bits, mesh_of, pattern

P = PartitionSpec
CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
WIDE = {"F64": "float64", "I64": "int64", "U64": "uint64"}


def _write(
    path: Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None
) -> None:
    """A safetensors file as any program might write it: unpadded header, tensors back to back."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata is not None else {}
    at = 0
    for name, (code, shape, data) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def test_numpy_files_of_the_package(tmp_path: Path) -> None:
    names = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"]
    tree = {name: pattern(name, (3, 5)) for name in names}
    tree |= {"zero": np.zeros((0, 3), np.float32), "scalar": np.array(2.5, np.float32)}
    safetensors.numpy.save_file(tree, tmp_path / "m.safetensors", metadata={"by": "numpy"})
    loaded = shardkeep.load(tmp_path / "m.safetensors")
    assert_same({name: loaded[name] for name in tree}, {name: jnp.asarray(array) for name, array in tree.items()})
    assert len(loaded) == len(tree)
    assert shardkeep.inspect(tmp_path / "m.safetensors").metadata == {"by": "numpy"}


def test_flax_files_of_the_package(tmp_path: Path) -> None:
    tree = {"w": jnp.asarray(pattern("bfloat16", (4, 4))), "b": jnp.arange(3)}
    safetensors.flax.save_file(dict(tree), tmp_path / "m.safetensors")
    loaded = shardkeep.load(tmp_path / "m.safetensors")
    assert_same({k: loaded[k] for k in tree}, tree)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("mmap", [True, False])
def test_every_dtype_of_the_format(code: str, mmap: Any, tmp_path: Path) -> None:
    host = pattern(dtype_of(CODES[code]), (3, 7))
    _write(tmp_path / "m.safetensors", {"odd": ("U8", [3], b"abc"), "w": (code, [3, 7], host.tobytes())})
    safetensors.deserialize((tmp_path / "m.safetensors").read_bytes())  # the package agrees that it is one
    loaded = shardkeep.load(tmp_path / "m.safetensors", mmap=mmap)
    assert_same(loaded["w"], jnp.asarray(host))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "complex64", "float32"])
def test_what_serialize_writes(name: str, tmp_path: Path) -> None:
    host = pattern(dtype_of(name), (2, 8))
    spec = safetensors.TensorSpec(dtype=name, shape=[2, 8], data_ptr=host.ctypes.data, data_len=host.nbytes)
    safetensors.serialize_file({"w": spec}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    assert_same(shardkeep.load(tmp_path / "m.safetensors"), {"w": jnp.asarray(host)})


@pytest.mark.parametrize("code", WIDE)
def test_64_bit_tensors_are_numpy_with_a_warning(code: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = pattern(WIDE[code], (5,))
    _write(tmp_path / "m.safetensors", {"w": (code, [5], host.tobytes())})
    assert_same(shardkeep.load(tmp_path / "m.safetensors"), {"w": host})
    assert "jax_enable_x64" in caplog.text


def test_four_bit_floats_are_unpacked_low_half_first(tmp_path: Path) -> None:
    _write(tmp_path / "m.safetensors", {"w": ("F4", [2, 4], bytes([0x10, 0x32, 0x54, 0xFE])), "z": ("F4", [0], b"")})
    safetensors.deserialize((tmp_path / "m.safetensors").read_bytes())
    loaded = shardkeep.load(tmp_path / "m.safetensors")
    expected = np.array([0, 1, 2, 3, 4, 5, 14, 15], np.uint8).view(ml_dtypes.float4_e2m1fn).reshape(2, 4)
    assert_same(loaded["w"], jnp.asarray(expected))
    assert loaded["z"].shape == (0,)
    part = shardkeep.load(tmp_path / "m.safetensors", mesh=mesh_of(2), shardings={"w": P("a")})["w"]
    assert bits(part) == bits(jnp.asarray(expected))


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2"])
def test_six_bit_floats_are_refused_by_name(code: str, tmp_path: Path) -> None:
    _write(tmp_path / "m.safetensors", {"w": (code, [4], b"abc")})
    with pytest.raises(shardkeep.IntegrityError, match=f"'w' has the packed dtype {code}"):
        shardkeep.load(tmp_path / "m.safetensors")


def test_dotted_names_nest_unless_they_collide(tmp_path: Path) -> None:
    names = ["model.layers.0.w", "model.layers.10.w", "head", "a", "a.b", "x..y", "."]
    _write(tmp_path / "m.safetensors", {n: ("U8", [1], bytes([i])) for i, n in enumerate(names)})
    loaded = shardkeep.load(tmp_path / "m.safetensors")
    assert int(loaded["model"]["layers"]["10"]["w"][0]) == 1
    assert int(loaded["a"][0]) == 3
    assert int(loaded["a.b"][0]) == 4
    assert sorted(int(x[0]) for x in jax.tree.leaves(loaded)) == list(range(7))


def test_a_file_without_tensors_or_metadata(tmp_path: Path) -> None:
    _write(tmp_path / "m.safetensors", {})
    assert shardkeep.load(tmp_path / "m.safetensors") == {}
    safetensors.numpy.save_file({}, tmp_path / "n.safetensors")
    assert shardkeep.load(tmp_path / "n.safetensors") == {}


def test_tensors_are_sharded_cast_and_chosen_like_our_own(tmp_path: Path) -> None:
    host = pattern("float32", (512, 1024)).copy()
    host[np.isnan(host)] = 0
    safetensors.numpy.save_file({"l.w": host, "l.b": np.ones(4, np.float32)}, tmp_path / "m.safetensors")
    loaded = shardkeep.load(
        tmp_path / "m.safetensors", include="w", mesh=mesh_of(8), shardings=P(None, "a"), dtype="bf16"
    )
    assert loaded["l"]["w"].sharding == NamedSharding(mesh_of(8), P(None, "a"))
    assert bits(loaded["l"]["w"]) == bits(host.astype(ml_dtypes.bfloat16))
    template = {"l": {"b": np.zeros(4, np.float32)}}
    assert_same(shardkeep.load(tmp_path / "m.safetensors", template=template), {"l": {"b": np.ones(4, np.float32)}})


def test_verify_says_that_there_is_nothing_to_check_against(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(3), "b": np.ones(2)}, tmp_path / "m.safetensors")
    report = shardkeep.verify(tmp_path / "m.safetensors")
    assert report.ok
    assert report.unchecked == 2


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Three shards and an index, as Hugging Face writes them, among other files."""
    directory = tmp_path / "hf"
    directory.mkdir()
    tree = {f"model.layers.{i}.w": pattern("float32", (16, 4), i) for i in range(6)}
    weight_map = {}
    for number in range(3):
        name = f"model-{number + 1:05d}-of-00003.safetensors"
        part = dict(list(tree.items())[2 * number : 2 * number + 2])
        safetensors.numpy.save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 6 * 256}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.model").write_bytes(b"x")
    return directory, tree


@pytest.mark.parametrize(
    "ending", ["", "/model.safetensors.index.json", "/model-00002-of-00003.safetensors", "/model", "/model.safetensors"]
)
def test_a_hugging_face_folder_under_any_of_its_names(folder: tuple[Path, dict[str, np.ndarray]], ending: str) -> None:
    directory, tree = folder
    loaded = shardkeep.load(f"{directory}{ending}")
    for name, array in tree.items():
        assert bits(loaded["model"]["layers"][name.split(".")[2]]["w"]) == bits(array)
    assert len(jax.tree.leaves(loaded)) == 6


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "weights.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert_same(shardkeep.load(tmp_path), {"w": jnp.ones(3)})


def test_of_several_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FileNotFoundError, match=r"the newest, .*b\.safetensors"):
        shardkeep.load(tmp_path)


def test_a_missing_shard_is_named(folder: tuple[Path, Any]) -> None:
    (folder[0] / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors is missing"):
        shardkeep.load(folder[0])
    with pytest.raises(ValueError, match="missing"):
        shardkeep.load(folder[0])


def test_a_tensor_the_index_speaks_of_must_be_there(folder: tuple[Path, Any]) -> None:
    """A folder mixed from two exports is not loaded as if it were whole."""
    name = "model-00002-of-00003.safetensors"
    safetensors.numpy.save_file({"model.layers.2.w": np.zeros((16, 4), np.float32)}, folder[0] / name)
    with pytest.raises(shardkeep.IntegrityError, match=r"model\.layers\.3\.w"):
        shardkeep.load(folder[0])


def test_a_tensor_in_two_shards_is_refused(folder: tuple[Path, Any]) -> None:
    safetensors.numpy.save_file({"model.layers.0.w": np.zeros(3)}, folder[0] / "model-00003-of-00003.safetensors")
    with pytest.raises(shardkeep.IntegrityError, match=r"two files contain|is in two files|but it is not"):
        shardkeep.load(folder[0])


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "", 3, None, "a\0b"])
def test_an_index_cannot_name_a_file_outside(folder: tuple[Path, Any], name: Any) -> None:
    safetensors.numpy.save_file({"w": np.ones(3)}, folder[0].parent / "secret.safetensors")
    index = folder[0] / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"w": name}}))
    with pytest.raises(shardkeep.IntegrityError, match=r"name|index"):
        shardkeep.load(folder[0])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\0", '{"metadata": 3, "weight_map": {}}'],
)
def test_what_is_no_index_is_an_integrity_error(folder: tuple[Path, Any], text: str) -> None:
    (folder[0] / "model.safetensors.index.json").write_text(text)
    with pytest.raises(shardkeep.IntegrityError, match="index"):
        shardkeep.load(folder[0])


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_a_cut_file_is_an_integrity_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"w": np.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(shardkeep.IntegrityError, match=r"m\.safetensors"):
        shardkeep.load(path)


@pytest.mark.parametrize(
    "notes", ["[]", "3", "{", '{"w": 3}', '{"w": "object"}', '{"w": "float64"}', '{"other": "int4"}']
)
def test_a_foreign_note_named_dtypes_does_no_harm(tmp_path: Path, notes: str) -> None:
    """The header's metadata belongs to whoever wrote the file."""
    _write(tmp_path / "m.safetensors", {"w": ("U8", [3], b"abc")}, {"dtypes": notes})
    with suppress(shardkeep.IntegrityError):
        loaded = shardkeep.load(tmp_path / "m.safetensors")
        assert_same(loaded["w"], jnp.asarray(np.frombuffer(b"abc", np.uint8)))


def test_our_own_notes_are_understood_without_the_manifest(tmp_path: Path) -> None:
    """A data file of ours, taken out of its checkpoint, still says what its bytes are."""
    tree = {"i": pattern(ml_dtypes.int4, (3,)), "c": pattern("complex128", (2, 2)), "d": pattern("datetime64[s]", (3,))}
    shardkeep.save(tmp_path / "c", tree)
    (file,) = (tmp_path / "c").rglob("*.safetensors")
    (tmp_path / "alone").mkdir()
    copy = tmp_path / "alone" / "x.safetensors"
    data = (
        file.read_bytes()
        .replace(b'"shardkeep":"1"', b'"somebodys":"1"')
        .replace(b'"shardkeep_save":', b'"somebodys_save":')
    )
    copy.write_bytes(data)
    loaded = shardkeep.load(copy)
    for name, array in tree.items():
        assert bits(loaded[name]) == bits(jnp.asarray(array) if name == "i" else array)
        assert loaded[name].dtype == array.dtype


def test_loading_a_foreign_file_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    with caplog.at_level(logging.INFO):
        shardkeep.load(tmp_path / "m.safetensors")
    assert caplog.records == []


def test_saving_onto_a_foreign_file_needs_overwrite_and_replaces_it_whole(folder: tuple[Path, Any]) -> None:
    directory = folder[0]
    target = directory / "model.safetensors"
    with pytest.raises(shardkeep.CheckpointExistsError, match="overwrite=True"):
        shardkeep.save(target, {"w": np.ones(2)})
    assert len(jax.tree.leaves(shardkeep.load(directory))) == 6
    shardkeep.save(target, {"w": np.ones(2)}, overwrite=True)
    assert_same(shardkeep.load(target), {"w": np.ones(2)})
    assert_same(shardkeep.load(directory), {"w": np.ones(2)})
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors", "tokenizer.model"]


def test_a_folder_of_a_peft_adapter_is_loaded(tmp_path: Path) -> None:
    """As `PeftModel.save_pretrained` writes it; a full model may lie beside it in a folder of its own."""
    weights = {
        "base_model.model.layers.0.q_proj.lora_A.weight": np.ones((2, 8), np.float32),
        "base_model.model.layers.0.q_proj.lora_B.weight": np.zeros((8, 2), np.float32),
    }
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    (tmp_path / "README.md").write_text("an adapter")
    safetensors.numpy.save_file(weights, tmp_path / "adapter_model.safetensors")
    found = shardkeep.load(tmp_path)
    lora = found["base_model"]["model"]["layers"]["0"]["q_proj"]
    assert_same(np.asarray(lora["lora_A"]["weight"]), weights["base_model.model.layers.0.q_proj.lora_A.weight"])
    assert shardkeep.inspect(tmp_path).source == "safetensors"
    assert shardkeep.latest(tmp_path) is not None
    assert shardkeep.verify(tmp_path).ok
    assert main(["convert", str(tmp_path), str(tmp_path / "ours")]) == 0


def test_a_sharded_folder_may_have_any_name(tmp_path: Path) -> None:
    """As `diffusers` writes it."""
    base = "diffusion_pytorch_model"
    index = {}
    for number, key in enumerate(("down.w", "up.w"), 1):
        index[key] = f"{base}-{number:05}-of-00002.safetensors"
        safetensors.numpy.save_file({key: np.full(3, number, np.float32)}, tmp_path / index[key])
    (tmp_path / f"{base}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (tmp_path / "config.json").write_text("{}")
    found = shardkeep.load(tmp_path)
    assert_same(np.asarray(found["up"]["w"]), np.full(3, 2, np.float32))
    assert shardkeep.verify(tmp_path).ok
    (tmp_path / index["up.w"]).unlink()
    with pytest.raises(shardkeep.MissingDataError, match=r"00002-of-00002\.safetensors is missing"):
        shardkeep.load(tmp_path)
