"""Processes with one CPU device each, as on most clusters without accelerators."""

from pathlib import Path

from multiprocess.cluster import run_cluster

LOAD = """
host = {key: pattern("float32", (8, 16)) + i for i, key in enumerate("uvw")}
shardkeep.save(root / "x", host)
mesh = mesh_over((2, 1))
wrong = []
for spec in (P("a"), P(None, "a"), P()):
    template = {key: jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh, spec)) for key in host}
    wrong += differences(shardkeep.load(root / "x", template=template), host)
    wrong += differences(shardkeep.load(root / "x", template=template, mmap=False), host)

whole = {"n": np.arange(16, dtype=np.int32)}
shardkeep.save(root / "n", whole)
with jax.set_mesh(mesh):
    cast = shardkeep.load(root / "n", shardings={"n": P("a")}, dtype="int16")
wrong += differences(cast, {"n": whole["n"].astype(np.int16)})
say(wrong=wrong, sharding=cast["n"].sharding == NamedSharding(mesh, P("a")))
"""


def test_small_arrays_of_one_form_are_loaded_in_shards(tmp_path: Path) -> None:
    """What a process needs is read as one array, of which its only device gets a part."""
    for process in run_cluster(LOAD, tmp_path, size=2, devices=1):
        assert process.said == {"wrong": [], "sharding": True}, process.output
