"""What processes save together, any number of processes loads, on any mesh, bit by bit."""

from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept
from multiprocess.inside import abstract_of, arrays_of, differences, values_of
from support import FORMATS, mesh_of

KINDS = sorted(FORMATS)

SAVE = """
from support import save_as
values = values_of({number})
path = save_as({kind!r}, root / "saved", arrays_of(values, mesh_over({shape}), {turn}), metadata={{"step": {number}}})
"""

LOAD = """
path = {path!r}
values = values_of({number})
wrong = []
for turn, shape in enumerate([(4, 1), (2, 2), (1, 4)]):
    mesh = mesh_over(shape)
    wrong += differences(shardkeep.load(path, template=abstract_of(values, mesh, turn)), values)
    wrong += differences(shardkeep.load(path, mesh=mesh, mapped=False), values)
wrong += differences(shardkeep.load(path), values)
wrong += differences(shardkeep.load(path, mesh=mesh_over((2, 2)), partition_rules=[("kernel|wide", P("b", "a")), (".*", P())]), values)
wrong += differences(shardkeep.load(path, shardings=shardings_of(values, mesh_over((2, 2)), 5)), values)
say(wrong=wrong)
"""


def load_here(path: Path, number: int) -> None:
    """One process with eight devices reads it, whole and on meshes."""
    values = values_of(number)
    assert differences(shardkeep.load(path), values) == []
    for turn, shape in enumerate([(8, 1), (2, 4)]):
        mesh = mesh_of(*shape)
        assert differences(shardkeep.load(path, template=abstract_of(values, mesh, turn)), values) == []
        assert differences(shardkeep.load(path, mesh=mesh), values) == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_save_and_two_or_one_load(pair: Kept, tmp_path: Path, kind: str) -> None:
    pair.run(SAVE.format(number=3, kind=kind, shape=(2, 2), turn=1), tmp_path)
    path = tmp_path / f"saved{FORMATS[kind][0]}"
    assert shardkeep.verify(path).ok
    assert shardkeep.inspect(path).metadata == {"step": 3}
    load_here(path, 3)
    said = pair.run(LOAD.format(path=str(path), number=3), tmp_path)
    assert [s["wrong"] for s in said] == [[], []]
    assert left_overs(path) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_saves_and_two_load(pair: Kept, tmp_path: Path, kind: str) -> None:
    ending, arguments = FORMATS[kind]
    path = tmp_path / f"saved{ending}"
    shardkeep.save(path, arrays_of(values_of(4), mesh_of(2, 4)), **arguments)
    said = pair.run(LOAD.format(path=str(path), number=4), tmp_path)
    assert [s["wrong"] for s in said] == [[], []]
