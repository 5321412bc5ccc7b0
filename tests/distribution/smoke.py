"""What a stranger does with an installed shardkeep, in an empty directory. `run.py` starts it in fresh environments."""

import importlib
import importlib.metadata
import importlib.resources
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import shardkeep

jax.config.update("jax_num_cpu_devices", 8)
P = PartitionSpec
HERE = Path.cwd()


def check_where_it_comes_from() -> None:
    installed = Path(os.environ["SHARDKEEP_INSTALLED"])
    assert Path(sys.prefix).samefile(installed)
    assert Path(shardkeep.__file__).is_relative_to(installed), shardkeep.__file__
    assert not list(HERE.iterdir())
    assert importlib.metadata.version("shardkeep") == shardkeep.__version__
    assert importlib.resources.files("shardkeep").joinpath("py.typed").is_file()


def check_every_module_is_imported_without_further_packages() -> None:
    for module in pkgutil.walk_packages(shardkeep.__path__, "shardkeep."):
        if module.name != "shardkeep.__main__":
            importlib.import_module(module.name)


def check_a_sharded_tree_on_another_mesh() -> None:
    mesh, other = jax.make_mesh((2, 4), ("fsdp", "tp")), jax.make_mesh((8,), ("fsdp",))
    rows = np.arange(1024 * 512, dtype=np.float32).reshape(1024, 512)
    tree = {"kernel": jax.device_put(rows, NamedSharding(mesh, P("fsdp", "tp"))), "key": jax.random.key(3), "step": 100}
    ways: dict[str, dict[str, Any]] = {
        "run/step_100": {},
        "run/step_200": {"format": "zarr", "compression": "zstd"},
        "export/model.safetensors": {},
    }
    for path, more in ways.items():
        shardkeep.save_async(path, tree, metadata={"loss": 0.25}, **more).wait()
        loaded = shardkeep.load(path, mesh=other, partition_rules=[("kernel", P("fsdp")), (".*", P())])
        assert loaded["kernel"].sharding == NamedSharding(other, P("fsdp"))
        assert np.array_equal(np.asarray(loaded["kernel"]), rows)
        assert jnp.array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(tree["key"]))
        assert loaded["step"] == 100
        assert shardkeep.verify(path).ok
    assert str(shardkeep.latest("run")).endswith("step_200")


def check_damage_is_found() -> None:
    shardkeep.save("damaged/step_1", {"w": np.ones(1000)})
    (file,) = Path("damaged/step_1").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert not shardkeep.verify("damaged/step_1").ok
    assert command("verify", "damaged/step_1", code=1).startswith("DAMAGED")


def check_a_run_resumes() -> None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for first, last in ((0, 4), (4, 6)):
        with shardkeep.Run("runs/exp1", save_every=2, keep=shardkeep.Keep(last=2)) as run:
            state, step = run.resume(lambda: {"w": jnp.zeros(8)}, shardings=one)
            assert step == first
            assert float(state["w"][0]) == first
            while step < last:
                state, step = {"w": state["w"] + 1}, step + 1
                run.step(step, state)
    assert [found["step"] for found in json.loads(command("ls", "runs/exp1", "--json"))["steps"]] == [4, 6]


def command(*words: str, code: int = 0) -> str:
    """What the installed command prints."""
    done = subprocess.run(["shardkeep", *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout


def check_the_command() -> None:
    assert command("--version") == f"shardkeep {shardkeep.__version__}\n"
    said = subprocess.run(
        [sys.executable, "-I", "-m", "shardkeep", "--version"], capture_output=True, text=True, check=False
    )
    assert said.stdout == command("--version")
    assert "step_100" in command("ls", "run")
    assert "kernel" in command("inspect", "run/step_100")
    assert command("verify", "run/step_100").startswith("ok")
    assert "no differences found" in command("diff", "run/step_100", "run/step_200")
    command("stats", "run/step_100")
    command("convert", "run/step_200", "export/converted.safetensors", "--dtype", "bfloat16")
    assert shardkeep.load("export/converted.safetensors")["kernel"].dtype == jnp.bfloat16
    for shell in ("bash", "zsh"):
        assert "_shardkeep" in command("completion", shell)


if __name__ == "__main__":
    check_where_it_comes_from()
    check_every_module_is_imported_without_further_packages()
    check_a_sharded_tree_on_another_mesh()
    check_damage_is_found()
    check_a_run_resumes()
    check_the_command()
