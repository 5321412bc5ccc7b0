"""What starts without JAX, which takes most of a second to import: everything that reads checkpoints but loads none."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from cli.commands import FIXTURES, GOLDEN, environment, leave_dead_save
from cli.trees import HF_TENSORS, rich_tree, save_like_hugging_face
from runs.runs import trained
from shardkeep import Keep


def python(code: str, *arguments: object) -> Any:
    """What a program prints, as JSON: a fresh process, in which nothing is imported yet."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every kind of checkpoint with every kind of leaf: ours, other programs', unfinished and damaged ones."""
    root = tmp_path_factory.mktemp("kinds")
    tree = rich_tree()
    shardkeep.save(root / "run/step_1", tree, metadata={"loss": 0.5})
    shardkeep.save(root / "run/step_2", tree, prefix="model")
    shardkeep.save(root / "run/step_2", tree, prefix="ema", format="zarr", compression="zstd")
    exchanged = {name: leaf for name, leaf in tree.items() if name not in ("complex", "times")}
    shardkeep.save(root / "exchange/model.safetensors", exchanged)
    save_like_hugging_face(root / "hf", HF_TENSORS)
    shardkeep.save(root / "lost", {"w": tree["wide"]})
    next((root / "lost").glob("*.safetensors")).unlink()
    leave_dead_save(root / "dead")
    trained(root / "exp", [1, 2], keep=Keep(best=2, metric="loss", mode="min"))
    for name in ("index_v1_0", "pytree_builtins", "pytree_optax", "ts_two_prefixes"):
        shutil.copytree(FIXTURES / name, root / "eformer" / name)
    found = [
        root / "run/step_1",
        root / "run/step_2",
        root / "exchange/model.safetensors",
        root / "hf",
        root / "lost",
        root / "dead",
        *sorted((root / "eformer").glob("*/ckpt")),
        *sorted(path.parent for path in GOLDEN.rglob("manifest.json") if "nothing" not in path.parts),
    ]
    assert len(found) > 10
    return found


COMMANDS = """
import contextlib, io, json, sys
from shardkeep.cli.main import main
calls = [["--help"], ["ls", sys.argv[1]], ["clean", sys.argv[1], "--dry-run"]]
for path in sys.argv[2:]:
    calls += [["ls", path], ["inspect", path], ["inspect", path, "--json"], ["inspect", path, "--include", "w"],
              ["verify", path], ["diff", path, path, "--no-values"], ["diff", path, path, "--values"],
              ["stats", path], ["clean", path, "--dry-run"], ["inspect", path + "-nothing"]]
run = sys.argv[1] + "/exp"
calls += [["ls", run], ["ls", run, "--json"], ["inspect", run + "@latest"], ["verify", run + "@best"],
          ["stats", run + "@1"], ["diff", run + "@1", run + "@latest"], ["pin", run + "@1"],
          ["unpin", run + "@best"], ["save-now", run]]
codes = {}
for call in calls:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        codes[" ".join(call)] = main(call)
    assert not {"jax", "jaxlib"} & set(sys.modules), call
print(json.dumps(codes))
"""


def test_no_command_but_convert_imports_jax(checkpoints: list[Path]) -> None:
    """`stats` and `diff --values` included: they compute with NumPy."""
    codes = python(COMMANDS, checkpoints[0].parents[1], *checkpoints)
    for path in checkpoints:
        good = path.name not in ("lost", "dead")
        assert (codes[f"inspect {path}"] == 0) == (path.name != "dead")
        assert (codes[f"stats {path}"] == 0) == good, path
        assert (codes[f"verify {path}"] == 0) == good, path
        assert (codes[f"diff {path} {path} --values"] == 0) == good, path
    assert codes[f"inspect {checkpoints[0]}-nothing"] == 2
    run = checkpoints[0].parents[1] / "exp"
    about_runs = {call: code for call, code in codes.items() if str(run) in call}
    assert list(about_runs.values()) == [0, 0, 0, 0, 0, 1, 0, 0, 2], about_runs  # diff: different; save-now: no writer


FUNCTIONS = """
import json, sys
import shardkeep
assert "jax" not in sys.modules
seen = {}
for path in sys.argv[1:]:
    seen[path] = shardkeep.exists(path)
    shardkeep.latest(path)
    try:
        manifest = shardkeep.inspect(path)
        str(manifest), repr(manifest), dict(manifest.leaves) if len(manifest.trees) == 1 else None
        for prefix, tree in manifest.trees.items():
            manifest.tree(prefix).skeleton.replaced()
        shardkeep.verify(path)
    except shardkeep.ShardkeepError as error:
        seen[path] = str(error)
    assert "jax" not in sys.modules, path
shardkeep.delete(sys.argv[1])
assert not shardkeep.exists(sys.argv[1])
assert "jax" not in sys.modules
print(json.dumps(seen))
"""


def test_inspect_exists_latest_verify_and_delete_do_not_import_jax(checkpoints: list[Path], tmp_path: Path) -> None:
    doomed = shutil.copytree(checkpoints[1], tmp_path / "doomed")
    seen = python(FUNCTIONS, doomed, *checkpoints)
    assert seen[str(checkpoints[0])] is True
    assert seen[str(checkpoints[1])] is True
    assert not doomed.exists()


def test_what_is_read_without_jax_is_what_is_read_with_it(checkpoints: list[Path]) -> None:
    code = "import json, sys; {}import shardkeep; print(json.dumps([str(shardkeep.inspect(p)) for p in sys.argv[1:]]))"
    readable = [path for path in checkpoints if path.name != "dead"]
    assert python(code.format(""), *readable) == python(code.format("import jax; "), *readable)


def test_with_jax_imported_first_all_is_imported_at_once() -> None:
    """So that nothing is imported within the first save."""
    code = (
        "import json, sys, jax, shardkeep; before = set(sys.modules)\n"
        "shardkeep.save, shardkeep.load, shardkeep.verify, shardkeep.OpaqueNode\n"
        "print(json.dumps([m for m in sys.modules if m.startswith('shardkeep') and m not in before]))"
    )
    assert python(code) == []


OPAQUE = """
import json, pickle, sys
import shardkeep
{first}
assert "jax" not in sys.modules
{node}
import jax
print(json.dumps([jax.tree.leaves(node), jax.tree.leaves(jax.tree.map(lambda x: x + 1, node))]))
"""
NODE = shardkeep.OpaqueNode("models:Dense", {"kernel": 1, "bias": 2})
NODES = {
    "made": "node = shardkeep.OpaqueNode('models:Dense', {'kernel': 1, 'bias': 2})",
    "unpickled": f"node = pickle.loads({pickle.dumps(NODE)!r})",
    "loaded": "node = shardkeep.load(sys.argv[1])",
}


@pytest.mark.parametrize("how", NODES)
def test_jax_knows_opaque_nodes_even_if_it_is_imported_later(how: str, tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", {"node": NODE})
    said = python(OPAQUE.format(first="shardkeep.inspect(sys.argv[1])", node=NODES[how]), tmp_path / "c")
    assert said == [[1, 2], [2, 3]]
