"""A few points of the part "stopped", each of which the limits of time or the truth of the message decide."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.stopped import BEGIN, COMMIT, DONE, WRITE, Point, scene
from multiprocess.cluster import all_well, run_cluster

POINTS = [
    Point(0, "stop", COMMIT),
    Point(0, "stop", COMMIT, inside=True),
    Point(0, "stop", COMMIT, bucket=True),
    Point(0, "kill", COMMIT, bucket=True, lease="60"),
    Point(0, "stop", BEGIN),
    Point(1, "stop", WRITE, inside=True),
    Point(1, "kill", DONE),
]


def test_a_process_that_is_lost_is_given_up_in_time_and_what_is_said_is_true() -> None:
    """Also if it holds the lock, or if the coordination service is stopped with it."""
    with scene() as check, ThreadPoolExecutor(3) as pool:
        for checked in [pool.submit(check, None, point) for point in POINTS]:
            checked.result()


def test_processes_that_are_all_stopped_and_continued_go_on(tmp_path: Path) -> None:
    """As by Ctrl-Z, or when the machine or the container is paused, for longer than a process may be silent."""
    script = """
import subprocess
tree = {"n": np.arange(3)}
shardkeep.save(root / "x", tree)
(root / f"{index}.pid").write_text(str(os.getpid()))
meet(root, "saved", index, size)
if index == 0:
    a, b = [(root / f"{i}.pid").read_text() for i in range(size)]
    # The first one has seen the last sign of life of the other, and none when it continues.
    stop = f"sleep 2; kill -STOP {b}; sleep 1.5; kill -STOP {a}; sleep 8; kill -CONT {a}; sleep 0.3; kill -CONT {b}"
    stop += f"; touch {root}/continued"
    subprocess.Popen(["sh", "-c", stop])
else:
    while not (root / "continued").exists():  # the first process waits for this one, before it is stopped and after
        time.sleep(0.1)
say(error=caught(shardkeep.save, root / "x", tree, overwrite=True))
"""
    for process in all_well(run_cluster(script, tmp_path, environment={"SHARDKEEP_PROCESS_SILENCE": "6"})):
        assert process["error"]["kind"] is None, process["error"]
        assert process["error"]["seconds"] < 30
