"""CRC-32C: the known values, and the same for data of any length and however it is cut into lanes."""

import numpy as np
import pytest
import tensorstore

from shardkeep.foreign.crc32c import crc32c


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_known_values(data: bytes, expected: int) -> None:
    """Those of RFC 3720."""
    assert crc32c(data) == expected


def test_lanes_give_what_bytes_give() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 255, 1023, 1024, 1025, 1280, 5000, 100_000):
        data = rng.bytes(size)
        state = 0xFFFFFFFF
        for byte in data:
            state ^= byte
            for _ in range(8):
                state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
        assert crc32c(data) == state ^ 0xFFFFFFFF
        assert crc32c(memoryview(data)) == crc32c(data)


def test_it_is_the_one_of_tensorstore(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Which writes it after a manifest."""
    path = tmp_path_factory.mktemp("database")
    tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result().write("a", b"b" * 5000).result()
    data = (path / "manifest.ocdbt").read_bytes()
    assert crc32c(data[:-4]) == int.from_bytes(data[-4:], "little")
