"""The dtypes of all tests, by name, and the parts of this table that libraries and formats tell apart."""

from typing import Any

import ml_dtypes
import numpy as np

WIDE = ["int64", "uint64", "float64", "complex128"]  # JAX has them only when 64-bit types are switched on
NUMPY = [
    *["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64"],
    *WIDE,
]
NO_ZARR_NAME = ["uint2", "uint4", "float8_e4m3"]  # neither zarr nor TensorStore has a name for them
SIX_BITS = ["float6_e2m3fn", "float6_e3m2fn"]  # only NumPy arrays hold them
TIMES = ["datetime64[ns]", "timedelta64[s]"]
JAX = [  # in the order of the golden checkpoints
    *["bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32"],
    *["bfloat16", "float16", "float32", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"],
    *["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64"],
]
EXTENDED = [name for name in JAX if name not in NUMPY]  # of ml_dtypes
SAMPLE = ["float32", "bfloat16", "int8", "float8_e4m3fn", "int4", "complex64", "bool"]  # where each costs time


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))
