"""The header of a `.npy` file, which says what array follows. It is text, which is parsed and never evaluated.

The format is described in https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

import math
import re
import struct
from collections.abc import Callable

import numpy as np

from shardkeep.foreign.base import UnreadableError
from shardkeep.model.arrays import NUMPY_NAMES, ArraySpec, DType, dtype_from_name, is_possible
from shardkeep.model.fastclass import fast_dataclass

MAGIC = b"\x93NUMPY"
_LONGEST = 64 << 10  # bytes of a header: NumPy refuses more than 10,000
_MOST_TEXT = 1 << 18  # bytes of an array of strings, which becomes plain values that take hundreds of bytes each
_FIELD = re.compile(
    r"""\s*(['"])(?P<name>\w+)\1\s*:\s*
    (?:(['"])(?P<text>[^'"]*)\3|(?P<truth>True|False)|\((?P<shape>[\d\sL,]*)\)|(?P<other>\[.*\]))\s*(?:,|$)""",
    re.VERBOSE | re.DOTALL,
)
_UNNAMED = {"V2": "bfloat16", "f1": "float8_e5m2"}  # what NumPy writes for dtypes that it does not have; V1 is several


@fast_dataclass
class NpyArray:
    """What a header says.

    Attributes:
        spec: The shape and the dtype, in the byte order in which it is stored.
        fortran: Whether the first axis is the one along which elements are neighbours.
        start: Where the elements begin.
        is_text: Whether its elements are strings. They have the dtype that NumPy has for them.
        is_unnamed: Whether the dtype is one that NumPy does not have: what it is called there is not unique to it.
    """

    spec: ArraySpec
    fortran: bool
    start: int
    is_text: bool = False
    is_unnamed: bool = False


def parse_npy(read: Callable[[int, int], bytes], size: int) -> NpyArray:
    """The header of a file of this size, of which `read` gives the bytes at an offset.

    `UnreadableError` for arrays that are not read, such as those of Python objects; `ValueError` for damage.
    """
    if read(0, 6) != MAGIC:
        raise ValueError("it does not start with the .npy signature")
    major, minor = read(6, 2)
    if (major, minor) not in ((1, 0), (2, 0), (3, 0)):
        raise UnreadableError(f"it has version {major}.{minor} of the .npy format; up to 3.0 is supported")
    width = 2 if major == 1 else 4
    (length,) = struct.unpack("<H" if major == 1 else "<L", read(8, width))
    if length > _LONGEST:
        raise ValueError(f"its header has {length:,} bytes; at most {_LONGEST:,} are read")
    start = 8 + width + length
    fields = _parse_fields(read(8 + width, length).decode("utf-8" if major == 3 else "latin-1"))
    descr, fortran, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    if not isinstance(descr, str) or not isinstance(fortran, bool) or not isinstance(shape, tuple):
        raise ValueError("its header is damaged")
    dtype, is_text = _dtype(descr)
    spec = ArraySpec(shape, dtype)
    if not is_possible(shape, max(dtype.itemsize, 1)) or len(shape) > 32:
        raise ValueError(f"its header does not describe a valid array of shape {shape}")
    if start + spec.nbytes != size:
        raise ValueError(
            f"it has {size:,} bytes, but its header describes an array that ends at byte {start + spec.nbytes:,}"
        )
    if is_text and math.prod(max(n, 1) for n in shape) * max(dtype.itemsize, 1) > _MOST_TEXT:
        raise UnreadableError(f"it has more than {_MOST_TEXT:,} bytes of text, too much for plain values")
    return NpyArray(spec, fortran, start, is_text, descr[1:] in _UNNAMED)


def _parse_fields(text: str) -> dict[str, str | bool | tuple[int, ...]]:
    """The three fields of a header, which is written as a Python dict."""
    text = text.strip(" \n\0")
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError("its header is damaged")
    found: dict[str, str | bool | tuple[int, ...]] = {}
    at, inside = 0, text[1:-1].rstrip()
    while at < len(inside):
        field = _FIELD.match(inside, at)
        if field is None or field["name"] in found:
            raise ValueError("its header is damaged")
        if field["other"] is not None:
            raise UnreadableError("it is a structured array; only arrays of numbers are supported")
        if field["shape"] is not None:
            numbers = [n.strip(" \nL") for n in field["shape"].split(",") if n.strip()]
            if not all(n.isdecimal() and len(n) < 20 for n in numbers):
                raise ValueError("its header does not describe a valid array")
            found[field["name"]] = tuple(map(int, numbers))
        else:
            found[field["name"]] = field["text"] if field["truth"] is None else field["truth"] == "True"
        at = field.end()
    if found.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header is damaged")
    return found


def _dtype(descr: str) -> tuple[DType, bool]:
    """The dtype of a description, and whether it is one of text."""
    if descr[:1] in ("<", "|") and descr[1:] in _UNNAMED:
        return dtype_from_name(_UNNAMED[descr[1:]]), False
    kind = descr.lstrip("<>|=")[:1]
    if kind == "O":
        raise UnreadableError(
            "it is an array of Python objects, stored as a pickle that could execute code, and is never read. Save "
            "numeric arrays instead"
        )
    if kind in ("V", "W"):
        raise UnreadableError(
            f"NumPy wrote its dtype as {descr!r}, which several dtypes share (float8_e4m3fn, int4 and others). Read it "
            "with NumPy, view it as its original dtype, and save it with shardkeep.save"
        )
    if not re.fullmatch(r"[<>|=][biufcmMSU]\d{1,6}(\[\d{0,9}[A-Za-z]{1,2}\])?", descr):
        raise ValueError(f"its dtype is {descr[:80]!r}")
    try:
        dtype = np.dtype(descr)
    except TypeError:
        raise ValueError(f"its dtype is {descr!r}") from None
    if kind in "SU":
        return dtype, True
    if dtype.newbyteorder("=").name not in NUMPY_NAMES and kind not in "mM":
        raise UnreadableError(f"its dtype is {dtype.name}, which JAX does not support")
    return dtype, False
