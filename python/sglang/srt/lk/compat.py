"""What hybrid MoE cannot serve, said in one message before a byte of memory is taken.

Looks at server arguments and at the layer's own configuration; each problem names the flag to change. What the roles of
all layers rule out is ``roles``' business, what is wrong with a checkpoint ``loading``'s.

A feature that becomes possible loses its line here and gains a test.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.lk.cpu_formats import on_cpu
from sglang.srt.lk.formats import FORMATS, ExpertFormat, Geometry
from sglang.srt.lk.kernels import Activation


class Refusal(RuntimeError):
    """Everything that keeps a layer from being taken over, as the one message a user needs."""

    def __init__(self, layer: str, problems: list[str]):
        self.problems = tuple(problems)
        super().__init__(f"Hybrid MoE: {layer} cannot be taken over: {'; '.join(problems)}. LK_MOE_HYBRID_ENABLED=0 serves stock SGLang.")


def _set(value: Any) -> bool:
    return bool(value)


def _not(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: value not in harmless


# Server argument, when it is a problem, what to say. An argument that a release does not have is no problem there.
ARGUMENTS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("kt_weight_path", _set, "--kt-weight-path is another hybrid engine: unset it"),
    ("enable_paged_experts", _set, "--enable-paged-experts is another way to place experts: unset it"),
    ("enable_eplb", _set, "--enable-eplb moves experts between ranks: unset it"),
    ("ep_num_redundant_experts", _set, "--ep-num-redundant-experts must be 0"),
    ("init_expert_location", _not("trivial", None), "--init-expert-location must be trivial"),
    ("ep_size", _not(1, None), "--ep-size must be 1 (experts are split by --tp-size)"),
    ("pp_size", _not(1, None), "--pp-size must be 1 (a stage would know only its own layers): use --tp-size"),
    ("dp_size", _not(1, None), "--dp-size must be 1 (every replica would hold all experts and take all cores): use --tp-size"),
    ("enable_dp_attention", _set, "--enable-dp-attention is not supported: unset it"),
    ("attn_dp_size", _not(1, None), "--attn-dp-size must be 1 (attention split by requests is not supported)"),
    ("moe_a2a_backend", _not("none", None), "--moe-a2a-backend must be none"),
    ("elastic_ep_backend", _not("none", None), "--elastic-ep-backend is not supported: unset it"),
    ("dwdp_size", _not(1, 0, None), "--dwdp-size must be 1"),
    ("enable_lora", _set, "--enable-lora is not supported (adapters may touch experts): unset it"),
    ("lora_paths", _set, "--lora-paths is not supported (adapters may touch experts): unset it"),
    ("speculative_algorithm", lambda value: str(value).upper() == "UNO", "--speculative-algorithm UNO drafts with an adapter, which may touch experts: use another"),
    ("enable_two_batch_overlap", _set, "--enable-two-batch-overlap is not supported: unset it"),
    ("enable_single_batch_overlap", _set, "--enable-single-batch-overlap is not supported: unset it"),
    ("enable_pdmux", _set, "--enable-pdmux runs two streams at once, and the CPU answers one step after the other: unset it"),
    ("enable_torch_compile", _set, "--enable-torch-compile would trace into the experts: unset it"),
    ("enable_fused_moe_sum_all_reduce", _set, "--enable-fused-moe-sum-all-reduce sums the experts itself: unset it"),
    ("startup_weight_load_mode", _not("serial", None), "--startup-weight-load-mode must be serial"),
    ("weight_cache_mode", _not("off", None), "--weight-cache-mode must be off (experts are packed at load)"),
    ("enable_memory_saver", _set, "--enable-memory-saver cannot release experts in host memory: unset it"),
    ("moe_runner_backend", lambda value: value == "triton_kernel", "--moe-runner-backend triton_kernel routes in a form that the CPU cannot read: use triton or auto"),
    ("load_format", _not("auto", "safetensors", "pt", "dummy", None), "--load-format must be auto, safetensors, pt or dummy"),
)


def check(*, layer: Any, name: str, method: object, format: ExpertFormat | None, args: Any, reason: str | None = None) -> None:
    """Raise one ``Refusal`` with everything that speaks against taking the layer over. ``reason``: why a format that is
    nearly a known one is none."""
    problems = [said for argument, wrong, said in ARGUMENTS if wrong(getattr(args, argument, None))]
    problems += _device(args)
    problems += [reason] if reason else _format(layer, method, format)
    problems += _layer(layer, format)
    problems += [activation(layer.moe_runner_config, device=device(args))[1] or ""]
    problems = [problem for problem in problems if problem]
    if problems:
        raise Refusal(name, problems)


def activation(config: Any, *, device: str) -> tuple[Activation, str | None]:
    """The layer's activation as the kernels know it, or why they do not. Follows upstream's Triton runner, on a CPU its path there."""
    alpha, clamp = config.gemm1_alpha, config.gemm1_clamp_limit
    limit = getattr(config, "swiglu_limit", None)
    if not config.is_gated:
        return Activation(), f"experts without a gate ({config.activation}) are not supported by this build"
    if config.activation == "silu" and alpha is not None:
        return Activation(alpha=alpha, limit=clamp or 0.0, up_bias=1.0), None
    if config.activation == "silu" and clamp is not None:
        return Activation(limit=clamp, limit_after=True), None
    if config.activation == "silu":
        return Activation(limit=limit or 0.0), None
    if config.activation in ("gelu", "gelu_tanh") and alpha is None and clamp is None and limit is None:
        # What upstream's CPU path calls gelu is the tanh form, beside a GPU it is the exact one.
        return Activation(name="gelu_tanh" if device == "cpu" else config.activation), None
    return Activation(), f"the activation {config.activation!r} is not supported by this build (silu and gelu are)"


def device(args: Any) -> str:
    """``cpu`` or ``cuda``, also where the user left the choice to upstream."""
    if args.device:
        return args.device.split(":")[0]
    from sglang.srt.utils import get_device

    return get_device().split(":")[0]


def _device(args: Any) -> list[str]:
    kind = device(args)
    if kind not in ("cpu", "cuda"):
        return [f"--device {kind} is not supported: use cuda or cpu"]
    if kind == "cpu" and not on_cpu():
        return ["--device cpu needs SGLANG_USE_CPU_ENGINE=1 in the environment"]
    return []


def _format(layer: Any, method: object, format: ExpertFormat | None) -> list[str]:
    if format is not None:
        return []
    scheme = getattr(layer, "scheme", None)
    found = type(method).__name__ + (f" with {type(scheme).__name__}" if scheme is not None else "")
    return [f"its experts are in a format that is not supported ({found}); supported are {labels()}"]


def labels() -> str:
    return ", ".join(known.label for known in FORMATS)


def _layer(layer: Any, format: ExpertFormat | None) -> list[str]:
    config, problems = layer.moe_runner_config, []
    if config.no_combine:
        problems.append("the model wants the experts' outputs apart (no_combine), which this build does not give")
    if getattr(layer, "moe_ep_size", 1) != 1:
        problems.append("experts are spread over ranks: use --ep-size 1")
    return problems + (format.problems(_geometry(layer)) if format else [])


def _geometry(layer: Any) -> Geometry:
    return Geometry(0, layer.hidden_size, layer.intermediate_size_per_partition, layer.moe_tp_rank, layer.moe_tp_size)
