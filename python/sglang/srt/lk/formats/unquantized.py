"""bf16 and f16 weights, and f32 ones that one of them holds."""

from typing import Self

import torch

from sglang.srt.lk.formats.base import CODES, PLAIN, ExpertFormat, Packing, expect, is_a, type_name
from sglang.srt.lk.formats.geometry import Axis, FormatError, Geometry

KERNELS = {torch.bfloat16: "bf16", torch.float16: "f16"}


class Unquantized(ExpertFormat):
    """Weights of the checkpoint's own 16 bits, exactly. What must become another type is rounded where ``--dtype`` asks for
    that type, as upstream rounds it, and must be exact in it elsewhere."""

    label = "unquantized (BF16, F16, F32)"

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        return cls() if is_a(method, "UnquantizedFusedMoEMethod") else None

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"weight": (CODES, torch.bfloat16)}

    def axes(self, what: str) -> tuple[Axis, ...]:
        return PLAIN

    def packing(self, geometry: Geometry) -> Packing:
        return Packing(KERNELS[self._type(geometry)])

    def codes(self, tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        expect(tensor, torch.bfloat16, torch.float16, torch.float32)
        wanted = self._type(geometry)
        if tensor.dtype is wanted:
            return tensor
        held = tensor.to(wanted)
        if geometry.dtype is not wanted and not torch.equal(held.to(tensor.dtype), tensor):
            names = type_name(tensor.dtype), type_name(wanted), type_name(wanted)
            raise FormatError("{} weights that {} does not hold exactly; --dtype {} rounds them".format(*names))
        return held

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if what != CODES:
            return super().sample(what, shape, generator)
        return torch.randint(-16, 17, shape, generator=generator) / 512  # exact in either type

    def _type(self, geometry: Geometry) -> torch.dtype:
        stored = geometry.stored.get(CODES)
        exact = stored is torch.float16 and geometry.dtype is not torch.bfloat16
        asked = stored is not torch.bfloat16 and geometry.dtype is torch.float16
        return torch.float16 if exact or asked else torch.bfloat16
