"""Auxiliary data that is not plain is stored where the program has told JAX how, and only then."""

import base64
import enum
import json
import logging
import sys
import uuid
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.export
import jax.numpy as jnp
import pytest

import shardkeep
from shardkeep.errors import IntegrityError, TreeError
from shardkeep.model.auxdata import build_static, describe_static, deserializer_named, serializer_of
from shardkeep.model.tree import Skeleton, flatten
from support import assert_same, run_python


class Settings:
    """Auxiliary data that is no plain value."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class Layer:
    """A node with settings, registered with a serializer."""

    def __init__(self, kernel: Any, settings: Any) -> None:
        self.kernel, self.settings = kernel, settings


def _serialize(settings: Any) -> bytes:
    if settings.text == "refused":
        raise RuntimeError("no such settings")
    return settings.text.encode()


def _deserialize(stored: bytes) -> Any:
    CALLS.append(stored)
    return Settings(stored.decode())


CALLS: list[bytes] = []
Pair = namedtuple("Pair", ["first", "second"])

jax.tree_util.register_pytree_node(
    Layer, lambda layer: ((layer.kernel,), layer.settings), lambda aux, children: Layer(children[0], aux)
)
jax.export.register_pytree_node_serialization(
    Layer, serialized_name="tests.Layer", serialize_auxdata=_serialize, deserialize_auxdata=_deserialize
)
jax.export.register_namedtuple_serialization(Pair, serialized_name="tests.Pair")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Config:
    width: int
    name: str = "mlp"
    shape: tuple[int, ...] = ()
    made: ClassVar[list[int]] = []

    def __post_init__(self) -> None:
        self.made.append(1)


@jax.tree_util.register_static
class Text(str):
    """The example of JAX's documentation."""


@jax.tree_util.register_static
class Mode(enum.Enum):
    TRAIN = 1
    EVAL = "evaluate"


@jax.tree_util.register_static
class Number(int):
    """Written out otherwise than it is."""

    def __str__(self) -> str:
        return "many"

    __repr__ = __str__


@jax.tree_util.register_static
class Opaque:
    """Holds what no file can."""

    def __init__(self) -> None:
        self.function = len


def _document(tree: Any) -> Any:
    return json.loads(json.dumps(flatten(tree, serialize=True)[0].to_json()))


def _through_json(tree: Any) -> Any:
    leaves = [leaf.value for leaf in flatten(tree)[1]]
    return Skeleton.from_json(_document(tree)).rebuild(leaves)


def test_jax_keeps_its_registries_where_they_are_looked_for() -> None:
    """A canary: without them, registered classes come back as `OpaqueNode`s."""
    assert serializer_of(Layer) == ("tests.Layer", _serialize)
    assert deserializer_named("tests.Layer") == (Layer, _deserialize)
    assert serializer_of(Config) is None
    assert deserializer_named("nobody") is None


def test_a_jax_without_the_registries_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jax._src.export._export")
    assert serializer_of(Layer) is None
    skeleton, _ = flatten(Layer(1, Settings("x")), serialize=True)
    assert list(Skeleton.from_json(json.loads(json.dumps(skeleton.to_json()))).replaced()) == [f"{__name__}:Layer"]


@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
def test_a_registered_class_comes_back_without_a_template(
    tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"layer": Layer(jnp.ones(3), Settings("gelu")), "pair": Pair(1, 2)}
    shardkeep.save(tmp_path / "c", tree, format=kind)
    loaded = shardkeep.load(tmp_path / "c")
    assert type(loaded["layer"]) is Layer
    assert loaded["layer"].settings == Settings("gelu")
    assert_same(loaded["layer"].kernel, jnp.ones(3))
    assert_same(loaded["pair"], Pair(1, 2))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_it_comes_back_under_its_registered_name_when_the_class_has_moved() -> None:
    text = json.dumps(_document({"layer": Layer(1, Settings("x")), "pair": Pair(1, 2)}))
    moved = Skeleton.from_json(json.loads(text.replace(f"{__name__}:", "__main__:")))
    assert moved.replaced() == {}
    loaded = moved.rebuild([7, 1, 2])
    assert type(loaded["layer"]) is Layer
    assert (loaded["layer"].kernel, loaded["layer"].settings) == (7, Settings("x"))
    assert type(loaded["pair"]) is Pair


def test_a_class_that_nobody_registered_here_is_an_opaque_node_and_its_bytes_go_nowhere() -> None:
    text = json.dumps(_document(Layer(1, Settings("x"))))
    foreign = text.replace("tests.Layer", "nobody.Layer").replace(f"{__name__}:", "nowhere:")
    CALLS.clear()
    skeleton = Skeleton.from_json(json.loads(foreign))
    assert list(skeleton.replaced()) == ["nowhere:Layer"]
    assert skeleton.rebuild([7]) == shardkeep.OpaqueNode("nowhere:Layer", {"0": 7})
    assert CALLS == []
    assert json.loads(foreign) == json.loads(json.dumps(skeleton.to_json())), "a copy keeps what it cannot read"


def test_inspecting_calls_no_deserializer(tmp_path: Path) -> None:
    shardkeep.save(tmp_path / "c", Layer(jnp.ones(3), Settings("x")))
    CALLS.clear()
    assert shardkeep.inspect(tmp_path / "c").nbytes == 12
    assert shardkeep.load(tmp_path / "c", template=Layer(jnp.zeros(3), None)).settings is None
    assert CALLS == []


def test_plain_auxiliary_data_is_stored_as_before() -> None:
    document = _document(Layer(1, "plain"))
    assert document == {
        "custom": f"{__name__}:Layer",
        "children": [["0", 0]],
        "registered": "tests.Layer",
        "aux": "plain",
    }


def test_a_serializer_that_fails_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    tree = Layer(jnp.ones(3), Settings("refused"))
    for save in (shardkeep.save, shardkeep.save_async):
        with pytest.raises(TreeError, match=r"test_auxdata:Layer as 'tests.Layer' failed: .*no such settings"):
            save(tmp_path / "c", tree)
    assert not shardkeep.exists(tmp_path / "c")


def test_a_deserializer_that_refuses_is_an_error_that_names_the_way_out() -> None:
    document = {**_document(Layer(1, Settings("x"))), "aux_bytes": base64.b64encode(b"\xff").decode()}
    with pytest.raises(TreeError, match=r"test_auxdata:Layer rejected the saved values .* template="):
        Skeleton.from_json(document).rebuild([1])


@pytest.mark.parametrize(
    "value", [Config(8), Config(8, "conv", (3, 3)), Text("add"), Text(""), Mode.EVAL, Number(7)], ids=lambda v: type(v)
)
def test_a_static_object_of_plain_values_comes_back(value: Any, tmp_path: Path) -> None:
    loaded = _through_json({"static": value, "x": 1})["static"]
    assert type(loaded) is type(value)
    assert loaded == value
    shardkeep.save(tmp_path / "c", [value, jnp.ones(2)])
    assert shardkeep.load(tmp_path / "c")[0] == value


def test_a_static_object_is_rebuilt_without_its_constructor() -> None:
    value = Config(8)
    before = len(Config.made)
    assert _through_json(value) == value
    assert len(Config.made) == before


def test_a_static_object_of_other_things_comes_from_the_template(tmp_path: Path) -> None:
    value = Opaque()
    assert describe_static(value) is None
    assert describe_static(Config(8, shape=(jnp.float32,))) is None  # type: ignore[arg-type]
    shardkeep.save(tmp_path / "c", {"o": value, "x": 1})
    assert shardkeep.load(tmp_path / "c", template={"o": value, "x": 0}) == {"o": value, "x": 1}
    assert isinstance(shardkeep.load(tmp_path / "c")["o"], shardkeep.OpaqueNode)


@pytest.mark.parametrize(
    ("cls", "described"),
    [
        (Config, {"fields": {"dict": [["width", {"int": "0x1"}]]}}),
        (Config, {"value": "text"}),
        (Config, {"member": "TRAIN"}),
        (Mode, {"member": "TEST"}),
        (Mode, {"value": {"int": "0x1"}}),
        (Text, {"value": {"int": "0x1"}}),
        (Text, {"value": None}),
        (Opaque, {"value": "text"}),
        (Opaque, {"fields": {"dict": []}}),
    ],
)
def test_a_description_that_does_not_fit_the_class_makes_nothing(cls: type, described: Any) -> None:
    assert build_static(cls, described) is None
    document = {"custom": f"{__name__}:{cls.__name__}", "children": [], "static": described}
    assert isinstance(Skeleton.from_json(document).rebuild([]), shardkeep.OpaqueNode)


@pytest.mark.parametrize(
    "fields",
    [
        {"registered": 3, "aux_bytes": ""},
        {"registered": "x", "aux_bytes": "not base64!"},
        {"registered": "x", "aux_bytes": 3},
        {"static": {}},
        {"static": {"fields": 3}},
        {"static": {"member": 3}},
        {"static": {"other": "x"}},
        {"static": {"member": "A", "value": "B"}},
        {"static": "x"},
    ],
)
def test_malformed_auxiliary_data_is_an_integrity_error(fields: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        Skeleton.from_json({"custom": "a:B", "children": [], **fields})


@pytest.fixture
def registered() -> Iterator[Callable[..., type]]:
    """Dataclasses with a static field that is not plain, under one module name."""
    module = sys.modules[__name__]

    def register(order: list[str], static: list[str]) -> type:
        cls = type("Block", (), {"__annotations__": dict.fromkeys(order, Any), "__module__": __name__})
        cls = dataclass(cls)
        jax.tree_util.register_dataclass(cls, [name for name in order if name not in static], static)
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=uuid.uuid4().hex,
            serialize_auxdata=lambda aux: "|".join(settings.text for settings in aux).encode(),
            deserialize_auxdata=lambda stored: tuple(Settings(text) for text in stored.decode().split("|")),
        )
        module.Block = cls  # type: ignore[attr-defined]
        return cls

    yield register
    del module.Block  # type: ignore[attr-defined]


def test_children_of_a_dataclass_that_changed_its_order_stay_with_their_names(registered: Callable[..., type]) -> None:
    block = registered(["w", "b", "act"], ["act"])
    document = _document(block(1, 2, Settings("gelu")))
    now = registered(["b", "act", "w"], ["act"])
    name = serializer_of(now)[0]  # type: ignore[index]
    loaded = Skeleton.from_json({**document, "registered": name}).rebuild([1, 2])
    assert type(loaded) is now
    assert (loaded.w, loaded.b, loaded.act) == (1, 2, Settings("gelu"))


def test_serialized_static_fields_in_another_order_are_not_mixed_up(registered: Callable[..., type]) -> None:
    block = registered(["w", "act", "norm"], ["act", "norm"])
    document = _document(block(1, Settings("gelu"), Settings("rms")))
    now = registered(["w", "norm", "act"], ["norm", "act"])
    name = serializer_of(now)[0]  # type: ignore[index]
    loaded = Skeleton.from_json({**document, "registered": name}).rebuild([1])
    assert isinstance(loaded, shardkeep.OpaqueNode)


def test_nothing_is_imported_because_a_file_names_it(tmp_path: Path) -> None:
    """In another process, which has registered nothing, the classes stay away and so does this module."""
    shardkeep.save(tmp_path / "c", {"l": Layer(jnp.ones(2), Settings("x")), "c": Config(3), "p": Pair(1, 2)})
    printed = run_python(
        "import sys\ntree = shardkeep.load(sys.argv[1])\n"
        "print(type(tree['l']).__name__, type(tree['c']).__name__, tree['p'])\n"
        f"print({__name__!r} in sys.modules)",
        str(tmp_path / "c"),
    )
    assert printed == "OpaqueNode OpaqueNode Pair(first=1, second=2)\nFalse\n"
