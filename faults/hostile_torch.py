"""PyTorch's files to be made hostile: the pickle, the archive around it, descriptions of distributed checkpoints."""

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from faults.hostile_cases import Case, Files, MemoryStore, read_arrays
from faults.mutate import PICKLED
from foreign.torchfiles import Call, Global, Pickle, Strided, encode_dcp, encode_torch, zipped
from shardkeep.errors import ShardkeepError
from shardkeep.foreign.registry import checks_of
from shardkeep.foreign.strided import STRIDED, StridedArray, StridedPlace
from shardkeep.model.arrays import ArraySpec, Region
from shardkeep.model.leaves import ForeignArray, StoredArray
from shardkeep.targets.directory import Directory
from shardkeep.targets.files import ForeignFile

# Steps of a pickle that describe tensors, or what is called instead of them.
_WORDS = [
    *PICKLED,
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_tensor_v3\n",
    b"ctorch._utils\n_rebuild_parameter\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch.storage\nUntypedStorage\n",
    b"ctorch\nSize\n",
    b"ctorch\nfloat8_e4m3fn\n",
    b"ccollections\nOrderedDict\n)R",
    b"c_codecs\nencode\n",
    b"cnumpy.core.multiarray\nscalar\n",
    b"X\x07\x00\x00\x00storage",
    b"X\x01\x00\x00\x000",
    b"X\x06\x00\x00\x00../../",
    b"J\xff\xff\xff\x7f",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x3f",
    b"\x89",
    b"tQ",
    b"tR",
    b"s",
]
# What a zip archive may say.
_ZIP = [
    b"PK\x01\x02",
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
    b"\x01\x00\x18\x00" + b"\xff" * 24,
    b"\xff\xff\xff\xff",
    b"\xff\xff",
    b"\x00\x00\x00\x00",
    b"\x08\x00",
    b"\x01\x00",
    b"../",
    b"archive/data/0",
    b"archive/data.pkl",
    b"big",
    struct.pack("<Q", 1 << 62),
]


def torch_cases() -> Iterator[Case]:
    """Each parser of PyTorch's files, with all else in order."""
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    tree = {
        "w": base,
        "t": Strided(base, 1, (6, 3), (1, 6)),
        "f8": base.astype("float32")[0].view("uint8").view(_float8()),
        "opt": {"state": {0: {"step": np.array(1.0, np.float32)}}, "groups": [{"lr": 0.1, "params": [0, 1]}]},
        "odd": [None, True, 1 << 70, 2.5, "ü", b"\0\xff", 1j, (1, (2,)), Global("torch", "float16")],
        "args": Call(Global("argparse", "Namespace"), (), {"lr": 0.1}),
        "param": Call(
            Global("torch._utils", "_rebuild_parameter"), (base, True, Call(Global("collections", "OrderedDict")))
        ),
    }
    written = Pickle()
    pickled = written.dumps(tree)
    inside = {f"data/{key}": raw for key, raw in enumerate(written.storages)}

    def with_pickle(text: bytes) -> Files:
        return {"w.pt": zipped({"data.pkl": text, "byteorder": b"little", **inside}, "archive")}

    files: dict[str, Files] = {"pickle": with_pickle(pickled)}
    yield _case("torch: pickle", files["pickle"], pickled, with_pickle, _WORDS, "w.pt")
    for name, deflate in (("archive", False), ("compressed archive", True)):
        whole = {"w.pt": encode_torch({"a": base, "b": Strided(base, 0, (6, 4), (1, 6)), "n": 1}, deflate=deflate)}
        yield _case(f"torch: {name}", whole, whole["w.pt"], lambda text: {"w.pt": _with_crcs(text)}, _ZIP, "w.pt")
    yield from _distributed(base)
    yield from _parts(base)
    yield _place()


def _float8() -> Any:
    import ml_dtypes

    return ml_dtypes.float8_e4m3fn


def _case(
    name: str,
    files: Files,
    start: bytes,
    close: Callable[[bytes], Files],
    words: list[bytes],
    target: str = "",
    is_json: bool = False,
) -> Case:
    def parse(text: bytes) -> None:
        _read_all({**files, **close(text)}, target)

    return Case(name, files, start, close, words, is_json=is_json, target=target, parse=parse)


def _read_all(files: Mapping[str, bytes], target: str) -> None:
    """All that a load and a verification do, in memory, of arrays that are not large."""
    store: Any = MemoryStore(dict(files))
    source: Any = ForeignFile(store, target) if target else Directory(store)
    for tree in source.read().trees.values():
        tree.skeleton.rebuild([0] * len(tree.leaves))
        for leaf in tree.arrays:
            for piece in leaf.pieces:
                assert piece.offset + piece.length <= len(files[tree.files[piece.file].name])
        read_arrays(store, tree)
        for check in checks_of(store, tree) or ():
            try:
                check(lambda _: None)
            except ShardkeepError:
                continue


def _with_crcs(archive: bytes) -> bytes:
    """The archive with the CRCs of its stored entries made right, so that what is in them is looked at."""
    found = bytearray(archive)
    at = archive.find(b"PK\x01\x02")
    while at >= 0 and at + 46 <= len(archive):
        method, size, start = (
            *struct.unpack_from("<H8xL", archive, at + 10),
            *struct.unpack_from("<L", archive, at + 42),
        )
        if method == 0 and start + 30 <= len(archive):
            data = start + 30 + sum(struct.unpack_from("<2H", archive, start + 26))
            found[at + 16 : at + 20] = struct.pack("<L", zlib.crc32(archive[data : data + size]))
        at = archive.find(b"PK\x01\x02", at + 4)
    return bytes(found)


def _distributed(base: np.ndarray) -> Iterator[Case]:
    paths = {"a.w": ("a", "w"), "l.0": ("l", 0), "v": ("v",)}
    arrays = {"a.w": base, "l.0": np.arange(5, dtype=np.int64), "scalar": np.array(2.5)}
    files = encode_dcp(arrays, {"v": {"lr": 0.1, "rng": [base]}}, paths)
    words = [*_WORDS, b"__0_0.distcp", b"../../secret", b"offset", b"length", b"chunks", b"sizes", b"Metadata"]
    yield _case("torch: metadata", files, files[".metadata"], lambda text: {".metadata": text}, words)
    part = files["__1_0.distcp"]
    yield _case("torch: distributed part", files, part, lambda text: {"__1_0.distcp": text}, _ZIP)


def _parts(base: np.ndarray) -> Iterator[Case]:
    index = "pytorch_model.bin.index.json"
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    weights = {"a.w": names[0], "b": names[1]}
    files = {
        names[0]: encode_torch({"a.w": base}),
        names[1]: encode_torch({"b": base}),
        index: json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}).encode(),
    }
    words = [json.dumps(name).encode() for name in (*names, "../x", "a.w")]
    yield _case("torch: index", files, files[index], lambda text: {index: text}, words, index, is_json=True)


def _place() -> Case:
    """The name of a place, which manifests have, and which is read beside them."""
    start = StridedPlace("w.bin", 0, 96, None, 0, (1, 6), "s").encode().encode()
    files = {"w.bin": bytes(range(96))}

    def parse(text: bytes) -> None:
        spec = ArraySpec((6, 4), np.dtype(np.float32))
        store: Any = MemoryStore(files)
        leaf = StoredArray(("w",), spec, (), ForeignArray(text.decode("utf-8", "replace"), STRIDED))
        array = StridedArray(store, leaf)
        array.find_damage({"w.bin": 96})
        array.read(Region.whole(spec.shape))

    words = [b"@", b"+", b"z", b".", b"s", b"c", b"n", b"0", b"-1", b"9" * 25, b"/etc/passwd", b"../"]
    on_disk = {"model.safetensors": _plain_safetensors()}
    return Case(
        "torch: place", on_disk, start, lambda text: {}, words, is_json=False, target="model.safetensors", parse=parse
    )


def _plain_safetensors() -> bytes:
    """Something that loads: the name of a place is in no file by itself."""
    return struct.pack("<Q", 2) + b"{}"
