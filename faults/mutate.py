"""Inputs made hostile: JSON changed by its structure, pickles by their opcodes, anything by its bytes."""

import random
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|[a-zA-Z]+|[{}\[\],:]')
_NUMBER = re.compile(rb"-?[0-9]+")

NASTY = [
    *(b"null true false 0 1 2 3 7 8 63 64 65 255 256 4096 -1 -0 1.0 0.5 1e3 1e999 -1e999 NaN Infinity".split()),
    *(str(n).encode() for n in (2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)),
    *(str(-n).encode() for n in (2**31, 2**63, 10**30)),
    b"9" * 4400, b'""', b'"x"', b'"0"', b'"a.b"', b'"."', b'".."', b'"../x"', b'"a/../../x"', b'"/etc/passwd"', b'"~"',
    b'"a\\u0000b"', b'"\\ud800"', b'"\\udcff"', b'"\\ud83d\\ude00"', b'"\xff\xfe"', b'"a\\\\b"', b'"a//b"', b'"/"',
    b'"' + b"x" * 5000 + b'"', b'"' + b"d/" * 300 + b'x"', b'"%68"', b'"\\u202e"', b'"\\n"', b'"manifest.json"',
    b'"__metadata__"', b'"shardkeep"', b'"digest"', b'"object"', b'"O"', b'"|O"', b'"<U9999999999"', b'"V8"',
    b'"float32"', b'"int4"', b'"<f4"', b'"M8[ns]"', b'"datetime64[9999999999s]"', b'"(2,3)f4"', b'"f4,f4"', b'"i4:x"',
    b'"bfloat16"', b'"zstd"', b'"blosc"', b'"gzip"', b'"zarr"', b'"prng"', b'"value"', b'"jax"', b'"numpy"',
    b'"foreign"',
    b'"F32"', b'"F4"', b'"F6_E2M3"', b'"C64"', b'"tensorstore"', b'"safetensors"', b'"os:system"', b'"builtins:eval"',
    b'"support:Dense"', b'"support:Point"', b'"support:Keyed"', b'"collections:OrderedDict"', b'"jax:Array"', b"[]",
    b"{}", b"[0]", b"[0,0]", b"[-1]", b"[4,0]", b"[1.5]", b"[null]", b"[[]]", b"[{}]", b'["a"]', b'{"a":1}', b'{"":{}}',
    b"[1,1,1,1]", b"[" + b"0," * 69 + b"0]", b"[4611686018427387904,4]", b"[1099511627776,1099511627776]",
    b"[" * 200 + b"]" * 200, b'{"a":' * 200 + b"1" + b"}" * 200, b"[" * 5000, b'{"list":[' * 160 + b"0" + b"]}" * 160,
    b'{"tuple":[' * 90 + b"1" + b"]}" * 90, b'{"int":"0x' + b"f" * 3000 + b'"}', b'{"int":"-"}', b'{"float":"nan:00"}',
    b'{"float":"1e999"}', b'{"bytes":"\\u0000"}', b'{"text":"7aCA"}', b'{"numpy":["float32","00"]}',
    b'{"numpy":["O",""]}',
    b'{"dict":[[{"dict":[]},1]]}', b'{"dict":[[{"float":"nan:7ff8000000000000"},1]]}', b'{"complex":["1"]}',
    b'{"tuple":5}', b'{"spec":[["q"]],"mesh":{}}', b'{"custom":5}', b'{"namedtuple":["x:y",["a","a"],[0,0]]}',
]  # fmt: skip

# Steps of a pickle that make, call or claim something.
PICKLED = [
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"(S'x'\ntR", b"(tR", b"\x8c\x02os\x8c\x06system\x93", b"\x81", b"b", b"}b",
    b"(ios\nsystem\n", b"(cos\nsystem\no", b"P1\n", b"Q", b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"0",
    b"2", b"(", b"t", b"]", b"}", b"\x8f", b"\x90", b"\x91", b"e", b"a", b"s", b"u", b"d", b"l", b"\x85", b"\x86",
    b"h\x00",
    b"q\x00", b"\x94", b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\xff", b"\x8d" + b"\xff" * 7 + b"\x7f",
    b"\x8e" + b"\xff" * 8,
    b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f", b"T\xff\xff\xff\x7f", b"B\xff\xff\xff\xff", b"\x8b\xff\xff\xff\x7f",
    b"\x95\x00\x00\x00\x00\x00\x00\x00\x01", b"\x8a\xff" + b"\x7f" * 255, b"I99\n", b"L9L\n", b"Fnan\n", b"N", b"\x88",
    b"K\x05", b"J\xff\xff\xff\xff", b"\x98", b"\x97", b"\x80\x05", b"\x80\xff", b".", b"(2" * 40, b"]2a" * 40,
]  # fmt: skip


@dataclass(frozen=True)
class Scanned:
    """A text, and where the values and the members of objects are in it."""

    text: bytes
    values: Sequence[tuple[int, int]]
    members: Sequence[tuple[int, int]]


def scan(text: bytes) -> Scanned:
    """Find the values in a JSON text, as far as it is one."""
    values: list[tuple[int, int]] = []
    members: list[tuple[int, int]] = []
    opened: list[int] = []
    keys: list[int | None] = []
    key: int | None = None
    last: tuple[int, int] | None = None
    for match in _TOKEN.finditer(text):
        start, end = match.span()
        token = text[start : start + 1]
        if token in b"{[":
            opened.append(start)
            keys.append(key)
            key = None
            continue
        if token == b":":
            key = last[0] if last else None
            if values and last == values[-1]:
                values.pop()
            continue
        if token == b",":
            continue
        if token in b"}]":
            if not opened:
                continue
            start, key = opened.pop(), keys.pop()
        last = (start, end)
        values.append(last)
        if key is not None:
            members.append((key, end))
            key = None
    return Scanned(text, values, members)


def mutate_json(seed: Scanned, rng: random.Random, donor: Scanned) -> bytes:
    """The text with one to four changes to its structure; now and then to its bytes as well."""
    if not seed.values:
        return mutate_bytes(seed.text, rng, NASTY)
    edits: list[tuple[int, int, bytes]] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        start, end = rng.choice(seed.values)
        old = seed.text[start:end]
        kind = rng.randrange(16)
        if kind < 5:
            new = rng.choice(NASTY)
        elif kind < 7:
            a, b = rng.choice(seed.values)
            new = seed.text[a:b]
        elif kind == 7 and donor.values:
            a, b = rng.choice(donor.values)
            new = donor.text[a:b]
        elif kind < 11 and _NUMBER.fullmatch(old):
            new = _other_number(int(old[:50]), rng)
        elif kind == 11 and old.startswith(b'"'):
            new = (
                b'"'
                + mutate_bytes(old[1:-1], rng, [b"/", b"..", b"\\u0000", b"\\ud800", b"."]).replace(b'"', b"")
                + b'"'
            )
        elif kind == 12:
            new = rng.choice((b"[" + old + b"]", b'{"x":' + old + b"}", old + b"," + old))
        elif seed.members:
            start, end = rng.choice(seed.members)
            old = seed.text[start:end]
            a, b = rng.choice(seed.members)
            new = rng.choice((b'"x":0', old + b"," + old, seed.text[a:b], old + b"," + seed.text[a:b]))
        else:
            new = b""
        edits.append((start, end, new))
    text = seed.text
    limit = len(text) + 1
    for start, end, new in sorted(edits, reverse=True):
        if end <= limit:
            text = text[:start] + new + text[end:]
            limit = start
    return mutate_bytes(text, rng, NASTY) if rng.random() < 0.06 else text


def _other_number(number: int, rng: random.Random) -> bytes:
    choices = (
        number + 1,
        number - 1,
        -number,
        number * 2,
        number + 64,
        number ^ (1 << rng.randrange(64)),
        number << 32,
    )
    return str(rng.choice(choices)).encode()


def mutate_bytes(data: bytes, rng: random.Random, words: Sequence[bytes]) -> bytes:
    """Bits flipped, parts removed, doubled, cut off or replaced, words put in."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not data:
            return rng.choice(words)
        at = rng.randrange(len(data))
        some = rng.choice((1, 1, 2, 4, 8, 32))
        data = _BYTES[rng.randrange(len(_BYTES))](data, at, some, rng, words)
    return data


_Change = Callable[[bytes, int, int, random.Random, Sequence[bytes]], bytes]
_BYTES: list[_Change] = [
    lambda d, at, n, rng, words: d[:at] + bytes([d[at] ^ (1 << rng.randrange(8))]) + d[at + 1 :],
    lambda d, at, n, rng, words: d[:at] + bytes([rng.choice((0, 1, 127, 128, 255, 10, 34, 92))]) + d[at + 1 :],
    lambda d, at, n, rng, words: d[:at] + d[at + n :],
    lambda d, at, n, rng, words: d[: at + n] + d[at:],
    lambda d, at, n, rng, words: d[:at] if rng.random() < 0.3 else d[:at] + rng.randbytes(n) + d[at + n :],
    lambda d, at, n, rng, words: d[:at] + rng.choice(words) + d[at:],
    lambda d, at, n, rng, words: rng.choice(words) + d,
    lambda d, at, n, rng, words: d[:at] + rng.choice(words) + d[at + n :],
    lambda d, at, n, rng, words: (
        d[:at] + struct.pack("<Q", rng.choice((0, 2**31, 2**62, 2**63, 2**64 - 1))) + d[at + 8 :]
    ),
]
