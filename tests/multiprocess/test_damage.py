"""A damaged checkpoint, a running save and a missing checkpoint, seen by several processes."""

from pathlib import Path

from multiprocess.cluster import Kept

CODE = """
mesh = mesh_over()
save_async = lambda *a, **k: shardkeep.save_async(*a, **k).wait()
tree = {"w": spread(pattern("float32", (512, 512)), P("a")), "n": np.arange(5)}
new = {"w": spread(pattern("float32", (512, 512), 1), P("a")), "n": np.arange(5)}
found = {}
for number, (save, kind) in enumerate((s, k) for s in (shardkeep.save, save_async) for k in ("safetensors", "zarr")):
    path = root / str(number)
    shardkeep.save(path, tree, format=kind, step=number)
    found[f"{number} complete"] = caught(save, path, new, format=kind)["kind"]
    if index == 0:
        data = [p for p in sorted(path.rglob("*")) if p.is_file() and p.stat().st_size > 100_000]
        data[-1].unlink()
    meet(root, f"damaged {number}", index, size)
    found[f"{number} exists"] = shardkeep.exists(path)
    meet(root, f"seen {number}", index, size)
    save(path, new, format=kind, step=number + 1)
    loaded = shardkeep.load(path, mesh=mesh)
    found[f"{number} replaced"] = [shardkeep.exists(path), shardkeep.inspect(path).step]
    found[f"{number} differs"] = differences(loaded, {"w": pattern("float32", (512, 512), 1), "n": np.arange(5)})
found["nothing"] = caught(shardkeep.load, root / "nothing", mesh=mesh, dtype="float99")["kind"]
found["no path"] = caught(shardkeep.save, tree, root / "swapped")["kind"]
say(found=found)
"""


def test_a_damaged_checkpoint_is_replaced_by_all_processes_without_overwrite(pair: Kept, tmp_path: Path) -> None:
    """The first of them decides; what is complete is refused on all."""
    for process in pair.run(CODE, tmp_path):
        found = process["found"]
        for number in range(4):
            assert found[f"{number} complete"] == "CheckpointExistsError"
            assert found[f"{number} exists"] is False
            assert found[f"{number} replaced"] == [True, number + 1]
            assert not found[f"{number} differs"]
        assert found["nothing"] == "CheckpointNotFoundError"
        assert found["no path"] == "PathTypeError"


PLACE = """
tree = {"a": {"w": spread(pattern("float32", (512, 512)), P("a"))}}
shardkeep.save(root / "c", tree)
if index == 1:
    files = sorted(p for p in (root / "c").rglob("*") if p.stat().st_size > 100_000)
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
meet(root, "damaged", index, size)
try:
    shardkeep.load(root / "c", mesh=mesh_over())
except shardkeep.IntegrityError as error:
    say(leaf=error.leaf, file=error.file, span=error.span, message=str(error))
"""


def test_every_process_hears_where_the_damage_is(pair: Kept, tmp_path: Path) -> None:
    """One of them reads the damaged bytes; the error of the other has the same attributes."""
    first, second = pair.run(PLACE, tmp_path)
    for name in ("leaf", "file", "span"):
        assert first[name] == second[name] is not None, name
    assert first["leaf"] == "a/w"
    assert sorted(f"leaf 'a/w': {first['file']}" in said["message"] for said in (first, second)) == [True, True]
    assert sum(said["message"].startswith("process ") for said in (first, second)) == 1
