"""A cluster beside other programs that save to the same place."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept
from multiprocess.inside import arrays_of, differences, values_of
from support import mesh_of


class Busy:
    """Does something over and over on a thread of its own, until it is left."""

    def __init__(self, work: Callable[[int], Any]) -> None:
        self._work, self._over = work, threading.Event()
        self.count, self.error = 0, None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._work(self.count)
                self.count += 1
        except Exception as error:  # noqa: BLE001  (raised by the test)
            self.error = error

    def __enter__(self) -> "Busy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore", "exchange"])
def test_processes_load_one_state_while_it_is_being_replaced(pair: Kept, tmp_path: Path, kind: str) -> None:
    """All of them the same one, bit by bit."""
    path = tmp_path / ("x.safetensors" if kind == "exchange" else "x")
    more = {"format": "zarr"} if kind == "tensorstore" else {}
    trees = [arrays_of(values_of(n), mesh_of(2, 4)) for n in range(3)]
    shardkeep.save(path, trees[0], **more)
    with Busy(lambda n: shardkeep.save(path, trees[n % 3], overwrite=True, **more)) as busy:
        said = pair.run(
            f"path = {str(path)!r}\n"
            + """
wrong, steps = [], []
values = [values_of(n) for n in range(3)]
until = time.monotonic() + 1.5
while len(steps) < 1000:
    loaded = shardkeep.load(path, mesh=mesh_over((2, 2)), mmap=[True, False][len(steps) % 2])
    wrong += differences(loaded, values[loaded["step"]])
    steps.append(loaded["step"])
    replaced = sum(a != b for a, b in zip(steps, steps[1:]))
    if shardkeep.processes.operation.join("time").share(time.monotonic() > until and replaced > 2):
        break
say(wrong=wrong, steps=steps)
""",
            tmp_path,
        )
    assert said[0]["wrong"] == said[1]["wrong"] == []
    assert said[0]["steps"] == said[1]["steps"]
    assert busy.count > 2, "nothing was replaced meanwhile"
    assert len(said[0]["steps"]) > 3


def test_a_cluster_and_another_program_save_under_their_prefixes(pair: Kept, tmp_path: Path) -> None:
    tree = arrays_of(values_of(7), mesh_of(2, 4))
    with Busy(lambda _: shardkeep.save(tmp_path / "x", tree, prefix="theirs", overwrite=True)) as busy:
        said = pair.run(
            """
for number in range(15):
    kind = ["safetensors", "tensorstore"][number % 2]
    tree = arrays_of(values_of(number), mesh_over((2, 2)))
    shardkeep.save(root / "x", tree, prefix="ours", format=kind, overwrite=True)
say(wrong=differences(shardkeep.load(root / "x", prefix="ours", mesh=mesh_over((4, 1))), values_of(14)))
""",
            tmp_path,
        )
    assert [process["wrong"] for process in said] == [[], []]
    assert busy.count > 0
    assert differences(shardkeep.load(tmp_path / "x", prefix="theirs"), values_of(7)) == []
    assert differences(shardkeep.load(tmp_path / "x", prefix="ours"), values_of(14)) == []
    assert left_overs(tmp_path / "x") == set()


def test_a_cluster_that_is_overtaken_raises_on_all_processes(pair: Kept, tmp_path: Path) -> None:
    """Another program replaces the tree while the cluster writes it: theirs stays, and all processes say so."""
    said = pair.run(
        """
values = [values_of(n) for n in range(3)]
trees = [arrays_of(v, mesh_over((2, 2))) for v in values]
shardkeep.save(root / "x", trees[0])
meet(root, "saved", index, size)
if index == 1:
    fault(root / "x", "pause", 2, "write")
    def overtake():
        while not Path(str(root / "x") + ".pause.reached").exists():
            time.sleep(0.01)
        import subprocess
        code = (
            "import shardkeep, numpy as np, sys; "
            "shardkeep.save(sys.argv[1], {'theirs': np.arange(3)}, overwrite=True)"
        )
        plain = {**os.environ, "LD_PRELOAD": ""}
        subprocess.run([sys.executable, "-c", code, str(root / "x")], check=True, env=plain)
        Path(str(root / "x") + ".pause.go").touch()
    threading.Thread(target=overtake).start()
error = caught(shardkeep.save, root / "x", trees[1], overwrite=True)
no_fault()
theirs = sorted(shardkeep.load(root / "x"))
shardkeep.save(root / "x", trees[2], overwrite=True)
say(error=error, theirs=theirs, wrong=differences(shardkeep.load(root / "x"), values[2]))
""",
        tmp_path,
    )
    for number, process in enumerate(said):
        assert process["error"]["kind"] == "ConflictError", process["error"]
        assert ("process 0" in process["error"]["message"]) == (number == 1)
        assert process["theirs"] == ["theirs"]
        assert process["wrong"] == []
    assert left_overs(tmp_path / "x") == set()
