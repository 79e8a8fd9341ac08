"""What is measured: shape × tokens × format, who computes it, and which cases are not worth their time.

Pure tables and arithmetic. A format or a method of a peer is one more ``Variant``; it is compared within its ``family``,
the nearest format of ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """``hidden`` and ``width`` of one expert, experts per layer, experts per token."""

    hidden: int
    width: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.hidden},{self.width},{self.experts},{self.top_k}"

    @property
    def weights(self) -> int:
        return 3 * self.hidden * self.width


SHAPES = (Shape(2048, 768, 128, 8), Shape(4096, 2048, 32, 6), Shape(2880, 2880, 32, 4))
TOKENS = (1, 4, 8, 32, 128, 512, 2048)
QUICK_SHAPES, QUICK_TOKENS, QUICK_FAMILIES = SHAPES[:1], (1, 8, 128), ("bf16", "fp8 block", "mxfp4", "int4")
CHECK_SHAPE, CHECK_TOKENS = Shape(512, 768, 8, 2), (1, 3, 40)  # 40 rows take the peers' other path


@dataclass(frozen=True)
class Variant:
    """One way to compute an expert call.

    ``format`` names the bytes in ``formats``; ``kind`` is the engine's own name of the method; ``multiple`` must divide
    hidden and width; ``error`` is the largest relative error (Euclidean norm against float64) of a correctly driven
    kernel; ``needs`` are flags of /proc/cpuinfo. ``resident`` formats are quantised by the peer from bf16 weights.
    """

    name: str
    engine: str
    family: str
    format: str
    kind: str
    multiple: int = 32
    error: float = 8e-3
    needs: tuple[str, ...] = ()
    stored: str = ""  # the format whose bytes the kernel reads, where the peer quantises by itself

    def refuses(self, shape: Shape, flags: frozenset[str]) -> str:
        """Why this variant cannot run here, or nothing."""
        missing = [flag for flag in self.needs if flag not in flags]
        if missing:
            return f"the processor lacks {', '.join(missing)}"
        if shape.hidden % self.multiple or shape.width % self.multiple:
            return f"hidden and width must be divisible by {self.multiple}"
        return ""


INT8_ACTIVATIONS = 2.5e-2  # what rounding activations to 8 bits may cost
OURS = (
    Variant("lk-bf16", "lk", "bf16", "bf16", "bf16"),
    Variant("lk-f16", "lk", "f16", "f16", "f16"),
    Variant("lk-fp8-block", "lk", "fp8 block", "fp8_block", "fp8", multiple=16),
    Variant("lk-fp8-channel", "lk", "8 bits per channel", "fp8_channel", "fp8"),
    Variant("lk-mxfp8", "lk", "8 bits in groups", "mxfp8", "mxfp8"),
    Variant("lk-mxfp4", "lk", "mxfp4", "mxfp4", "mxfp4"),
    Variant("lk-nvfp4", "lk", "nvfp4", "nvfp4", "nvfp4"),
    Variant("lk-int4-g32", "lk", "int4", "int4_g32", "int4"),
    Variant("lk-int4-zeros", "lk", "int4 with zero points", "int4_zeros", "int4"),
)
KT = (
    Variant("kt-bf16", "kt", "bf16", "bf16", "AMXBF16_MOE"),
    Variant("kt-bf16-avx2", "kt", "bf16", "bf16", "AVX2BF16_MOE"),
    Variant("kt-fp8-block", "kt", "fp8 block", "fp8_block", "AMXFP8_MOE", multiple=128),
    Variant("kt-fp8-block-avx2", "kt", "fp8 block", "fp8_block", "AVX2FP8_MOE"),
    Variant("kt-fp8-channel", "kt", "8 bits per channel", "fp8_channel", "AMXFP8PerChannel_MOE"),
    Variant("kt-int8", "kt", "8 bits per channel", "bf16", "AMXInt8_MOE", multiple=64, error=6e-2, stored="int8_channel"),
    Variant("kt-mxfp8", "kt", "8 bits in groups", "mxfp8", "AMXMXFP8_KGroup_MOE"),
    Variant("kt-mxfp8-avx2", "kt", "8 bits in groups", "mxfp8", "AVX2MXFP8_MOE"),
    Variant("kt-gguf-q8_0", "kt", "8 bits in groups", "q8_0", "MOE", multiple=256, error=INT8_ACTIVATIONS),
    Variant("kt-mxfp4", "kt", "mxfp4", "mxfp4", "AMXFP4_KGroup_MOE"),
    Variant("kt-mxfp4-avx2", "kt", "mxfp4", "mxfp4", "AVX2MXFP4_MOE"),
    Variant("kt-nvfp4-avx2", "kt", "nvfp4", "nvfp4", "AVX2MXFP4_MOE"),
    Variant("kt-rawint4", "kt", "int4", "int4_g32", "AMXInt4_KGroup_MOE", error=INT8_ACTIVATIONS),
    Variant("kt-rawint4-blocked", "kt", "int4", "int4_g32", "AMXInt4_KGroupBlocked_MOE", error=INT8_ACTIVATIONS),
    Variant("kt-rawint4-avx2", "kt", "int4", "int4_g32", "AVX2RawInt4_MOE"),
    Variant("kt-rawint4-avxvnni", "kt", "int4", "int4_g32", "AVXVNNI256RawInt4_MOE", error=INT8_ACTIVATIONS, needs=("avx_vnni",)),
    Variant("kt-int4", "kt", "int4", "bf16", "AMXInt4_MOE", multiple=128, error=0.3, stored="int4_channel"),
    Variant("kt-gptq-avx2", "kt", "int4 with zero points", "int4_gptq", "AVX2GPTQInt4_MOE", multiple=64),
    Variant(
        "kt-gptq-avxvnni", "kt", "int4 with zero points", "int4_gptq", "AVXVNNI256GPTQInt4Packed_MOE",
        multiple=64, error=INT8_ACTIVATIONS, needs=("avx_vnni",),
    ),  # fmt: skip
    Variant("kt-gguf-q4_K", "kt", "int4 with zero points", "q4_K", "MOE", multiple=256, error=INT8_ACTIVATIONS),
)
LLAMA = (
    Variant("llama-bf16", "llama", "bf16", "bf16", "plain"),
    Variant("llama-f16", "llama", "f16", "f16", "plain"),
    Variant("llama-q8_0", "llama", "8 bits in groups", "q8_0", "plain", error=INT8_ACTIVATIONS),
    Variant("llama-q8_0-repack", "llama", "8 bits in groups", "q8_0", "repack", error=INT8_ACTIVATIONS),
    Variant("llama-mxfp4", "llama", "mxfp4", "mxfp4_ggml", "plain", error=INT8_ACTIVATIONS),
    Variant("llama-mxfp4-repack", "llama", "mxfp4", "mxfp4_ggml", "repack", error=INT8_ACTIVATIONS),
    Variant("llama-nvfp4", "llama", "nvfp4", "nvfp4_ggml", "plain", multiple=64, error=INT8_ACTIVATIONS),
    Variant("llama-q4_0", "llama", "int4", "q4_0", "plain", error=INT8_ACTIVATIONS),
    Variant("llama-q4_0-repack", "llama", "int4", "q4_0", "repack", error=INT8_ACTIVATIONS),
    Variant("llama-q4_K", "llama", "int4 with zero points", "q4_K", "plain", multiple=256, error=INT8_ACTIVATIONS),
    Variant("llama-q4_K-repack", "llama", "int4 with zero points", "q4_K", "repack", multiple=256, error=INT8_ACTIVATIONS),
)
VARIANTS = OURS + KT + LLAMA
FAMILIES = tuple(dict.fromkeys(variant.family for variant in OURS))

# Bits of one weight as stored, its share of the scales included (scales per row or block of 128 x 128 are left out).
BITS = {
    "bf16": 16, "f16": 16, "fp8_block": 8, "fp8_channel": 8, "int8_channel": 8, "mxfp8": 8.25, "q8_0": 8.5,
    "mxfp4": 4.25, "mxfp4_ggml": 4.25, "nvfp4": 4.5, "nvfp4_ggml": 4.5, "int4_g32": 4.5, "int4_channel": 4,
    "int4_gptq": 4.125, "int4_zeros": 4.1875, "q4_0": 4.5, "q4_K": 4.5,
}  # fmt: skip


def bits(variant: Variant) -> float:
    return BITS[variant.stored or variant.format]


def expert_bytes(variant: Variant, shape: Shape) -> float:
    return shape.weights * bits(variant) / 8


def flops(shape: Shape, tokens: int) -> int:
    return 2 * tokens * shape.top_k * shape.weights


def layers(variant: Variant, shape: Shape, cache_bytes: int) -> int:
    """Layers to rotate through so that the weights between two visits are eight times the last-level cache."""
    return max(1, math.ceil(8 * cache_bytes / (shape.experts * expert_bytes(variant, shape))))


def routes(shape: Shape, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Expert ids of successive calls on one layer, each ``[tokens, top_k]`` int32.

    The ids walk through a fixed shuffle of the experts, so a token's experts are distinct, every expert gets the same
    number of rows (±1), and a call begins where the one before ended.
    """
    order = np.random.default_rng(seed).permutation(shape.experts).astype(np.int32)
    step = tokens * shape.top_k
    calls = math.ceil(shape.experts / step)
    return [order[(np.arange(step) + call * step) % shape.experts].reshape(tokens, shape.top_k) for call in range(calls)]


def layer_bytes(variant: Variant, shape: Shape, cache_bytes: int) -> float:
    """Bytes of all layers that a variant keeps in memory."""
    return layers(variant, shape, cache_bytes) * shape.experts * expert_bytes(variant, shape)


def distinct(shape: Shape, tokens: int) -> int:
    return min(tokens * shape.top_k, shape.experts)


@dataclass(frozen=True)
class Limits:
    """How often a case is measured, by the seconds that one call is expected to last, and when it is left out.

    Up to ``often`` eight times or more, up to ``rarely`` four times, up to ``once`` twice, up to ``never`` once. ``behind``:
    from so many tokens on, a peer so many times slower than the fastest peer of its family was with fewer tokens is out.
    """

    often: float = 0.25
    rarely: float = 1.0
    once: float = 3.0
    never: float = 10.0
    behind: tuple[tuple[int, float], ...] = ((32, 4.0), (512, 1.5))


def repeats(expected: float, limits: Limits) -> tuple[int, int]:
    """Calls in each of the two passes when one is expected to last ``expected`` seconds."""
    if expected > limits.once:
        return 1, 0
    few = 4 if expected < limits.often else 2 if expected < limits.rarely else 1
    return few, few


def left_out(variant: Variant, tokens: int, expected: float, fastest: float, limits: Limits) -> str:
    """Why this variant is not measured at this number of tokens, or nothing.

    ``expected`` and ``fastest`` are the seconds that a call of it and of the fastest peer of its family would last.
    """
    if expected > limits.never:
        return f"one call would take {expected:.0f} s"
    factor = min((factor for least, factor in limits.behind if tokens >= least), default=float("inf"))
    if variant.engine != "lk" and expected > factor * fastest:
        return f"{expected / fastest:.1f} times slower than the fastest peer with fewer tokens"
    return ""
