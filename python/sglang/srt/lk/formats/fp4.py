"""MXFP4 and NVFP4: two e2m1 codes in a byte, the even column in the low half, and scales per 32 or 16 columns."""

import math
from abc import abstractmethod
from typing import Self

import torch

from sglang.srt.lk.formats.base import (
    CODES,
    E4M3,
    E8M0,
    GLOBAL,
    SCALES,
    UNUSED,
    ExpertFormat,
    Packing,
    expect,
    is_a,
    misfits,
)
from sglang.srt.lk.formats.geometry import COLUMNS, ROWS, Axis, FormatError, Geometry, Window


class _FourBit(ExpertFormat):
    kernel: str
    group: int
    needs = (CODES, SCALES)

    def axes(self, what: str) -> tuple[Axis, ...]:
        return (Axis(ROWS), Axis(COLUMNS, 2 if what == CODES else self.group))

    def packing(self, geometry: Geometry) -> Packing:
        return Packing(self.kernel)

    def problems(self, geometry: Geometry) -> list[str]:
        return misfits(geometry, self.group, "that share a scale")

    def codes(self, tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        expect(tensor, torch.uint8, torch.int8)
        return tensor.view(torch.uint8)

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if what == CODES:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return super().sample(what, shape, generator)


class Mxfp4(_FourBit):
    """e8m0 scales per 32 columns: gpt-oss (stacked, rows interleaved, codes in blocks) and compressed-tensors (per expert).

    compressed-tensors calls the codes ``weight_packed``, upstream's method ``weight``; both lead to the same place.
    """

    label = "MXFP4 (gpt-oss, compressed-tensors)"
    kernel = "mxfp4"
    group = 32

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        return cls() if type(method).__name__ == "Mxfp4MoEMethod" else None

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {
            "weight": (CODES, torch.uint8),
            "weight_packed": (CODES, torch.uint8),
            "weight_scale": (SCALES, torch.uint8),
        }

    def view(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(1) if what == CODES and tensor.dim() == 3 else tensor

    def scales(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        expect(tensor, torch.uint8, E8M0)
        return tensor.view(torch.uint8)

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if what == SCALES:
            return torch.randint(117, 121, shape, dtype=torch.uint8, generator=generator)
        return super().sample(what, shape, generator)


class DeepseekMxfp4(Mxfp4):
    """MXFP4 experts of an FP8 checkpoint (DeepSeek-V4 and relatives); f32 scales must be powers of two."""

    label = "MXFP4 (experts of FP8 checkpoints)"
    # Upstream's FP8 method itself, or the backend's that it is wrapped in.
    _wrappers = ("Mxfp4MarlinMoEMethod", "Mxfp4HummingMoEMethod", "Mxfp4FlashinferCutlassMoEMethod", "Mxfp4FlashinferTrtllmMoEMethod")

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        plain = is_a(method, "Fp8MoEMethod") and bool(getattr(method, "is_fp4_expert", False))
        return cls() if plain or type(method).__name__ in cls._wrappers else None

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"weight": (CODES, torch.int8), "weight_scale_inv": (SCALES, torch.uint8)}

    def scales(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return super().scales(tensor, window, packing)
        bits = tensor.contiguous().view(torch.int32)
        if bool(((bits & 0x807FFFFF) != 0).any()):
            raise FormatError("float32 scales of MXFP4 must be powers of two")
        return (bits >> 23).to(torch.uint8)


class _Nvfp4(_FourBit):
    """e4m3 scales per 16 columns and one f32 scale per expert and part. Activation scales are not used: activations
    stay as the model computes them, so an expert that lacks one is as good as any other."""

    kernel = "nvfp4"
    group = 16
    needs = (CODES, SCALES, GLOBAL)

    def scales(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        expect(tensor, E4M3)
        return tensor.view(torch.uint8)

    def multiplier(self, value: float) -> float:
        if not math.isfinite(value) or value <= 0:
            raise FormatError(f"the per-tensor scale is {value}; it must be finite and above 0")
        return self._multiplier(value)

    @abstractmethod
    def _multiplier(self, value: float) -> float:
        """From the convention of the checkpoint to a factor."""

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if what == SCALES:
            return (torch.rand(shape, generator=generator) / 64 + 1 / 64).to(E4M3)
        return super().sample(what, shape, generator)


class ModelOptNvfp4(_Nvfp4):
    """ModelOpt: the weight is code times block scale times ``weight_scale_2``."""

    label = "NVFP4 (ModelOpt)"

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        named = type(method).__name__ == "ModelOptNvFp4FusedMoEMethod"
        return cls() if named and method.quant_config.is_checkpoint_nvfp4_serialized else None

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {
            "weight": (CODES, torch.uint8),
            "weight_scale": (SCALES, E4M3),
            "weight_scale_2": (GLOBAL, torch.float32),
            "input_scale": (UNUSED, torch.float32),
        }

    def _multiplier(self, value: float) -> float:
        return value


class CompressedTensorsNvfp4(_Nvfp4):
    """compressed-tensors: the weight is code times block scale divided by ``weight_global_scale``."""

    label = "NVFP4 (compressed-tensors)"
    _schemes = ("CompressedTensorsW4A4Nvfp4MoE", "CompressedTensorsW4A16Nvfp4MoE")

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        return cls() if type(scheme).__name__ in cls._schemes else None

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {
            "weight_packed": (CODES, torch.uint8),
            "weight_scale": (SCALES, E4M3),
            "weight_global_scale": (GLOBAL, torch.float32),
            "input_global_scale": (UNUSED, torch.float32),
        }

    def _multiplier(self, value: float) -> float:
        return 1.0 / value
