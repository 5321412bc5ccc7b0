"""Write tests/fixtures/torch with the torch of this environment: files, and `expected.json` with what is in them.

    .venv-torch/bin/python tests/pytorch/make_fixtures.py [directory]

`expected.json` has the bits of every tensor: {file: {key: [dtype, shape, hexadecimal bytes]}}.
"""

import argparse
import collections
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

HERE = Path(__file__).parents[1] / "fixtures" / "torch"
FLOATS = ("float16", "float32", "float64", "bfloat16", "complex64", "complex128")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def bits_of(tensor: torch.Tensor) -> list[Any]:
    """The dtype, the shape and the bytes of a tensor, in C order."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach().resolve_conj().resolve_neg())
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw.hex()]


def tensors_in(tree: Any, path: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Every tensor of a tree by its key here: names joined with `/`, dots in the names of state dicts as well."""
    if isinstance(tree, DTensor):
        return {"/".join(path): bits_of(tree.full_tensor())}
    if isinstance(tree, torch.Tensor):
        return {"/".join(path): bits_of(tree)}
    if isinstance(tree, dict):
        dotted = any(isinstance(value, torch.Tensor) for value in tree.values())
        items = [
            (key.split(".") if dotted and isinstance(key, str) else [str(key)], value) for key, value in tree.items()
        ]
    elif isinstance(tree, list | tuple):
        items = [([str(number)], value) for number, value in enumerate(tree)]
    else:
        return {}
    found: dict[str, list[Any]] = {}
    for names, value in items:
        found |= tensors_in(value, (*path, *names))
    return found


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(collections.OrderedDict(first=torch.nn.Linear(4, 3), norm=torch.nn.BatchNorm1d(3)))


def trained() -> dict[str, Any]:
    """A checkpoint as training loops save it."""
    module = model()
    optimizer = torch.optim.AdamW(
        [{"params": [*module.first.parameters()], "lr": 1e-3}, {"params": [*module.norm.parameters()], "lr": 1e-4}]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    module(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "best": 0.25,
        "done": False,
        "name": "run ü",
        "nothing": None,
        "bytes": b"\0\xff",
        "complex": 1 + 2j,
        "score": np.float64(2.5),
        "long": 1 << 70,
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "rng": torch.get_rng_state()[:16].clone(),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "losses": (1.5, [2.5, {"last": torch.tensor(3.5)}]),
    }


def views() -> dict[str, torch.Tensor]:
    """Tensors that share storages, in every order."""
    base = torch.arange(48, dtype=torch.float32).reshape(4, 12)
    cube = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4)
    numbers = torch.complex(base[0], -base[1])
    return {
        "base": base,
        "same": base,
        "transposed": base.t(),
        "row": base[2],
        "column": base[:, 3],
        "inner": base[1:3, 2:9:3],
        "permuted": cube.permute(2, 0, 1),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "scalar": base[1, 1],
        "empty": base[:0],
        "nothing": torch.zeros(3, 0, 2),
        "windows": base[0].unfold(0, 4, 2),
        "conjugated": numbers.conj(),
        "imaginary": numbers.clone().conj().imag,
        "parameter": torch.nn.Parameter(base[:2]),
        "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    }


def dtypes() -> dict[str, torch.Tensor]:
    """Every dtype that an array can have, with odd bits."""
    raw = torch.arange(7 * 64, dtype=torch.int32).mul(2654435761).bitwise_right_shift(7).to(torch.uint8)
    found = {"bool": torch.tensor([True, False, True])}
    for name in (*FLOATS, *EIGHT_BITS, *INTEGERS):
        dtype = getattr(torch, name)
        found[name] = raw[: 12 * dtype.itemsize].clone().view(dtype).reshape(3, 4)
    return found


def unknown() -> dict[str, Any]:
    """What no array can be, beside one that can."""
    return {
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
        "halves": torch.zeros(2, dtype=torch.complex32),
        "sparse": torch.eye(3).to_sparse(),
        "set": {1, 2},
        "module": torch.nn.Linear(2, 1),
        "w": torch.ones(2),
    }


def write_files(into: Path) -> dict[str, Any]:
    """Every file of one process, and what is in it."""
    made: dict[str, Any] = {"views.pt": views(), "dtypes.pt": dtypes(), "trained.pt": trained(), "state.pth": {}}
    made["state.pth"] = model().state_dict()
    for name, tree in made.items():
        torch.save(tree, into / name)
    for protocol in (3, 4, 5):
        made[f"protocol_{protocol}.pt"] = views()
        torch.save(views(), into / f"protocol_{protocol}.pt", pickle_protocol=protocol)
    torch.serialization.set_crc32_options(False)
    torch.save(views(), into / "no_crcs.pt")
    torch.serialization.set_crc32_options(True)
    made["no_crcs.pt"] = views()
    torch.save(torch.arange(3), into / "one_tensor.pt")
    made["one_tensor.pt"] = torch.arange(3)
    torch.save(unknown(), into / "unknown.pt")
    torch.save(views(), into / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 1)), str(into / "program.pt"))
    return {name: tensors_in(tree) for name, tree in made.items()}


def write_parts(into: Path) -> dict[str, Any]:
    """A folder as transformers writes it, in two files, and an adapter folder of PEFT."""
    whole = {f"model.layers.{i}.w": torch.full((3, 2), float(i), dtype=torch.bfloat16) for i in range(4)}
    folder = into / "parts"
    folder.mkdir(exist_ok=True)
    weights: dict[str, str] = {}
    for number in range(2):
        part = {key: whole[key] for key in list(whole)[2 * number : 2 * number + 2]}
        name = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save(part, folder / name)
        weights |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 48}, "weight_map": weights}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2))
    torch.save(argparse.Namespace(lr=0.1), folder / "training_args.bin")
    adapter = into / "adapter"
    adapter.mkdir(exist_ok=True)
    small = {
        "base_model.model.q_proj.lora_A.weight": torch.ones(2, 4),
        "base_model.model.q_proj.lora_B.weight": torch.zeros(4, 2),
    }
    torch.save(small, adapter / "adapter_model.bin")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    return {"parts": tensors_in(whole), "adapter": tensors_in(small)}


def distributed_state() -> dict[str, Any]:
    """Sharded over a mesh of 2 × 2, replicated, of one process, and no tensors at all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    w = torch.arange(48, dtype=torch.float32).reshape(8, 6)
    return {
        "model": {
            "layer.0.weight": distribute_tensor(w, mesh, [Shard(0), Shard(1)]),
            "layer.0.bias": distribute_tensor(torch.arange(5), mesh, [Shard(0), Replicate()]),
            "layer.1.weight": distribute_tensor(w.bfloat16(), mesh, [Replicate(), Shard(1)]),
            "layer.1.fp8": w.to(torch.float8_e4m3fn),
        },
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2, 3), "step": torch.tensor(4.0)}}, "lr": 0.1},
        "transposed": w.t(),
        "list": [torch.zeros(2), torch.ones(2)],
        "step": 7,
        "note": "ü",
        "shape": torch.Size([1, 2]),
        "states": {"rng": (torch.arange(4), 1)},
    }


def _save_distributed(rank: int, world: int, into: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", RANK=str(rank), WORLD_SIZE=str(world))
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    state = distributed_state()
    found = tensors_in(state)
    os.chdir(into)  # the path is written into the checkpoint
    dcp.save(state, checkpoint_id="dcp")
    if rank == 0:
        Path(into, "dcp.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def write_all(into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    found = {**write_files(into), **write_parts(into)}
    multiprocessing.spawn(_save_distributed, args=(4, str(into)), nprocs=4)
    found["dcp"] = json.loads((into / "dcp.json").read_text())
    (into / "dcp.json").unlink()
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    (into / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    write_all(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
