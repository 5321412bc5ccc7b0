"""Processes that do not see the same directory, though it has the same name."""

import subprocess
from pathlib import Path

import pytest

import shardkeep
from multiprocess.cluster import all_well, run_cluster
from multiprocess.inside import files_below

# A process with a directory of its own behind the name that all use.
OWN = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$UNSHARED" && exec "$@"', "sh"]


def _can_unshare() -> bool:
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode == 0


@pytest.mark.skipif(not _can_unshare(), reason="needs the right to mount")
def test_storage_that_is_not_shared_is_told_and_nothing_committed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shared = tmp_path / "shared"
    shared.mkdir()
    outcomes = run_cluster(
        f"SHARED = Path({str(shared)!r})\n"
        + """
tree = {"w": spread(pattern("float32", (512, 512)), P("a")), "n": np.arange(5)}
other = {"w": spread(pattern("float32", (512, 512), 1), P("a")), "n": np.arange(5)}
save_async = lambda *a, **k: shardkeep.save_async(*a, **k).wait()
found, views = {}, {}
for call in (shardkeep.save, save_async):
    for kind in ("safetensors", "tensorstore"):
        found[f"{call.__name__} {kind}"] = caught(call, root / kind, tree, format=kind)
        views[kind] = files_below(root / kind)
# The same checkpoint lies there for both: a new one must not be cut in two all the same.
shardkeep.save(SHARED / "x", tree)
meet(SHARED, "saved x", index, size)  # each has removed its record: nothing vanishes while it is copied
import shutil
shutil.copytree(SHARED / "x", root / "x")
found["over a copy"] = caught(shardkeep.save, root / "x", other, overwrite=True)
views["over a copy"] = differences(shardkeep.load(root / "x"), {"w": pattern("float32", (512, 512)), "n": np.arange(5)})
found["load of nothing"] = caught(shardkeep.load, root / ("x" if index == 0 else "nothing"))
# Only the first process sees this one.
if index == 0:
    shutil.copytree(SHARED / "x", root / "mine")
found["load"] = caught(shardkeep.load, root / "mine")
# Both see one, but not the same.
shardkeep.save(SHARED / "y", other)
meet(SHARED, "saved y", index, size)
shutil.copytree(SHARED / ("x" if index == 0 else "y"), root / "different")
found["load of another"] = caught(shardkeep.load, root / "different")
# What is shared works.
shardkeep.save(SHARED / "z", tree)
say(found=found, views=views)
meet(SHARED, "end", index, size)
""",
        root,
        timeout=60,
        environment={"UNSHARED": str(root)},
        commands={1: OWN},
    )
    for process in all_well(outcomes):
        found = process["found"]
        for name in (
            "save safetensors",
            "save tensorstore",
            "<lambda> safetensors",
            "<lambda> tensorstore",
            "over a copy",
        ):
            assert found[name]["kind"] == "StorageError", found[name]
            assert "same shared directory" in found[name]["message"], found[name]
            assert found[name]["seconds"] < 3
        assert process["views"] == {"safetensors": {}, "tensorstore": {}, "over a copy": []}
        assert found["load"]["kind"] == "CheckpointNotFoundError"
        assert "same shared directory" in found["load"]["message"]
        assert "same shared directory" in found["load of another"]["message"], found["load of another"]
        assert found["load of another"]["seconds"] < 3
    assert files_below(root / "safetensors") == {}
    assert shardkeep.exists(shared / "z")
