"""The layout of exchange files: a header with room for all that its manifest will hold."""

from pathlib import Path

import numpy as np

import shardkeep
from support import assert_same


def test_many_plain_values_find_room_in_the_header(tmp_path: Path) -> None:
    """They are in the manifest, which is measured before it is known."""
    tree = {"w": np.arange(3.0), **{f"value {number}": "x" * 100 for number in range(300)}}
    shardkeep.save(tmp_path / "c.safetensors", tree)
    assert_same(shardkeep.load(tmp_path / "c.safetensors"), tree)
