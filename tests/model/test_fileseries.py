"""The records of files in series, and beside them those of single files. A malformed one gives an error of ours."""

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkeep.errors import IntegrityError
from shardkeep.model.digests import seal
from shardkeep.model.document import decode_files, decode_manifest, encode_files, encode_manifest
from shardkeep.model.manifest import DataFile, Manifest, Tree
from shardkeep.model.tree import flatten

STEM = "5" * 32


def named(number: int, stem: str = f"{STEM}-00001-", end: str = ".safetensors", **fields: Any) -> DataFile:
    """A file with this number in its name, and a digest that no other one has."""
    known = {"size": 33_000_000 + number, "header_length": 4096, "header_digest": f"{number:032x}"}
    return DataFile(f"{stem}{number:05d}{end}", **{**known, **fields})


def records_of(files: list[DataFile]) -> list[Any]:
    """The records as they are in a document. Those files are read from them again."""
    records = json.loads(json.dumps(encode_files(files)))
    assert decode_files(records) == tuple(files)
    return records


def one_by_one(files: list[DataFile]) -> list[Any]:
    """Their records without any series."""
    return [record for file in files for record in encode_files([file])]


def kinds(files: list[DataFile]) -> list[Any]:
    """For each record: "file", or the names in a series, the first number and how many there are."""
    return [
        "file" if isinstance(record, list) else (record["names"], record["first"], len(record["sizes"]))
        for record in records_of(files)
    ]


def test_eight_files_with_consecutive_numbers_are_a_series_and_seven_are_not() -> None:
    names = f"{STEM}-00001-*.safetensors"
    assert kinds([]) == []
    assert kinds([named(i) for i in range(7)]) == ["file"] * 7
    assert kinds([named(i) for i in range(8)]) == [(names, 0, 8)]
    assert kinds([named(i) for i in range(5, 1005)]) == [(names, 5, 1000)]


def test_a_series_ends_where_the_numbers_or_the_names_do() -> None:
    two = [named(i) for i in range(10)] + [named(i) for i in range(11, 20)]
    assert [kind[1:] for kind in kinds(two)] == [(0, 10), (11, 9)]
    data = [named(i, f"{STEM}-{process:05d}-") for process in range(3) for i in range(9)]
    tables = [named(process, f"{STEM}-0-", ".pieces") for process in range(8)]
    assert kinds(data + tables) == [
        *[(f"{STEM}-{process:05d}-*.safetensors", 0, 9) for process in range(3)],
        (f"{STEM}-0-*.pieces", 0, 8),
    ]
    assert kinds([named(i) for i in reversed(range(20))]) == ["file"] * 20
    assert kinds([named(i, end=(".safetensors", ".pieces")[i % 2]) for i in range(20)]) == ["file"] * 20


def test_numbers_have_as_many_digits_as_in_names() -> None:
    assert kinds([named(i) for i in range(99_990, 100_010)]) == [(f"{STEM}-00001-*.safetensors", 99_990, 20)]
    for name in ("x-{:06d}.pieces", "x-{}.pieces", "x-{:05d}.of.pieces", "x{:05d}.pieces", "x-{:05d}/0"):
        assert kinds([DataFile(name.format(i), 5, 5, "0" * 32) for i in range(20)]) == ["file"] * 20


@pytest.mark.parametrize("stem", ["a*b-", "-*-", "x" * 201 + "-"])
def test_names_that_do_not_fit_have_records_of_their_own(stem: str) -> None:
    assert kinds([named(i, stem) for i in range(20)]) == ["file"] * 20


def test_a_file_without_a_digest_is_in_no_series() -> None:
    files = [named(i, header_digest=None if i == 9 else "0" * 32) for i in range(18)]
    assert kinds(files) == [(f"{STEM}-00001-*.safetensors", 0, 9), "file", (f"{STEM}-00001-*.safetensors", 10, 8)]


def test_header_lengths_are_one_number_if_they_are_all_equal() -> None:
    (equal,) = records_of([named(i) for i in range(9)])
    assert equal["header_lengths"] == 4096
    (other,) = records_of([named(i, header_length=8192 if i == 8 else 4096) for i in range(9)])
    assert other["header_lengths"] == [4096] * 8 + [8192]


def test_a_file_of_a_series_takes_less_than_32_bytes() -> None:
    files = [named(i) for i in range(100)]
    assert len(json.dumps(records_of(files), separators=(",", ":"))) < 32 * len(files) + 120
    assert len(json.dumps(one_by_one(files), separators=(",", ":"))) > 100 * len(files)


FILES = st.builds(
    named,
    st.integers(0, 30) | st.integers(99_995, 100_005) | st.integers(10**9 - 3, 10**9 + 3),
    st.sampled_from(["a-", "a/b-", "a*-", "é-\n-", "a"]),
    st.sampled_from([".pieces", ".safetensors", "", "/0.0"]),
    size=st.integers(5, 2**70),
    header_length=st.integers(0, 5),
    header_digest=st.sampled_from([None, "0" * 32, "0123456789abcdef" * 2]),
)


@given(
    some=st.lists(FILES, unique_by=lambda file: file.name),
    series=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 40)), max_size=3),
)
@example(some=[], series=[(99_999, 8), (10**9 - 4, 9)])
def test_files_are_read_as_they_were_written(some: list[DataFile], series: list[tuple[int, int]]) -> None:
    for number, (first, count) in enumerate(series):
        some = [*some, *[named(i, f"series-{number}-") for i in range(first, first + count)]]
    records_of(some)


SERIES = json.loads(json.dumps(encode_files([named(i) for i in range(3, 13)])))[0]
TEXT = SERIES["header_digests"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"names": 5}, "invalid pattern of file names"),
        ({"names": "x.safetensors"}, "invalid pattern of file names"),
        ({"names": "*-*.safetensors"}, "invalid pattern of file names"),
        ({"names": "x" * 255 + "*"}, "invalid pattern of file names"),
        ({"names": "../*"}, "outside the checkpoint"),
        ({"names": "/*"}, "outside the checkpoint"),
        ({"names": "*/../x"}, "outside the checkpoint"),
        ({"names": "\0*"}, "not a file name"),
        ({"names": "\ud800*"}, "not a file name"),
        ({"first": -1}, "invalid numbers"),
        ({"first": 2**32 - 9}, "invalid numbers"),
        ({"first": 10**4000}, "invalid numbers"),
        ({"first": True}, "not an integer"),
        ({"first": 1.0}, "not an integer"),
        ({"sizes": []}, "invalid numbers"),
        ({"sizes": 10}, "not a list"),
        ({"sizes": SERIES["sizes"][1:]}, "not as many as the files"),
        ({"sizes": [*SERIES["sizes"], 5000]}, "not as many as the files"),
        ({"sizes": [-1] * 10}, "invalid sizes"),
        ({"sizes": [4095] * 10}, "invalid sizes"),
        ({"sizes": [5000.0] * 10}, "not an integer"),
        ({"sizes": [True] * 10}, "not an integer"),
        ({"header_lengths": -1}, "invalid sizes"),
        ({"header_lengths": 34_000_000}, "invalid sizes"),
        ({"header_lengths": []}, "invalid sizes"),
        ({"header_lengths": [4096] * 9}, "invalid sizes"),
        ({"header_lengths": [4096] * 11}, "invalid sizes"),
        ({"header_lengths": [4096] * 9 + [-1]}, "invalid sizes"),
        ({"header_lengths": True}, "not an integer"),
        ({"header_lengths": [None] * 10}, "not an integer"),
        ({"header_digests": None}, "not as many as the files"),
        ({"header_digests": TEXT[:-4]}, "not as many as the files"),
        ({"header_digests": TEXT + "AAAA"}, "not as many as the files"),
        ({"header_digests": TEXT[:-1]}, "not as many as the files"),
        ({"header_digests": TEXT[:-4] + "AAA="}, "not canonical Base64"),
        ({"header_digests": TEXT[:-4] + "A==="}, "(?i)base64|padding"),
        ({"header_digests": "!" + TEXT[1:]}, "(?i)base64"),
        ({"header_digests": "_" + TEXT[1:]}, "(?i)base64"),
        ({"header_digests": "\n" + TEXT[1:]}, "(?i)base64"),
        ({"header_digests": "é" + TEXT[1:]}, "ASCII"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_series_is_refused(change: dict[str, Any], problem: str) -> None:
    assert len(decode_files([SERIES])) == 10
    with pytest.raises((ValueError, IntegrityError), match=problem):
        decode_files([{**SERIES, **change}])
    with pytest.raises(IntegrityError, match=r"manifest\.json is malformed|file name|outside the checkpoint"):
        decode_manifest(document_of([{**SERIES, **change}]), "run", "run/manifest.json")


def test_digests_in_another_form_of_base64_are_refused() -> None:
    """The last character of ten digests has four bits that count, and two that should be 0."""
    assert TEXT.endswith("==")
    other = TEXT[:-3] + chr(ord(TEXT[-3]) + 1) + "=="
    assert base64.b64decode(other) == base64.b64decode(TEXT)
    with pytest.raises(ValueError, match="not canonical Base64"):
        decode_files([{**SERIES, "header_digests": other}])


@pytest.mark.parametrize("field", SERIES)
def test_a_series_without_one_of_its_fields_is_refused(field: str) -> None:
    with pytest.raises(KeyError, match=field):
        decode_files([{name: value for name, value in SERIES.items() if name != field}])


def test_a_file_of_a_series_has_no_second_record() -> None:
    (file,) = encode_files([named(11)])
    for records in ([SERIES, file], [file, SERIES], [SERIES, SERIES], [SERIES, {**SERIES, "first": 12}]):
        with pytest.raises(ValueError, match="a file has two records"):
            decode_files(records)
    assert len(decode_files([SERIES, {**SERIES, "first": 13}, *encode_files([named(2)])])) == 21


@pytest.mark.parametrize("record", [None, 5, "abcd", [], {}, ["x", 1, 1], ["x", 1, 2, None], ["x", 1, 1, "0"]])
def test_what_is_no_record_is_refused(record: Any) -> None:
    with pytest.raises((ValueError, KeyError), match="list|unpack|invalid|names"):
        decode_files([record])


def document_of(records: list[Any], version: int = 2) -> bytes:
    """A manifest with these records of files and no leaves."""
    skeleton, _ = flatten({})
    tree = Tree("0" * 32, "safetensors", skeleton, (), (), {}, "")
    body = json.loads(encode_manifest(Manifest("", "0" * 32, {"": tree})))
    body["trees"][""]["files"] = records
    return seal(json.dumps({**body, "shardkeep": version, "digest": "0" * 32}, separators=(",", ":")).encode())


def test_version_1_has_no_series() -> None:
    files = tuple(named(i) for i in range(3, 13))
    single = one_by_one(list(files))
    for version, records in ((2, [SERIES]), (2, single), (1, single)):
        assert decode_manifest(document_of(records, version), "run", "run/manifest.json").tree().files == files
    with pytest.raises(IntegrityError, match=r"run/manifest\.json is malformed"):
        decode_manifest(document_of([SERIES], version=1), "run", "run/manifest.json")
