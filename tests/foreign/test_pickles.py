"""Pickles become plain values and inert records: whatever bytes they hold, nothing runs, hangs or ends the program."""

import copyreg
import datetime
import os
import pickle
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.foreign.pickles import PickledObject, decode_pickle, is_plain_within, plain_value
from support import assert_same, run_python

WHERE = "run/state_structure.json"
TREE = {"a": [1, -(2**70), 2.5, float("-inf"), "é\n", True, None], "t": (1, (2,), ()), 3: {"x": {}}, (0, "k"): []}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back_whatever_the_protocol(protocol: int) -> None:
    assert_same(decode_pickle(pickle.dumps(TREE, protocol), WHERE), TREE)
    if protocol >= 3:  # before that, bytes are a call
        assert_same(decode_pickle(pickle.dumps(b"\x00\xff", protocol), WHERE), b"\x00\xff")


CALLS = {
    "reduce": b"cos\nsystem\n(S'x'\ntR.",
    "inst": b"(S'x'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'x'\no.",
    "newobj": b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00x\x85\x81.",
    "newobj_ex": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85}\x8c\x01k\x8c\x01vs\x92.",
    "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.",
}


@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_make_an_object_makes_a_record(call: str) -> None:
    record = decode_pickle(CALLS[call], WHERE)
    assert isinstance(record, PickledObject)
    assert (record.class_name(), record.args, record.state) == ("os:system", ("x",), None)


def test_a_class_or_function_by_itself_is_a_record_class_and_is_not_looked_up() -> None:
    before = set(sys.modules)
    for pickled, name in (
        (pickle.dumps(os.system), f"{os.system.__module__}:system"),
        (b"cno.such.module\nA.b\n.", "no.such.module:A.b"),
        (b"cxml.dom.expatbuilder\nparse\n.", "xml.dom.expatbuilder:parse"),
    ):
        made = decode_pickle(pickled, WHERE)
        assert issubclass(made, PickledObject)
        assert made.class_name() == name
    assert set(sys.modules) == before


@pytest.mark.parametrize("state", [{"module": "os", "args": 1}, (None, {"module": "os"}), [1], "text"])
def test_state_is_kept_aside_and_sets_no_attribute(state: Any) -> None:
    record = decode_pickle(b"\x80\x02ca\nb\n)\x81" + pickle.dumps(state, 2)[2:-1] + b"b.", WHERE)
    assert_same(record.state, state)
    assert (record.module, record.args) == ("a", ())


REFUSED = {
    "empty": b"",
    "no end": b"N",
    "cut short": pickle.dumps(TREE)[:-3],
    "rubbish": b"\x00\x01\x02",
    "a later protocol": b"\x80\x63N.",
    "nothing on the stack": b".",
    "no mark": b"t.",
    "an unknown memo": b"h\x07.",
    "a persistent id": b"Pabc\n.",
    "a persistent id from the stack": b"\x80\x02NQ.",
    "an unknown extension": b"\x82\xee.",
    "a buffer that is elsewhere": b"\x80\x05\x97.",
    "a buffer of no buffer": b"\x80\x05N\x98.",
    "bad utf-8": b"\x80\x04\x8c\x01\xff.",
    "more digits than Python reads": b"I" + b"1" * 5000 + b"\n.",
    "a list as a key": b"\x80\x02}]K\x01s.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "an object of no class": b"\x80\x02K\x01)\x81.",
    "attributes for a list": b"\x80\x02]}X\x01\x00\x00\x00xK\x01sb.",
    "attributes for a class": b"\x80\x02ca\nb\n}b.",
    "append to a record": b"\x80\x02ca\nb\n)\x81Na.",
    "a key for a record": b"\x80\x02ca\nb\n)\x81NNs.",
    "many keys for a record": b"\x80\x02ca\nb\n)\x81(NNu.",
    "elements for a record": b"\x80\x04ca\nb\n)\x81(N\x90.",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_decoded_is_an_integrity_error_that_names_the_file(what: str) -> None:
    with pytest.raises(shardkeep.IntegrityError, match=f"{WHERE}: a pickled structure cannot be decoded: "):
        decode_pickle(REFUSED[what], WHERE)


def test_more_than_a_structure_could_have_is_refused_unread() -> None:
    with pytest.raises(
        shardkeep.IntegrityError, match=f"{WHERE}: .* has 67,108,865 bytes, more than the limit of 67,108,864"
    ):
        decode_pickle(bytes((64 << 20) + 1), WHERE)


def _values(value: Any) -> Iterator[Any]:
    """Everything inside a decoded value, each object once."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, PickledObject):
            pending += [*item.args, item.state]
        elif isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            pending += item


def test_a_pickle_with_any_byte_changed_gives_inert_values_or_our_error() -> None:
    good = pickle.dumps([(1, "a"), datetime.date(2026, 1, 2), {"k": 2.5}], 2)
    plain = (type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
    plain = (*plain, PickledObject)
    refused = decoded = 0
    for place in range(len(good)):
        for byte in set(range(256)) - {good[place]}:
            try:
                value = decode_pickle(good[:place] + bytes([byte]) + good[place + 1 :], WHERE)
            except shardkeep.IntegrityError:
                refused += 1
                continue
            decoded += 1
            for item in _values(value):
                assert isinstance(item, plain) or (isinstance(item, type) and issubclass(item, PickledObject))
    assert refused > 1000
    assert decoded > 1000


def test_lists_nested_very_deeply_are_decoded_and_are_not_plain() -> None:
    deep = decode_pickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", WHERE)
    assert not is_plain_within(deep, 10**9)


def test_a_dict_key_nested_very_deeply_does_not_end_the_program() -> None:
    printed = run_python(
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from shardkeep.foreign.pickles import decode_pickle\n"
        r"try: decode_pickle(b'\x80\x02})' + b'\x85' * 1_000_000 + b'K\x01s.', 'x')"
        "\nexcept shardkeep.IntegrityError: pass\nprint('alive')"
    )
    assert printed == "alive\n"


PLACES = {
    "a key of a dict": b"}%sNs.",
    "a key among several": b"}(NN%sNu.",
    "a key of a dict made at once": b"(NN%sNd.",
    "a member of a set": b"\x8f(N%s\x90.",
    "a member of a frozenset": b"(N%s\x91.",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_key_that_repeats_itself_is_not_looked_through_for_ever(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve levels here; a file could have two hundred, and a C loop that nothing interrupts."""
    looks = 0

    def count(record: PickledObject) -> int:
        nonlocal looks
        looks += 1
        return 0

    monkeypatch.setattr(PickledObject, "__hash__", count)
    key = b"ca\nb\n)\x81" + b"2\x86" * 12
    try:
        decode_pickle(b"\x80\x04" + PLACES[place] % key, WHERE)
    except shardkeep.IntegrityError:
        pass
    assert looks < 100


@pytest.mark.parametrize("place", PLACES)
def test_keys_are_plain_or_tuples_and_not_so_large_that_hashing_them_takes_time(place: str) -> None:
    for key in (1, -(2**63), "k", b"k", 2.5, None, (), (1, ("a", (None,)))):
        found = decode_pickle(b"\x80\x04" + PLACES[place] % pickle.dumps(key, 3)[2:-1], WHERE)
        assert key in found
    for key in (2**64, (1, (2**64,)), (0,) * 101, (((0,) * 50,), (0,) * 50)):
        with pytest.raises(shardkeep.IntegrityError, match="a key is not a plain value"):
            decode_pickle(b"\x80\x04" + PLACES[place] % pickle.dumps(key, 3)[2:-1], WHERE)


GREEDY = {
    "a large memo number": b"\x80\x02Nr" + (1 << 20).to_bytes(4, "little") + b".",  # with more, up to 64 GiB
    "one class over and over": b"(" + b"ca\nb\n" * 2000 + b"t.",
    "class after class": b"(" + b"".join(b"ca\n%d\n" % i for i in range(20_000)) + b"t.",
    "a bytearray that is not there": b"\x80\x05\x96" + (1 << 20).to_bytes(8, "little") + b".",
}


@pytest.mark.parametrize("what", GREEDY)
def test_memory_stays_in_proportion_to_the_pickle(what: str) -> None:
    tracemalloc.start()
    try:
        decode_pickle(GREEDY[what], WHERE)
    except shardkeep.IntegrityError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(GREEDY[what]) + (1 << 16)


CALLED: list[Any] = []


def called(argument: Any) -> None:
    CALLED.append(argument)


def test_a_function_the_program_registered_as_an_extension_is_not_called() -> None:
    copyreg.add_extension(called.__module__, "called", 0xEE)
    try:
        assert pickle.loads(pickle.dumps(called, 2)) is called  # now it is in the cache
        decode_pickle(b"\x80\x02\x82\xeeK\x01\x85R.", WHERE)
    except shardkeep.IntegrityError:
        pass
    finally:
        copyreg.remove_extension(called.__module__, "called", 0xEE)
    assert CALLED == []


def _leaf(value: Any, protocol: int = 4) -> Any:
    return plain_value(decode_pickle(pickle.dumps(value, protocol), WHERE))


@pytest.mark.parametrize("value", [1 + 2j, complex("nan-infj"), complex(-0.0, 0.0)], ids=str)
def test_a_complex_number_is_rebuilt(value: complex) -> None:
    assert_same(_leaf(value), value)


@pytest.mark.parametrize("protocol", [3, pickle.DEFAULT_PROTOCOL, 5])
@pytest.mark.parametrize("name", ["bool_", "int8", "int64", "uint16", "uint64", "float16", "float64", "complex64"])
def test_a_numpy_scalar_is_rebuilt(name: str, protocol: int) -> None:
    value = getattr(np, name)(1)
    assert_same(_leaf(value, protocol), value)


@pytest.mark.parametrize("value", [None, 3, "s", 2.5, True, b"x"])
def test_a_plain_leaf_is_itself(value: Any) -> None:
    assert_same(_leaf(value), value)


STRANGE = {
    "datetime:date": pickle.dumps(datetime.date(2026, 1, 2)),
    "builtins:list": pickle.dumps([1]),
    "builtins:dict": pickle.dumps({}),
    "builtins:bytearray": pickle.dumps(bytearray(b"x"), 5),
    "builtins:complex": b"\x80\x02cbuiltins\ncomplex\nK\x01K\x02\x86R.",
    "numpy:dtype": b"cnumpy\ndtype\n(S'f4'\ntR.",
    "numpy.core:scalar": b"\x80\x02cnumpy.core\nscalar\nK\x01\x85R.",
}


@pytest.mark.parametrize("name", STRANGE)
def test_any_other_leaf_is_a_stand_in_that_tells_its_class(name: str) -> None:
    assert plain_value(decode_pickle(STRANGE[name], WHERE)).build([]) == shardkeep.OpaqueNode(name, {})


def _numpy(kind: Any, raw: Any) -> Any:
    """The record of numpy's scalar(dtype(kind), raw)."""
    scalar = type("PickledObject", (PickledObject,), {"module": "numpy._core.multiarray", "name": "scalar"})
    dtype = type("PickledObject", (PickledObject,), {"module": "numpy", "name": "dtype"})
    return plain_value(scalar(dtype(kind), raw))


def test_a_numpy_scalar_made_by_hand_is_one() -> None:
    assert_same(_numpy("f4", b"\x00\x00\x80\x3f"), np.float32(1))


@pytest.mark.parametrize(
    ("kind", "raw"),
    [("f4", b""), ("f4", b"12345"), ("f4", "1234"), ("f4", 3), ("O", b"12345678"), ("no", b"1"), ("S3", b"abc")]
    + [
        ("V4", b"1234"),
        ("i4,i4", b"12345678"),
        ("M8", b"12345678"),
        ([("a", "i4")], b"1234"),
        ({}, b""),
        (PickledObject, b"1234"),
    ],
)
def test_a_numpy_scalar_that_is_none_is_a_stand_in(kind: Any, raw: Any) -> None:
    """No object array in particular, whose bytes would be addresses."""
    assert _numpy(kind, raw).build([]) == shardkeep.OpaqueNode("numpy._core.multiarray:scalar", {})


@pytest.mark.parametrize("kind", ["f4,(", "(1,,2)f4,i4"])
def test_a_dtype_that_numpy_cannot_parse_is_a_stand_in(kind: str) -> None:
    assert isinstance(_numpy(kind, b"1234").build([]), shardkeep.OpaqueNode)


@pytest.mark.parametrize(
    ("value", "count"),
    [(1, 1), (None, 1), ([], 1), ([1, 2, 3], 4), ({"a": 1}, 3), ({"a": [1, (2, 3)]}, 7), ((((1,),),), 4)],
)
def test_plainness_is_judged_within_so_many_values(value: Any, count: int) -> None:
    assert is_plain_within(value, count)
    assert not is_plain_within(value, count - 1)


def test_plainness_is_judged_within_so_many_levels() -> None:
    value: Any = 1
    for _ in range(50):
        value = [value]
    assert is_plain_within(value, 1000)
    assert not is_plain_within([value], 1000)
    assert is_plain_within([value], 1000, depth=51)


def test_what_contains_itself_or_anything_else_is_not_plain() -> None:
    endless: list[Any] = []
    endless.append(endless)
    laughs: Any = "ha"
    for _ in range(40):
        laughs = (laughs, laughs)
    for value in (endless, laughs, [object()], {"a": {1}}, {(1, int): 2}, [np.zeros(1)], bytearray()):
        assert not is_plain_within(value, 10_000)
