"""Real transformers and shardkeep in one process: each reads what the other writes. Run it by `make test-hf`.

Every function named `check_…` is called with an empty directory. torch and transformers need their own environment, so
this is no part of the other tests. Nothing is downloaded: the model is a small Llama with random weights.
"""

import contextlib
import io
import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardkeep
from checks import run_checks
from shardkeep import remap
from shardkeep.cli.main import main as command

P = PartitionSpec
GRID = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tp"))
OTHER = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
RULES = [("embed_tokens|lm_head", P("tp", "fsdp")), ("proj/weight", P("fsdp", "tp")), (".*", P())]
SHARDS = "400KB"  # far below the size of the model, and of its largest array

Tree = dict[str, Any]


@cache
def llama(tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Random weights. The embedding has 2 MiB, beyond what we store whole when it is sharded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    # Not .to(dtype): that would cast the rotary frequencies too, which from_pretrained does not.
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(32).reshape(2, 16) * 100).logits


def stored(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The weights as transformers saves them: those tied to another are left out."""
    left_out = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: to_numpy(t) for name, t in model.state_dict().items() if name not in left_out}


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.bfloat16:  # NumPy gets the bits
        return tensor.contiguous().view(torch.uint16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def tree_of(model: Any) -> Tree:
    """The weights as a JAX user has them: nested, layers in a list, each array spread over a (2, 4) mesh."""
    tree: Tree = {}
    for name, array in stored(model).items():
        *way, last = name.split(".")
        branch = tree
        for part in way:
            branch = branch.setdefault(part, {})
        spec = next(spec for rule, spec in RULES if re.search(rule, name.replace(".", "/")))
        branch[last] = jax.device_put(array, NamedSharding(GRID, P(*spec[: array.ndim])))
    layers = tree["model"]["layers"]
    tree["model"]["layers"] = [layers[str(i)] for i in range(len(layers))]
    return tree


def dotted(tree: Any, name: str = "") -> Tree:
    """Leaves by their names joined with dots."""
    if not isinstance(tree, dict | list):
        return {name: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, child in pairs for k, v in dotted(child, f"{name}.{key}" if name else str(key)).items()}


def same_bits(tree: Any, model: Any) -> None:
    found, expected = dotted(tree), stored(model)
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


def same_model(directory: Path, model: Any, **options: Any) -> None:
    """transformers reads the directory without a complaint, and what it reads computes the same."""
    for by in (AutoModelForCausalLM, LlamaForCausalLM):
        read, told = by.from_pretrained(directory, output_loading_info=True, **options)
        assert not any(told.values()), told
        assert read.dtype == model.dtype
        for name, tensor in model.state_dict().items():
            assert torch.equal(read.state_dict()[name], tensor), name
        assert torch.equal(logits(read.eval()), logits(model))


def shardkeep_command(*words: object) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command([str(word) for word in words])
    assert code == 0, said.getvalue()
    return said.getvalue()


def check_a_sharded_model_of_transformers_loads_bit_for_bit(path: Path) -> None:
    for number, model in enumerate([llama(), llama(tied=True), llama(dtype=torch.bfloat16)]):
        home = path / str(number)
        model.save_pretrained(home, max_shard_size=SHARDS)
        shards = sorted(home.glob("*.safetensors"))
        assert len(shards) > 3, shards
        for where in (home, home / "model.safetensors", home / "model.safetensors.index.json"):
            same_bits(shardkeep.load(where), model)
        report = shardkeep.verify(home)
        assert report.ok
        assert report.unchecked == len(stored(model))


def check_an_unsharded_model_of_transformers_loads_bit_for_bit(path: Path) -> None:
    llama().save_pretrained(path)
    assert [file.name for file in path.glob("*.safetensors*")] == ["model.safetensors"]
    same_bits(shardkeep.load(path), llama())
    same_bits(shardkeep.load(path / "model.safetensors"), llama())


def check_a_model_of_transformers_loads_onto_a_mesh(path: Path) -> None:
    llama().save_pretrained(path, max_shard_size=SHARDS)
    tree = shardkeep.load(path, mesh=OTHER, partition_rules=RULES)
    same_bits(tree, llama())
    embedding = dotted(tree)["model.embed_tokens.weight"]
    assert embedding.sharding.shard_shape(embedding.shape) == (2048, 32)


def check_part_of_a_model_of_transformers_loads_into_a_template(path: Path) -> None:
    llama().save_pretrained(path, max_shard_size=SHARDS)
    norms = shardkeep.load(path, include="layernorm")
    assert len(jax.tree.leaves(norms)) == 4
    template = {"model": {"norm": {"weight": jax.ShapeDtypeStruct((128,), jnp.bfloat16)}}}
    norm = shardkeep.load(path, template=template)["model"]["norm"]["weight"]
    assert norm.dtype == jnp.bfloat16
    assert (np.asarray(norm) == stored(llama())["model.norm.weight"].astype(jnp.bfloat16)).all()


def check_transformers_reads_one_file_of_ours(path: Path) -> None:
    for number, model in enumerate([llama(), llama(tied=True), llama(dtype=torch.bfloat16)]):
        home = path / str(number)
        shardkeep.save(home / "model.safetensors", tree_of(model))
        model.config.save_pretrained(home)
        assert [file.name for file in home.glob("*.safetensors*")] == ["model.safetensors"]
        same_model(home, model, dtype="auto")


def check_transformers_reads_shards_of_ours(path: Path) -> None:
    shardkeep.save(path / "model.safetensors", tree_of(llama()), max_shard_size=SHARDS)
    llama().config.save_pretrained(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored(llama()).values())
    assert len(set(index["weight_map"].values())) > 3
    assert not (path / "model.safetensors").exists()
    same_model(path, llama())


def check_transformers_reads_what_replaced_something_else(path: Path) -> None:
    """Of theirs or ours, of one file or several: no file of the old model is left to be read."""
    other = {name: jnp.zeros(array.shape, array.dtype) for name, array in stored(llama()).items()}
    llama().save_pretrained(path, max_shard_size=SHARDS)
    for size in (None, SHARDS, "1MB", None):
        shardkeep.save(path / "model.safetensors", other, max_shard_size=size, overwrite=True)
        shardkeep.save(path / "model.safetensors", tree_of(llama()), max_shard_size=size, overwrite=True)
        same_model(path, llama())
        same_bits(shardkeep.load(path), llama())


def check_transformers_reads_a_converted_checkpoint(path: Path) -> None:
    """Saved on a (2, 4) mesh, array by array in pieces; converted to one file and to several, in either format."""
    for format in ("safetensors", "tensorstore"):
        checkpoint = path / format
        shardkeep.save(checkpoint, tree_of(llama()), format=format)
        pieces = {leaf.key: len(leaf.pieces) for leaf in shardkeep.inspect(checkpoint).tree().arrays}
        if format == "safetensors":  # a zarr array of 2 MiB is one chunk
            assert pieces["model/embed_tokens/weight"] == 8, pieces
        for name, options in {"one": (), "several": ("--max-shard-size", SHARDS)}.items():
            home = path / f"{format}-{name}"
            shardkeep_command("convert", checkpoint, home / "model.safetensors", *options)
            llama().config.save_pretrained(home)
            assert (home / "model.safetensors.index.json").exists() == (name == "several")
            same_model(home, llama())


def check_transformers_reads_one_tree_of_a_training_state_cast_to_bfloat16(path: Path) -> None:
    weights = tree_of(llama())
    shardkeep.save(path / "run", weights, prefix="model")
    shardkeep.save(path / "run", jax.tree.map(jnp.zeros_like, weights), prefix="optimizer")
    home = path / "export"
    shardkeep_command("convert", path / "run", home / "model.safetensors", "--prefix", "model", "--dtype", "bfloat16")
    config = llama().config.to_dict() | {"dtype": "bfloat16"}
    LlamaConfig(**config).save_pretrained(home)
    half = AutoModelForCausalLM.from_config(llama().config, dtype=torch.bfloat16).eval()
    half.load_state_dict(llama().state_dict())  # torch casts them
    same_model(home, half, dtype="auto")


STACKED = [
    remap.stack(r"model/layers/{i}/(.*)/weight", r"layers/\1/kernel"),
    remap.fuse([f"(.*)/{n}_proj/kernel" for n in "qkv"], r"\1/qkv/kernel", axis=1),  # (layers, out, in)
    remap.fuse([f"(.*)/{n}_proj/kernel" for n in ("gate", "up")], r"\1/gate_up/kernel", axis=1),
    remap.transpose("layers/(self_attn|mlp)/.*", (0, 2, 1)),
    remap.reshape("layers/self_attn/o_proj/kernel", (2, 4, 32, 128)),  # (layers, heads, head, width)
    remap.rename("model/embed_tokens/weight", "embed/embedding"),
    remap.rename("model/norm/weight", "norm/scale"),
    remap.transpose("lm_head/weight", (1, 0)),
    remap.rename("lm_head/weight", "head/kernel"),
]


def _logits_of_stacked(tree: Tree, tokens: np.ndarray[Any, Any], config: Any) -> jax.Array:
    """Llama on stacked arrays, one layer after another by `scan`."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size, width = config.hidden_size // heads, config.hidden_size

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps) * scale

    angles = np.arange(tokens.shape[1])[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[None, :, None] for f in (np.cos, np.sin))

    def rotate(x: Any) -> Any:
        return x * cos + jnp.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

    def layer(x: Any, weights: Tree) -> Any:
        attention, mlp = weights["self_attn"], weights["mlp"]
        qkv = norm(x, weights["input_layernorm"]["kernel"]) @ attention["qkv"]["kernel"]
        q, k, v = jnp.split(qkv, [width, width + groups * size], -1)
        q, k, v = (y.reshape(*y.shape[:2], -1, size) for y in (q, k, v))
        k, v = (jnp.repeat(y, heads // groups, 2) for y in (rotate(k), v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), k) / np.sqrt(size)
        scores = jnp.where(np.tri(tokens.shape[1], dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bqhd,hdw->bqw", mixed, attention["o_proj"]["kernel"])
        gate, up = jnp.split(norm(x, weights["post_attention_layernorm"]["kernel"]) @ mlp["gate_up"]["kernel"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ mlp["down_proj"]["kernel"], None

    x, _ = jax.lax.scan(layer, tree["embed"]["embedding"][tokens], tree["layers"])
    return norm(x, tree["norm"]["scale"]) @ tree["head"]["kernel"]


def check_a_model_of_transformers_loads_into_stacked_arrays_and_goes_back(path: Path) -> None:
    """Stacked, fused, transposed and reshaped, on a mesh; the rules of the inverse write what transformers had."""
    model = llama()
    model.save_pretrained(path / "theirs", max_shard_size=SHARDS)
    plan = shardkeep.plan_load(path / "theirs", remap=STACKED)
    shapes = {leaf.key: leaf.form for leaf in plan.leaves}
    assert shapes["layers/self_attn/qkv/kernel"] == "float32[2, 128, 256]"
    rules = [("qkv|gate_up|down", P(None, "fsdp", "tp")), ("o_proj", P(None, "tp", None, "fsdp")), (".*", P())]
    tree = shardkeep.load(path / "theirs", remap=STACKED, mesh=GRID, partition_rules=rules)
    assert tree["layers"]["self_attn"]["o_proj"]["kernel"].sharding.spec == P(None, "tp", None, "fsdp")
    host = jax.tree.map(np.asarray, tree)
    ours = _logits_of_stacked(host, np.arange(32).reshape(2, 16) * 100, model.config)
    assert np.allclose(ours, logits(model).numpy(), atol=1e-4), np.abs(ours - logits(model).numpy()).max()

    shardkeep.save(path / "ours", tree)
    back = shardkeep.load(path / "ours", remap=plan.inverse())
    shardkeep.save(path / "back" / "model.safetensors", back, max_shard_size=SHARDS)
    model.config.save_pretrained(path / "back")
    same_model(path / "back", model)
    (path / "inverse.json").write_text(json.dumps(remap.to_json(plan.inverse())))  # the same by the command
    shardkeep_command("convert", path / "ours", path / "again" / "model.safetensors", "--remap", path / "inverse.json")
    model.config.save_pretrained(path / "again")
    same_model(path / "again", model)


def check_a_model_goes_there_and_back(path: Path) -> None:
    """transformers → a checkpoint of ours → a mesh → safetensors → transformers."""
    llama().save_pretrained(path / "theirs", max_shard_size=SHARDS)
    shardkeep_command("convert", path / "theirs", path / "ours")
    assert shardkeep.verify(path / "ours").unchecked == 0
    tree = shardkeep.load(path / "ours", mesh=OTHER, partition_rules=RULES)
    shardkeep.save(path / "back" / "model.safetensors", tree, max_shard_size=SHARDS)
    llama().config.save_pretrained(path / "back")
    same_model(path / "back", llama())
    assert "no differences found" in shardkeep_command("diff", path / "theirs", path / "back")


def main() -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return run_checks(globals())


if __name__ == "__main__":
    sys.exit(main())
