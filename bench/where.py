"""Where the time of one save or load goes, by module: ours, JAX's, the rest. It shows what bounds a figure.

python bench/where.py WORKLOAD save|call|load [FORMAT]

It profiles the calling thread only. The profiler takes time itself (the first line shows how much), so read the shares.
"""

import cProfile
import pstats
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
from contenders import CONTENDERS, clocked
from trees import WORKLOADS, builder, nbytes_of, template
from worker import into_cache, settle, warm_up

import shardkeep

LEAST = 0.02  # of the whole: what is less is left out


def module_of(file: str) -> str:
    """What a function's file belongs to: a module of ours, another package, or nothing (built in)."""
    parts = Path(file).parts
    if "site-packages" in parts:
        package = parts[parts.index("site-packages") + 1]
        return package if package != "shardkeep" else "shardkeep/" + "/".join(parts[parts.index("shardkeep") + 1 :])
    if "shardkeep" in parts and "src" in parts:
        return "shardkeep/" + "/".join(parts[parts.index("src") + 2 :])
    return "" if file in ("~", "") or file.startswith("<") else "standard library"


def shares(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds by module; what is built in counts for who called it."""
    found: dict[str, float] = {}
    stats: Any = pstats.Stats(profile)
    for (file, _, _), (_, _, own, _, callers) in stats.stats.items():
        name = module_of(file)
        if name:
            found[name] = found.get(name, 0.0) + own
            continue
        for (caller, _, _), (_, _, part, _) in callers.items():
            name = module_of(caller) or "built in"
            found[name] = found.get(name, 0.0) + part
    return found


def main() -> None:
    name, what, *given = sys.argv[1:]
    workload = WORKLOADS[name]
    format: Any = given[0] if given else "safetensors"
    save, save_async = (partial(f, format=format) for f in (shardkeep.save, shardkeep.save_async))
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        warm_up(CONTENDERS["shardkeep"](), where)
        fresh = builder(workload)
        wanted = template(workload)
        if what == "load":
            save(where / "saved", fresh(0))
            into_cache(where / "saved")

        def measured(number: int, profile: cProfile.Profile | None = None) -> float:
            tree = None if what == "load" else fresh(number)
            settle(nbytes_of(workload))
            work = {
                "save": lambda: save(where / f"step_{number}", tree),
                "call": lambda: save_async(where / f"step_{number}", tree),
                "load": lambda: jax.block_until_ready(shardkeep.load(where / "saved", template=wanted)),
            }[what]
            seconds, result = clocked(work if profile is None else lambda: profile.runcall(work))
            if isinstance(result, shardkeep.PendingSave):
                result.wait()
            return seconds

        plain = [measured(number) for number in range(1, 4)]
        profile = cProfile.Profile()
        seconds = measured(4, profile)
        named = f"{workload.title}, {' '.join((what, *given))}"
        print(f"{named}: {min(plain) * 1e3:.0f} ms, under the profiler {seconds * 1e3:.0f}")
        found = shares(profile)
        for module, own in sorted(found.items(), key=lambda item: -item[1]):
            if own / seconds >= LEAST:
                print(f"  {own / seconds:4.0%}  {module}")


if __name__ == "__main__":
    main()
