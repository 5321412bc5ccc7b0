"""What must stay true of the project as a whole: public names, layers, import weight, the size of a save and a load."""

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.serialization import AsyncCheckpointManager, serialization, sharding_utils, utils
from walk import WALKS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardkeep"

# From the bottom up: a package, or a module beside them, imports only from those above it in this list.
# docs/architecture.md shows the same order.
PACKAGES = [
    "_version",
    "errors",
    "config",
    "system",
    "jaxapi",
    "model",
    "runtime",
    "processes",
    "stores",
    "layouts",
    "foreign",
    "targets",
    "catalog",
    "saving",
    "remap",
    "loading",
    "runs",
    "converting",
    "eformer",
    "serialization",
    "cli",
    "__main__",
]
DOCUMENTED = {  # by eFormer
    "is_array_like", "join_key", "leaf_key_paths", "tree_serialize_leaves", "tree_deserialize_leaves",
    "apply_sharding_tree", "create_sharding_tree_from_index", "make_itsharded", "validate_sharding_tree",
    "apply_gather_functions", "broadcast_tensor", "chunk_tensor_by_memory", "derive_base_prefix_from_path",
    "estimate_array_nbytes", "flatten_for_broadcast", "group_keys_by_shard_size", "is_gcs_path",
    "optimize_shard_layout", "parse_gcs_path", "read_process_array", "reshard", "to_host",
}  # fmt: skip
# Functions entered, files they are in, how deeply they are nested: what was reached, so they may only fall.
MOST_IN_A_SAVE = (208, 41, 11)
MOST_IN_A_LOAD = (191, 44, 14)
MOST_LINES_WITH_ANY = 481  # may only fall as well: `Any` is for the leaves of users' trees and what JAX leaves untyped
RULES_SWITCHED_OFF = {"reportMissingTypeStubs", "reportUnnecessaryIsInstance"}  # of other packages; input is checked
MANAGER = {
    "check_for_errors", "close", "compute_checksum", "global_manager", "is_tensorstore", "load", "load_pytree",
    "load_tree_parallel", "safe_loadpath", "save", "save_async", "save_pytree", "save_tree", "wait_until_finished",
}  # fmt: skip


# Modules without a test file of their own, and where they are tested.
TESTED_ELSEWHERE = {
    "_version": "cli/test_main.py",
    "__main__": "cli/test_main.py",
    "converting.convert": "cli/test_converting.py",
    "converting.scratch": "cli/test_converting.py",
    "converting.survey": "cli/test_listing.py",
    "converting.usage": "cli/test_main.py",
    "eformer.checkpointer": "serialization/test_checkpointer.py",
    "eformer.grouping": "serialization/test_utils.py",
    "eformer.handover": "serialization/test_serialization.py",
    "eformer.leaves": "serialization/test_serialization.py",
    "eformer.loader": "serialization/test_loads.py",
    "eformer.paths": "serialization/test_async_manager.py",
    "eformer.shardings": "serialization/test_sharding_utils.py",
    "foreign.base": "foreign/test_registry.py",
    "loading.leftovers": "loading/test_remapping.py",
    "loading.request": "loading/test_load.py",
    "model.summaries": "model/test_manifest.py",
    "remap.steps": "remap/test_rules.py",
    "saving.rows": "saving/test_multiprocess.py",
    "processes.group": "processes/test_operation.py",
    "stores.bucket.listing": "stores/bucket/test_store.py",
    "stores.bucket.objects": "stores/bucket/test_store.py",
    "stores.local.locks": "stores/local/test_store.py",
    "targets.base": "targets/test_transaction.py",
    "targets.cleanup": "targets/test_transaction.py",
}


def _modules() -> dict[str, Path]:
    """Every module by its dotted name below the package, packages' own files left out."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if not name.endswith("__init__"):
            found[name] = path
    return found


MODULES = _modules()


def _imported(path: Path) -> set[str]:
    """The shardkeep modules a file imports, anywhere in it: at the top, in a function, under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            if node.module == "shardkeep" or (node.module or "").startswith("shardkeep."):
                base = (node.module or "").removeprefix("shardkeep").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".lstrip(".")
                    found.add(inner if inner in MODULES else base)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("shardkeep.") for a in node.names if a.name.startswith("shardkeep.")}
            assert all(a.name != "shardkeep" for a in node.names), f"{path.name}:{node.lineno} imports the root"
    return found


def test_public_names_are_listed_sorted_and_documented() -> None:
    names = shardkeep.__all__
    assert list(names) == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        thing = getattr(shardkeep, name)
        if name != "__version__":
            assert inspect.getdoc(thing), f"{name} has no docstring"


def test_nothing_else_looks_public() -> None:
    modules = {name.partition(".")[0] for name in MODULES}
    looks_public = {name for name in vars(shardkeep) if not name.startswith("_")} - modules
    assert looks_public - {"__version__"} <= set(shardkeep.__all__)


def test_no_helper_of_ours_looks_like_a_method_of_the_user() -> None:
    assert {name for name in dir(AsyncCheckpointManager) if not name.startswith("_")} == MANAGER
    for name in shardkeep.__all__:
        if name.endswith("Error"):
            own = vars(getattr(shardkeep, name)).items()
            assert not [key for key, value in own if inspect.isfunction(value) and not key.startswith("_")]


def _explained() -> list[tuple[str, Any]]:
    """Public functions whose docstrings explain every parameter."""
    public = [(name, getattr(shardkeep, name)) for name in shardkeep.__all__]
    found = [(name, thing) for name, thing in public if inspect.isfunction(thing)]
    found += [("PendingSave.wait", shardkeep.PendingSave.wait), ("Manifest.tree", shardkeep.Manifest.tree)]
    for module in (serialization, sharding_utils, utils):
        found += [
            (f"{module.__name__}.{name}", thing)
            for name, thing in vars(module).items()
            if inspect.isfunction(thing) and not name.startswith("_") and name in DOCUMENTED
        ]
    methods = [(name, getattr(AsyncCheckpointManager, name)) for name in sorted(MANAGER)]
    return found + [(f"manager.{name}", method) for name, method in methods if inspect.isfunction(method)]


@pytest.mark.parametrize(("name", "function"), _explained(), ids=[name for name, _ in _explained()])
def test_every_parameter_is_explained(name: str, function: Any) -> None:
    text = inspect.getdoc(function) or ""
    parameters = [p for p in inspect.signature(function).parameters if p != "self"]
    section = text.partition("Args:")[2]
    assert [p for p in parameters if not re.search(rf"^    {p}: \S", section, re.MULTILINE)] == []


@pytest.mark.parametrize("cls", ["StoredLeaf", "Tree", "SaveReport", "VerifyReport", "Problem", "Manifest"])
def test_every_field_is_explained(cls: str) -> None:
    thing = getattr(shardkeep, cls)
    text = inspect.getdoc(thing) or ""
    internal = {"Tree": {"skeleton", "files", "indexed", "published"}}
    names = {field.name for field in dataclasses.fields(thing)} - internal.get(cls, set())
    assert [name for name in names if not re.search(rf"^    {name}: \S", text, re.MULTILINE)] == []


def test_every_public_error_is_in_the_drawn_tree() -> None:
    drawn = (SOURCE / "errors.py").read_text().split('"""')[1]
    for name in shardkeep.__all__:
        if name.endswith("Error"):
            assert re.search(rf"\b{name}\b", drawn), f"{name} is missing from the tree at the top of errors.py"


def test_every_package_has_its_layer() -> None:
    assert {name.partition(".")[0] for name in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    package = module.partition(".")[0]
    allowed = set(PACKAGES[: PACKAGES.index(package) + 1])
    upwards = sorted(name for name in _imported(MODULES[module]) if name.partition(".")[0] not in allowed)
    assert not upwards, f"{module} imports {upwards}, which come later in the pipeline"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_tests(module: str) -> None:
    *package, name = module.split(".")
    own = Path(*package, f"test_{name}.py")
    assert (ROOT / "tests" / own).is_file() != (module in TESTED_ELSEWHERE), f"{module}: tests/{own}"
    assert (ROOT / "tests" / TESTED_ELSEWHERE.get(module, own)).is_file()


def test_modules_that_are_tested_elsewhere_exist() -> None:
    assert set(TESTED_ELSEWHERE) <= set(MODULES)


def test_every_class_has_a_name_of_its_own() -> None:
    """One word has one meaning in the whole package, but for classes that only their own module uses."""
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_no_imports_in_circles() -> None:
    graph = {name: _imported(path) & set(MODULES) for name, path in MODULES.items()}
    done: set[str] = set()
    while ready := [name for name, needs in graph.items() if name not in done and needs <= done]:
        done.update(ready)
    assert done == set(graph), f"these import each other: {sorted(set(graph) - done)}"


def test_architecture_page_shows_the_packages_in_this_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    layout = page.split("```")[1]
    shown = re.findall(r"^(\w+)(?:\.py|/)", layout, re.MULTILINE)
    assert shown == PACKAGES


def _in_fresh_python(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_brings_in_nothing_heavy() -> None:
    heavy = ["tensorstore", "flax", "orbax", "torch", "safetensors", "zarr", "fsspec", "eformer", "optax", "equinox"]
    code = f"import json, sys, shardkeep; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    assert _in_fresh_python(code) == []


def test_import_starts_no_device_and_no_thread() -> None:
    code = (
        "import json, threading, shardkeep; from jax._src import xla_bridge as b;"
        "print(json.dumps([threading.active_count(), len(b._backends)]))"
    )
    assert _in_fresh_python(code) == [1, 0]


@pytest.mark.parametrize("call", WALKS)
def test_one_call_is_small_enough_to_be_followed(call: str, tmp_path: Path) -> None:
    """`python tests/walk.py save` or `load` shows the way it goes."""
    walk = WALKS[call](tmp_path)
    most = {"save": MOST_IN_A_SAVE, "load": MOST_IN_A_LOAD}[call]
    assert all(reached <= bound for reached, bound in zip(walk.size, most, strict=True)), f"more than {most}:\n{walk}"


def _is_number(value: ast.expr) -> bool:
    """Whether an expression is a number, an operation on numbers, or a tuple of them."""
    parts = [node for node in ast.walk(value) if isinstance(node, ast.expr)]
    numbers = [node for node in parts if isinstance(node, ast.Constant) and isinstance(node.value, int | float)]
    others = [node for node in parts if node not in numbers]
    return bool(numbers) and all(isinstance(node, ast.BinOp | ast.UnaryOp | ast.Tuple) for node in others)


@pytest.mark.parametrize("module", MODULES)
def test_every_number_says_why(module: str) -> None:
    """A constant that is a number has its unit or its reason in a comment on its line or above it."""
    text = MODULES[module].read_text()
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]).strip("()").isupper()
            and _is_number(node.value)
        ):
            commented = "#" in lines[node.lineno - 1] or lines[node.lineno - 2].startswith("#")
            assert commented, f"{module}, line {node.lineno}: {lines[node.lineno - 1]}"


def test_the_package_says_it_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_the_type_checker_is_strict_and_has_no_further_rule_switched_off() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]
    weaker = {name for name, value in settings.items() if value in (False, "none", "information", "warning")}
    assert settings["typeCheckingMode"] == "strict"
    assert settings["include"] == ["src"]
    assert weaker == RULES_SWITCHED_OFF
    assert not {"exclude", "ignore", "baselineFile", "executionEnvironments"} & settings.keys()


def test_every_exception_to_a_rule_names_the_rule() -> None:
    code = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    assert [str(path) for path, text in code.items() if re.search(r"#\s*pyright:(?!\s*ignore\[\w)", text)] == []
    assert [str(path) for path, text in code.items() if re.search(r"#\s*type:\s*ignore(?!\[)", text)] == []


def test_there_is_not_more_any_than_there_was() -> None:
    lines = [line for path in SOURCE.rglob("*.py") for line in path.read_text().splitlines()]
    assert sum(re.search(r"\bAny\b", line) is not None for line in lines) <= MOST_LINES_WITH_ANY


def _text_files() -> list[Path]:
    """Every file of the project that is meant to be read."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git work tree")
    endings = {".py", ".ipynb", ".md", ".toml", ".json", ".txt", ".yml", ".yaml", ".cfg", ".sh", ""}
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix in endings]


# Spelled so that this file does not contain them.
MACHINE_PATHS = [re.compile(b"/" + name) for name in (rb"work/", rb"home/[a-z]", rb"root/", rb"Users/")]


def test_no_file_names_the_machine_it_was_written_on() -> None:
    for path in _text_files():
        content = path.read_bytes()
        for pattern in MACHINE_PATHS:
            assert not pattern.search(content), f"{path.relative_to(ROOT)} contains {pattern.pattern!r}"


LIBRARIES = {
    "equinox",
    "flax",
    "grain",
    "jax",
    "keras",
    "matplotlib",
    "numpy",
    "optax",
    "orbax",
    "safetensors",
    "torch",
}


@pytest.mark.parametrize("folder", ["bench", "examples"])
def test_no_program_hides_a_library_by_its_name(folder: str) -> None:
    """Python looks for imports beside the program first: a bench/orbax.py made `import orbax.checkpoint` fail there."""
    programs = {path.stem for path in (ROOT / folder).iterdir()}
    assert programs
    assert not programs & LIBRARIES
