"""The same kill in other libraries: an overwrite that gets SIGKILL at a file system call, and what loads afterwards.

`make faults-peers` runs it in the environment of the benchmarks, where they are installed, and writes its table to
docs/reliability.md.
"""

import importlib
import importlib.metadata
import logging
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from faults.pool import room
from faults.spawner import Fault, Spawner

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
_POINTS = 40


def state(number: int) -> dict[str, Any]:
    """Six arrays of 64 KiB, another state for each number."""
    random = np.random.default_rng(number)
    return {f"w{i}": jax.numpy.asarray(random.standard_normal((128, 128), np.float32)) for i in range(6)}


def _mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))


def _orbax_save(path: str, tree: Any) -> None:
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, tree, force=True)
    checkpointer.wait_until_finished()


def _orbax_load(path: str) -> Any:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer().restore(path)


def _eformer_save(path: str, tree: Any) -> None:
    from eformer.serialization import AsyncCheckpointManager

    AsyncCheckpointManager().save(tree, path, _mesh())


def _eformer_load(path: str) -> Any:
    from eformer.serialization import AsyncCheckpointManager

    rules = [(".*", jax.sharding.PartitionSpec())]
    return AsyncCheckpointManager().load(path, _mesh(), partition_rules=rules)[0]


def _our_save(path: str, tree: Any) -> None:
    import shardkeep

    shardkeep.save(path, tree, format="zarr", overwrite=True)


def _our_load(path: str) -> Any:
    import shardkeep

    return shardkeep.load(path)


@dataclass(frozen=True)
class Peer:
    """A library, and how a tree is saved over another and loaded."""

    package: str
    modules: tuple[str, ...]
    save: Callable[[str, Any], None]
    load: Callable[[str], Any]


PEERS = {
    "shardkeep": Peer("shardkeep", ("shardkeep.saving.save", "shardkeep.loading.load"), _our_save, _our_load),
    "Orbax": Peer("orbax-checkpoint", ("orbax.checkpoint",), _orbax_save, _orbax_load),
    "eFormer": Peer("eformer", ("eformer.serialization",), _eformer_save, _eformer_load),
}


def save(peer: str, path: str, number: int) -> None:
    PEERS[peer].save(path, state(number))


def look(peer: str, path: str) -> str:
    """The old state, the new one, a mix of both or something else; or none, if loading raises."""
    logging.disable(logging.WARNING)
    try:
        found = PEERS[peer].load(path)
    except Exception as error:  # noqa: BLE001  (whatever it is: nothing can be loaded)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return "none"
    states = [state(number) for number in (1, 2)]
    which = {_which(np.asarray(found.get(name)), *(each[name] for each in states)) for name in states[0]}
    return which.pop() if len(which) == 1 else "a mix"


def _which(array: Any, *states: Any) -> str:
    told = [name for name, known in zip(("old", "new"), states, strict=True) if np.array_equal(array, known)]
    return told[0] if told else "wrong"


def sweep(peer: str, spawner: Spawner) -> Counter[str]:
    """How often which state was there, after a kill at each of some calls of an overwrite."""
    seen: Counter[str] = Counter()
    with room() as place:
        outcome = spawner.run("save", peer=peer, path=str(place / "old" / "x"), number=1)
        assert outcome.ok, outcome.log
        looked = spawner.run("look", peer=peer, path=str(place / "old" / "x"))
        assert looked.value == "old", looked.log
        shutil.copytree(place / "old", place / "counted")
        counted = Fault(str(place / "counted"))
        outcome = spawner.run("save", counted, peer=peer, path=str(place / "counted" / "x"), number=2)
        assert outcome.ok, outcome.log
        looked = spawner.run("look", peer=peer, path=str(place / "counted" / "x"))
        assert looked.value == "new", looked.log
        for at in sorted({1 + i * outcome.calls // _POINTS for i in range(_POINTS)}):
            here = place / f"at-{at}"
            shutil.copytree(place / "old", here)
            died = spawner.run("save", Fault(str(here), "torn", at), peer=peer, path=str(here / "x"), number=2)
            if died.signal:
                seen[spawner.run("look", peer=peer, path=str(here / "x")).value] += 1
    return seen


def main() -> int:
    """Try every library that is installed; the table goes to the page."""
    lines = ["| killed during an overwrite | kills | old state | new state | nothing loads | mixed or wrong |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, peer in PEERS.items():
        try:
            version = importlib.metadata.version(peer.package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not installed")
            continue
        with Spawner("faults.peers") as spawner:
            seen = sweep(name, spawner)
        bad = seen["a mix"] + seen["wrong"]
        lines.append(f"| {name} {version} | {seen.total()} | {seen['old']} | {seen['new']} | {seen['none']} | {bad} |")
        print(lines[-1], flush=True)
    # In a process of its own: it imports as little as it can beside what it tries.
    flips = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("peers_rot.py"))], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    print(flips, flush=True)
    page = PAGE.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text("\n".join([f"{before}{BEGIN}", *lines, "", flips.strip(), f"{END}{after}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
else:  # the process that starts others: what they need is imported once
    for _peer in PEERS.values():
        for _module in _peer.modules:
            try:
                importlib.import_module(_module)
            except ImportError:
                pass
