"""The layouts that `format=` names.

A layout from outside the package is registered under its own name, by which the manifest knows it too:

    register("packed", lambda codec, limit, bucket: PackedLayout(codec))
"""

from collections.abc import Callable

from shardkeep.layouts.base import Layout
from shardkeep.layouts.codecs import RAW, Codec, codec_named
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.layouts.zarr import ZarrLayout
from shardkeep.model.manifest import add_format

Make = Callable[[Codec, int | None, bool], Layout]  # codec, size limit of a file, whether it goes to a bucket


def _safetensors(codec: Codec, limit: int | None, bucket: bool) -> Layout:
    if codec is not RAW:
        raise ValueError("format='safetensors' has no compression; use format='zarr'")
    return SafetensorsLayout(limit)


def _zarr(codec: Codec, limit: int | None, bucket: bool) -> Layout:
    return ZarrLayout(codec, limit, groups=bucket)


_made: dict[str, Make] = {"safetensors": _safetensors, "zarr": _zarr, "tensorstore": _zarr}


def register(name: str, make: Make) -> None:
    """Make a layout known as `name`: to `format=`, and to readers of manifests."""
    _made[name] = make
    add_format(name)


def layout_named(name: str, compression: str | None = None, limit: int | None = None, bucket: bool = False) -> Layout:
    """The layout for `format=` and `compression=`; `ValueError` if there is none.

    Args:
        name: `safetensors`, `zarr` (also called `tensorstore`), or one that was registered.
        compression: None or `zstd`.
        limit: The size limit of a file in bytes; None without one.
        bucket: Whether the files go to a bucket.
    """
    codec = codec_named(compression)
    if name not in _made:
        raise ValueError(f"format must be {_names()}, not {name!r}")
    return _made[name](codec, limit, bucket)


def _names() -> str:
    """The names to choose from. "tensorstore" is the name of zarr on disk, and eFormer's."""
    return " or ".join(repr(name) for name in _made if name != "tensorstore")
