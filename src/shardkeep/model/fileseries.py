"""The record of a series of files in a manifest: files with consecutive numbers in their names.

docs/format.md specifies it. The length of a series is that of its lists in the document, so a document cannot make a
reader allocate memory for files that it does not list.
"""

import base64
import re
from collections.abc import Sequence
from itertools import count, groupby

from shardkeep.model.leafrecords import integer
from shardkeep.model.manifest import DataFile
from shardkeep.model.naming import check_name
from shardkeep.model.values import Json, JsonObject, as_list

SHORTEST = 8  # files: fewer take little space one by one, where each is easier to see
_NUMBERED = re.compile(r"([^*]{0,200}-)([0-9]{5,9})(\.[a-z]{1,20})")  # names of files that are recorded in series
_LONGEST_NAME = 255  # characters, of which each file of a series gets a copy for 24 bytes of the document
_NUMBERS = 1 << 32  # the numbers in names are below
_DIGEST = 16  # bytes


def join_series(files: Sequence[DataFile], records: Sequence[Json]) -> list[Json]:
    """The records of some files, with those of each series joined into one."""
    found: list[Json] = []
    for key, group in groupby(enumerate(files), lambda placed: _series_of(*placed)):
        places, some = zip(*group, strict=True)
        if key is None or len(some) < SHORTEST:
            found += records[places[0] : places[-1] + 1]
        else:
            start, end, shift = key
            found.append(_encode_series(f"{start}*{end}", places[0] + shift, some))
    return found


def decode_series(record: JsonObject) -> list[DataFile]:
    """The files in the record of a series; `ValueError`, or the error of a missing field, if it is malformed."""
    names, first, sizes = record["names"], integer(record["first"]), list(map(integer, as_list(record["sizes"])))
    if not isinstance(names, str) or len(names) > _LONGEST_NAME or names.count("*") != 1:
        raise ValueError(f"invalid pattern of file names: {names!r:.80}")
    if not sizes or first < 0 or first + len(sizes) > _NUMBERS:
        raise ValueError(f"the files {names!r} have invalid numbers")
    start, _, end = names.partition("*")
    check_name(f"{start}{first:05d}{end}")  # the others only have other digits
    lengths = record["header_lengths"]
    lengths = list(map(integer, lengths)) if isinstance(lengths, list) else [integer(lengths)] * len(sizes)
    if len(lengths) != len(sizes) or not all(0 <= a <= b for a, b in zip(lengths, sizes, strict=True)):
        raise ValueError(f"the files {names!r} have invalid sizes or header lengths")
    digests = _decode_digests(record["header_digests"], len(sizes))
    return [
        DataFile(f"{start}{number:05d}{end}", size, length, digest)
        for number, size, length, digest in zip(count(first), sizes, lengths, digests, strict=False)
    ]


def _series_of(place: int, file: DataFile) -> tuple[str, str, int] | None:
    """What the files of a series have in common: the parts of their names, and by how much number exceeds place."""
    match = _NUMBERED.fullmatch(file.name)
    if match is None or file.header_digest is None or (match[2][0] == "0" and len(match[2]) > 5):
        return None
    return match[1], match[3], int(match[2]) - place


def _encode_series(names: str, first: int, files: Sequence[DataFile]) -> Json:
    lengths: list[Json] = [file.header_length for file in files]
    digests = bytes.fromhex("".join([file.header_digest or "" for file in files]))
    return {
        "names": names,
        "first": first,
        "sizes": [file.size for file in files],
        "header_lengths": lengths[0] if lengths.count(lengths[0]) == len(lengths) else lengths,
        "header_digests": base64.b64encode(digests).decode(),
    }


def _decode_digests(text: Json, number: int) -> list[str]:
    """As many digests as there are files, from canonical Base64."""
    if not isinstance(text, str) or len(text) != -(-number * _DIGEST // 3) * 4:
        raise ValueError("the header digests are not as many as the files")
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text or len(data) != number * _DIGEST:
        raise ValueError("the header digests are not canonical Base64")
    digits = data.hex()
    return [digits[at : at + 2 * _DIGEST] for at in range(0, len(digits), 2 * _DIGEST)]
