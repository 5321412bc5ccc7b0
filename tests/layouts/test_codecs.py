"""Codecs: what is encoded comes back, and what is damaged is refused."""

import numpy as np
import pytest

from shardkeep.layouts.codecs import CODECS, NIBBLES, RAW, ZSTD, Codec, codec_of_encoded


@pytest.mark.parametrize("codec", [RAW, ZSTD, NIBBLES])
def test_what_is_encoded_comes_back(codec: Codec) -> None:
    values = np.arange(1000, dtype=np.uint8) % 16
    stored = np.frombuffer(codec.encode(memoryview(values.tobytes())), np.uint8)
    memory = np.empty(values.size, np.uint8)
    codec.decode(stored, memory)
    assert (memory == values).all()


@pytest.mark.parametrize("size", [999, 1001])
@pytest.mark.parametrize("codec", [RAW, ZSTD])
def test_more_or_fewer_bytes_than_declared_are_refused(codec: Codec, size: int) -> None:
    stored = np.frombuffer(codec.encode(memoryview(bytes(1000))), np.uint8)
    with pytest.raises(ValueError, match=f"{size:,}"):
        codec.decode(stored, np.empty(size, np.uint8))


def test_what_is_not_compressed_is_refused() -> None:
    with pytest.raises(ValueError, match="frame"):
        ZSTD.decode(np.zeros(10, np.uint8), np.empty(10, np.uint8))


def test_encoded_pieces_without_compression_are_nibbles() -> None:
    assert codec_of_encoded(None) is NIBBLES
    assert codec_of_encoded("zstd") is CODECS["zstd"]
