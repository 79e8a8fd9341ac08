"""Decode and prefill of a KTransformers server, timed as ``sglang-lk bench decode`` and ``bench prefill`` time ours.

    python test/bench/peers/serving_kt.py --python KT/bin/python --layers 12 --threads 14 --json out.json

``--python`` is of an environment with sglang-kt and kt-kernel; both SGLangs are called sglang, so it is another one than
ours, which runs this script. Random experts of one layer are written to a temporary folder (1.2 GB for Qwen3-30B-A3B in
bf16); ``kt_server.py`` has every layer read them. Nothing of KTransformers is changed besides. A new method of kt-kernel
is an entry of ``METHODS``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
if not __package__:  # run as a script: modules of this folder are called like others' packages
    sys.path[0] = str(HERE.parent)

from peers import formats  # noqa: E402  (after the path is set)
from peers.cases import Shape  # noqa: E402
from sglang_lk import light_package  # noqa: E402

light_package("sglang")
from sglang.srt.lk.bench import serving  # noqa: E402
from sglang.srt.lk.config import SWITCH  # noqa: E402

DIFFERENT = 4  # experts; the others repeat them, since speed does not depend on values
LIMITS = "--dtype bfloat16 --chunked-prefill-size 4096 --max-running-requests 8 --max-total-tokens 16384 --context-length 8192"
OF_THIS_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_USUAL = "model.layers.0.mlp.experts.{expert}.{part}_proj.{what}"
_DEEPSEEK_V4 = "layers.0.ffn.experts.{expert}.{w}.{what}"
# Method: its format in ``formats``, how its tensors are called, endings and safetensors types of codes and scales.
METHODS = {
    "BF16": ("bf16", _USUAL, ("weight", "BF16"), None),
    "FP8": ("fp8_block", _USUAL, ("weight", "F8_E4M3"), ("weight_scale_inv", "F32")),
    "MXFP4": ("mxfp4", _DEEPSEEK_V4, ("weight", "U8"), ("scale", "U8")),
    "RAWINT4": ("int4_g32", _USUAL, ("weight_packed", "U8"), ("weight_scale", "BF16")),
}


def write_experts(file: Path, method: str, shape: Shape) -> None:
    """The experts of layer 0 as safetensors, written in one pass."""
    fmt, name, *kinds = METHODS[method]
    experts = formats.random_experts(fmt, shape, DIFFERENT, seed=0, whole=False)
    header: dict[str, dict] = {}
    arrays, at = [], 0
    for index in range(shape.experts):
        for w, part in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            matrix = experts[index % DIFFERENT][part]
            for (what, dtype), array in zip(filter(None, kinds), (matrix.codes, matrix.scales)):
                entry = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
                header[name.format(expert=index, part=part, w=w, what=what)] = entry
                arrays.append(array)
                at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            out.write(np.ascontiguousarray(array).data)


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    experts = config.get("num_experts") or config.get("n_routed_experts")
    if experts is None:
        raise ValueError(f"--model-config {name}: neither num_experts nor n_routed_experts in it")
    missing = [key for key in ("hidden_size", "moe_intermediate_size", "num_experts_per_tok") if key not in config]
    if missing:
        raise ValueError(f"--model-config {name}: no {', '.join(missing)} in it")
    return Shape(config["hidden_size"], config["moe_intermediate_size"], experts, config["num_experts_per_tok"])


def flags(options: argparse.Namespace, experts: Path) -> list[str]:
    """Of the server, beside those that ours gets too; the user's come last, so they count."""
    return [
        *LIMITS.split(), "--kt-weight-path", str(experts), "--kt-method", options.method, "--kt-cpuinfer", str(options.threads),
        "--kt-threadpool-count", str(options.pools), "--kt-num-gpu-experts", "0", *options.flags,
    ]  # fmt: skip


def environ(of_this: Mapping[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in of_this.items() if name not in OF_THIS_ENVIRONMENT}, SWITCH: "0"}


def batches(options: argparse.Namespace) -> list[int]:
    return options.batch or [1, 4]


def measure(options: argparse.Namespace) -> Iterator[serving.Row | str]:
    """Rows as they are measured, and lines for the reader between them."""
    config = serving.config_of(options.model_config, experts=None, layers=options.layers)
    shape, model, experts = shape_of(config, options.model_config), Path(options.model_config).stem, f"kt {options.method}"
    program = [options.python, str(HERE / "kt_server.py")]
    usual = {"repeats": options.repeats, "vocabulary": config["vocab_size"]}
    with tempfile.TemporaryDirectory() as folder:
        write_experts(Path(folder) / "model.safetensors", options.method, shape)
        with serving.Server(config, flags(options, Path(folder)), environ(os.environ), program) as server:
            yield f"ready after {server.ready():.0f} s"
            for batch in batches(options):
                times = serving.decode(server, batch=batch, prompt=16, tokens=options.tokens, **usual)
                yield serving.row("decode", model, experts, batch=batch, prompt=16, times=times, work=batch)
            times = serving.prefill(server, batch=1, prompt=options.prompt, **usual)
            yield serving.row("prefill", model, experts, batch=1, prompt=options.prompt, times=times, work=options.prompt)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="serving_kt", description="Decode and prefill of a KTransformers server.")
    made.add_argument("--python", required=True, help="of an environment with sglang-kt and kt-kernel")
    made.add_argument("--model-config", default="qwen3-30b-a3b", help=f"a config.json, or one of {', '.join(serving.known())}")
    made.add_argument("--layers", type=int, help="as many as the config says")
    made.add_argument("--method", choices=METHODS, default="BF16")
    made.add_argument("--threads", type=int, default=max(len(os.sched_getaffinity(0)) - 2, 1), help="all but two")
    made.add_argument("--pools", type=int, default=1, help="thread pools: one per NUMA node")
    made.add_argument("--batch", type=int, action="append", metavar="N", help="requests decoded together (1 and 4)")
    made.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt for prefill")
    made.add_argument("--tokens", type=int, default=48, help="decode steps of one sample")
    made.add_argument("--repeats", type=int, default=4)
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of the server")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    rows: list[serving.Row] = []
    status = 0
    try:
        for found in measure(options):
            if isinstance(found, str):
                print(found, flush=True)
            else:
                rows.append(found)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"serving_kt: {error}", file=sys.stderr)
        status = 2
    if rows:
        print("\n".join(serving.lines(rows)))
    if rows and options.json:
        options.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
