"""Every name of JAX that is not public, each with what is done if a version of JAX does not have it.

No other module uses such names. `tests/test_jaxapi.py` compares each of them with its public counterpart, so that a
version of JAX that changes one is noticed by a test and not by a user. JAX is never imported from here unless the
program has imported it, or calls something that needs it. Public functions that JAX does not annotate completely have
a typed form here.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast, overload

from shardkeep.errors import ProcessError
from shardkeep.system import after_fork_in_child

if TYPE_CHECKING:
    import jax
    import numpy as np
    from jax.experimental.layout import Format
    from jax.sharding import PartitionSpec, Sharding

    Array = np.ndarray[Any, np.dtype[Any]]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Functions of JAX that only run compiled code, as the innermost frame of the traceback of an array. Several are fast
# paths for computations outside of jit. One that is missing here costs a copy, nothing else.
COMPUTING = frozenset(
    (
        ("interpreters/pxla.py", "ExecuteReplicated.__call__"),
        ("dispatch.py", "apply_primitive"),
        ("pjit.py", "_pjit_call_impl"),
        ("pmap.py", "pmap.<locals>.wrapped"),
        ("shard_map.py", "pmap.<locals>.wrapped"),  # its place in JAX 0.8
        ("numpy/ufunc_api.py", "ufunc.__call__"),
    )
)


class Membership(NamedTuple):
    """This process among those that `jax.distributed.initialize` has connected, and its client of their service."""

    client: Any
    process: int
    size: int


def membership() -> Membership | None:
    """The membership of this process; None if it is alone.

    JAX has no public access to the client. Without it, a process that is alone still saves and loads.
    """
    if "jax" not in sys.modules:
        return None
    try:
        from jax._src.distributed import global_state

        state = cast(Any, global_state)
        client, process, size = state.client, state.process_id or 0, state.num_processes or 1
    except (ImportError, AttributeError) as error:
        return _alone_or_refuse(error)
    return None if client is None or size == 1 else Membership(client, process, size)


def _alone_or_refuse(reason: Exception) -> None:
    import jax

    if process_count() > 1:
        raise ProcessError(
            f"shardkeep cannot reach the coordination service of JAX {jax.__version__} ({reason}), so several "
            "processes cannot save or load together; use a version of JAX that this shardkeep was tested with"
        )


def present_client() -> Any:
    """The client, if there is one; nothing is imported, because a process that was just forked asks."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "client", None)


def service_error() -> type[Exception]:
    """What calls to the coordination service and collectives raise."""
    from jax import errors

    return cast(Any, errors).JaxRuntimeError


def process_count() -> int:
    """The number of processes."""
    import jax

    return jax.process_count()  # pyright: ignore[reportUnknownMemberType]  (its parameter)


def process_index() -> int:
    """The index of this process."""
    import jax

    return jax.process_index()  # pyright: ignore[reportUnknownMemberType]  (its parameter)


@overload
def device_put(
    x: "Sequence[jax.Array | Array]", device: "Sharding | Sequence[Sharding] | None" = None
) -> "list[jax.Array]": ...
@overload
def device_put(x: "jax.Array | Array", device: "Sharding | jax.Device | None" = None) -> "jax.Array": ...
def device_put(x: Any, device: Any = None) -> Any:
    """`jax.device_put` of one array, or of a list of arrays in one call."""
    import jax

    return jax.device_put(x, device)  # pyright: ignore[reportUnknownMemberType]  (its parameter)


def block_until_ready(arrays: "Sequence[jax.Array]") -> None:
    """Wait until the arrays are computed and on their devices."""
    import jax

    jax.block_until_ready(arrays)  # pyright: ignore[reportUnknownMemberType]  (its parameter)


def flatten_once(node: object) -> tuple[list[tuple[object, Any]], tuple[type[object], Any] | None]:
    """The children of a container, each with JAX's name for it, and its class and auxiliary data; None for a leaf."""
    import jax

    def is_inside(x: object) -> bool:
        return x is not node

    # Not `from jax import tree_util`: this is called for each leaf, and that takes as long as the rest.
    flatten = cast("Callable[..., Any]", jax.tree_util.tree_flatten_with_path)  # pyright: ignore[reportUnknownMemberType]
    flat = flatten(node, is_inside)
    pairs, treedef = cast("tuple[list[tuple[tuple[object, ...], Any]], jax.tree_util.PyTreeDef]", flat)
    data = treedef.node_data()
    return [] if data is None else [(path[0], child) for path, child in pairs], data


def wrap_key_data(data: "jax.Array | Array", impl: str) -> "jax.Array":
    """Typed PRNG keys from their data."""
    import jax

    return cast("jax.Array", jax.random.wrap_key_data(cast("jax.Array", data), impl=impl))


def jit(function: Callable[_P, _T], out_shardings: "Sharding | Format | list[Any]") -> Callable[_P, _T]:
    """`jax.jit`, which does not tell what the compiled function takes and returns."""
    import jax

    return jax.jit(function, out_shardings=out_shardings)  # pyright: ignore[reportUnknownMemberType]  (its parameter)


def permute(x: "jax.Array", axis: str, pairs: Sequence[tuple[int, int]]) -> "jax.Array":
    """`jax.lax.ppermute`: inside `jax.shard_map`, the data of the first of each pair on the second, elsewhere zeros."""
    import jax

    return jax.lax.ppermute(x, axis, pairs)  # pyright: ignore[reportUnknownMemberType]


def eval_shape(function: Callable[[], Any]) -> Any:
    """What a function would return, as abstract arrays. One that is jitted with `out_shardings` gives them those."""
    import jax

    return jax.eval_shape(function)  # pyright: ignore[reportUnknownMemberType]


def has_x64() -> bool:
    """Whether JAX holds 64-bit numbers, as it is configured in this thread."""
    import jax

    return bool(getattr(jax.config, "jax_enable_x64"))  # noqa: B009  (an attribute that JAX makes at run time)


def set_key(client: Any, key: str, value: str) -> None:
    """Set a key of the coordination service, whether or not it is set already."""
    client.key_value_set(key, value, allow_overwrite=True)


def set_new_key(client: Any, key: str, value: str) -> bool:
    """Set a key of the coordination service unless it is set already. Tells whether it was set now."""
    try:
        client.key_value_set(key, value, allow_overwrite=False)
    except service_error() as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def list_keys(client: Any, directory: str) -> list[tuple[str, str]]:
    """The keys that begin with a directory, and their values."""
    return client.key_value_dir_get(directory)


def get_key(client: Any, key: str) -> str | None:
    """The value of a key; None if it is not set."""
    try_get = getattr(client, "key_value_try_get", None)
    if try_get is None:
        return dict(list_keys(client, key.rpartition("/")[0] + "/")).get(key)
    try:
        return try_get(key)
    except service_error() as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def wait_for_key(client: Any, key: str, seconds: float) -> str | None:
    """The value of a key as soon as it is set; None if it is not set within that time.

    The thread waits in C++, and nothing but the key or the time ends the wait. Every wait that times out leaves 15 to
    20 kB behind, in the client and in the service, until the key is set: so waits must be long.
    """
    get = getattr(client, "blocking_key_value_get", None)
    if get is None:
        return _poll_for_key(client, key, seconds)
    try:
        return get(key, int(seconds * 1000))
    except service_error() as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def _poll_for_key(client: Any, key: str, seconds: float) -> str | None:
    until = time.monotonic() + seconds
    while (value := get_key(client, key)) is None and time.monotonic() < until:
        time.sleep(min(1.0, seconds / 10))
    return value


def delete_keys(client: Any, directory: str) -> None:
    """Delete all keys that begin with a directory."""
    client.key_value_delete(directory)


def backends_are_in_use() -> bool:
    """Whether JAX has started a backend, and with it threads. Nothing is imported: a forked child asks."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None:
        return "jax" in sys.modules  # it is elsewhere in this version: assume the worst
    return getattr(bridge, "backends_are_initialized", lambda: True)()


def export_registry(name: str) -> Mapping[Any, Any]:
    """A registry of `jax.export`: "serialization_registry" or "deserialization_registry". Empty if it is elsewhere.

    A program that has registered anything has imported the module, so nothing is imported here.
    """
    found = getattr(sys.modules.get("jax._src.export._export"), name, None)
    return cast("Mapping[Any, Any]", found) if isinstance(found, dict) else {}


def local_parts(array: "jax.Array", count: int) -> Sequence[Any]:
    """The parts of an array on the first `count` of its local devices: `addressable_data`, in half the time."""
    parts = getattr(array, "_arrays", None)
    return [array.addressable_data(number) for number in range(count)] if parts is None else parts


def transfers_allowed() -> AbstractContextManager[None]:
    """A context for transfers of our own, which a `jax.transfer_guard` of the program does not concern.

    The guard belongs to a thread. No code of the user may run inside.
    """
    jax = sys.modules.get("jax")
    return nullcontext() if jax is None else jax.transfer_guard("allow")


def own_computation() -> AbstractContextManager[None]:
    """A context for computations of our own: outside of any transfer guard and of the mesh of `jax.set_mesh`.

    With a mesh in force, JAX computes on all of its devices, and refuses arrays that are on others. In this context it
    computes where the arrays are. No code of the user may run inside.
    """
    return transfers_allowed() if current_mesh() is None else _outside_of_the_mesh()


@contextmanager
def _outside_of_the_mesh() -> Generator[None]:
    import jax
    import numpy as np

    with transfers_allowed(), jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        yield


def private_part(part: "jax.Array") -> "jax.Array":
    """The data of an array on one device as another array object.

    An array keeps the host copy that is made of it as long as it lives: this one does, and the caller's does not.
    """
    import jax

    return jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])


def can_lay_out_narrow() -> bool:
    """Whether arrays with elements of less than a byte can have any layout: before 0.8.2 JAX corrupts memory then."""
    import jax

    return jax.__version_info__ >= (0, 8, 2)


def drop_host_copies() -> None:
    """Have JAX let go of host copies whose transfers are over.

    Its threads cannot: they leave that to the next call of JAX that looks for it, and to a function that Python's
    garbage collector calls. A program that computes nothing in between would keep the memory.
    """
    gc.collect(0)


def is_weakly_typed(array: "jax.Array") -> bool:
    """Whether the dtype gives way to that of other operands."""
    try:
        return cast(Any, array).aval.weak_type  # in a tenth of the time of `typeof`
    except AttributeError:
        import jax

        return cast(Any, jax).typeof(array).weak_type


def traceback_of(array: "jax.Array") -> Any:
    """Where an array was created; None if this JAX does not record it."""
    return getattr(array, "traceback", None)


def frames_of(traceback: Any) -> list[tuple[str, str]]:
    """The frames of a traceback from the innermost, each a file and a function. Empty if it has another form."""
    try:
        return [(frame.file_name, frame.function_name) for frame in traceback.frames]
    except AttributeError:
        return []


def file_in_jax(file: str) -> str | None:
    """The name of a file of JAX inside `jax/_src`, "" for its other files and those of jaxlib, None for any other."""
    _, found, within = file.rpartition("/jax/_src/")  # compiled code keeps the path where it was compiled
    if found:
        return within
    return "" if file.startswith(_home_of_jax()) or "/jaxlib/" in file else None


@cache
def _home_of_jax() -> str:
    import jax

    return os.path.dirname(jax.__file__) + os.sep


def batched_device_put() -> Callable[..., "jax.Array"] | None:
    """The function behind `jax.device_put` and `jax.make_array_from_single_device_arrays`, if this JAX has it."""
    try:
        from jax._src.interpreters.pxla import batched_device_put as put  # pyright: ignore[reportUnknownVariableType]
    except ImportError:
        return None
    return cast(Any, put)


def put_like(first: "jax.Array", devices: list[Any], parts: Sequence[list[Any]]) -> "list[jax.Array] | None":
    """Arrays of the shape, dtype and sharding of `first`, each made of its parts on these devices.

    None if this JAX cannot: the caller then places them like the first, which takes four times as long.
    """
    put = batched_device_put()
    if put is None:
        return None
    like = cast(Any, first)
    try:
        return [put(like.aval, like.sharding, list(some), devices, like.committed) for some in parts]
    except (AttributeError, TypeError):  # this JAX has another signature
        return None


def partitions_of(spec: "PartitionSpec") -> tuple[Any, ...]:
    """The axes of a spec by dimension. JAX 0.8 has them as the elements of the spec, where others refuse that."""
    return tuple(cast(Any, spec).partitions if hasattr(spec, "partitions") else spec)


def current_mesh() -> "jax.sharding.Mesh | None":
    """The mesh that `jax.set_mesh` has set; None if it has set none, or this JAX does not tell."""
    import jax

    get = getattr(jax.sharding, "get_mesh", None)
    if get is None:  # JAX 0.8
        try:
            from jax._src.mesh import get_concrete_mesh as get
        except ImportError:
            return None
    mesh = cast(Any, get)()
    return None if mesh is None or mesh.empty else mesh


def finish_on_thread(manager: Any, work: Callable[[], None]) -> None:
    """Have a `GlobalAsyncCheckpointManager` wait for `work`, which runs on a new thread, and raise what it raises.

    Its public `serialize` does that for one process. With several it runs `work` on the first one only, behind barriers
    that are counted; so there it is given the thread as its own.
    """
    if process_count() == 1 or not (hasattr(manager, "_thread") and hasattr(manager, "_exception")):
        manager.serialize([], [], on_commit_callback=work)
        return

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  (raised by the manager's next wait)
            manager._exception = error

    manager._thread = threading.Thread(target=run, name="shardkeep-hand-over")
    manager._thread.start()


# A forked child cannot use JAX, whose threads do not exist there: calls that need them hang. It can still save and load
# NumPy arrays and plain values. (The client for buckets has the same limitation and reports it itself.)
_has_lost_jax = False


def refuse_without_jax() -> None:
    """Raise a `ProcessError` if this process was forked from one that had already used JAX."""
    if _has_lost_jax:
        raise ProcessError(
            "this process was forked after its parent had used JAX, whose threads do not survive a fork. In a forked "
            "child, save and load only NumPy arrays and plain values, or start the child with multiprocessing's "
            "'spawn' or 'forkserver' method"
        )


def _after_fork() -> None:
    global _has_lost_jax
    _has_lost_jax = _has_lost_jax or backends_are_in_use()


after_fork_in_child(_after_fork)
