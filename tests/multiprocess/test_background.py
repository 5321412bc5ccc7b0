"""Saves in the background of training on several processes."""

from pathlib import Path

import pytest

import shardkeep
from faults.sweep import left_overs
from multiprocess.cluster import Kept
from multiprocess.inside import differences, values_of

TRAIN = """
from functools import partial
mesh = mesh_over((4, 1))
rows, everywhere = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())

@partial(jax.jit, donate_argnums=0)
def step(state, x):
    # Every step needs all processes: the mean over the rows is a sum over all devices.
    w, m, count = state
    g = jnp.mean(w * x, axis=0, keepdims=True)
    m = 0.9 * m + g
    return w - 0.01 * m, m, count + 1

def begin():
    w = put(np.linspace(0, 1, 256 * 128, dtype=np.float32).reshape(256, 128), rows)
    m = put(np.zeros((1, 128), np.float32), everywhere)
    return w, m, put(np.array(0, np.int32), everywhere)

x = put(np.linspace(1, 2, 256 * 128, dtype=np.float32).reshape(256, 128), rows)

def train(steps, after=lambda number, state: None):
    state = begin()
    for number in range(1, steps + 1):
        state = jax.block_until_ready(step(state, x))  # more steps at once can stall on CPU devices, saves or not
        after(number, state)
    return state

def local(state):
    return [[np.asarray(s.data).tobytes().hex() for s in a.addressable_shards] for a in state]
"""


def test_training_with_collectives_and_donation_is_undisturbed(pair: Kept, tmp_path: Path) -> None:
    """Twenty saves, to one path and to many, formats mixed, while each step reduces over all processes."""
    said = pair.run(
        TRAIN
        + """
undisturbed = local(train(60))
expected = {}
pending = []

def save(number, state):
    if number % 3 == 0:
        w, m, count = state
        expected[number] = local(state)
        kind = ["safetensors", "tensorstore"][number % 2]
        path = root / ("latest" if number % 2 else f"step_{number}")
        pending.append(shardkeep.save_async(path, {"w": w, "m": m, "count": count}, format=kind, overwrite=True))

state = train(60, save)
disturbed = local(state)
reports = [p.wait() for p in pending]
wrong = []
for number in [57, *range(6, 61, 6)]:
    path = root / ("latest" if number % 2 else f"step_{number}")
    loaded = shardkeep.load(path, mesh=mesh)
    if local([loaded[name] for name in ("w", "m", "count")]) != expected[number]:
        wrong.append(number)
say(same=disturbed == undisturbed, wrong=wrong, saves=len(reports))
""",
        tmp_path,
    )
    for process in said:
        assert process == {"same": True, "wrong": [], "saves": 20}
    assert left_overs(tmp_path / "latest") == set()


def test_saves_to_two_prefixes_of_one_directory_at_once_are_both_kept(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
trees = {name: arrays_of(values_of(n), mesh_over((2, 2)), n) for n, name in enumerate(("model", "optimizer", "ema"))}
for kind in ("safetensors", "tensorstore"):
    pending = [shardkeep.save_async(root / kind, tree, prefix=name, format=kind) for name, tree in trees.items()]
    for p in pending:
        p.wait()
say(prefixes=shardkeep.inspect(root / "tensorstore").prefixes)
""",
        tmp_path,
    )
    assert [sorted(process["prefixes"]) for process in said] == [["ema", "model", "optimizer"]] * 2
    for kind in ("safetensors", "tensorstore"):
        for number, name in enumerate(("model", "optimizer", "ema")):
            assert differences(shardkeep.load(tmp_path / kind, prefix=name), values_of(number)) == []
        assert left_overs(tmp_path / kind) == set()


def test_many_saves_in_a_row_leave_few_keys(pair: Kept, tmp_path: Path) -> None:
    """Also when more saves are under way at once than operations are remembered."""
    said = pair.run(
        """
from jax._src import distributed
tree = {"w": spread(np.ones((8, 8), np.float32), P("a"))}
keys = lambda: len(distributed.global_state.client.key_value_dir_get("shardkeep/"))
counts = []
shardkeep.processes.group._KEPT_SECONDS = 0.5
for number in range(100):
    shardkeep.save(root / "x", tree, overwrite=True)
    if number % 10 == 0:
        counts.append(keys())
first = [shardkeep.save_async(root / "y", {**tree, "n": number}, overwrite=True) for number in range(90)]
done_early = sum(p.done() for p in first)
for p in first:
    p.wait()
shardkeep.processes.group._KEPT_SECONDS = 5
say(counts=counts, last=keys(), done_early=done_early, n=shardkeep.load(root / "y")["n"])
""",
        tmp_path,
        timeout=90,
    )
    for process in said:
        assert process["n"] == 89
        assert process["done_early"] < 26, "the saves were not under way at once"
        assert max(process["counts"][7:]) < 100 * 9, "keys grow with every save"
        assert process["last"] < (64 + 90) * 9


def test_failures_in_the_background_are_raised_by_wait_on_all(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
import errno
tree = {"w": spread(np.ones((512, 512), np.float32), P("a"))}
good = shardkeep.save_async(root / "good", tree)
good.wait()
meet(root, "good", index, size)
if index == 1:
    fault(root / "bad", "fail", 2, "write", errno.ENOSPC)
bad = shardkeep.save_async(root / "bad", tree)
other = shardkeep.save_async(root / "other", tree)
exists = shardkeep.save_async(root / "good", tree)
found = [caught(p.wait) for p in (bad, other, exists, bad)]
no_fault()
say(found=found, other=shardkeep.exists(root / "other"), bad=shardkeep.exists(root / "bad"))
""",
        tmp_path,
    )
    for number, process in enumerate(said):
        bad, other, exists, again = process["found"]
        assert bad["kind"] == again["kind"] == "NotEnoughSpaceError"
        assert ("process 1" in bad["message"]) == (number == 0)
        assert other["kind"] is None
        assert exists["kind"] == "CheckpointExistsError"
        assert process["other"]
        assert not process["bad"]


def test_an_interrupt_in_one_process_is_told_to_the_others(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
values = [values_of(n) for n in range(3)]
trees = [arrays_of(v, mesh_over((2, 2))) for v in values]
shardkeep.save(root / "x", trees[0])
meet(root, "saved", index, size)
usual_signals()
if index == 1:
    fault(root / "x", "interrupt", 2, "write", again=0)
try:
    error = caught(shardkeep.save, root / "x", trees[1], overwrite=True)
except KeyboardInterrupt:
    error = {"kind": "KeyboardInterrupt"}
no_fault()
old = differences(shardkeep.load(root / "x"), values[0])
shardkeep.save(root / "x", trees[2], overwrite=True)
say(error=error, old=old, new=differences(shardkeep.load(root / "x"), values[2]))
""",
        tmp_path,
    )
    for process in said:
        assert process["old"] == []
        assert process["new"] == []
    assert said[1]["error"]["kind"] == "KeyboardInterrupt"
    assert said[0]["error"]["kind"] == "ProcessError"
    assert "process 1: KeyboardInterrupt" in said[0]["error"]["message"]
    assert left_overs(tmp_path / "x") == set()


def test_each_process_brings_what_it_wrote_into_the_page_cache(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
from shardkeep.runtime.save_queue import QueueEntry
from shardkeep.runtime.scopes import Scope
from support import cached_pages
w = put(np.arange(10 << 20, dtype=np.float32).reshape(1024, -1), NamedSharding(mesh_over((4, 1)), P("a")))
running = QueueEntry("elsewhere", Scope("a save"))
if index == 1:
    running.enter()  # until it is over, this process reads nothing
report = shardkeep.save_async(root / "step_1", {"w": w}).wait()
mine = [report.warm.wait(60 if index == 0 else 0.2)]
meet(root, "one is warm", index, size)
pages = sorted(cached_pages(file) / (file.stat().st_size // 4096) for file in root.rglob("*.safetensors"))
meet(root, "both have looked", index, size)
running.release()
mine.append(report.warm.wait(60))
meet(root, "both are warm", index, size)
pages += sorted(cached_pages(file) / (file.stat().st_size // 4096) for file in root.rglob("*.safetensors"))
say(mine=mine, pages=[round(share) for share in pages], share=report.share, nbytes=report.nbytes)
""",
        tmp_path,
    )
    if said[0]["pages"][0] == 1:
        pytest.skip("files of this file system do not leave the page cache")
    assert [process["mine"] for process in said] == [[True, True], [False, True]]
    assert [process["pages"] for process in said] == [[0, 1, 1, 1]] * 2
    assert all(16 << 20 < process["share"] < process["nbytes"] for process in said)
