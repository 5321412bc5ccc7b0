"""What processes save together, any number of processes loads, on any mesh, bit by bit."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorstore

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept
from multiprocess.inside import abstract_of, arrays_of, differences, values_of
from support import FORMATS, mesh_of

KINDS = sorted(FORMATS)
SAVED = [pytest.param(kind) if kind in ("exchange", "shards") else kind for kind in KINDS]

SAVE = """
from support import save_as
values = values_of({number})
path = save_as({kind!r}, root / "saved", arrays_of(values, mesh_over({shape}), {turn}), metadata={{"step": {number}}})
"""

LOAD = """
path = {path!r}
values = values_of({number})
wrong = []
count = len(jax.devices())
for turn, shape in enumerate([(count, 1), (2, count // 2), (1, count)]):
    mesh = mesh_over(shape)
    wrong += differences(shardkeep.load(path, template=abstract_of(values, mesh, turn)), values)
    wrong += differences(shardkeep.load(path, mesh=mesh, mmap=False), values)
mesh = mesh_over((2, count // 2))
wrong += differences(shardkeep.load(path), values)
rules = [("kernel|wide", P("b", "a")), (".*", P())]
loaded = shardkeep.load(path, mesh=mesh, partition_rules=rules)
wrong += differences(loaded, values)
if loaded["params"]["odd"]["wide"].sharding != NamedSharding(mesh, P("b", "a")):
    wrong.append("the rules were not followed")
wrong += differences(shardkeep.load(path, shardings=shardings_of(values, mesh, 5)), values)
part = shardkeep.load(path, mesh=mesh, include="odd/wide")
wrong += differences(part["params"]["odd"]["wide"], values["params"]["odd"]["wide"])
cast = shardkeep.load(path, mesh=mesh, include="layers/0", dtype="bf16")["params"]["layers"][0]["kernel"]
if not holds(cast, np.asarray(jnp.asarray(values["params"]["layers"][0]["kernel"]).astype(jnp.bfloat16))):
    wrong.append("cast to bfloat16")
ints = shardkeep.load(path, mesh=mesh, include="three", partition_rules=[("three", P(None, "a"))], dtype="int32")
wrong += differences(ints["params"]["odd"]["three"], values["params"]["odd"]["three"].astype(np.int32))
narrow = caught(shardkeep.load, path, mesh=mesh, include="many key|uneven", dtype="uint8")
if "does not fit uint8" not in narrow["message"]:
    wrong.append(f"values cut off: {{narrow}}")
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


@pytest.mark.parametrize("kind", SAVED)
def test_two_processes_save_and_two_or_one_load(pair: Kept, tmp_path: Path, kind: str) -> None:
    pair.run(SAVE.format(number=3, kind=kind, shape=(2, 2), turn=1), tmp_path)
    path = tmp_path / f"saved{FORMATS[kind][0]}"
    assert shardkeep.verify(path).ok
    assert shardkeep.inspect(path).metadata == {"step": 3}
    load_here(path, 3)
    said = pair.run(LOAD.format(path=str(path), number=3), tmp_path)
    assert [s["wrong"] for s in said] == [[], []]
    assert left_overs(path) == set()


@pytest.mark.parametrize("kind", ["tensorstore", "zstd"])
def test_what_two_processes_save_over_another_tree_has_its_clean_names(pair: Kept, tmp_path: Path, kind: str) -> None:
    """The first process links what both have written, and lists it for eFormer."""
    save = SAVE.replace("metadata", "overwrite=True, metadata")
    for number in (3, 4, 5):
        pair.run(save.format(number=number, kind=kind, shape=(2, 2), turn=1), tmp_path)
        path = tmp_path / "saved"
        tree = shardkeep.inspect(path).tree()
        assert (number > 3) == tree.published
        for clean, name in tree.clean_names.items():
            assert (path / clean).samefile(path / name)
        index = json.loads((path / "tensorstore_index.json").read_text())
        assert index["shardkeep"] == tree.save_id
        assert "params/odd/wide" in [entry["path"] for entry in index["arrays"]]
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path / "params" / "odd" / "wide")}}
        wide = tensorstore.open(spec, read=True, context=tensorstore.Context()).result().read().result()
        assert np.asarray(wide).tobytes() == values_of(number)["params"]["odd"]["wide"].tobytes()
        assert left_overs(path) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_saves_and_two_load(pair: Kept, tmp_path: Path, kind: str) -> None:
    ending, arguments = FORMATS[kind]
    path = tmp_path / f"saved{ending}"
    shardkeep.save(path, arrays_of(values_of(4), mesh_of(2, 4)), **arguments)
    said = pair.run(LOAD.format(path=str(path), number=4), tmp_path)
    assert [s["wrong"] for s in said] == [[], []]


def test_a_prefix_a_template_of_a_part_and_another_kind_of_tree(pair: Kept, tmp_path: Path) -> None:
    """What is saved under a prefix is loaded under it; a template takes what it names, in its own containers."""
    said = pair.run(
        """
values = values_of(2)
mesh = mesh_over((2, 2))
shardkeep.save(root / "x", arrays_of(values, mesh), prefix="model/main")
shardkeep.save(root / "x", arrays_of(values_of(3), mesh, 2), prefix="ema", format="zarr")
wrong = []
sharding = NamedSharding(mesh, P("b"))
template = {"params": {"layers": {"0": {"kernel": jax.ShapeDtypeStruct((64, 48), jnp.float32, sharding=sharding)}}}}
part = shardkeep.load(root / "x", prefix="model/main", template=template)
wrong += differences(part, {"params": {"layers": {"0": {"kernel": values["params"]["layers"][0]["kernel"]}}}})
wrong += differences(shardkeep.load(root / "x", prefix="ema", mesh=mesh), values_of(3))
unknown = caught(shardkeep.load, root / "x", prefix="other")
say(wrong=wrong, unknown=unknown["kind"], prefixes=shardkeep.inspect(root / "x").prefixes)
""",
        tmp_path,
    )
    for process in said:
        assert process["wrong"] == []
        assert process["unknown"] == "PrefixError"
        assert len(process["prefixes"]) == 2
    assert differences(shardkeep.load(tmp_path / "x", prefix="ema"), values_of(3)) == []


EMPTY = """
shapes = [(0, 8), (8, 0), (4, 0, 8)]
values = {f"{n} {i}": np.zeros(shape, np.float32) for n, shape in enumerate(shapes) for i in range(4)}
specs = [P(), P("a"), P(None, "a"), P(("a", "b"))]
tree = {name: spread(v, specs[int(name[-1])], (2, 2)) for name, v in values.items()}
wrong = []
for kind in ({}, {"format": "zarr"}, {"format": "zarr", "compression": "zstd"}):
    path = root / f"x{len(kind)}"
    shardkeep.save(path, tree, **kind)
    wrong += differences(shardkeep.load(path), values)
    wrong += differences(shardkeep.load(path, mesh=mesh_over((4, 1))), values)
say(wrong=wrong)
"""


def test_empty_arrays_cut_along_any_axis(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(EMPTY, tmp_path)
    assert [process["wrong"] for process in said] == [[], []]
    for name in ("x0", "x1", "x2"):
        assert shardkeep.verify(tmp_path / name).ok
