"""Programs on the simulated device, each in processes of its own: JAX chooses its devices when it starts.

A program begins with the names of `device.control`, as `device`, and of `support`. It tells the test what it saw with
`say(name=value)`.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from device.declarations import header
from multiprocess.cluster import all_well, run_cluster, said
from support import run_python

_HERE = Path(__file__).parent
_SOURCES = [_HERE / "simulated_device.cc", _HERE / "machine.h"]
_FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread"]
_BEGIN = """
from device import control as device
from multiprocess.inside import say
"""


def run_on_device(
    program: str, *arguments: str, devices: int = 4, platform: str = "simulated", timeout: float = 100, **more: str
) -> dict[str, Any]:
    """What a program says that runs on one process with so many simulated devices, and one CPU device.

    Args:
        program: Its source.
        arguments: What it finds in `sys.argv[1:]`.
        devices: How many simulated devices there are.
        platform: What they are called: any name but "cpu" and "cuda"; "rocm" devices have the platform "gpu".
        timeout: Seconds after which it is ended.
        more: Environment variables.
    """
    return said(run_python(_BEGIN + program, *arguments, timeout=timeout, **_environment(platform, devices), **more))


def run_on_devices(
    program: str, root: Path, processes: int = 2, devices: int = 2, platform: str = "simulated", timeout: float = 120
) -> list[dict[str, Any]]:
    """The same on several processes that `jax.distributed` connects; what each of them says.

    `multiprocess.cluster` starts them. The program finds `index`, `size` and `root`.
    """
    variables = _environment(platform, devices)
    return all_well(run_cluster(_BEGIN + program, root, processes, 1, timeout, variables))


def _environment(platform: str, devices: int) -> dict[str, str]:
    library = str(built())
    return {
        "JAX_PLATFORMS": f"{platform},cpu",
        "PJRT_NAMES_AND_LIBRARY_PATHS": f"{platform}:{library}",
        "SIMULATED_LIBRARY": library,
        "SIMULATED_PLATFORM": platform,
        "SIMULATED_DEVICES": str(devices),
        "PYTHONWARNINGS": "ignore:Platform:UserWarning",
    }


@cache
def built() -> Path:
    """The plugin, compiled unless the same source was before; the test is skipped where that is not possible."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("the simulated device needs a C++ compiler (c++, or the one that CXX names)")
    try:
        declarations = header()
    except ImportError as error:
        pytest.skip(f"the simulated device needs the package pypjrt: {error}")
    parts = [*(source.read_text() for source in _SOURCES), declarations, compiler, *_FLAGS]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    room = Path(tempfile.gettempdir()) / f"shardkeep-device-{os.getuid()}"
    room.mkdir(mode=0o700, exist_ok=True)
    library = room / f"simulated-{digest}.so"
    with open(room / "lock", "w") as lock:  # other test processes want the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, declarations, library)
    return library


def _compile(compiler: str, declarations: str, library: Path) -> None:
    """Either the whole library is there afterwards, or nothing."""
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        room = Path(name)
        (room / "pjrt_declarations.h").write_text(declarations)
        command = [compiler, *_FLAGS, f"-I{room}", "-o", str(room / "made.so"), str(_SOURCES[0])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, f"the simulated device does not compile:\n{done.stderr}"
        (room / "made.so").replace(library)
