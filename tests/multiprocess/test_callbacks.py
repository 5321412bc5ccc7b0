"""Metadata and commit callbacks of saves that several processes make together."""

from pathlib import Path

import shardkeep
from multiprocess.cluster import Kept
from support import assert_same

START = """
from shardkeep.serialization import AsyncCheckpointManager, tree_serialize_leaves
manager = AsyncCheckpointManager()
tree = {"w": spread(np.ones((8, 8), np.float32), P("a"))}
"""


def test_a_callback_that_raises_comes_after_the_commit_and_fails_on_process_0_only(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        START
        + """
def callback(path):
    raise LookupError("the callback's own")
error = caught(manager.save, tree, root / "x", mesh_over(), callback=callback)
pending = manager.save_async(tree, root / "y", mesh_over(), callback=callback)
later = caught(pending.wait)
shardkeep.save(root / "z", tree)
last = caught(manager.close)
say(error=error, later=later["kind"], last=last["kind"], there=[shardkeep.exists(root / name) for name in "xyz"],
    succeeded=pending.succeeded())
""",
        tmp_path,
    )
    assert "was saved, but the callback raised LookupError: the callback's own" in said[0]["error"]["message"]
    assert (said[0]["error"]["kind"], said[0]["later"]) == ("CallbackError", "CallbackError")
    assert (said[1]["error"]["kind"], said[1]["later"]) == (None, None)
    for process in said:
        assert process["there"] == [True] * 3
        assert process["succeeded"]
        assert process["last"] is None


def test_callbacks_run_in_the_order_of_the_calls(pair: Kept, tmp_path: Path) -> None:
    """A large save, then small ones to other paths, through our manager and through JAX's."""
    said = pair.run(
        START
        + """
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
theirs = GlobalAsyncCheckpointManager(timeout_secs=30)
large = {"w": spread(pattern("float32", (1024, 2048)), P("a"))}
ours_called, theirs_called = [], []
for number in range(4):
    some = tree if number else large
    manager.save_async(some, root / f"a{number}", mesh_over(), callback=lambda _, n=number: ours_called.append(n))
for number in range(4):
    some = tree if number else large
    tree_serialize_leaves(root / f"b{number}", some, theirs, commit_callback=lambda n=number: theirs_called.append(n))
manager.close()
theirs.wait_until_finished()
say(ours=ours_called, theirs=theirs_called)
""",
        tmp_path,
    )
    assert said[0] == {"ours": [0, 1, 2, 3], "theirs": [0, 1, 2, 3]}
    assert said[1] == {"ours": [], "theirs": []}


def test_metadata_of_arrays_that_span_processes_and_nan_is_the_same_everywhere(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        START
        + """
loss = jax.jit(lambda w: (w * np.nan).sum())(tree["w"])  # replicated over the devices of all processes
step = spread(np.int32(7), P())
given = {"loss": loss, "step": step, "best": float("inf"), "mine": np.float32("nan")}
wrong = [] if not loss.is_fully_addressable else ["this shows nothing"]
errors = [
    caught(shardkeep.save, root / "a", tree, metadata=given)["message"],
    caught(lambda: shardkeep.save_async(root / "b", tree, metadata=given).wait())["message"],
    caught(manager.save, tree, root / "c", mesh_over(), metadata=given)["message"],
]
say(wrong=wrong, errors=errors)
""",
        tmp_path,
    )
    assert said == [{"wrong": [], "errors": [""] * 3}] * 2
    nan = float("nan")
    expected = {"loss": nan, "step": 7, "best": float("inf"), "mine": nan}
    for name in "ab":
        assert_same(dict(shardkeep.inspect(tmp_path / name).metadata), expected)
    assert_same(shardkeep.inspect(tmp_path / "c").metadata["custom_metadata"], expected)


def test_an_error_about_different_metadata_does_not_mention_the_time(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        START
        + """
save = lambda: manager.save(tree, root / "x", mesh_over(), metadata={"loss": float("nan") if index else 1.5})
say(message=caught(save)["message"])
""",
        tmp_path,
    )
    for process in said:
        assert '"loss": 1.5' in process["message"]
        assert '{"float": "nan"}' in process["message"]
        assert "timestamp" not in process["message"]
