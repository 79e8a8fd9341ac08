"""Models that upstream stops on a CPU without AMX for one GPU-only helper beside the experts: the helper's plain torch form.

Experts are not touched here, and nothing changes where upstream has a path of its own (a GPU, or AMX). Each function is a
patch for the module that it names in ``patches.PATCHES`` and says what upstream does instead. A model that needs more
than a helper (another attention backend, a recurrent layer) stays what ``docs/reference/support-matrix.md`` says it is.
"""

import functools
from types import ModuleType
from typing import Any

from sglang.srt.lk.cpu_formats import on_cpu


def absorb_latent_attention(module: ModuleType) -> None:
    """DeepSeek's latent attention on ``torch_native``: upstream has no handler for that backend and takes Triton's, which
    hands over per-head keys in prefill, while ``torch_native`` reads keys from the cache, where only the latents are."""
    if on_cpu():
        module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def gate_shared_expert(module: ModuleType) -> None:
    """Qwen2-MoE's shared expert is gated and added by a Triton kernel, whatever the device."""
    if on_cpu():
        _replace(module, fused_gate_sigmoid_mul_add=gated_add)


def normalise_queries_and_keys(module: ModuleType) -> None:
    """MiniMax-M2 normalises queries and keys with Triton kernels unless there is AMX."""
    if on_cpu():
        _replace(module, rms_sumsq_serial=squares_of_both, rms_apply_serial=normalise_both)


def attend_with_sinks(module: ModuleType) -> None:
    """gpt-oss' attention has a sink per head: a logit without a value. ``torch_native`` knows none and refuses the argument;
    its two entries get it, and its attention takes it into account while it is there."""
    if not on_cpu():
        return
    backend, plain = module.TorchNativeAttnBackend, module.scaled_dot_product_attention
    sinks: list[Any] = []  # of the call under way; a scheduler attends on one thread

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return sink_attention(query, key, value, sinks[0], **options) if sinks else plain(query, key, value, **options)

    _replace(module, scaled_dot_product_attention=attention)
    for name in ("forward_extend", "forward_decode"):
        setattr(backend, name, _with_sinks(getattr(backend, name), sinks))


def _with_sinks(original: Any, current: list[Any]) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, sinks: Any = None, **kwargs: Any) -> Any:
        if sinks is None:
            return original(self, *args, **kwargs)
        current.append(sinks)
        try:
            return original(self, *args, **kwargs)
        finally:
            current.clear()

    return forward


def sink_attention(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    *,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention over ``[1, heads, rows, width]`` in which each head's sink takes its share of the weight."""
    import torch

    heads, rows = query.shape[1], query.shape[2]
    if enable_gqa:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(rows, key.shape[2], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    sink = sinks.float().view(1, heads, 1, 1).expand(1, heads, rows, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ value.float()).to(query.dtype)


def gated_add(hidden_states: Any, gate_weight: Any, shared_output: Any, final_hidden_states: Any) -> None:
    """``final += sigmoid(hidden · gate) * shared``, rounded once."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid().unsqueeze(-1)
    final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())


def squares_of_both(x1: Any, x2: Any) -> Any:
    """Sums of squares of the rows of ``x1``, then of ``x2``; ranks add them up between this and ``normalise_both``."""
    import torch

    return torch.cat([x.float().square().sum(-1) for x in (x1, x2)])


def normalise_both(x1: Any, x2: Any, w1: Any, w2: Any, sum_sq: Any, tp_world: int = 1, eps: float = 1e-5) -> tuple[Any, Any]:
    """RMS norm of both over all ranks' columns, from the sums of squares."""
    import torch

    rows = x1.shape[0]

    def norm(x: Any, weight: Any, squares: Any) -> Any:
        scale = torch.rsqrt(squares / (x.shape[1] * tp_world) + eps)
        return (x.float() * scale.unsqueeze(-1) * weight.float()).to(x.dtype)

    return norm(x1, w1, sum_sq[:rows]), norm(x2, w2, sum_sq[rows : 2 * rows])


def _replace(module: ModuleType, **functions: Any) -> None:
    """A helper that upstream has renamed must be noticed: its replacement would never be called."""
    missing = [name for name in functions if not hasattr(module, name)]
    if missing:
        raise AttributeError(f"Hybrid MoE: upstream's {module.__name__} has no {', '.join(missing)}; reinstall sglang-lk")
    for name, function in functions.items():
        setattr(module, name, function)
