"""Decode and prefill of a KTransformers server and of ours, by turns, timed as ``sglang-lk bench`` does.

    python test/bench/peers/serving_kt.py --python KT/bin/python --layers 12 --threads 14 --json out.json

``--python`` is of an environment with sglang-kt and kt-kernel; both SGLangs are called sglang, so it is another one than
ours, which runs this script. Random experts of one layer are written to a temporary folder (1.2 GB for Qwen3-30B-A3B in
bf16); ``kt_server.py`` has every layer read them. Nothing of KTransformers is changed besides. Both servers are up at the
same time, and the one that is not measured is stopped (SIGSTOP): a machine that others use, too, changes by the minute,
so what counts is the ratio of two samples that follow each other. A new method of kt-kernel is an entry of ``METHODS``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
# ``serving.EXPERTS`` has what our server computes beside it, under the format's name.
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
    """Of KTransformers' server, beside those that ours gets too; the user's come last, so they count."""
    return [
        *LIMITS.split(), "--kt-weight-path", str(experts), "--kt-method", options.method, "--kt-cpuinfer", str(options.threads),
        "--kt-threadpool-count", str(options.pools), "--kt-num-gpu-experts", "0", *options.flags, *shlex.split(options.kt_flags),
    ]  # fmt: skip


def environ(of_this: Mapping[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in of_this.items() if name not in OF_THIS_ENVIRONMENT}, SWITCH: "0"}


def our_flags(options: argparse.Namespace) -> list[str]:
    return [*LIMITS.split(), *options.flags, *shlex.split(options.our_flags)]


def our_environ(options: argparse.Namespace, of_this: Mapping[str, str]) -> dict[str, str]:
    return {**of_this, SWITCH: "1", "LK_THREADS": str(options.threads)}


def our_experts(options: argparse.Namespace) -> str:
    fmt = METHODS[options.method][0]
    if fmt not in serving.EXPERTS:
        raise ValueError(f"--method {options.method}: ours has no random experts of it ({', '.join(serving.EXPERTS)}); --alone measures KTransformers")
    return fmt


def batches(options: argparse.Namespace) -> list[int]:
    return options.batch or [1, 4]


@dataclass(frozen=True)
class Case:
    """One figure of a server: ``once`` gives a sample in seconds; ``work``: the tokens that it made or read."""

    what: str
    once: Callable[..., float]
    sizes: dict[str, int]
    work: int


def cases(options: argparse.Namespace, vocabulary: int) -> list[Case]:
    found = [
        Case("decode", serving.decode_step, {"batch": batch, "prompt": 16, "tokens": options.tokens, "vocabulary": vocabulary}, batch)
        for batch in batches(options)
    ]
    return [*found, Case("prefill", serving.prefill_once, {"batch": 1, "prompt": options.prompt, "vocabulary": vocabulary}, options.prompt)]


def by_turns(case: Case, servers: Mapping[str, serving.Server], repeats: int) -> dict[str, list[float]]:
    """Samples of every server, in another order every other turn; only the one that is measured has the processors. The first
    turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(repeats + 1):
        for name in list(servers)[:: -1 if turn % 2 else 1]:
            servers[name].go_on()
            times[name].append(case.once(servers[name], seed=turn, **case.sizes))
            servers[name].stop()
    return {name: of_one[1:] for name, of_one in times.items()}


def ratio(case: Case, kt: Sequence[float], ours: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles([theirs / of_us for theirs, of_us in zip(kt, ours)], n=4)
    return f"{case.what}, batch {case.sizes['batch']}: KTransformers takes {middle:.2f} times as long (middle half {low:.2f} to {high:.2f})"


def measure(options: argparse.Namespace) -> Iterator[serving.Row | str]:
    """Rows as they are measured, and lines for the reader between them."""
    plain = serving.config_of(options.model_config, experts=None, layers=options.layers)
    shape, model = shape_of(plain, options.model_config), Path(options.model_config).stem
    ours = None if options.alone else our_experts(options)
    program = [options.python, str(HERE / "kt_server.py")]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_experts(folder / "model.safetensors", options.method, shape)
        servers = {f"kt {options.method}": stack.enter_context(serving.Server(plain, flags(options, folder), environ(os.environ), program))}
        if ours:
            config = serving.config_of(options.model_config, experts=ours, layers=options.layers)
            servers[f"lk {ours}"] = stack.enter_context(serving.Server(config, our_flags(options), our_environ(options, os.environ)))
        for name, server in servers.items():
            yield f"{name}: ready after {server.ready():.0f} s"
        for server in servers.values():
            server.stop()
        for case in cases(options, plain["vocab_size"]):
            times = by_turns(case, servers, options.repeats)
            for name, of_one in times.items():
                yield serving.row(case.what, model, name, batch=case.sizes["batch"], prompt=case.sizes["prompt"], times=of_one, work=case.work)
            if ours:
                yield ratio(case, *times.values())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="serving_kt", description="Decode and prefill of a KTransformers server and of ours, by turns.")
    made.add_argument("--python", required=True, help="of an environment with sglang-kt and kt-kernel")
    made.add_argument("--alone", action="store_true", help="KTransformers only")
    made.add_argument("--model-config", default="qwen3-30b-a3b", help=f"a config.json, or one of {', '.join(serving.known())}")
    made.add_argument("--layers", type=int, help="as many as the config says")
    made.add_argument("--method", choices=METHODS, default="BF16", help="of kt-kernel; ours computes experts of the same format")
    made.add_argument("--threads", type=int, default=max(len(os.sched_getaffinity(0)) - 2, 1), help="of each server; all but two")
    made.add_argument("--pools", type=int, default=1, help="KTransformers' thread pools: one per NUMA node")
    made.add_argument("--batch", type=int, action="append", metavar="N", help="requests decoded together (1 and 4)")
    made.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt for prefill")
    made.add_argument("--tokens", type=int, default=48, help="decode steps of one sample")
    made.add_argument("--repeats", type=int, default=4)
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--kt-flags", default="", metavar="'FLAG ...'", help="of KTransformers' server alone: --kt-flags='--a --b 1'")
    made.add_argument("--our-flags", default="", metavar="'FLAG ...'", help="of our server alone, likewise")
    made.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of both servers")
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
