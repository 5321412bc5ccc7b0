"""A job that is killed and started again on the same machine: how long its load takes. A part of `make bench`.

python bench/resume.py CONTENDER WORKLOAD DIRECTORY

One process saves and is killed two seconds after the save has returned. A new one imports the library and loads, as a
job does that resumes: nothing was saved, loaded or touched in it before, and nothing was done to the files or the page
cache. It loads a second time, for comparison.
"""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

SECONDS = 2.0  # from the commit to the kill


def save(contender: str, workload: str, path: Path) -> None:
    from contenders import CONTENDERS
    from trees import WORKLOADS, builder

    tree = builder(WORKLOADS[workload])(1)
    CONTENDERS[contender]().save(path, tree)
    time.sleep(SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def load(contender: str, workload: str, path: Path) -> dict[str, float]:
    import jax
    from contenders import CONTENDERS, clocked
    from trees import WORKLOADS, template

    library, wanted = CONTENDERS[contender](), template(WORKLOADS[workload])
    jax.block_until_ready(jax.device_put(1.0))  # the devices are there
    read = partial(clocked, lambda: jax.block_until_ready(library.load(path, wanted)))
    return {"resumed": read()[0], "resumed, again": read()[0]}


def main() -> None:
    contender, workload, directory, *part = sys.argv[1:]
    path = Path(directory) / "killed"
    if part == ["save"]:
        save(contender, workload, path)
    elif part == ["load"]:
        print(json.dumps(load(contender, workload, path)), flush=True)
    else:
        program = [sys.executable, __file__, contender, workload, directory]
        killed = subprocess.run([*program, "save"], capture_output=True, text=True, check=False)
        if killed.returncode != -signal.SIGKILL:
            raise SystemExit(killed.stderr)
        print(subprocess.run([*program, "load"], stdout=subprocess.PIPE, text=True, check=True).stdout, end="")


if __name__ == "__main__":
    main()
