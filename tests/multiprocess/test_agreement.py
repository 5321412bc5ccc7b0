"""Processes that do not ask for the same are told so, all of them, before anything is written."""

from pathlib import Path

import pytest

import shardkeep
from multiprocess.cluster import Kept

# Each variant is what process 1 does differently: (its tree or arguments, words of the error on every process).
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "shape": ("tree['layer']['w'] = spread(np.ones((16, 8), np.float32), P('a'))", ["layer/w", "[8, 8]", "[16, 8]"]),
    "dtype": ("tree['layer']['w'] = spread(np.ones((8, 8), np.int32), P('a'))", ["layer/w", "float32", "int32"]),
    "sharding": ("tree['layer']['w'] = spread(np.ones((8, 8), np.float32), P(None, 'a'))", ["layer/w", "layout"]),
    "key": ("tree['layer'] = {'v': tree['layer']['w']}", ["layer/w", "(nothing)"]),
    "extra leaf": ("tree['more'] = np.ones(3)", ["more", "(nothing)"]),
    "missing leaf": ("del tree['host']", ["host", "(nothing)"]),
    "extra leaf first": ("tree = {'aaa': 1, **tree}", ["aaa", "(nothing)"]),
    "NumPy values": ("tree['host'] = np.arange(5) + 1", ["host", "contents"]),
    "local JAX values": ("tree['local'] = jnp.arange(4.0) + 1", ["local", "contents"]),
    "scalar": ("tree['step'] = 8", ["step", "7", "8"]),
    "long text": ("tree['text'] = 'x' * 5000 + 'y'", ["text"]),
    "order of devices": (
        "mesh = Mesh(np.array(jax.devices()[::-1]).reshape(-1, 1), ('a', 'b')); "
        "tree['layer']['w'] = put(np.ones((8, 8), np.float32), NamedSharding(mesh, P('a')))",
        ["writers of layer/w"],
    ),
    "cut of local arrays": (
        "values = np.arange(1 << 19).reshape(2, 2, -1).transpose(1, 0, 2).reshape(2, -1); "
        "tree['cut'] = jax.device_put(values, local(P(None, 'l')))",
        ["cut", "contents"],
    ),
    "kind of leaf": ("tree['host'] = jnp.arange(5)", ["host", "numpy", "jax"]),
    "container": ("tree['pair'] = list(tree['pair'])", ["structure"]),
    "PRNG implementation": ("tree['key'] = key('unsafe_rbg')", ["key", '"rbg"', '"unsafe_rbg"']),
    "path": ("path = root / 'elsewhere'", ["path", "/x", "/elsewhere"]),
    "prefix": ("more['prefix'] = 'b'", ["prefix", "''", "'b'"]),
    "metadata": ("more['metadata'] = {'epoch': 2}", ["metadata", '"epoch": 1', '"epoch": 2']),
    "a time in metadata": ("more['metadata']['timestamp'] = 'later'", ["metadata", '"timestamp"']),
    "overwrite": ("more['overwrite'] = True", ["overwrite", "False", "True"]),
    "format": ("more['format'] = 'tensorstore'", ["format", "safetensors", "zarr"]),
    "step": ("more['step'] = 8", ["step None", "step 8"]),
}  # fmt: skip

DIFFER = """
def key(impl):
    return jax.random.wrap_key_data(np.arange(4, dtype=np.uint32), impl=impl)

def local(spec):
    return NamedSharding(Mesh(np.array(jax.local_devices()), ("l",)), spec)

def make():
    tree = {
        "layer": {"w": spread(np.ones((8, 8), np.float32), P("a"))}, "host": np.arange(5), "local": jnp.arange(4.0),
        "step": 7, "text": "x" * 5000, "pair": (1, 2),
        "key": key("rbg"),
        "cut": jax.device_put(np.arange(1 << 19).reshape(2, -1), local(P("l"))),
    }
    return tree, root / "x", {"metadata": {"epoch": 1}}

found = {}
for name, how in VARIANTS.items():
    tree, path, more = make()
    if index == size - 1:
        here = {**globals(), "tree": tree, "path": path, "more": more}
        exec(how, here)
        tree, path, more = here["tree"], here["path"], here["more"]
    for call in (shardkeep.save, lambda *a, **k: shardkeep.save_async(*a, **k).wait()):
        error = caught(call, path, tree, **more)
        found.setdefault(name, []).append([error["kind"], error["message"], error["seconds"]])
    meet(root, name, index, size)
    found[name].append(files_below(root / "x") | files_below(root / "elsewhere"))
    meet(root, name + " seen", index, size)
tree, path, more = make()
shardkeep.save(path, tree, **more)
say(found=found, loaded=shardkeep.load(path)["step"])
"""


def test_every_difference_is_named_before_anything_is_written(pair: Kept, tmp_path: Path) -> None:
    variants = {name: how for name, (how, _) in VARIANTS.items()}
    said = pair.run(f"VARIANTS = {variants!r}\n" + DIFFER, tmp_path)
    problems: list[str] = []
    for number, process in enumerate(said):
        assert process["loaded"] == 7
        for name, (*errors, files) in process["found"].items():
            if files:
                problems.append(f"{name}: written all the same: {files}")
            for kind, message, seconds in errors:
                missing = [word for word in VARIANTS[name][1] if word not in message]
                if kind != "ProcessError" or missing or seconds > 5 or len(message) > 2000:
                    problems.append(f"{name}, process {number}: {kind} without {missing}: {message} ({seconds:.1f} s)")
    assert not problems, "\n".join(problems)


def test_equal_values_of_each_process_are_saved_once(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
tree = {"n": np.arange(1 << 16), "l": jnp.arange(1 << 16), "s": 3, "f": 0.5, "k": jax.random.key(3)}
report = shardkeep.save(root / "x", tree)
loaded = shardkeep.load(root / "x")
say(nbytes=report.nbytes, wrong=[name for name in tree if not np.all(loaded[name] == tree[name])])
""",
        tmp_path,
    )
    arrays = (1 << 16) * 8 + (1 << 16) * 4
    for process in said:
        assert process["wrong"] == []
        assert arrays <= process["nbytes"] < arrays + 20_000
    assert sum(leaf.nbytes for leaf in shardkeep.inspect(tmp_path / "x").leaves.values()) == arrays + 8


LOADS: dict[str, tuple[str, list[str]]] = {
    "path": ("path = root / 'y'", ["path", "/x", "/y"]),
    "prefix": ("more['prefix'] = 'b'", ["prefix", "None", "'b'"]),
    "include": ("more['include'] = 'b'", ["include", "None", "'b'"]),
}


def test_loads_of_something_else_are_told_on_every_process(pair: Kept, tmp_path: Path) -> None:
    variants = {name: how for name, (how, _) in LOADS.items()}
    said = pair.run(
        f"VARIANTS = {variants!r}\n"
        + """
for name in ("x", "y"):
    shardkeep.save(root / name, {"a": np.ones(3)})
found = {}
for name, how in VARIANTS.items():
    here = {"path": root / "x", "more": {}, "root": root}
    if index == 1:
        exec(how, here)
    found[name] = caught(shardkeep.load, here["path"], **here["more"])
say(found=found, after=shardkeep.load(root / "x")["a"].tolist())
""",
        tmp_path,
    )
    for process in said:
        assert process["after"] == [1, 1, 1]
        for name, error in process["found"].items():
            assert error["kind"] == "ProcessError", error
            assert all(word in error["message"] for word in LOADS[name][1]), error


LOCAL: dict[str, tuple[str, list[str]]] = {
    "unsupported leaf": ("tree['f'] = print", ["UnsupportedLeafError", "f: a function"]),
    "deleted array": ("tree['l'].delete()", ["UnsupportedLeafError", "deleted"]),
    "bad metadata": ("more['metadata'] = {'x': print}", ["MetadataError"]),
    "bad prefix": ("more['prefix'] = '../x'", ["PrefixError"]),
    "tree with two equal names": ("tree = {'a': {'b': np.ones(1)}, 'a.b': np.ones(1)}", ["KeyCollisionError"]),
}


@pytest.mark.parametrize("where", ["directory", pytest.param("exchange")])
@pytest.mark.parametrize("culprit", [0, 1])
def test_what_one_process_refuses_all_refuse_at_once(pair: Kept, tmp_path: Path, where: str, culprit: int) -> None:
    variants = {name: how for name, (how, _) in LOCAL.items() if where == "exchange" or "names" not in name}
    ending = ".safetensors" if where == "exchange" else ""
    said = pair.run(
        f"VARIANTS, ENDING, CULPRIT = {variants!r}, {ending!r}, {culprit}\n"
        + """
found = {}
for name, how in VARIANTS.items():
    for kind in ("save", "save_async"):
        here = {**globals(), "tree": {"w": spread(np.ones((8, 8)), P("a")), "l": jnp.ones(3)}, "more": {}}
        if index == CULPRIT:
            exec(how, here)
        call = shardkeep.save if kind == "save" else lambda *a, **k: shardkeep.save_async(*a, **k).wait()
        found[f"{name}, {kind}"] = caught(call, root / ("x" + ENDING), here["tree"], **here["more"])
shardkeep.save(root / ("x" + ENDING), {"w": spread(np.ones((8, 8)), P("a"))})
say(found=found, after=sorted(shardkeep.load(root / ("x" + ENDING))))
""",
        tmp_path,
        timeout=10,
    )
    problems: list[str] = []
    for number, process in enumerate(said):
        assert process["after"] == ["w"]
        for name, error in process["found"].items():
            kind, *words = LOCAL[name.partition(", ")[0]][1]
            expected = words if number == culprit else [*words, f"process {culprit}"]
            if error["kind"] != kind or error["seconds"] > 3 or any(word not in error["message"] for word in expected):
                problems.append(f"{name}, process {number}: {error}")
    assert not problems, "\n".join(problems)


def test_what_one_process_cannot_load_none_loads(pair: Kept, tmp_path: Path) -> None:
    said = pair.run(
        """
values = pattern("float32", (8, 8))
shardkeep.save(root / "x", {"w": spread(values, P("a"))})
bad = jax.ShapeDtypeStruct((4, 4), jnp.float32) if index == 1 else jax.ShapeDtypeStruct((8, 8), jnp.float32)
found = caught(shardkeep.load, root / "x", template={"w": bad})
missing = caught(shardkeep.load, root / "nowhere")
say(found=found, missing=missing, wrong=differences(shardkeep.load(root / "x"), {"w": values}))
""",
        tmp_path,
    )
    for number, process in enumerate(said):
        assert process["wrong"] == []
        assert process["found"]["kind"] == "TemplateMismatchError"
        assert "(8, 8)" in process["found"]["message"]
        assert ("process 1" in process["found"]["message"]) == (number == 0)
        assert process["found"]["seconds"] < 3
        assert process["missing"]["kind"] == "CheckpointNotFoundError"
        assert "FileNotFoundError" in process["missing"]["bases"]
