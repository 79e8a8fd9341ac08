"""The recite model as checkpoints that upstream's loaders accept: BF16 and 4-bit, both of exactly the same values.

The committed file keeps its experts as MXFP4 (two e2m1 codes a byte, low nibble first; one e8m0 scale for 32
columns). Every product of the two is exact in bf16, so both forms are rewritings, never roundings: whatever does
not fit stops with the tensor named. Nothing here computes a model.

A new form means a function in FORMS that maps the committed tensors to the tensors of a checkpoint and the
entries that it adds to ``config.json``, and its decoder in the tests.
"""

import argparse
import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MODEL = Path(__file__).parent / "models" / "recite-moe"
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DTYPES = {"BF16": np.uint16, "U8": np.uint8}

# e2m1: sign, two exponent bits, one mantissa bit.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = np.array(MAGNITUDES + tuple(-m for m in MAGNITUDES), np.float32)
MX_GROUP = 32


@dataclass(frozen=True)
class Tensor:
    """Bytes as safetensors stores them: ``dtype`` is the file's name for the element type."""

    dtype: str
    data: np.ndarray


def read(path: Path) -> dict[str, Tensor]:
    raw = np.fromfile(path, np.uint8)
    length = struct.unpack("<Q", raw[:8].tobytes())[0]
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        data = raw[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = Tensor(entry["dtype"], data)
    return tensors


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.data.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).tobytes())


def codes(packed: np.ndarray) -> np.ndarray:
    """Unscaled values of packed e2m1 codes: the low nibble is the even column."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return CODES[both.reshape(packed.shape[0], -1)]


def to_bf16(name: str, values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    if (bits & 0xFFFF).any():
        raise ValueError(f"{name}: a value is not exact in bf16")
    return (bits >> 16).astype(np.uint16)


def experts(tensors: dict[str, Tensor]) -> list[str]:
    """Names of the expert matrices, without the suffix that tells their encoding."""
    return [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]


def as_bf16(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict]:
    out = {name: tensor for name, tensor in tensors.items() if tensor.dtype == "BF16"}
    for name in experts(tensors):
        exponents = tensors[f"{name}.weight_scale"].data.astype(np.int32) - 127
        scales = np.ldexp(np.float32(1), exponents).repeat(MX_GROUP, axis=1)
        values = codes(tensors[f"{name}.weight_packed"].data) * scales
        out[f"{name}.weight"] = Tensor("BF16", to_bf16(f"{name}.weight", values))
    return out, {}


# The compressed-tensors convention for MXFP4: all three supported releases choose it without asking for a device.
MXFP4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": MX_GROUP,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": "mxfp4-pack-quantized",
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp[.]gate$"],
}


def as_mxfp4(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict]:
    return tensors, {"quantization_config": MXFP4_CONFIG}


FORMS = {"bf16": as_bf16, "mxfp4": as_mxfp4}


def make(form: str, target: Path, source: Path = MODEL) -> None:
    """Writes one checkpoint folder; it appears under its name only when complete."""
    tensors, additions = FORMS[form](read(source / "model.safetensors"))
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial / "model.safetensors", tensors)
    config = json.loads((source / "config.json").read_text())
    (partial / "config.json").write_text(json.dumps(config | additions, indent=2) + "\n")
    for name in COPIED:
        shutil.copyfile(source / name, partial / name)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    make(arguments.form, arguments.target)


if __name__ == "__main__":
    main()
