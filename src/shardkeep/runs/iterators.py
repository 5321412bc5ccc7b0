"""The states of data iterators: taken for a save, put back after a load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from shardkeep.errors import MissingLeafError, ProcessError, UnsupportedLeafError, an, counted
from shardkeep.jaxapi import membership
from shardkeep.model.perprocess import PerProcess
from shardkeep.processes.operation import join

_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_STATES = (str, int, float, complex, bytes, dict, list, tuple, type(None))

Kind: TypeAlias = Literal["process", "global"]
Redistribute: TypeAlias = Callable[[list[Any], int], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Global:
    """Marks a data iterator, or its state, as identical on every process.

    By default, each process saves the state of its own iterators, so a run must be resumed with the same number of
    processes, or with `redistribute`. A `Global` state is saved once and can be restored on any number of processes.

    Args:
        iterator: An iterator with `get_state` and `set_state`, or `state_dict` and `load_state_dict`; or a state.

    >>> import numpy as np, shardkeep
    >>> with shardkeep.Run(tmp / "exp1") as run:
    ...     _ = run.save(100, {"w": np.zeros(3)}, iterators={"train": shardkeep.Global({"seen": 4096})})
    >>> with shardkeep.Run(tmp / "exp1") as run:
    ...     state, step = run.resume({"w": np.zeros(3)}, iterators={"train": shardkeep.Global(None)})
    >>> run.resumed.iterators
    {'train': {'seen': 4096}}
    """

    iterator: Any


class Taken(NamedTuple):
    """The states of iterators, as a tree to save, and which of them are global."""

    tree: dict[str, Any]
    kinds: dict[str, Kind]


def take(iterators: Mapping[str, Any]) -> Taken:
    """The present states of iterators, to be saved.

    Args:
        iterators: By name, each an iterator with `get_state` and `set_state` (as grain's have), one with `state_dict`
            and `load_state_dict` (as torch's have), or a state itself: anything that `PerProcess` takes. A `Global`
            one is saved as a plain value, which must be the same on every process.

    >>> take({"train": {"seen": 4096}})
    Taken(tree={'train': PerProcess({'seen': 4096})}, kinds={'train': 'process'})
    """
    taken = Taken({}, {})
    for name, given in _checked(iterators).items():
        state = _state_of(name, given)
        is_global = isinstance(given, Global)
        taken.tree[name] = state if is_global else PerProcess(state)
        taken.kinds[name] = "global" if is_global else "process"
    return taken


def put_back(
    iterators: Mapping[str, Any],
    kinds: Mapping[str, Kind],
    processes: int | None,
    load: Callable[[Literal["own", "all"]], Mapping[str, Any]],
    redistribute: Redistribute | None = None,
    what: str = "resuming",
) -> dict[str, Any]:
    """Put saved states back into iterators. Returns the state of each by its name.

    Every name is checked before the first iterator is changed.

    Args:
        iterators: By name, as for `take`. In place of a state, any state may stand: the saved one is returned.
        kinds: The names that were saved, and which are global.
        processes: How many processes have saved their own states; None if all are global.
        load: Loads the states by name; takes the `per_process` argument of `shardkeep.load`.
        redistribute: For another number of processes: takes the list of all states of an iterator and the new number,
            and returns that many states, by the index of the process. It is called on every process.
        what: What is done, for messages.
    """
    iterators = _checked(iterators)
    if not iterators:
        return {}
    _refuse_missing(iterators, kinds, what)
    member = membership()
    index, size = (0, 1) if member is None else (member.process, member.size)
    own = [name for name in iterators if kinds[name] == "process"]
    spread = bool(own) and processes != size
    if spread and redistribute is None:
        raise _other_count(own, processes, size, what)
    found = load("all" if spread else "own")
    states = {name: found[name] for name in iterators}
    with join(f"{what}: positioning the iterators") as operation:  # what is raised here is raised everywhere
        if spread and redistribute is not None:
            for name in own:
                states[name] = _redistributed(name, list(states[name]), size, redistribute, what)[index]
        for name, given in iterators.items():
            if (names := _protocol_of(name, _unwrapped(given))) is not None:
                getattr(_unwrapped(given), names[1])(states[name])
        operation.gather(None)
        operation.share()
    return states


def _checked(iterators: Any) -> Mapping[str, Any]:
    """The iterators; raises an error that names what is none."""
    given = cast("Mapping[Any, Any]", iterators)
    if not isinstance(iterators, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise TypeError(f'iterators must be a dict of names and iterators, as {{"train": data}}, not {iterators!r:.80}')
    for name, one in given.items():
        _protocol_of(name, _unwrapped(one))
    return given


def _unwrapped(given: Any) -> Any:
    inside = given.iterator if isinstance(given, Global) else given
    return inside.value if isinstance(inside, PerProcess) else inside


def _state_of(name: str, given: Any) -> Any:
    inside = _unwrapped(given)
    names = _protocol_of(name, inside)
    return inside if names is None else getattr(inside, names[0])()


def _protocol_of(name: str, inside: Any) -> tuple[str, str] | None:
    """The names of the methods that give and take the state; None for a state itself."""
    for names in _PROTOCOLS:
        if all(callable(getattr(inside, method, None)) for method in names):
            return names
    if isinstance(inside, _STATES) or hasattr(inside, "dtype"):
        return None
    has = [method for names in _PROTOCOLS for method in names if callable(getattr(inside, method, None))]
    pairs = "get_state and set_state, {} state_dict and load_state_dict"
    found = f"has only {', '.join(has)} of {pairs.format('or')}" if has else f"has neither {pairs.format('nor')}"
    raise UnsupportedLeafError(
        f"iterator {name!r}: {an(type(inside).__name__)} {found}, and is not a state (str, numbers, bytes, None, "
        "NumPy arrays, and dicts, lists and tuples of them). Pass an iterator that has both, or its position as a "
        "plain value"
    )


def _refuse_missing(iterators: Mapping[str, Any], kinds: Mapping[str, Kind], what: str) -> None:
    missing = [name for name in iterators if name not in kinds]
    if not missing:
        return
    names = ", ".join(map(repr, missing))
    has = f"only that of {', '.join(map(repr, kinds))}" if kinds else "none"
    error = MissingLeafError(
        f"{what}: the checkpoint has no state of iterator {names}; it has {has}. Pass the names that were saved, or "
        "leave iterators out and position the data yourself"
    )
    error.problems = tuple(f"{name}: not saved" for name in missing)
    raise error


def _other_count(names: Sequence[str], processes: int | None, size: int, what: str) -> ProcessError:
    saved = counted(processes or 0, "process", "processes")
    return ProcessError(
        f"{what}: the state of iterator {', '.join(map(repr, names))} was saved by {saved}, each its own, but now "
        f"there {'is' if size == 1 else 'are'} {size:,}. Pass redistribute=function, where function(states, count) "
        f"takes the list of the {processes} saved states and returns a list of {size}; or leave iterators out. A state "
        "that is the same on every process can be saved as shardkeep.Global(iterator), for any number of them"
    )


def _redistributed(name: str, states: list[Any], size: int, redistribute: Redistribute, what: str) -> Sequence[Any]:
    made = redistribute(states, size)
    if not isinstance(made, list | tuple) or len(made) != size:
        got = counted(len(made), "state") if isinstance(made, list | tuple) else an(type(made).__name__)
        raise ProcessError(
            f"{what}: redistribute(states, {size}) must return a list of {counted(size, 'state')} for iterator "
            f"{name!r}, not {got}"
        )
    return made
