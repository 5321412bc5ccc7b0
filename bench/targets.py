"""What is to be reached, as ratios of medians within one run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Medians = Mapping[tuple[str, str, str], float]  # by (workload, contender, metric)
US, ZARR, ORBAX, FLAX, RAW = "shardkeep", "shardkeep, tensorstore", "Orbax", "safetensors.flax", "limits"
LARGE = ("a512", "a2048", "b512", "b2048", "f")


@dataclass(frozen=True)
class Row:
    """One thing to reach: `value` against `target`, the larger the better unless `most`."""

    what: str
    value: float | None
    target: float
    most: bool = False

    @property
    def reached(self) -> bool:
        return self.value is not None and (self.value <= self.target if self.most else self.value >= self.target)

    def __str__(self) -> str:
        verdict = "pass" if self.reached else "short"
        return f"{self.what:78} {self.value or 0:8.2f}  {'≤' if self.most else '≥'} {self.target:<5.3g} {verdict}"


def rows(found: Medians) -> Iterator[Row]:
    workloads = list(dict.fromkeys(key[0] for key in found))

    def ratio(workload: str, over: tuple[str, str], under: tuple[str, str]) -> float | None:
        a, b = found.get((workload, *over)), found.get((workload, *under))
        return None if a is None or not b else a / b

    def each(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if name in workloads]

    for w in each(LARGE):
        yield Row(f"{w}: stall of a donating loop, of Orbax's", ratio(w, (US, "stall"), (ORBAX, "stall")), 1 / 3, True)
    for w in each(("c", "c-mesh")):
        yield Row(f"{w}: the save_async call, of Orbax's", ratio(w, (US, "call"), (ORBAX, "call")), 1 / 8, True)
    for us in (US, ZARR):
        for w in each(LARGE[:4]):
            least = 2.5 if w.startswith("a") else 4.0
            yield Row(f"{w}: {us}: durable save, × Orbax", ratio(w, (ORBAX, "durable"), (us, "durable")), least)
            least = 0.75 if us == US or w.startswith("a") else 0.5
            yield Row(f"{w}: {us}: durable save, of the raw disk", ratio(w, (RAW, "durable"), (us, "durable")), least)
        for w in each(("c", "c-mesh")):
            least = 30 if us == US else 3
            yield Row(f"{w}: {us}: durable save, × Orbax", ratio(w, (ORBAX, "durable"), (us, "durable")), least)
    for w in each(LARGE[:4]):
        yield Row(f"{w}: durable save, × safetensors + fsync", ratio(w, (FLAX, "durable"), (US, "durable")), 1.0)
    for w in each(("c",)):
        yield Row(f"{w}: durable save, of safetensors + fsync", ratio(w, (US, "durable"), (FLAX, "durable")), 1.3, True)
    for w in each(("b512", "b2048")):
        what = f"{w}: load of one layer, of safetensors.flax"
        yield Row(what, ratio(w, (US, "one layer"), (FLAX, "one layer")), 1.0, True)
    for us in (US, ZARR):
        for w in each(LARGE):
            yield Row(f"{w}: {us}: load, warm, × Orbax", ratio(w, (ORBAX, "load"), (us, "load")), 10)
            yield Row(f"{w}: {us}: load, warm, × safetensors.flax", ratio(w, (FLAX, "load"), (us, "load")), 2)
            yield Row(f"{w}: {us}: load, cold, × Orbax", ratio(w, (ORBAX, "cold"), (us, "cold")), 2.5)
        for w in each(("c", "c-mesh")):
            yield Row(f"{w}: {us}: load, × Orbax", ratio(w, (ORBAX, "load"), (us, "load")), 30 if us == US else 10)
            if us == US:
                yield Row(f"{w}: {us}: load, × safetensors.flax", ratio(w, (FLAX, "load"), (us, "load")), 3)
        for w in each(("b512", "b2048")):
            for where in ("onto (8, 1)", "onto (4, 2) swapped"):
                yield Row(f"{w}: {us}: load {where}, × Orbax", ratio(w, (ORBAX, where), (us, where)), 5)
    for w in each(("a512", "b512")):
        for peer, least in ((ORBAX, 8), (FLAX, 4)):
            what = f"{w}: load of a new process after a kill, × {peer}"
            yield Row(what, ratio(w, (peer, "resumed"), (US, "resumed")), least)
    for w in workloads:
        yield from _memory(w, found.get)


def _memory(w: str, get: Callable[[tuple[str, str, str]], float | None]) -> Iterator[Row]:
    if w in LARGE:
        yield Row(f"{w}: memory of a save, of the state", get((w, US, "save memory")), 0.1, True)
        yield Row(f"{w}: memory of a donating loop's saves", get((w, US, "donating memory")), 1.1, True)
        yield Row(f"{w}: … and what later saves add", get((w, US, "donating memory, later")), 0.1, True)
        yield Row(f"{w}: memory of a load (mapped)", get((w, US, "load memory")), 0.1, True)
    if w != "limits":
        yield Row(f"{w}: speed a donating loop keeps beside saves", get((w, US, "kept")), 0.6)
