"""PyTorch's files, alone and in parts, as real torch wrote them (tests/fixtures/torch) and as anyone may."""

import json
import os
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
from foreign.conformance import FileReaderTests
from foreign.torchfiles import Call, Global, Pickle, StorageId, Strided, encode_torch, zipped
from shardkeep.foreign.torch import TorchReader
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
