"""4-bit integers of AWQ, GPTQ and compressed-tensors: eight codes in an int32 word, scales and zero points per group.

The weight is ``(code - zero point) * scale``; symmetric checkpoints have the zero point 8. Columns that were grouped in another
order than their own (GPTQ's act-order) are refused, since a group's columns must be neighbours.

The three differ in what a word holds: eight columns of a row (GPTQ, compressed-tensors), or eight rows of a column in an
order of their own (AWQ, whose words are turned around here, the only format that is not packed from where it lies).
"""

from typing import Self

import torch

from sglang.srt.lk.formats.base import (
    CHANNEL,
    CODES,
    ORDER,
    SCALES,
    TP,
    UNUSED,
    ZEROS,
    ExpertFormat,
    Packing,
    expect,
    is_a,
    spread,
    tp,
    type_name,
)
from sglang.srt.lk.formats.geometry import COLUMNS, ROWS, WHOLE, Axis, FormatError, Geometry, Window

WORD = 8
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in its word of each of eight neighbouring rows
STORED = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
TYPES = {name: dtype for dtype, name in STORED.items()}


class _Int4(ExpertFormat):
    group: int  # columns to a scale; WHOLE: one scale per row
    zero_points: bool

    def __init__(self, *, group: int, zero_points: bool):
        self.group = WHOLE if group == -1 else group
        self.zero_points = zero_points
        scales = SCALES if self._grouped else CHANNEL
        self.needs = (CODES, scales, ZEROS) if zero_points else (CODES, scales)

    @property
    def _grouped(self) -> bool:
        """Whether the extension holds scales per group: with a zero point per row it does so, too."""
        return self.group != WHOLE or self.zero_points

    @property
    def _scales(self) -> str:
        return SCALES if self._grouped else CHANNEL

    def packing(self, geometry: Geometry) -> Packing:
        if not self._grouped:
            return Packing("int4", column_scales=True)
        stored = STORED.get(geometry.stored.get(SCALES, torch.float32), "f32")
        return Packing("int4", group=self._group(geometry), scales=stored, zeros=self.zero_points)

    def problems(self, geometry: Geometry) -> list[str]:
        sizes = {geometry.hidden: "", geometry.width: tp(geometry, WORD)}
        found = [
            f"{size} {axis.along} do not fill words of {axis.per}{flag}"
            for axis in self.axes(CODES)
            for size, flag in sorted(sizes.items())
            if size % axis.per
        ]
        if self.group != WHOLE and self.group % 32:
            found.append(f"INT4 groups of {self.group} columns are not supported (multiples of 32 are)")
        elif self._grouped and self._group(geometry) % 32:
            found.append(f"groups of {self.group} columns and a rank's share of {geometry.width} have no multiple of 32 in common{TP}")
        return found

    def _group(self, geometry: Geometry) -> int:
        if self.group == WHOLE:  # one that holds every column of either matrix
            return -(-max(geometry.hidden, geometry.width) // 32) * 32
        return geometry.common(self.group)

    def scales(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        expect(tensor, *STORED)
        wanted = TYPES[packing.scales]
        held = tensor.to(wanted)
        if tensor.dtype is not wanted and not torch.equal(held.to(tensor.dtype), tensor):
            raise FormatError(f"{type_name(tensor.dtype)} scales, where the layer's first ones are {type_name(wanted)}")
        return spread(self._upright(held), (Axis(ROWS), Axis(COLUMNS, self.group)), window, packing.group)

    def channel_scales(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().channel_scales(self._upright(tensor))

    def zeros(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        expect(tensor, torch.int32)
        return spread(self._zeros(tensor), (Axis(ROWS), Axis(COLUMNS, self.group)), window, packing.group)

    def _upright(self, tensor: torch.Tensor) -> torch.Tensor:
        """Scales as ``[rows, groups]``."""
        return tensor.T

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """Zero points as uint8 ``[rows, groups]``."""
        raise FormatError("this format has no zero points")

    def check_order(self, tensor: torch.Tensor) -> None:
        expected = torch.arange(tensor.numel(), dtype=tensor.dtype) // self.group
        if not torch.equal(tensor.flatten(), expected):
            raise FormatError("columns are grouped in another order than their own (act-order), which is not supported")

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if what in (CODES, ZEROS):
            return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        if what == ORDER:
            return torch.arange(shape[0], dtype=torch.int32) // self.group
        return (torch.rand(shape, generator=generator) * 0.01 + 0.001).to(torch.bfloat16)  # exact in f16, too


class CompressedTensorsInt4(_Int4):
    """``pack-quantized``: words hold eight columns, zero-point words eight rows."""

    label = "INT4 (compressed-tensors)"
    _schemes = ("CompressedTensorsWNA16MoE", "CompressedTensorsMxInt4MoE")

    def __init__(self, *, group: int, zero_points: bool, ordered: bool = False):
        super().__init__(group=group, zero_points=zero_points)
        self.needs += (ORDER,) if ordered else ()

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        if not is_a(scheme, *cls._schemes):
            return None
        if scheme.num_bits != 4:
            raise FormatError(f"compressed-tensors integers of {scheme.num_bits} bits are not supported (4 bits are)")
        order = getattr(scheme, "actorder", None)
        grouped = getattr(scheme.strategy, "value", scheme.strategy) != "channel"
        return cls(
            group=scheme.group_size if grouped else -1,
            zero_points=not getattr(scheme, "sym", True),
            ordered=getattr(order, "value", order) in ("group", "dynamic"),
        )

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {
            "weight_packed": (CODES, torch.int32),
            "weight_scale": (self._scales, torch.float16),
            "weight_zero_point": (ZEROS if self.zero_points else UNUSED, torch.int32),
            "weight_g_idx": (ORDER, torch.int32),
            "weight_shape": (UNUSED, torch.int64),
        }

    def axes(self, what: str) -> tuple[Axis, ...]:
        return {
            CODES: (Axis(ROWS), Axis(COLUMNS, WORD)),
            ZEROS: (Axis(ROWS, WORD), Axis(COLUMNS, self.group)),
            ORDER: (Axis(COLUMNS),),
        }.get(what, (Axis(ROWS), Axis(COLUMNS, self.group)))

    def codes(self, tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        expect(tensor, torch.int32)
        return tensor

    def _upright(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        return nibbles(words.T, range(WORD)).T


class Gptq(_Int4):
    """Words hold eight columns and lie row by row of words; zero-point words hold eight rows, one less than what is meant."""

    label = "INT4 (GPTQ)"

    def __init__(self, *, group: int, zero_points: bool, ordered: bool = False, more: int = 1):
        super().__init__(group=group, zero_points=zero_points)
        self.needs += (ORDER,) if ordered else ()
        self._more = more  # what is added to a stored zero point: nothing in version 2 of the format

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        config = getattr(method, "quant_config", None)
        mixed = is_a(method, "MoeWNA16Method") and config.linear_quant_method == "gptq"
        if not mixed and not is_a(method, "GPTQMoEMethod", "GPTQMarlinMoEMethod"):
            return None
        if config.weight_bits != 4:
            raise FormatError(f"GPTQ with {config.weight_bits} bits is not supported (4 bits are)")
        written = getattr(config, "full_config", None) or {}
        version = getattr(config, "checkpoint_format", "") or written.get("checkpoint_format", "")
        if version == "marlin":
            raise FormatError("GPTQ checkpoints in Marlin's own layout are not supported (those in GPTQ's are)")
        said = (getattr(config, name, None) for name in ("is_sym", "sym"))
        symmetric = bool(next((value for value in said if value is not None), written.get("sym", False)))
        ordered = bool(getattr(config, "desc_act", False)) and config.group_size != -1
        return cls(group=config.group_size, zero_points=not symmetric, ordered=ordered, more=0 if version == "gptq_v2" else 1)

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {
            "qweight": (CODES, torch.int32),
            "scales": (self._scales, torch.float16),
            "qzeros": (ZEROS if self.zero_points else UNUSED, torch.int32),
            "g_idx": (ORDER, torch.int32),
        }

    def axes(self, what: str) -> tuple[Axis, ...]:
        return {
            CODES: (Axis(COLUMNS, WORD), Axis(ROWS)),
            ZEROS: (Axis(COLUMNS, self.group), Axis(ROWS, WORD)),
            ORDER: (Axis(COLUMNS),),
        }.get(what, (Axis(COLUMNS, self.group), Axis(ROWS)))

    def codes(self, tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        expect(tensor, torch.int32)
        return tensor.T

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        return nibbles(words, range(WORD)).T + self._more


class Awq(_Int4):
    """Words hold eight rows of one column, in AWQ's order; so do those of the zero points, which symmetric checkpoints have, too."""

    label = "INT4 (AWQ)"

    @classmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        config = getattr(method, "quant_config", None)
        mixed = is_a(method, "MoeWNA16Method") and config.linear_quant_method == "awq"
        if not mixed and not is_a(method, "AWQMoEMethod"):
            return None
        if config.weight_bits != 4:
            raise FormatError(f"AWQ with {config.weight_bits} bits is not supported (4 bits are)")
        return cls(group=config.group_size, zero_points=True)

    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        return {"qweight": (CODES, torch.int32), "scales": (SCALES, torch.float16), "qzeros": (ZEROS, torch.int32)}

    def axes(self, what: str) -> tuple[Axis, ...]:
        return {
            CODES: (Axis(COLUMNS), Axis(ROWS, WORD)),
            ZEROS: (Axis(COLUMNS, self.group), Axis(ROWS, WORD)),
        }.get(what, (Axis(COLUMNS, self.group), Axis(ROWS)))

    def codes(self, tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        expect(tensor, torch.int32)
        return turned(tensor).T

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        return nibbles(words, AWQ_PLACES).T


def nibbles(words: torch.Tensor, places: range | tuple[int, ...]) -> torch.Tensor:
    """uint8 ``[a, 8 * b]`` out of int32 ``[a, b]``: value n of a word is the nibble at ``places[n]``."""
    shifts = torch.tensor([4 * place for place in places], dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)


def turned(words: torch.Tensor) -> torch.Tensor:
    """AWQ's ``[columns, rows / 8]`` as GPTQ's ``[columns / 8, rows]``.

    Eight words are an 8 x 8 square of nibbles that is transposed in three steps, halves, quarters and eighths at once.
    """
    squares = words.reshape(-1, WORD, words.shape[1]).clone()
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        low, high = squares.unflatten(1, (-1, 2, distance)).unbind(2)
        swapped = (low >> (4 * distance)).bitwise_xor_(high).bitwise_and_(mask)
        high ^= swapped
        low ^= swapped.bitwise_left_shift_(4 * distance)
    out = torch.empty((squares.shape[0], squares.shape[2], WORD), dtype=torch.int32)
    for row, place in enumerate(AWQ_PLACES):  # faster than one gather
        out[:, :, row] = squares[:, place]
    return out.flatten(1)
