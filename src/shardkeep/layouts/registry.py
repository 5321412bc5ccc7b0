"""The layouts that `format=` names.

A layout from outside the package is registered under its own name, by which the manifest knows it too:

    register("packed", lambda codec, traits: PackedLayout(codec))
"""

from collections.abc import Callable

from shardkeep.layouts.codecs import CODECS, Codec
from shardkeep.layouts.plan import Layout
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.layouts.zarr import ZarrLayout
from shardkeep.model.document import add_format
from shardkeep.stores.base import Traits
from shardkeep.stores.local.store import LocalStore

Make = Callable[[Codec, Traits], Layout]
_made: dict[str, Make] = {
    "safetensors": lambda codec, traits: SafetensorsLayout(traits.object_limit),
    "zarr": lambda codec, traits: ZarrLayout(codec, traits.object_limit, groups=not traits.editable),
}
_made["tensorstore"] = _made["zarr"]  # the name on disk


def register(name: str, make: Make) -> None:
    """Make a layout known as `name`: to `format=`, and to readers of manifests."""
    _made[name] = make
    add_format(name)


def layout_named(name: str, compression: str | None = None, traits: Traits = LocalStore.traits) -> Layout:
    """The layout for `format=` and `compression=`; `ValueError` if there is none.

    Args:
        name: `safetensors`, `zarr` (also called `tensorstore`), or one that was registered.
        compression: None or `zstd`.
        traits: Those of the store that the files go to.
    """
    if compression not in CODECS:
        raise ValueError(f"compression must be None or 'zstd', not {compression!r}")
    if name not in _made:
        names = " or ".join(repr(name) for name in _made if name != "tensorstore")
        raise ValueError(f"format must be {names}, not {name!r}")
    layout = _made[name](CODECS[compression], traits)
    if layout.codec.name != compression:
        raise ValueError(f"format={name!r} has no compression; use format='zarr'")
    return layout
