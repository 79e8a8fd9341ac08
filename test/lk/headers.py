"""Checkpoint folders for tests that read headers: right names, types and sizes, all bytes zero."""

import json
import math
import struct

BITS = {"BF16": 16, "F16": 16, "F32": 32, "U8": 8, "I8": 8, "I32": 32, "F8_E4M3": 8, "F8_E8M0": 8}
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "quantization_config": {},  # what it says does not matter here, only that it is there
}
H, I, E = 64, 32, 4


def write_file(path, tensors):
    """``tensors``: name -> (dtype, shape)."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def per_expert(kinds, *, layers=(0, 1), prefix="model.layers.{}.mlp.experts.", names=("gate_proj", "up_proj", "down_proj")):
    """``kinds``: suffix -> function of (rows, columns) to (dtype, shape)."""
    tensors = {}
    for layer in layers:
        for expert in range(E):
            for name, (rows, columns) in zip(names, ((I, H), (I, H), (H, I))):
                for kind, make in kinds.items():
                    tensors[f"{prefix.format(layer)}{expert}.{name}.{kind}"] = make(rows, columns)
    return tensors


def bf16(**where):
    return per_expert({"weight": lambda r, c: ("BF16", (r, c))}, **where)


def mxfp4(**where):
    return per_expert(
        {"weight_packed": lambda r, c: ("U8", (r, c // 2)), "weight_scale": lambda r, c: ("U8", (r, c // 32))}, **where
    )


def checkpoint(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    write_file(folder / "model.safetensors", {"model.embed_tokens.weight": ("BF16", (100, H)), **tensors})
    return folder
