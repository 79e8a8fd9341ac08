"""How a checkpoint writes experts down, one ``ExpertFormat`` per way, and what becomes of each tensor.

A format recognises upstream's quantization method (or compressed-tensors scheme), names the parameters that upstream's
model code looks up, and turns a checkpoint tensor into what the kernels read. It never allocates: the parameters are
empty stubs, and where the bytes go is ``store``'s business.

Adding a format means adding a subclass to ``FORMATS``; one that needs another kernel adds that to the extension first.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

E8M0 = torch.float8_e8m0fnu
E4M3 = torch.float8_e4m3fn
CODES, SCALES, GLOBAL, BIAS, UNUSED = "codes", "scales", "global scale", "bias", "unused"


class FormatError(ValueError):
    """A tensor that this format cannot take; the message says what it is and what is expected."""


@dataclass(frozen=True)
class Field:
    """A parameter of the layer: its half (``w13`` holds gate and up) and what it holds."""

    half: str
    what: str
    dtype: torch.dtype


class ExpertFormat(ABC):
    label: str  # shown to users
    kernel: str  # the extension's name of it
    group: int | None = None  # columns that share a scale
    packed: int = 1  # columns in one element of the codes
    needs: tuple[str, ...] = (CODES,)

    @classmethod
    @abstractmethod
    def supports(cls, method: object, scheme: object | None) -> bool:
        """Whether upstream chose this format for a layer: its method, and the scheme of methods that have one."""

    @abstractmethod
    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        """Suffix of ``w13_`` and ``w2_`` -> what the parameter holds, and the type the stub shows."""

    def fields(self, *, bias: bool) -> dict[str, Field]:
        names = self.names() | ({"weight_bias": (BIAS, torch.float32)} if bias else {})
        return {f"{half}_{name}": Field(half, *held) for name, held in names.items() for half in ("w13", "w2")}

    def check_exact(self, tensor: torch.Tensor) -> None:
        """Raise unless the kernels hold exactly these values, where the model's type does not ask for rounding."""

    @abstractmethod
    def codes(self, tensor: torch.Tensor) -> torch.Tensor:
        """The codes in the type the kernels read, by a view where possible."""

    def scales(self, tensor: torch.Tensor) -> torch.Tensor:
        raise FormatError("this format has no group scales")

    def multiplier(self, value: float) -> float:
        """What the per-tensor scale of the checkpoint multiplies a weight by."""
        raise FormatError("this format has no per-tensor scale")

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Valid random values, for starts without a checkpoint."""
        if what == CODES and self.packed == 2:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if what == GLOBAL:
            return torch.ones(shape)
        return torch.randn(shape, generator=generator) * 0.02


class Unquantized(ExpertFormat):
    """bf16 weights. With ``--dtype bfloat16`` f16 and f32 checkpoints are rounded, as upstream rounds them; with another
    type they must be exact in bf16."""

    label = "unquantized (BF16, F16, F32)"
    kernel = "bf16"

    @classmethod
    def supports(cls, method: object, scheme: object | None) -> bool:
        from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

        return isinstance(method, UnquantizedFusedMoEMethod)

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"weight": (CODES, torch.bfloat16)}

    def check_exact(self, tensor: torch.Tensor) -> None:
        if tensor.dtype is not torch.bfloat16 and not torch.equal(tensor.to(torch.bfloat16).to(tensor.dtype), tensor):
            name = str(tensor.dtype).removeprefix("torch.")
            raise FormatError(f"{name} weights that bfloat16 does not hold exactly; --dtype bfloat16 rounds them")

    def codes(self, tensor: torch.Tensor) -> torch.Tensor:
        _expect(tensor, torch.bfloat16, torch.float16, torch.float32)
        return tensor.to(torch.bfloat16)


class _FourBit(ExpertFormat):
    """Two e2m1 codes in a byte, the even column in the low half."""

    packed = 2
    needs = (CODES, SCALES)

    def codes(self, tensor: torch.Tensor) -> torch.Tensor:
        _expect(tensor, torch.uint8, torch.int8)
        return tensor.view(torch.uint8)


class Mxfp4(_FourBit):
    """e8m0 scales per 32 columns: gpt-oss (stacked, rows interleaved) and compressed-tensors (per expert).

    compressed-tensors calls the codes ``weight_packed``, upstream's method ``weight``; both lead to the same place.
    """

    label = "MXFP4 (gpt-oss, compressed-tensors)"
    kernel = "mxfp4"
    group = 32

    @classmethod
    def supports(cls, method: object, scheme: object | None) -> bool:
        from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod

        return type(method) is Mxfp4MoEMethod

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {
            "weight": (CODES, torch.uint8),
            "weight_packed": (CODES, torch.uint8),
            "weight_scale": (SCALES, torch.uint8),
        }

    def scales(self, tensor: torch.Tensor) -> torch.Tensor:
        _expect(tensor, torch.uint8, E8M0)
        return tensor.view(torch.uint8)

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if what == SCALES:
            return torch.randint(117, 121, shape, dtype=torch.uint8, generator=generator)
        return super().sample(what, shape, generator)


class DeepseekMxfp4(Mxfp4):
    """MXFP4 experts of an FP8 checkpoint (DeepSeek-V4 and relatives); f32 scales must be powers of two."""

    label = "MXFP4 (experts of FP8 checkpoints)"

    @classmethod
    def supports(cls, method: object, scheme: object | None) -> bool:
        from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod

        return isinstance(method, Fp8MoEMethod) and bool(getattr(method, "is_fp4_expert", False))

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"weight": (CODES, torch.int8), "weight_scale_inv": (SCALES, torch.uint8)}

    def scales(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return super().scales(tensor)
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

    def scales(self, tensor: torch.Tensor) -> torch.Tensor:
        _expect(tensor, E4M3)
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
    def supports(cls, method: object, scheme: object | None) -> bool:
        from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

        return type(method) is ModelOptNvFp4FusedMoEMethod and method.quant_config.is_checkpoint_nvfp4_serialized

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
    def supports(cls, method: object, scheme: object | None) -> bool:
        return type(scheme).__name__ in cls._schemes  # by name: 0.5.21 has only the first of them

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {
            "weight_packed": (CODES, torch.uint8),
            "weight_scale": (SCALES, E4M3),
            "weight_global_scale": (GLOBAL, torch.float32),
            "input_global_scale": (UNUSED, torch.float32),
        }

    def _multiplier(self, value: float) -> float:
        return 1.0 / value


FORMATS: tuple[type[ExpertFormat], ...] = (
    Unquantized,
    Mxfp4,
    DeepseekMxfp4,
    ModelOptNvfp4,
    CompressedTensorsNvfp4,
)


def format_for(method: object, scheme: object | None) -> ExpertFormat | None:
    """The format of a layer by what upstream chose for it, None if there is none."""
    return next((known() for known in FORMATS if known.supports(method, scheme)), None)


def _expect(tensor: torch.Tensor, *types: torch.dtype) -> None:
    if tensor.dtype not in types:
        raise FormatError(f"the type is {_name(tensor.dtype)}; expected {' or '.join(map(_name, types))}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
