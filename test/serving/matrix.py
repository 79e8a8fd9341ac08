"""Which MoE architectures and formats serve on a CPU, with stock SGLang and with the experts on our kernels, and whether they agree.

``python matrix.py`` writes each checkpoint, serves it three times (stock and hybrid with float32 activations, to compare; hybrid
as users start it, in bf16) and leaves the findings in ``docs/reference/support-matrix.json`` and the table made of them in
``support-matrix.md`` beside it. ``--table`` only makes the table; names restrict the run to those rows.

A row is compared with stock, where stock cannot serve with ``transformers`` in float32, and a 4-bit row with its BF16 twin of the
same values. A row of ``FORMATS`` is compared with its twin, too, which stock serves. Models of random weights have near ties, so greedy tokens are compared up to the first step whose two best
tokens are closer than ``TIE``, and the log-probabilities of a fixed text at every position. Reasons are recognised in the
servers' own errors: an error that ``REASONS`` does not know is shown as it is.
"""

import argparse
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from checkpoints import ARCHITECTURES, FORMATS, TOKENIZER, VOCABULARY, Architecture, write
from engines import Host

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "reference" / "support-matrix.json"
TABLE = RESULTS.with_suffix(".md")

# By the activations' type: the gap of the two best log-probabilities below which rounding may choose between tokens, and the
# median difference of log-probabilities that rounding explains. Logits have a deviation of about 4.
TIE = {"float32": 0.01, "bfloat16": 0.25}
CLOSE = {"float32": 0.0005, "bfloat16": 0.05}
NEW_TOKENS = 12
STEADY = dict(temperature=0, ignore_eos=True)

# What an error says, and what that means. Symbols are upstream's; a later release may lose the limit.
REASONS = (
    (r"convert_weight_packed_scale_zp", "repacks for AMX, by an operator that the published wheel lacks (`convert_weight_packed_scale_zp`)"),
    (r"unexpected keyword argument 'sinks'", "`TorchNativeAttnBackend`, the attention without AMX, has no sinks"),
    (r"_load_w2", "the `triton_kernel` runner is chosen on a CPU, too, and its transposed experts do not load (`FusedMoE._load_w2`)"),
    (r"_launch_fused_gate_sigmoid_mul", "`qwen2_moe` gates its shared expert with a Triton kernel (`fused_gate_sigmoid_mul_add`)"),
    (r"rms_sumsq_serial", "`minimax_m2` normalises queries and keys with a Triton kernel (`rms_sumsq_serial`)"),
    (r"_run_sdpa_forward_extend", "no handler for latent attention on `torch_native` (`AttentionBackendRegistry`)"),
    (r"shape '\[-1, 4, 32\]' is invalid", "queries normalised head by head are taken for padded rows (`padded_extend_real_tokens`)"),
    (r"no MoE layer was taken over", "there is no `FusedMoE` layer to take over"),
    (r"moe_forward_native", "`moe_forward_native` cannot weight the input (`apply_router_weight_on_input`)"),
    (r"\['fa3', 'triton', 'trtllm_mha'\] is required", "asks for fa3, triton or trtllm_mha attention (`model_hook.py`)"),
    (r"'sgl_kernel' object has no attribute", "its recurrent layers need sgl_kernel's CPU build, which is not published as a wheel"),
    (r"has no SGlang implementation", "its module asks for sgl_kernel's CPU operators at import, which the published wheel lacks"),
    (r"longcat_flash.py:\d+ <listcomp>", "does not find the base of its rotation with transformers 5 (`config.rope_parameters` is None)"),
    (r"experts without a gate", "experts without a gate (relu2) are not supported by this build"),
    (r"inplace_fused_experts", "calls the Triton `fused_moe` itself, without a `FusedMoE` layer"),
    (r"models/qwen3_next.py", "its recurrent layers are built on `torch.cuda` (`FusedRMSNormGated`)"),
    (r"marlin_make_workspace", "repacks the experts for a GPU after loading (`marlin_make_workspace`)"),
    (r"Fp8LinearMethod on CPU requires", "its FP8 layers want AMX (`Fp8LinearMethod`)"),
    (r"sgl_per_tensor_quant_fp8", "quantizes FP8 layers anew after loading, with a GPU kernel (`scaled_fp8_quant`)"),
    (r"_check_scheme_supported", "asks for a GPU's compute capability (`_check_scheme_supported`)"),
    (r"weight_block_size\[0\] == weight_block_size\[1\]", "knows square blocks only (`get_moe_padding_size`)"),
    (r"not supported for quantization method awq", "admits float16 only (`AWQConfig.get_supported_act_dtypes`)"),
    (r"gptq_v2 is not supported", "does not know version 2 on a CPU (`_check_cpu_amx_support`)"),
    (r"AutoRound CPU inference path", "its AutoRound wants AMX (`check_cpu_support`)"),
)


PACKED = {name: row for name, row in FORMATS.items() if row.packed}


def texts() -> dict[str, list[list[int]]]:
    """Fixed token ids: prompts of several lengths, and a text to score."""
    draw = random.Random(20)
    return dict(
        prompts=[[draw.randrange(1, VOCABULARY) for _ in range(n)] for n in (1, 7, 20, 33)],
        scored=[[draw.randrange(1, VOCABULARY) for _ in range(n)] for n in (64, 48)],
    )  # fmt: skip


def batches() -> list[dict]:
    t = texts()
    greedy = dict(input_ids=t["prompts"], sampling_params=dict(max_new_tokens=NEW_TOKENS, **STEADY), return_logprob=True, top_logprobs_num=2)
    score = dict(input_ids=t["scored"], sampling_params=dict(max_new_tokens=1, **STEADY), return_logprob=True, logprob_start_len=0)
    return [greedy, score]  # fmt: skip


def condense(answer: dict) -> dict:
    """Of an engine's answer, what is compared."""
    if "error" in answer:
        return {"error": answer["error"]}
    greedy, score = answer["answers"]
    gaps = [[top[0][0] - top[1][0] for top in one["meta_info"]["output_top_logprobs"]] for one in greedy]
    scored = [[entry[0] for entry in one["meta_info"]["input_token_logprobs"][1:]] for one in score]
    return dict(ready_s=answer["ready_s"], tokens=[one["output_ids"] for one in greedy], gaps=gaps, scored=scored)


def compare(mine: dict, other: dict, tie: float) -> dict:
    """Tokens up to the first tie, and the differences of all scored log-probabilities."""
    equal, checked = True, 0
    for tokens, expected, gaps in zip(mine["tokens"], other["tokens"], other["gaps"], strict=True):
        clear = next((i for i, gap in enumerate(gaps) if gap < tie), len(gaps))
        equal &= tokens[:clear] == expected[:clear]
        checked += clear
    return dict(tokens_equal=equal, tokens_checked=checked, **differences(mine["scored"], other["scored"]))


def differences(mine: list[list[float]], other: list[list[float]]) -> dict:
    gaps = sorted(abs(a - b) for xs, ys in zip(mine, other, strict=True) for a, b in zip(xs, ys, strict=True))
    assert gaps, "nothing was compared"
    return dict(median=round(statistics.median(gaps), 4), p95=round(gaps[int(0.95 * len(gaps))], 4), worst=round(gaps[-1], 4))


def serve_all(rows: list[Architecture], checkpoints: Path, logs: Path, *, hybrid: bool, extra: dict[str, dict]) -> dict[str, dict]:
    found = {}
    with Host({"LK_MOE_HYBRID_ENABLED": str(int(hybrid))}) as host:
        for row in rows:
            more = extra.get(row.name, {})
            log = logs / "-".join([row.name, "hybrid" if hybrid else "stock", more.get("dtype", "usual")])
            found[row.name] = condense(host.run(checkpoints / row.name, batches(), Path(f"{log}.log"), **row.serve, **more))
            sys.stderr.write(f"{log.name}: {found[row.name].get('error', 'serves')}\n")
    return found


def references(rows: list[Architecture], checkpoints: Path) -> dict[str, list | dict]:
    names = {row.name: row.name.removesuffix(f"_{row.grid}") if row.packed else row.name for row in rows}
    jobs = "".join(json.dumps(dict(model=str(checkpoints / twin), ids=texts()["scored"])) + "\n" for twin in names.values())
    command = [sys.executable, str(Path(__file__).with_name("opinion.py"))]
    output = subprocess.run(command, input=jobs, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(zip(names, map(json.loads, output.splitlines()), strict=True))


def examine(rows: list[Architecture], checkpoints: Path, logs: Path, *, usual: bool = True) -> dict[str, dict]:
    """``usual`` serves hybrid a second time, with the activations that it has by default."""
    exact = {row.name: {"dtype": "float32"} for row in rows if row.float32}
    unpacked = {row.name: exact.get(row.name, {}) for row in rows if not row.packed}  # stock's 4-bit formats take no float32
    stock = serve_all(rows, checkpoints, logs, hybrid=False, extra=unpacked)
    hybrid = serve_all(rows, checkpoints, logs, hybrid=True, extra=exact)
    default = serve_all(rows, checkpoints, logs, hybrid=True, extra={}) if usual else hybrid
    truth = references(rows, checkpoints)
    findings = {}
    for row in rows:
        mine, theirs = hybrid[row.name], stock[row.name]
        finding = dict(model_class=_model_class(checkpoints / row.name))
        finding["stock"] = _verdict(theirs)
        finding["hybrid"] = _verdict(default[row.name] if "error" in default[row.name] else mine)
        if "error" not in theirs and isinstance(truth[row.name], list):
            finding["stock_and_transformers"] = differences(theirs["scored"], truth[row.name])
        if finding["hybrid"]["serves"]:
            finding["compared"] = _judge(row, mine, theirs, hybrid, truth[row.name])
        findings[row.name] = finding
    return findings


def examine_formats(rows: list[Architecture], checkpoints: Path, logs: Path, *, usual: bool = True) -> dict[str, dict]:
    """Packed rows by hybrid with float32 activations, and with those that users have if ``usual``; their twins by stock."""
    exact = {row.name: {"dtype": "float32"} for row in FORMATS.values()}
    twins = serve_all([FORMATS[row.twin] for row in rows], checkpoints, logs, hybrid=False, extra=exact)
    hybrid = serve_all(rows, checkpoints, logs, hybrid=True, extra=exact)
    default = serve_all(rows, checkpoints, logs, hybrid=True, extra={}) if usual else hybrid
    stock = serve_all(rows, checkpoints, logs, hybrid=False, extra={}) if usual else {}
    findings = {}
    for row in rows:
        mine, twin = hybrid[row.name], twins[row.twin]
        finding = dict(hybrid=_verdict(default[row.name] if "error" in default[row.name] else mine))
        finding |= dict(stock=_verdict(stock[row.name])) if usual else {}
        if "error" not in mine and "error" not in twin:
            finding["compared"] = {"with": "its twin, by stock"} | compare(mine, twin, TIE["float32"])
        findings[row.name] = finding
    return findings


def _verdict(side: dict) -> dict:
    return dict(serves="error" not in side, **{key: side[key] for key in ("error",) if key in side})


def _judge(row: Architecture, mine: dict, theirs: dict, twins: dict, truth: list | dict) -> dict:
    """The comparison with the best opinion there is."""
    tie = TIE[kind(row)]
    twin = twins.get(row.name.removesuffix(f"_{row.grid}"), {"error": ""}) if row.packed else {"error": ""}
    if "error" not in twin:
        return {"with": "its BF16 twin"} | compare(mine, twin, tie)
    if "error" not in theirs:
        return {"with": "stock"} | compare(mine, theirs, tie)
    if isinstance(truth, list):
        return {"with": "transformers"} | differences(mine["scored"], truth)
    return {"with": "nothing", "why": truth["error"].splitlines()[0][:200]}


def kind(row: Architecture) -> str:
    """The activations that the row is compared with."""
    return "float32" if row.float32 else "bfloat16"


def explain(error: str) -> str:
    known = next((text for pattern, text in REASONS if re.search(pattern, error)), None)
    return known or (error.removeprefix("Hybrid MoE: ") if error.startswith("Hybrid MoE: ") else f"`{error}`")


def table(findings: dict[str, dict]) -> str:
    architectures = {name: row for name, row in findings.items() if name in ARCHITECTURES}
    return _architectures(architectures) + _formats({name: row for name, row in findings.items() if name in FORMATS})


def _formats(findings: dict[str, dict]) -> str:
    lines = [FORMATS_HEAD.rstrip("\n"), "", "| checkpoint | stock | hybrid | tokens | log-probabilities: median, 95 %, worst |", "|" + " --- |" * 5]
    for name, row in findings.items():
        found = row.get("compared", {})
        tokens = f"{found['tokens_checked']} {'equal' if found['tokens_equal'] else 'NOT EQUAL'}" if found else ""
        gaps = "{median}, {p95}, {worst}".format(**found) if found else ""
        says = FORMAT_NAMES[FORMATS[name].grid]
        lines.append(f"| {says} | {_cell(row['stock'])} | {_cell(row['hybrid'])} | {tokens} | {gaps} |")
    return "\n".join(lines) + "\n"


def _architectures(findings: dict[str, dict]) -> str:
    counts = {side: sum(row[side]["serves"] for row in findings.values()) for side in ("stock", "hybrid")}
    summary = "Of {0} rows stock serves {stock} and hybrid {hybrid}.".format(len(findings), **counts)
    lines = [HEAD.rstrip("\n"), "", summary, ""]
    lines += ["| architecture | class | stock | hybrid | compared with | tokens | log-probabilities: median, 95 %, worst |", "|" + " --- |" * 7]
    for name, row in findings.items():
        found = row.get("compared", {})
        tokens = f"{found['tokens_checked']} {'equal' if found['tokens_equal'] else 'NOT EQUAL'}" if "tokens_checked" in found else ""
        gaps = "{median}, {p95}, {worst}".format(**found) if "median" in found else found.get("why", "")
        note = ARCHITECTURES[name].note
        gaps = f"{gaps} ({note})" if note else gaps
        lines.append(f"| {name} | {row['model_class']} | {_cell(row['stock'])} | {_cell(row['hybrid'])} | {found.get('with', '')} | {tokens} | {gaps} |")
    return "\n".join(lines) + "\n"


def _cell(side: dict) -> str:
    return "serves" if side["serves"] else f"no: {explain(side['error'])}"


NO_FLOAT32 = [name for name, row in ARCHITECTURES.items() if not row.float32]
HEAD = f"""# Which architectures and formats serve on a CPU

Generated by `test/serving/matrix.py` from `support-matrix.json`: SGLang 0.5.23, `--device cpu`, a machine without AMX and without a GPU,
checkpoints of random weights with two layers. *Hybrid* is `LK_MOE_HYBRID_ENABLED=1`. Every row was served with bf16 activations;
the comparison is made with float32 ones, save where upstream has none ({", ".join(NO_FLOAT32)}: bf16). Tokens are greedy, counted
up to the first step whose two best log-probabilities are closer than {TIE["float32"]} (bf16: {TIE["bfloat16"]}). The last column says how far the
log-probabilities of two fixed texts are apart, all positions taken together: in float32 nothing but the order of summation is left, in bf16
roundings are, and a routing choice that is nearly a tie may fall the other way.
"""


FORMATS_HEAD = f"""
## Expert formats

One small Qwen3-MoE whose experts and attention are written in each format (F16, MXFP8 and GPTQ's version 2: the experts). It is compared with a checkpoint of the same values in BF16 (F16:
in F32), which stock serves, both with float32 activations. Columns of GPTQ and compressed-tensors checkpoints in act-order (`desc_act`, `actorder: group`) and integers of other than 4 bits
are refused by name. Attention is SGLang's business; where it has no kernel for the format, on a CPU without AMX, the weights are decoded to the model's type after loading.
"""
FORMAT_NAMES = {
    "f16": "F16",
    "fp8_block": "FP8 in blocks (`fp8`, `weight_block_size`)",
    "fp8_tensor": "FP8 per tensor (`fp8`)",
    "fp8_modelopt": "FP8 per tensor (`modelopt`)",
    "fp8_channel": "FP8 per channel (compressed-tensors `float-quantized`)",
    "mxfp8": "MXFP8 (`mxfp8`)",
    "awq": "INT4 (`awq`), zero points, groups of 32",
    "gptq": "INT4 (`gptq`), symmetric, groups of 32",
    "gptq_zeros": "INT4 (`gptq`), zero points, groups of 32",
    "gptq_v2_channel": "INT4 (`gptq`, version 2), zero points, per channel",
    "auto_round": "INT4 (`auto-round`, packed as GPTQ), symmetric, groups of 32",
    "int4": "INT4 (compressed-tensors `pack-quantized`), symmetric, groups of 64",
    "int4_zeros": "INT4 (compressed-tensors `pack-quantized`), zero points, groups of 32",
    "int4_channel": "INT4 (compressed-tensors `pack-quantized`), symmetric, per channel",
}


def _model_class(checkpoint: Path) -> str:
    return json.loads((checkpoint / "config.json").read_text())["architectures"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tries every MoE architecture with stock SGLang and with hybrid MoE.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join([*ARCHITECTURES, *PACKED])}; all by default")
    parser.add_argument("--table", action="store_true", help="only make the table from the results file")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--keep", type=Path, help="directory for the checkpoints and logs (else a temporary one)")
    arguments = parser.parse_args()
    findings = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.table:
        names = arguments.names or [*ARCHITECTURES, *PACKED]
        rows, formats = ([known[name] for name in names if name in known] for known in (ARCHITECTURES, PACKED))
        with contextlib.ExitStack() as stack:
            place = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            place.mkdir(parents=True, exist_ok=True)
            for row in [*rows, *formats, *(FORMATS[row.twin] for row in formats)]:
                write(row, place / row.name, arguments.tokenizer)
            findings |= examine(rows, place, place) if rows else {}
            findings |= examine_formats(formats, place, place) if formats else {}
        findings = {name: findings[name] for name in [*ARCHITECTURES, *PACKED] if name in findings}
        RESULTS.write_text(json.dumps(findings, indent=1) + "\n")
    TABLE.write_text(table(findings))


if __name__ == "__main__":
    main()
