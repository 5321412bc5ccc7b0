"""Digests name bytes; a part can be checked alone; a sealed document notices every change."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.errors import IntegrityError
from shardkeep.model.digests import BLOCK, block_count, blocks, check_seal, digest, seal

DOCUMENT = b'{"x":1,"digest":"' + b"0" * 32 + b'","rest":["digest",2]}'


@given(st.binary(max_size=300))
def test_a_digest_is_xxh3_128(data: bytes) -> None:
    assert digest(data) == digest(memoryview(data)) == digest(bytearray(data)) == xxhash.xxh3_128(data).hexdigest()


def test_an_array_has_the_digest_of_its_bytes() -> None:
    array = np.arange(10, dtype=np.float32)
    assert digest(array.view(np.uint8).data) == digest(array.tobytes())


@given(st.integers(0, 10 * BLOCK))
def test_blocks_cover_everything_once(nbytes: int) -> None:
    found = list(blocks(0, block_count(nbytes), nbytes))
    edges = [0, *(end for _, _, end in found)]
    assert [start for _, start, _ in found] == edges[:-1]
    assert edges[-1] == nbytes
    assert all(0 < end - start <= BLOCK for _, start, end in found)
    assert [number for number, _, _ in found] == list(range(len(found)))


@pytest.mark.parametrize(("nbytes", "count"), [(0, 0), (1, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2)])
def test_block_count_rounds_up(nbytes: int, count: int) -> None:
    assert block_count(nbytes) == count


def test_a_sealed_document_passes_its_own_check() -> None:
    sealed = seal(DOCUMENT)
    assert len(sealed) == len(DOCUMENT)
    check_seal(sealed, "here")


def test_every_single_changed_bit_breaks_the_seal() -> None:
    sealed = seal(DOCUMENT)
    for bit in range(len(sealed) * 8):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError, match="here is damaged"):
            check_seal(bytes(changed), "here")


@given(st.integers(0, len(DOCUMENT) - 1), st.binary(max_size=5))
def test_a_cut_or_longer_document_breaks_the_seal(at: int, more: bytes) -> None:
    sealed = seal(DOCUMENT)
    with pytest.raises(IntegrityError, match="damaged"):
        check_seal(sealed[:at], "x")
    if more:
        with pytest.raises(IntegrityError, match="damaged"):
            check_seal(sealed + more, "x")


@pytest.mark.parametrize("document", [b"", b"{}", b'{"digest":"', b'{"digest":""}', b'{"digest":"' + b"0" * 31])
def test_a_document_without_a_seal_is_refused(document: bytes) -> None:
    with pytest.raises(IntegrityError, match="damaged"):
        check_seal(document, "x")
