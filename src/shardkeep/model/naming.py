"""File names: directories of prefixes and leaves, clean names, names of safetensors shards."""

import hashlib
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence

from shardkeep import system
from shardkeep.errors import IntegrityError
from shardkeep.model.tree import Path, join_key

SAFETENSORS = ".safetensors"
SAFETENSORS_INDEX = ".safetensors.index.json"
TABLE = ".pieces"
SHARD_END = re.compile(r"(-[0-9a-f]{32})?-\d{5}-of-\d{5}\Z")

_MAX_NAME = 200  # bytes; file systems allow 255, and a suffix may be appended
_MAX_PATH = min(1000, system.longest_path() // 2)  # bytes of a name in a checkpoint; the rest is for the way to it
_PLAIN = re.compile(r"[A-Za-z0-9_\-+=@,]([A-Za-z0-9_\-+=@,. ]*[A-Za-z0-9_\-+=@,])?")
_PLAIN_PATH = re.compile(r"[\w~-][\w.~-]*(?:/[\w~-][\w.~-]*)*", re.ASCII)  # no part of it is "." or ".."
_CHUNK = re.compile(r"[0-9]+(\.[0-9]+)+")
_RESERVED = frozenset((".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json", ".shardkeep", "manifest.json"))
_RESERVED_TOP = frozenset(("tensorstore_index.json", "checkpoint_metadata.json", "config.json"))
_DEVICE = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)  # what Windows does not call a file


def check_name(name: object) -> str:
    """A file name from a document: relative, inside the checkpoint, without odd characters."""
    if isinstance(name, str) and len(name) <= 4000 and _PLAIN_PATH.fullmatch(name):
        return name  # nearly all are like this, and a checkpoint can have hundreds of thousands
    odd = isinstance(name, str) and ("\0" in name or "\\" in name or (system.RESERVES_NAMES and ":" in name))
    if not isinstance(name, str) or not name or odd or len(name) > 4000:
        raise IntegrityError(f"not a file name: {str(name)[:80]!r}")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise IntegrityError(f"the file name {name!r} points outside the checkpoint")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate, which no file system accepts
        raise IntegrityError(f"not a file name: {name[:80]!r}") from None
    return name


def prefix_directory(prefix: str) -> str:
    """The directory for the data of a prefix; each dot starts a subdirectory.

    >>> prefix_directory("model.encoder")
    'model/encoder'
    """
    return "/".join(_safe(part) for part in prefix.split(".")) if prefix else ""


def own_directory(prefix: str, save_id: str) -> str:
    """The directory for the data of a save whose prefix already has its clean names in use.

    >>> own_directory("model", "5" * 4)
    'model~5555'
    """
    return f"{prefix_directory(prefix)}~{save_id}"


def clean_name(name: str, save_id: str) -> str:
    """The clean name of a file in a save's own directory: the same name without the save's id.

    >>> clean_name("model~5555/w/0.0", "5555")
    'model/w/0.0'
    """
    directory, mark, rest = name.partition(f"~{save_id}/")
    clean = f"{directory}/{rest}" if directory else rest
    top = clean.partition("/")[0]
    if not mark or _is_reserved(top):
        raise ValueError(f"{name!r} has no clean name")
    return clean


def table_name(base: str, writer: int) -> str:
    """The name of a table of pieces, in the directory of the manifest whatever the prefix of its tree.

    >>> table_name("5555-0", 3)
    '5555-0-00003.pieces'
    """
    return f"{base}-{writer:05d}{TABLE}"


def is_table(name: str) -> bool:
    """Whether a file of a tree is a table of pieces, by its name."""
    return name.endswith(TABLE) and "/" not in name


def shard_filename(base_prefix: object, idx: int, total: int) -> str:
    """The name of shard `idx` of `total`, counted from 1.

    >>> shard_filename("/x/model", 1, 4)
    '/x/model-00001-of-00004.safetensors'
    """
    return f"{base_prefix}-{idx:05d}-of-{total:05d}{SAFETENSORS}"


def index_filename(base_prefix: object) -> str:
    """The name of the index of a sharded safetensors checkpoint.

    >>> index_filename("/x/model")
    '/x/model.safetensors.index.json'
    """
    return f"{base_prefix}{SAFETENSORS_INDEX}"


def base_of_shard(name: str) -> str:
    """The part of a file name that all files of a model share, without shard numbers and save ids.

    >>> base_of_shard("model.safetensors.index.json")
    'model'
    """
    for ending in (SAFETENSORS_INDEX, SAFETENSORS):
        if name.endswith(ending):
            name = name[: -len(ending)]
            break
    return SHARD_END.sub("", name)


def leaf_directories(paths: Sequence[Path]) -> list[str]:
    """A directory for each leaf, relative to that of the tree: readable if possible, a hash where names could clash.

    >>> leaf_directories([("layers", "0", "w"), ("a/b",), ("..",)])
    ['layers/0/w', 'a%2Fb', '%2E%2E']
    """
    names = [[_safe(part) for part in path] or ["%"] for path in paths]
    _hash_clashes(paths, names)
    joined = ["/".join(parts) for parts in names]
    return [
        name if len(os.fsencode(name)) <= _MAX_PATH else hashed(join_key(path))
        for name, path in zip(joined, paths, strict=True)
    ]


def _hash_clashes(paths: Sequence[Path], names: list[list[str]]) -> None:
    """Replace names that a file system may consider equal (because of case or Unicode form) by hashes, in place."""
    seen: dict[tuple[str, ...], set[str]] = {}
    for path, parts in zip(paths, names, strict=True):
        for depth, part in enumerate(parts[: len(path)]):
            place = (*path[:depth], _folded(part))
            seen.setdefault(place, set()).add(path[depth])
    if all(len(originals) == 1 for originals in seen.values()):
        return
    for path, parts in zip(paths, names, strict=True):
        for depth, part in enumerate(parts[: len(path)]):
            if len(seen[(*path[:depth], _folded(part))]) > 1:
                parts[depth] = hashed(path[depth])


def _folded(name: str) -> str:
    return name.lower() if name.isascii() else unicodedata.normalize("NFKC", name).casefold()


def folded(names: Iterable[str]) -> set[str]:
    """Names in the form in which those are equal that a file system may take for the same."""
    return set(map(_folded, names))


def _safe(part: str) -> str:
    """A part of a key as a file name: percent-encoded reversibly, or a hash if it is too long or reserved."""
    if _PLAIN.fullmatch(part) and len(part) <= _MAX_NAME:
        name = part
    else:
        name = "".join(c if c.isalnum() or c in "_-+=@, " else _escaped(c) for c in part) or "%"
        if name.strip(" ") != name:
            name = "".join(_escaped(c) if c == " " else c for c in name)
    if len(os.fsencode(name)) > _MAX_NAME or _is_reserved(part) or _CHUNK.fullmatch(part):
        return hashed(part)
    return name


def _is_reserved(part: str) -> bool:
    name = part.lower()  # where case is ignored, Config.json is config.json
    return name in _RESERVED or name in _RESERVED_TOP or (system.RESERVES_NAMES and bool(_DEVICE.fullmatch(part)))


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def hashed(text: str) -> str:
    """A file name for any text: fixed length, plain characters."""
    return "%h" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def dotted_names(paths: Sequence[Path]) -> list[str]:
    """The names of arrays in the metadata: dotted, with dots in names escaped if two would be the same otherwise.

    >>> dotted_names([("a", "b.c")]), dotted_names([("a.b",), ("a", "b")])
    (['a.b.c'], ['a\\\\.b', 'a.b'])
    """
    names = [".".join(path) for path in paths]
    return names if len(set(names)) == len(names) else [join_key(path) for path in paths]
