"""Canaries: each private name of JAX that is used, compared with its public counterpart.

If one fails after an upgrade of JAX, shardkeep still works, more slowly or with more copies (the message says what is
lost), and `shardkeep/jaxapi.py` needs the name that JAX uses now.
"""

import ast
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkeep
from multiprocess.service import groups
from shardkeep import jaxapi
from shardkeep.errors import ProcessError
from shardkeep.processes.group import Group
from support import bits, mesh_of

SOURCE = Path(shardkeep.__file__).parent
PRIVATE = re.compile(
    r"jax\._src|jax/_src|\._arrays|\"_arrays\"|\.traceback\b|\"traceback\"|global_state|batched_device_put|key_value_"
    r"|weak_type|\.aval\b|manager\._thread|manager\._exception"
)


def lost(what: str) -> str:
    return f"JAX {jax.__version__} has changed; {what}. Adapt shardkeep/jaxapi.py"


@pytest.mark.parametrize("module", sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")))
def test_no_other_module_uses_a_private_name_of_jax(module: str) -> None:
    if module != "jaxapi.py":
        code = re.sub(r'""".*?"""|#.*', "", (SOURCE / module).read_text(), flags=re.DOTALL)
        assert PRIVATE.findall(code) == []


@pytest.mark.parametrize("module", ["jaxlib._jax", "jaxlib._jax.pytree", "jaxlib.xla_client"])
def test_the_types_written_down_for_jaxlib_name_what_it_has(module: str) -> None:
    """The stubs in `typings/` are for the type checker only; it would not notice that jaxlib has changed."""
    path = SOURCE.parents[1] / "typings" / module.replace(".", "/")
    stub = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
    found = sys.modules[module]
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert hasattr(found, node.name), node.name
        for inside in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inside, ast.FunctionDef):
                assert hasattr(getattr(found, node.name), inside.name), f"{node.name}.{inside.name}"
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jaxlib"):
            assert all(hasattr(found, name.name) for name in node.names)


@pytest.mark.parametrize("several", [False, True])
def test_the_typed_forms_place_compile_and_wait_like_those_of_jax(several: bool) -> None:
    sharding = NamedSharding(mesh_of(8), P("a"))
    host = np.arange(16, dtype=np.float32)
    placed = jaxapi.device_put([host], [sharding])[0] if several else jaxapi.device_put(host, sharding)
    jaxapi.block_until_ready([placed])
    doubled = jaxapi.jit(lambda x: x * 2, sharding)(placed)
    assert placed.sharding == doubled.sharding == sharding
    assert bits(placed) == bits(host)
    assert bits(doubled) == bits(host * 2)


def test_whether_jax_holds_64_bits_is_what_it_is_configured_to_here() -> None:
    assert jaxapi.has_x64() is False
    with jax.enable_x64(True):
        assert jaxapi.has_x64() is True


class _Pair(NamedTuple):
    left: Any
    right: Any


def test_a_container_is_taken_apart_one_level_deep() -> None:
    children, data = jaxapi.flatten_once(_Pair([1, 2], None))
    assert [child for _, child in children] == [[1, 2], None]
    assert data is not None
    assert data[0] is _Pair
    assert jaxapi.flatten_once(3) == ([], None)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with groups(1) as (one,):
        yield one


@pytest.fixture
def spread() -> jax.Array:
    mesh = mesh_of(8)
    return jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("a")))


def test_the_parts_of_an_array_are_its_addressable_data(spread: jax.Array) -> None:
    assert hasattr(spread, "_arrays"), lost("snapshots of sharded arrays take twice as long")
    parts = jaxapi.local_parts(spread, 8)
    for number in range(8):
        assert bits(parts[number]) == bits(spread.addressable_data(number)), lost("the order of parts is another")


def test_without_them_the_public_function_gives_the_parts(spread: jax.Array) -> None:
    class Public:
        addressable_data = staticmethod(spread.addressable_data)

    parts: Any = jaxapi.local_parts(Public(), 3)  # type: ignore[arg-type]
    assert [bits(part) for part in parts] == [bits(spread.addressable_data(i)) for i in range(3)]


@pytest.mark.parametrize("value", [jnp.asarray(1.0), jnp.asarray(np.float32(1)), jnp.ones(3) * 2, jnp.add(1, 2)])
def test_weak_types_are_those_of_the_public_function(value: jax.Array) -> None:
    assert hasattr(value, "aval"), lost("looking for weak types takes ten times as long")
    assert jaxapi.is_weakly_typed(value) == jax.typeof(value).weak_type  # type: ignore[attr-defined]


def test_without_the_abstract_value_the_public_function_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class Public:
        pass

    monkeypatch.setattr(jax, "typeof", lambda _: jnp.asarray(1.0).aval)
    assert jaxapi.is_weakly_typed(Public())  # type: ignore[arg-type]


def test_the_traceback_names_where_an_array_was_made() -> None:
    """What follows from it is tested in saving/test_buffers.py."""
    (file, function), *_ = [
        frame for frame in jaxapi.frames_of(jaxapi.traceback_of(jax.device_put(np.ones(3)))) if frame[0] == __file__
    ] or [("", "")]
    assert (file, function) == (
        __file__,
        "test_the_traceback_names_where_an_array_was_made",
    ), lost("every JAX array on CPU is copied by save_async")


def test_without_tracebacks_nothing_is_known_of_an_array() -> None:
    assert jaxapi.traceback_of(object()) is None  # type: ignore[arg-type]
    assert jaxapi.frames_of(object()) == []


def test_files_of_jax_are_told_from_others() -> None:
    assert jaxapi.file_in_jax("/elsewhere/jax/_src/pjit.py") == "pjit.py"
    assert jaxapi.file_in_jax(str(Path(jax.__file__).parent / "numpy" / "__init__.py")) == ""
    assert jaxapi.file_in_jax("/x/jaxlib/a.py") == ""
    assert jaxapi.file_in_jax(__file__) is None


@pytest.mark.parametrize("function", sorted({function for _, function in jaxapi.COMPUTING}))
def test_functions_that_compute_are_in_files_of_jax(function: str) -> None:
    """In one of the files, if versions of JAX differ in that."""
    files = [Path(jax.__file__).parent / "_src" / file for file, name in jaxapi.COMPUTING if name == function]
    pattern = rf"def {function.rpartition('.')[2]}\b"
    found = any(re.search(pattern, file.read_text()) for file in files if file.exists())
    assert found, lost(f"results of {function} are copied by save_async")


@pytest.mark.parametrize("spec", [P(), P("a")], ids=str)
def test_arrays_placed_together_are_as_the_public_function_places_them(spec: P) -> None:
    sharding = NamedSharding(mesh_of(8), spec)
    arrays = [np.full((8, 4), i, np.float32) for i in range(3)]
    first, *public = [jax.device_put(array, sharding) for array in arrays]
    devices = list(sharding.addressable_devices_indices_map((8, 4)))
    indices: Any = sharding.addressable_devices_indices_map((8, 4)).values()
    placed = jaxapi.put_like(first, devices, [[array[index] for index in indices] for array in arrays[1:]])
    assert placed is not None, lost("placing thousands of small arrays takes four times as long")
    for one, other in zip(placed, public, strict=True):
        assert (one.sharding, one.committed, one.aval) == (other.sharding, other.committed, other.aval)  # type: ignore[attr-defined]
        assert bits(one) == bits(other)


@pytest.mark.parametrize("put", [None, lambda only: only], ids=["missing", "another signature"])
def test_without_the_inner_function_the_caller_places_them(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxapi, "batched_device_put", lambda: put)
    assert jaxapi.put_like(jnp.ones(3), jax.devices()[:1], [[np.ones(3)]]) is None


class TestService:
    def test_keys_are_set_listed_and_deleted(self, group: Group) -> None:
        client = group.client
        message = lost("several processes cannot save or load together")
        jaxapi.set_key(client, "canary/a", "1")
        jaxapi.set_key(client, "canary/a", "2")
        jaxapi.set_key(client, "canary/b/c", "3")
        assert sorted(jaxapi.list_keys(client, "canary/")) == [("canary/a", "2"), ("canary/b/c", "3")], message
        jaxapi.delete_keys(client, "canary/b/")
        assert jaxapi.list_keys(client, "canary/") == [("canary/a", "2")], message
        assert (jaxapi.get_key(client, "canary/a"), jaxapi.get_key(client, "canary/x")) == ("2", None), message

    def test_a_key_is_found_without_the_function_for_one(self, group: Group) -> None:
        class Older:
            key_value_dir_get = staticmethod(group.client.key_value_dir_get)

        jaxapi.set_key(group.client, "older/a", "1")
        assert (jaxapi.get_key(Older(), "older/a"), jaxapi.get_key(Older(), "older/x")) == ("1", None)

    def test_a_key_that_is_set_stays_as_it_is(self, group: Group) -> None:
        message = lost("the processes of a run cannot agree on a step")
        assert [jaxapi.set_new_key(group.client, "new/a", value) for value in "12"] == [True, False], message
        assert jaxapi.get_key(group.client, "new/a") == "1", message

    def test_another_error_of_the_service_is_raised(self, group: Group) -> None:
        class Refusing:
            def key_value_set(self, *_: Any, **__: Any) -> None:
                group.client.blocking_key_value_get("refused", 1)

            def blocking_key_value_get(self, *_: Any) -> None:
                group.client.key_value_set("new/b", "1", allow_overwrite=True)
                group.client.key_value_set("new/b", "2", allow_overwrite=False)

        with pytest.raises(jaxapi.service_error(), match="DEADLINE_EXCEEDED"):
            jaxapi.set_new_key(Refusing(), "new/a", "1")
        with pytest.raises(jaxapi.service_error(), match="ALREADY_EXISTS"):
            jaxapi.wait_for_key(Refusing(), "new/a", 1)

    @pytest.mark.parametrize("older", [False, True], ids=["as JAX does it", "by asking again and again"])
    def test_a_thread_waits_for_a_key_until_it_is_set(self, group: Group, older: bool) -> None:
        class Older:
            key_value_try_get = staticmethod(group.client.key_value_try_get)

        client = Older() if older else group.client
        message = lost("the processes of a run poll for requests")
        assert hasattr(group.client, "blocking_key_value_get"), message
        assert jaxapi.wait_for_key(client, f"awaited/{older}", 0.05) is None, message
        timer = threading.Timer(0.1, jaxapi.set_key, (group.client, f"awaited/{older}", "1"))
        timer.start()
        assert jaxapi.wait_for_key(client, f"awaited/{older}", 5) == "1", message
        timer.join()
        assert jaxapi.wait_for_key(client, f"awaited/{older}", 5) == "1", message


def test_a_process_that_is_alone_is_a_member_of_nothing() -> None:
    from jax._src import distributed

    state = distributed.global_state
    assert {"client", "num_processes", "process_id"} <= set(dir(state)), lost("several processes cannot save together")
    assert jaxapi.membership() is None
    assert jaxapi.present_client() is None


def test_members_have_the_index_and_number_that_jax_tells_publicly(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed

    client = object()
    for name, value in {"client": client, "num_processes": 3, "process_id": 2}.items():
        monkeypatch.setattr(distributed.global_state, name, value)
    assert jaxapi.membership() == (client, 2, 3)
    assert jaxapi.present_client() is client


@pytest.mark.parametrize("count", [1, 2])
def test_without_the_service_only_a_process_that_is_alone_goes_on(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed

    monkeypatch.delattr(distributed, "global_state")
    monkeypatch.setattr(jax, "process_count", lambda: count)
    assert jaxapi.present_client() is None
    if count == 1:
        assert jaxapi.membership() is None
    else:
        with pytest.raises(ProcessError, match=f"cannot reach the coordination service of JAX {jax.__version__}"):
            jaxapi.membership()


def test_whether_jax_has_threads_is_known_without_importing_it() -> None:
    code = (
        "import sys; from shardkeep import jaxapi; seen = [jaxapi.backends_are_in_use(), 'jax' in sys.modules]\n"
        "import jax; seen.append(jaxapi.backends_are_in_use()); jax.devices()\n"
        "print(*seen, jaxapi.backends_are_in_use())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "False False False True\n", lost("forked children are refused, or hang") + done.stderr


def test_a_registration_for_export_is_found() -> None:
    class Pair(tuple[int, int]):
        __slots__ = ()

    jax.tree_util.register_pytree_node(Pair, lambda pair: (tuple(pair), None), lambda _, pair: Pair(pair))
    jax.export.register_pytree_node_serialization(
        Pair, serialized_name="canary.Pair", serialize_auxdata=lambda _: b"", deserialize_auxdata=lambda _: None
    )
    message = lost("auxiliary data of registered classes is not saved")
    assert jaxapi.export_registry("serialization_registry")[Pair][0] == "canary.Pair", message
    assert jaxapi.export_registry("deserialization_registry")["canary.Pair"][0] is Pair, message
    assert jaxapi.export_registry("nothing") == {}


class TestManager:
    @pytest.fixture(params=[1, 2], ids=["alone", "one of two"])
    def manager(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
        from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

        made = GlobalAsyncCheckpointManager()
        assert hasattr(made, "_thread"), lost("its manager cannot wait for saves of several processes")
        assert hasattr(made, "_exception"), lost("its manager cannot wait for saves of several processes")
        monkeypatch.setattr(jax, "process_count", lambda: request.param)
        return made

    def test_it_waits_for_the_work_and_raises_its_error(self, manager: Any) -> None:
        done: list[int] = []
        jaxapi.finish_on_thread(manager, lambda: done.append(1))
        manager.wait_until_finished()
        assert done == [1]

        def fail() -> None:
            raise ValueError("lost")

        jaxapi.finish_on_thread(manager, fail)
        with pytest.raises(ValueError, match="lost"):
            manager.wait_until_finished()
