"""FP8 weights (e4m3): one f32 scale per block, per tensor or per output channel; MXFP8 with e8m0 scales per 32 columns.

A block that a rank's share cuts, in either direction, keeps its scale on both sides of the cut. Activation scales are not
used, activations stay as the model computes them; weights that upstream would make FP8 while loading are refused.
"""

import math
from typing import Self

import torch

from sglang.srt.lk.formats.base import (
    CHANNEL,
    CODES,
    E4M3,
    E8M0,
    GLOBAL,
    PLAIN,
    SCALES,
    TP,
    UNUSED,
    ExpertFormat,
    Packing,
    expect,
    is_a,
    misfits,
    spread,
)
from sglang.srt.lk.formats.geometry import COLUMNS, ROWS, WHOLE, Axis, FormatError, Geometry, Window

PANEL = 16  # rows that share a scale where the extension keeps one for all of them


class _Fp8(ExpertFormat):
    def axes(self, what: str) -> tuple[Axis, ...]:
        return PLAIN

    def codes(self, tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        expect(tensor, E4M3)
        return tensor.view(torch.uint8)

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if what != CODES:
            return torch.rand(shape, generator=generator) * 1e-3 + 1e-4
        bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return (bits & 0xBF).view(E4M3)  # below 2, never NaN


class Fp8Block(_Fp8):
    """The weight is code times the scale of its block; blocks of any height, and of a multiple of 32 columns."""

    label = "FP8 in blocks"
    needs = (CODES, SCALES)

    def __init__(self, height: int, width: int, name: str = "weight_scale_inv"):
        self.blocks = (Axis(ROWS, height), Axis(COLUMNS, width))
        self._name = name

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        if is_a(scheme, "CompressedTensorsW8A8Fp8MoE") and scheme.weight_block_size is not None:
            return cls(*scheme.weight_block_size, name="weight_scale")
        if not _upstream_fp8(method) or method.use_mxfp8 or method.quant_config.weight_block_size is None:
            return None
        return cls(*method.quant_config.weight_block_size)

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"weight": (CODES, E4M3), self._name: (SCALES, torch.float32)}

    def axes(self, what: str) -> tuple[Axis, ...]:
        return self.blocks if what == SCALES else PLAIN

    def packing(self, geometry: Geometry) -> Packing:
        return Packing("fp8", group=self._group(geometry), scales="f32_shared" if self._shared(geometry) else "f32")

    def problems(self, geometry: Geometry) -> list[str]:
        width = self.blocks[1].per
        if width % 32:
            return [f"FP8 blocks of {width} columns are not supported (multiples of 32 are)"]
        if self._group(geometry) % 32:
            return [f"blocks of {width} columns and a rank's share of {geometry.width} have no multiple of 32 in common{TP}"]
        return []

    def scales(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        expect(tensor, torch.float32, torch.bfloat16, torch.float16, E8M0)
        return spread(tensor.to(torch.float32), self.blocks, window, packing.group)

    def _group(self, geometry: Geometry) -> int:
        return geometry.common(self.blocks[1].per)

    def _shared(self, geometry: Geometry) -> bool:
        """Whether the rows of a panel always lie in one block: blocks and shares begin at multiples of a panel."""
        begins = geometry.width if geometry.ranks > 1 else 0
        return math.gcd(self.blocks[0].per, begins) % PANEL == 0


class Fp8Tensor(_Fp8):
    """One scale per expert and part; gate and up may differ."""

    label = "FP8 per tensor"
    needs = (CODES, GLOBAL)

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        plain = _upstream_fp8(method) and not method.use_mxfp8 and method.quant_config.weight_block_size is None
        return cls() if plain or _modelopt_fp8(method) or _strategy(scheme) == "tensor" else None

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"weight": (CODES, E4M3), "weight_scale": (GLOBAL, torch.float32), "input_scale": (UNUSED, torch.float32)}

    def packing(self, geometry: Geometry) -> Packing:
        return Packing("fp8")

    def multiplier(self, value: float) -> float:
        if not math.isfinite(value):
            raise FormatError(f"the per-tensor scale is {value}; it must be finite")
        return value


class Fp8Channel(_Fp8):
    """One scale per output row, ``[rows, 1]`` or ``[rows]``."""

    label = "FP8 per channel"
    needs = (CODES, CHANNEL)

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        rows = is_a(method, "W8A8FP8MoEMethod") and _serialized(method, "w8a8_fp8")
        return cls() if rows or _strategy(scheme) == "channel" else None

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"weight": (CODES, E4M3), "weight_scale": (CHANNEL, torch.float32), "input_scale": (UNUSED, torch.float32)}

    def axes(self, what: str) -> tuple[Axis, ...]:
        return (Axis(ROWS), Axis(COLUMNS, WHOLE)) if what == CHANNEL else PLAIN

    def view(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(1) if what == CHANNEL and tensor.dim() == 1 else tensor

    def packing(self, geometry: Geometry) -> Packing:
        return Packing("fp8", column_scales=True)


class Mxfp8(_Fp8):
    """e8m0 scales per row and 32 columns."""

    label = "MXFP8"
    needs = (CODES, SCALES)
    group = 32

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        return cls() if _upstream_fp8(method) and method.use_mxfp8 else None

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"weight": (CODES, E4M3), "weight_scale_inv": (SCALES, torch.uint8)}

    def axes(self, what: str) -> tuple[Axis, ...]:
        return (Axis(ROWS), Axis(COLUMNS, self.group)) if what == SCALES else PLAIN

    def packing(self, geometry: Geometry) -> Packing:
        return Packing("mxfp8")

    def problems(self, geometry: Geometry) -> list[str]:
        return misfits(geometry, self.group, "that share a scale")

    def scales(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        expect(tensor, torch.uint8, E8M0)
        return tensor.view(torch.uint8)

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if what == SCALES:
            return torch.randint(114, 118, shape, dtype=torch.uint8, generator=generator)
        return super().sample(what, shape, generator)


def _upstream_fp8(method: object) -> bool:
    """Upstream's own FP8 method with FP8 experts, which may hold 4-bit ones instead."""
    return is_a(method, "Fp8MoEMethod") and not getattr(method, "is_fp4_expert", False) and _serialized(method, "fp8")


def _modelopt_fp8(method: object) -> bool:
    return is_a(method, "ModelOptFp8MoEMethod") and _serialized(method, "modelopt_fp8")


def _serialized(method: object, name: str) -> bool:
    if not method.quant_config.is_checkpoint_fp8_serialized:
        raise FormatError(f"--quantization {name} makes FP8 weights while loading, which hybrid MoE does not: unset it")
    return True


def _strategy(scheme: object | None) -> str | None:
    """"tensor" or "channel" of an FP8 scheme of compressed-tensors or Quark."""
    if is_a(scheme, "CompressedTensorsW8A8Fp8MoE"):
        strategy = scheme.weight_quant.strategy
        return str(getattr(strategy, "value", strategy))
    if is_a(scheme, "QuarkW8A8FP8MoE"):
        return scheme.weight_qscheme.removeprefix("per_")
    return None
