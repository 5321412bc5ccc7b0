"""What `.metadata` must say, and what of it is refused."""

from typing import Any

import numpy as np
import pytest

import shardkeep
from foreign.torchfiles import Global, Pairs, Pickle, encode_dcp, of_metadata, size_of
from shardkeep.foreign.dcpmetadata import FileRange, decode_metadata
from shardkeep.model.arrays import Region

FILE = "__0_0.distcp"


def decoded(fields: dict[str, Any]) -> Any:
    return decode_metadata(Pickle().dumps(of_metadata("Metadata", fields)), "x")


def chunk(start: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    return of_metadata("ChunkStorageMetadata", {"offsets": size_of(start), "sizes": size_of(shape)})


def fields_of(
    shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], **others: Any
) -> dict[str, Any]:
    """The fields of a checkpoint with one tensor."""
    properties = of_metadata("TensorProperties", others.get("properties", (Global("torch", "float32"), 0)))
    about = {"properties": properties, "size": size_of(shape), "chunks": [chunk(*each) for each in chunks]}
    place = {"relative_path": others.get("file", FILE), "offset": 0, "length": 9, **others.get("place", {})}
    stored = tuple(
        (
            of_metadata("MetadataIndex", {"fqn": "w", "offset": size_of(start), "index": number}),
            of_metadata("_StorageInfo", place, "torch.distributed.checkpoint.filesystem"),
        )
        for number, (start, _) in enumerate(chunks)
    )
    tensor = of_metadata("TensorStorageMetadata", about)
    return {"state_dict_metadata": {"w": tensor}, "planner_data": others.get("planner"), "storage_data": Pairs(stored)}


def test_it_says_where_every_part_is() -> None:
    found = decode_metadata(
        encode_dcp({"a": np.arange(3, dtype=np.int16)}, {"v": 1}, {"a": ("x", "a")})[".metadata"], "x"
    )
    tensor = found.tensors["a"]
    assert (tensor.shape, tensor.dtype) == ((3,), np.dtype("int16"))
    assert [region for region, _ in tensor.parts] == [Region((0,), (2,)), Region((2,), (1,))]
    assert [span.file for _, span in tensor.parts] == ["__0_0.distcp", "__1_0.distcp"]
    assert found.paths == {"a": ("x", "a"), "v": ("v",)}
    assert found.values["v"] in found.spans


def test_older_versions_have_the_dtype_in_a_dict() -> None:
    found = decoded(fields_of((2,), [((0,), (2,))], properties={"dtype": Global("torch", "bfloat16")}))
    assert found.tensors["w"].dtype.name == "bfloat16"
    assert found.tensors["w"].parts == ((Region((0,), (2,)), FileRange(FILE, 0, 9)),)


def test_a_process_may_have_nothing_of_a_tensor() -> None:
    assert len(decoded(fields_of((2,), [((0,), (2,)), ((2,), (0,))])).tensors["w"].parts) == 1
    assert decoded(fields_of((0, 3), [((0, 0), (0, 3))])).tensors["w"].parts == ()


def test_parts_that_are_no_grid_may_fill_a_tensor_too() -> None:
    parts = [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3)), ((4, 0), (1, 4))]
    assert len(decoded(fields_of((5, 4), parts)).tensors["w"].parts) == 4


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 0), (2, 4))],
        [((0, 0), (2, 4)), ((1, 0), (3, 4))],
        [((0, 0), (2, 4)), ((0, 0), (2, 4))],
        [((0, 0), (4, 2)), ((0, 3), (4, 2))],
        [((0,), (4,))],
        [((0, 0), (3, 4)), ((2, 0), (1, 4))],  # as many elements as there are, and a hole
        [],
    ],
)
def test_parts_that_do_not_fill_a_tensor_are_refused(parts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    with pytest.raises(shardkeep.IntegrityError, match="do not cover it exactly once"):
        decoded(fields_of((4, 4), parts))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"file": "../secret"}, "points outside the checkpoint"),
        ({"file": "/etc/passwd"}, "points outside the checkpoint"),
        ({"place": {"offset": -1}}, "does not describe a checkpoint"),
        ({"place": {"length": 1 << 63}}, "does not describe a checkpoint"),
        ({"place": {"transform_descriptors": ["zstd"]}}, "compressed or encrypted, which is not supported"),
        ({"planner": {"w": ()}}, "a path in the tree does not consist of names and numbers"),
        ({"planner": {"w": ("a", -1)}}, "a path in the tree does not consist of names and numbers"),
        ({"planner": {"w": ("a",) * 100}}, "a path in the tree does not consist of names and numbers"),
    ],
)
def test_what_cannot_be_is_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(shardkeep.IntegrityError, match=message):
        decoded(fields_of((2,), [((0,), (2,))], **others))


@pytest.mark.parametrize("document", [b"", b"\x80\x02}.", b"\x80\x02K\x01.", Pickle().dumps(of_metadata("Other", {}))])
def test_what_describes_no_checkpoint_is_refused(document: bytes) -> None:
    with pytest.raises(shardkeep.IntegrityError, match="cannot be decoded|does not describe a checkpoint"):
        decode_metadata(document, "x")


def test_a_dtype_that_no_array_can_have_is_kept_as_a_name() -> None:
    found = decoded(fields_of((2,), [((0,), (2,))], properties=(Global("torch", "qint8"), 0)))
    assert (found.tensors["w"].dtype, found.tensors["w"].type_name) == (None, "qint8")
