"""Layouts by name, and one from outside the package."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shardkeep
from shardkeep.layouts import registry
from shardkeep.layouts.plan import Draft, FilePlan, PiecePlan, StagedLeaf
from shardkeep.layouts.registry import layout_named, register
from shardkeep.layouts.safetensors import SafetensorsLayout
from shardkeep.layouts.zarr import ZarrLayout
from shardkeep.model import document
from shardkeep.stores.local.store import LocalStore
from support import assert_same


@dataclass(frozen=True)
class BareLayout(SafetensorsLayout):
    """One file for each piece, with nothing but its bytes."""

    name: str = "bare"

    def lay_out(self, leaves: Sequence[StagedLeaf], pieces: Sequence[PiecePlan], draft: Draft) -> list[FilePlan]:
        return [FilePlan(f"{draft.save_id}-{i}.bin", b"", (p,), p.nbytes) for i, p in enumerate(pieces)]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(registry, "_made", dict(registry._made))
    monkeypatch.setattr(document, "_FORMATS", dict(document._FORMATS))
    register("bare", lambda codec, traits: BareLayout(traits.object_limit))
    return "bare"


def test_a_layout_from_outside_is_saved_and_loaded_like_any_other(bare: str, tmp_path: Path) -> None:
    tree = {"w": np.arange(12.0).reshape(3, 4), "b": np.ones(3, np.int8), "n": 1}
    for number in range(2):
        shardkeep.save(tmp_path / "c", tree, format=cast(Any, bare), overwrite=number > 0)
        assert_same(shardkeep.load(tmp_path / "c"), tree)
    assert shardkeep.inspect(tmp_path / "c").tree().format == "bare"
    assert len(list((tmp_path / "c").glob("*.bin"))) == 2
    assert shardkeep.verify(tmp_path / "c").ok


def test_names_and_what_is_no_name() -> None:
    assert isinstance(layout_named("safetensors"), SafetensorsLayout)
    assert layout_named("zarr", "zstd") == layout_named("tensorstore", "zstd")
    in_bucket = replace(LocalStore.traits, object_limit=100, editable=False)
    assert layout_named("zarr", traits=in_bucket) == ZarrLayout(most=100, groups=True)
    with pytest.raises(ValueError, match="format must be 'safetensors' or 'zarr', not 'pickle'"):
        layout_named("pickle")
    with pytest.raises(ValueError, match="compression must be None or 'zstd', not 'gzip'"):
        layout_named("zarr", "gzip")
    with pytest.raises(ValueError, match="format='safetensors' has no compression; use format='zarr'"):
        layout_named("safetensors", "zstd")
