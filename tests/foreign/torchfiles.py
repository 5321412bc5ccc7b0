"""Files as `torch.save` writes them, made without torch: its pickle opcode by opcode, and its zip archive."""

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


@dataclass(frozen=True)
class Global:
    """A name that a pickle has, such as `torch.float16`."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A call that a pickle asks for, and the state that it gives to the result."""

    function: Global
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class StorageId:
    """A persistent id of a storage."""

    kind: Global
    key: str
    count: int


@dataclass(frozen=True)
class Strided:
    """A tensor of a storage of its own: elements, the first one, shape and strides."""

    storage: np.ndarray
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    metadata: Any = None


class Pickle:
    """Writes the pickle of a tree, and collects the storages of its tensors."""

    def __init__(self) -> None:
        self.storages: list[bytes] = []
        self._keys: dict[int, str] = {}
        self._kept: list[np.ndarray] = []  # so that no two have the same id

    def dumps(self, tree: Any) -> bytes:
        return b"\x80\x02" + self._value(tree) + b"."

    def _value(self, value: Any) -> bytes:
        if isinstance(value, np.ndarray):
            strides = tuple(n // value.itemsize for n in np.empty(value.shape, value.dtype).strides)
            return self._value(Strided(value, 0, value.shape, strides))
        if isinstance(value, Strided):
            return self._tensor(value)
        if isinstance(value, StorageId):
            return self._value(("storage", value.kind, value.key, "cpu", value.count)) + b"Q"
        if isinstance(value, Global):
            return b"c" + f"{value.module}\n{value.name}\n".encode()
        if isinstance(value, Call):
            state = b"" if value.state is None else self._value(value.state) + b"b"
            return self._value(value.function) + self._value(value.args) + b"R" + state
        if isinstance(value, Pairs):
            return b"}(" + b"".join(self._value(k) + self._value(v) for k, v in value.items) + b"u"
        if isinstance(value, Mapping):
            return b"}(" + b"".join(self._value(k) + self._value(v) for k, v in value.items()) + b"u"
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self._value, value)) + b"t"
        if isinstance(value, list):
            return b"](" + b"".join(map(self._value, value)) + b"e"
        return pickle.dumps(value, 2)[2:-1]

    def _tensor(self, tensor: Strided) -> bytes:
        name = tensor.storage.dtype.name
        raw = tensor.storage.tobytes()
        typed = name in STORAGES
        kind = Global("torch", STORAGES[name]) if typed else Global("torch.storage", "UntypedStorage")
        key = self._keys.setdefault(id(tensor.storage), str(len(self._keys)))
        self._kept.append(tensor.storage)
        if int(key) == len(self.storages):
            self.storages.append(raw)
        storage = StorageId(kind, key, tensor.storage.size if typed else len(raw))
        hooks = Call(Global("collections", "OrderedDict"))
        args: tuple[Any, ...] = (storage, tensor.offset, tensor.shape, tensor.strides, False, hooks)
        args += () if typed else (Global("torch", name),)
        args += () if tensor.metadata is None else (tensor.metadata,)
        return self._value(Call(Global("torch._utils", f"_rebuild_tensor_v{2 if typed else 3}"), args))


def encode_torch(
    tree: Any, root: str = "archive", deflate: bool = False, notes: Mapping[str, bytes] | None = None
) -> bytes:
    """A file of `torch.save`: entries aligned to 64 bytes, not compressed unless asked for."""
    written = Pickle()
    data = written.dumps(tree)
    entries = {"data.pkl": data, ".format_version": b"1", "byteorder": b"little"}
    entries |= {f"data/{key}": raw for key, raw in enumerate(written.storages)}
    return zipped({**entries, "version": b"3\n", ".data/serialization_id": b"0" * 40, **(notes or {})}, root, deflate)


def zipped(entries: Mapping[str, bytes], root: str, deflate: bool = False) -> bytes:
    """A zip archive with entries below a root."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as archive:
        for name, raw in entries.items():
            entry = zipfile.ZipInfo(f"{root}/{name}")
            entry.compress_type = archive.compression
            at = file.tell() + 30 + len(entry.filename) + 4
            padding = b"Z" * (-at % 64)
            entry.extra = struct.pack("<2s H", b"FB", len(padding)) + padding
            archive.writestr(entry, raw)
    return file.getvalue()


@dataclass(frozen=True)
class Pairs:
    """A dict whose keys are objects."""

    items: tuple[tuple[Any, Any], ...]


METADATA = "torch.distributed.checkpoint.metadata"


def of_metadata(name: str, state: Any, module: str = METADATA) -> Call:
    return Call(Global(module, name), (), state)


def size_of(shape: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (shape,))


def encode_dcp(
    arrays: Mapping[str, np.ndarray], values: Mapping[str, Any] | None = None, paths: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """The files of a checkpoint of `torch.distributed.checkpoint`: of each array, the rows are in two files in turn."""
    data = {"__0_0.distcp": b"", "__1_0.distcp": b""}
    stored: list[tuple[Any, Any]] = []
    described: dict[str, Any] = {}

    def add(file: str, index: dict[str, Any], document: bytes) -> None:
        place = {"relative_path": file, "offset": len(data[file]), "length": len(document)}
        module = "torch.distributed.checkpoint.filesystem"
        stored.append((of_metadata("MetadataIndex", index), of_metadata("_StorageInfo", place, module)))
        data[file] += document

    for name, array in arrays.items():
        chunks: list[Any] = []
        half = -(-len(array) // 2) if array.ndim and array.size else 0
        for number, (start, part) in enumerate([(0, array[:half]), (half, array[half:])] if half > 0 else [(0, array)]):
            if part.size == 0 and array.size:
                continue
            offsets = size_of((start, *[0] * (array.ndim - 1))[: array.ndim])
            chunks.append(of_metadata("ChunkStorageMetadata", {"offsets": offsets, "sizes": size_of(part.shape)}))
            index = {"fqn": name, "offset": offsets, "index": number}
            add(f"__{number}_0.distcp", index, encode_torch(np.ascontiguousarray(part).reshape(part.shape)))
        properties = of_metadata("TensorProperties", (Global("torch", array.dtype.name), 0, False, 0, False))
        about = {"properties": properties, "size": size_of(array.shape), "chunks": chunks}
        described[name] = of_metadata("TensorStorageMetadata", about)
    for name, value in (values or {}).items():
        described[name] = of_metadata("BytesStorageMetadata", None)
        add("__0_0.distcp", {"fqn": name, "index": None}, encode_torch(value))
    fields = {"state_dict_metadata": described, "planner_data": paths, "storage_data": Pairs(tuple(stored))}
    return {**data, ".metadata": Pickle().dumps(of_metadata("Metadata", {**fields, "version": "1.0.0"}))}
