"""OCDBT, TensorStore's key-value database in files: a manifest, and a B+tree whose leaves say where each value lies.

Only the newest version of a database is read. Its nodes and its manifest carry CRC-32Cs, which are checked; its values
carry none. Nothing is allocated for a number in a file before the file has shown that it has so much.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import zstandard

from shardkeep.errors import IntegrityError, MissingDataError
from shardkeep.foreign.crc32c import crc32c
from shardkeep.model.naming import check_name
from shardkeep.runtime.crew import run_tasks
from shardkeep.stores.base import Store

MANIFEST = "manifest.ocdbt"
_NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")  # where the base has no atomic replacement
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE  # what each begins with, most significant byte first
_HEADER = 12  # bytes of the magic number and the length
_LARGEST = 128 << 20  # bytes of a node, decoded: Orbax allows 100 MB, TensorStore's default is 8 MiB
_SLACK, _RATIO = 16 << 20, 256  # bytes that any node may decode to, and how often its own size beyond them
_KEY_SLACK, _KEY_RATIO = 1 << 20, 64  # bytes of the keys of a node, which share prefixes, in the same way
_HIGHEST = 16  # levels of the B+tree: with two children each, 65,536 nodes
_NONE = (1 << 64) - 1  # offset and length of the root of an empty database


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A value in a file of the store."""

    file: str
    offset: int
    length: int


Value: TypeAlias = FileSpan | bytes  # small values lie in the nodes


@dataclass(frozen=True)
class Database:
    """The values of a database by key, and the files of nodes that were read for them, the manifest included."""

    values: Mapping[str, Value]
    files: frozenset[str]


def read_database(store: Store, directory: str) -> Database:
    """The database in a directory. `IntegrityError` if its manifest or a node is damaged, or points outside."""
    manifest = _join(directory, MANIFEST)
    names = {manifest}
    reader = _opened(_read_whole(store, manifest), _MANIFEST_MAGIC, store.locate(manifest))
    if reader.skip_config():  # the versions are in another file
        numbered = [name for name in store.children(directory) if _NUMBERED.fullmatch(name)]
        if not numbered:
            raise IntegrityError(f"{store.locate(manifest)} names no version of the database", file=manifest)
        manifest = _join(directory, max(numbered))
        names.add(manifest)
        reader = _opened(_read_whole(store, manifest), _MANIFEST_MAGIC, store.locate(manifest))
        reader.skip_config()
    root = reader.newest_version(directory)
    values: dict[str, Value] = {}
    level = [] if root is None else [root]
    seen: set[tuple[str, int]] = set()
    while level:
        for node in level:
            if (node.span.file, node.span.offset) in seen:
                raise IntegrityError(f"{store.locate(node.span.file)} is damaged: a node of the database occurs twice")
            seen.add((node.span.file, node.span.offset))
            names.add(node.span.file)
        level = [child for node in _read_nodes(store, level, values) for child in node]
    return Database(values, frozenset(names))


@dataclass(frozen=True, slots=True)
class _NodeRef:
    """Where a node lies. `prefix`: what all keys below it begin with. `base`: of the paths of files it names."""

    span: FileSpan
    height: int
    base: str
    prefix: bytes


def _read_nodes(store: Store, level: list[_NodeRef], values: dict[str, Value]) -> Iterator[list[_NodeRef]]:
    """The children of the nodes of one level; the values in leaves are added to `values`. Several requests at once."""
    data: dict[int, bytes] = {}

    def read(number: int) -> None:
        span = level[number].span
        if span.length > _LARGEST:
            raise IntegrityError(f"{store.locate(span.file)} is damaged: a node of the database is too large")
        data[number] = read_value(store, span)

    if store.traits.costly_requests and len(level) > 1:
        run_tasks([partial(read, number) for number in range(len(level))], store.traits.concurrency)
    for number, ref in enumerate(level):
        if number not in data:
            read(number)
        reader = _opened(data.pop(number), _NODE_MAGIC, store.locate(ref.span.file))
        yield reader.node(ref, values)


def read_value(store: Store, value: Value, start: int = 0, length: int | None = None) -> bytes:
    """The bytes of a value, or some of them. `IntegrityError` if its file does not have them."""
    if isinstance(value, bytes):
        return value[start : None if length is None else start + length]
    length = value.length - start if length is None else length
    where = store.locate(value.file)
    try:
        with store.open(value.file) as file:
            if start < 0 or length < 0 or value.offset + start + length > file.size:
                raise IntegrityError(
                    f"{where} is truncated: it has {file.size:,} bytes, and a value ends at byte "
                    f"{value.offset + value.length:,}",
                    file=where,
                )
            memory = np.empty(length, np.uint8)
            file.read_into(value.offset + start, memory)
            return memory.tobytes()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingDataError(f"{where} is missing", file=where) from None
    except EOFError as error:
        raise IntegrityError(f"{where} is truncated: {error}", file=where) from error


def _read_whole(store: Store, name: str) -> bytes:
    size = store.size(name)
    if size is None:
        raise MissingDataError(f"{store.locate(name)} is missing", file=store.locate(name))
    if size > _LARGEST:
        raise IntegrityError(f"{store.locate(name)} is too large for a manifest", file=store.locate(name))
    return read_value(store, FileSpan(name, 0, size))


def _opened(data: bytes, magic: int, where: str) -> "_NodeReader":
    """The body of a manifest or node, its checksum checked, decompressed."""

    def damaged(problem: str) -> IntegrityError:
        return IntegrityError(f"{where} is damaged: {problem}", file=where)

    if len(data) < _HEADER + 6 or int.from_bytes(data[:4], "big") != magic:
        raise damaged("it is not the expected part of an OCDBT database")
    if int.from_bytes(data[4:_HEADER], "little") != len(data):
        raise damaged("its length differs from the recorded one")
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise damaged("it does not match its CRC-32C")
    version, compression = data[_HEADER], data[_HEADER + 1]
    if version != 0 or compression > 1:
        raise damaged(f"version {version} and compression {compression} of OCDBT are unknown")
    body = data[_HEADER + 2 : -4]
    if compression:
        limit = min(_LARGEST, _SLACK + _RATIO * len(body))
        unpacked = _decompress(body, limit)
        if unpacked is None:
            raise damaged(f"it cannot be decompressed, or is larger than {limit:,} bytes")
        body = unpacked
    return _NodeReader(body, damaged)


def _decompress(data: bytes, limit: int) -> bytes | None:
    """The content of a zstd frame; None if it is damaged or larger than the limit."""
    parts: list[bytes] = []
    total = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
            while total <= limit and (part := reader.read(1 << 20)):
                parts.append(part)
                total += len(part)
    except (zstandard.ZstdError, MemoryError):
        return None
    return b"".join(parts) if total <= limit else None


class _NodeReader:
    """Reads the body of a manifest or node from its start."""

    def __init__(self, body: bytes, damaged: Callable[[str], IntegrityError]) -> None:
        self._body, self._at = body, 0
        self._damaged = damaged

    def skip_config(self) -> bool:
        """Read past the configuration; returns whether the versions are in numbered manifests."""
        self._take(16)
        kind, _, _ = self._varints(3)
        self._take(1)
        (compression,) = self._varints(1)
        if compression > 1 or kind > 1:
            raise self._damaged("its configuration is unknown")
        self._take(4 * compression)  # the level
        return kind == 1

    def newest_version(self, directory: str) -> _NodeRef | None:
        """The root of the newest version; None if it is empty."""
        files = self._files(directory)
        (count,) = self._varints(1)
        if not 1 <= count <= 1 << 16:
            raise self._damaged("it has no version")
        self._varints(count)  # generations, in order
        height = self._take(count)[-1]
        columns = [self._varints(count) for _ in range(3)]
        number, offset, length = (column[-1] for column in columns)
        if (offset, length) == (_NONE, _NONE):
            return None
        if height > _HIGHEST:
            raise self._damaged(f"its B+tree has {height} levels")
        return self._ref(files, number, offset, length, height, b"")

    def node(self, ref: _NodeRef, values: dict[str, Value]) -> list[_NodeRef]:
        """The children of an inner node; the values of a leaf are added to `values`."""
        height = self._take(1)[0]
        files = self._files(ref.base)
        (count,) = self._varints(1)
        if height != ref.height or not count:
            raise self._damaged("a node of its B+tree is not at its level, or empty")
        if height:
            return self._inner(ref, files, count)
        self._leaf(ref, files, count, values)
        return []

    def _inner(self, ref: _NodeRef, files: list[tuple[str, str]], count: int) -> list[_NodeRef]:
        prefixes, suffixes = self._varints(count - 1), self._varints(count)
        common = self._varints(count)
        keys = self._keys(ref.prefix, [0, *prefixes], suffixes)
        columns = [self._varints(count) for _ in range(3)]
        found: list[_NodeRef] = []
        for key, shared, number, offset, length in zip(keys, common, *columns, strict=True):
            prefix = key[: len(ref.prefix) + shared]
            found.append(self._ref(files, number, offset, length, ref.height - 1, prefix))
        return found

    def _leaf(self, ref: _NodeRef, files: list[tuple[str, str]], count: int, values: dict[str, Value]) -> None:
        prefixes, suffixes = self._varints(count - 1), self._varints(count)
        keys = self._keys(ref.prefix, [0, *prefixes], suffixes)
        lengths, kinds = self._varints(count), self._varints(count)
        outside = [number for number, kind in enumerate(kinds) if kind == 1]
        if any(kind > 1 for kind in kinds):
            raise self._damaged("a value of an unknown kind")
        numbers, offsets = self._varints(len(outside)), self._varints(len(outside))
        spans = {
            number: self._span(files, file, offset, lengths[number])
            for number, file, offset in zip(outside, numbers, offsets, strict=True)
        }
        for number, key in enumerate(keys):
            try:
                name = key.decode()
            except UnicodeDecodeError:
                raise self._damaged("a key is not UTF-8") from None
            if name in values:
                raise self._damaged(f"the key {name!r} occurs twice")
            values[name] = spans[number] if number in spans else self._take(lengths[number])

    def _keys(self, start: bytes, prefixes: list[int], suffixes: list[int]) -> list[bytes]:
        """Keys, of which each shares a prefix with the one before."""
        total = sum(prefixes) + sum(suffixes) + len(start) * len(suffixes)
        if total > _KEY_SLACK + _KEY_RATIO * len(self._body):
            raise self._damaged("its keys are longer than it is")
        keys: list[bytes] = []
        before = b""
        for shared, length in zip(prefixes, suffixes, strict=True):
            if shared > len(before):
                raise self._damaged("a key is longer than it can be")
            before = before[:shared] + self._take(length)
            keys.append(start + before)
        return keys

    def _files(self, base: str) -> list[tuple[str, str]]:
        """The files that a node names: the path, and the base of the paths in the node that it may be."""
        (count,) = self._varints(1)
        if not count:
            return []
        prefixes, suffixes, bases = self._varints(count - 1), self._varints(count), self._varints(count)
        paths = self._keys(b"", [0, *prefixes], suffixes)
        found: list[tuple[str, str]] = []
        for path, length in zip(paths, bases, strict=True):
            try:
                text, inner = path.decode(), path[:length].decode()
            except UnicodeDecodeError:
                raise self._damaged("the name of a file is not UTF-8") from None
            found.append((_join(base, text), _join(base, inner.rstrip("/")) if inner else base))
        return found

    def _ref(
        self, files: list[tuple[str, str]], number: int, offset: int, length: int, height: int, prefix: bytes
    ) -> _NodeRef:
        span = self._span(files, number, offset, length)
        return _NodeRef(span, height, files[number][1], prefix)

    def _span(self, files: list[tuple[str, str]], number: int, offset: int, length: int) -> FileSpan:
        if number >= len(files) or offset + length > 1 << 62:
            raise self._damaged("a value has no file")
        return FileSpan(check_name(files[number][0]), offset, length)

    def _take(self, length: int) -> bytes:
        start = self._at
        self._at += length
        if self._at > len(self._body):
            raise self._damaged("it is truncated")
        return self._body[start : self._at]

    def _varints(self, count: int) -> list[int]:
        """So many numbers, each of which takes a byte at least."""
        body, at = self._body, self._at
        if count > len(body) - at:
            raise self._damaged("it is truncated")
        found: list[int] = []
        try:
            for _ in range(count):
                number = body[at]
                at += 1
                if number >= 128:
                    number &= 127
                    shift = 7
                    while (byte := body[at]) >= 128:
                        number |= (byte & 127) << shift
                        shift += 7
                        at += 1
                        if shift > 63:
                            raise self._damaged("a number has more than 64 bits")
                    number |= byte << shift
                    at += 1
                    if number > _NONE:
                        raise self._damaged("a number has more than 64 bits")
                found.append(number)
        except IndexError:
            raise self._damaged("it is truncated") from None
        self._at = at
        return found


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory and name else directory or name
