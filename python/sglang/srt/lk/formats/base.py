"""What a checkpoint format owes the loader: names and axes of its tensors, and what becomes of their values.

A format is made for one layer out of upstream's choice for it (``of``). It never allocates: the parameters are empty
stubs, and where the bytes go is ``store``'s business.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch

from sglang.srt.lk.formats.geometry import COLUMNS, ROWS, Axis, FormatError, Geometry, Window

E8M0 = torch.float8_e8m0fnu
E4M3 = torch.float8_e4m3fn
CODES, SCALES, ZEROS, ORDER = "codes", "scales", "zero points", "column order"
CHANNEL, GLOBAL, BIAS, UNUSED = "channel scales", "global scale", "bias", "unused"
TP = ", choose another --tp-size"


@dataclass(frozen=True)
class Field:
    """A parameter of the layer: its half (``w13`` holds gate and up) and what it holds."""

    half: str
    what: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Packing:
    """How the extension holds a layer: the arguments of its ``Experts`` of the same names."""

    format: str
    group: int = 0  # columns that share a scale, where the format leaves it open
    scales: str = ""  # type of the group scales, where the format leaves it open
    zeros: bool = False
    column_scales: bool = False


class ExpertFormat(ABC):
    label: str  # shown to users
    needs: tuple[str, ...] = (CODES,)

    @classmethod
    @abstractmethod
    def of(cls, method: object, scheme: object | None) -> Self | None:
        """The format if upstream chose it for a layer, by its method and the scheme of methods that have one.

        ``FormatError`` says why a layer that is nearly this cannot be taken over.
        """

    @abstractmethod
    def names(self) -> dict[str, tuple[str, torch.dtype]]:
        """Suffix of ``w13_`` and ``w2_`` -> what the parameter holds, and the type the stub shows."""

    @abstractmethod
    def packing(self, geometry: Geometry) -> Packing:
        """What the extension is asked for."""

    @abstractmethod
    def axes(self, what: str) -> tuple[Axis, ...]:
        """Of the tensor of one expert's part that holds this."""

    @abstractmethod
    def codes(self, tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The codes as the kernels read them, by a view where possible: a row per output, or int32 words of 8 codes."""

    def fields(self, *, bias: bool) -> dict[str, Field]:
        names = self.names() | ({"weight_bias": (BIAS, torch.float32)} if bias else {})
        return {f"{half}_{name}": Field(half, *held) for name, held in names.items() for half in ("w13", "w2")}

    def problems(self, geometry: Geometry) -> list[str]:
        """Why experts of these sizes cannot be packed, each with the flag to change if there is one."""
        return []

    def view(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with the axes of ``axes``, where checkpoints have other ways to write it."""
        return tensor

    def scales(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        """``[rows, groups]`` of the window, from the elements that it touches."""
        raise FormatError("this format has no group scales")

    def zeros(self, tensor: torch.Tensor, window: Window, packing: Packing) -> torch.Tensor:
        """uint8 ``[rows, groups]``: what is subtracted from a code."""
        raise FormatError("this format has no zero points")

    def channel_scales(self, tensor: torch.Tensor) -> torch.Tensor:
        """float32 ``[rows]``."""
        expect(tensor, torch.float32, torch.bfloat16, torch.float16)
        return tensor.to(torch.float32).flatten()

    def check_order(self, tensor: torch.Tensor) -> None:
        """Raise unless the columns of a matrix are grouped in their own order."""

    def multiplier(self, value: float) -> float:
        """What the per-tensor scale of the checkpoint multiplies a weight by."""
        raise FormatError("this format has no per-tensor scale")

    def sample(self, what: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Valid random values, for starts without a checkpoint."""
        if what == GLOBAL:
            return torch.ones(shape)
        return torch.randn(shape, generator=generator) * 0.02


PLAIN = (Axis(ROWS), Axis(COLUMNS))


def is_a(thing: object, *names: str) -> bool:
    """Whether a class of one of these names is among the thing's: upstream moves them, and one release lacks some."""
    return any(kind.__name__ in names for kind in type(thing).__mro__)


def expect(tensor: torch.Tensor, *types: torch.dtype) -> None:
    if tensor.dtype not in types:
        raise FormatError(f"the type is {type_name(tensor.dtype)}; expected {' or '.join(map(type_name, types))}")


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spread(table: torch.Tensor, axes: tuple[Axis, Axis], window: Window, group: int) -> torch.Tensor:
    """One value for each of the window's rows and groups, from a table of the blocks that it touches."""
    rows, columns = axes
    if columns.per != group:
        groups = -(-window.columns // group)
        table = table.index_select(1, _elements(window.column % columns.per, groups, group, columns.per))
    if rows.per != 1:
        table = table.index_select(0, _elements(window.row % rows.per, window.rows, 1, rows.per))
    return table


@lru_cache(maxsize=64)
def _elements(begin: int, count: int, step: int, per: int) -> torch.Tensor:
    return (begin + step * torch.arange(count)) // per


def misfits(geometry: Geometry, multiple: int, said: str) -> list[str]:
    """One problem per size that is no multiple; ``said`` is what there is one of."""
    sizes = ((geometry.hidden, ""), (geometry.width, tp(geometry, multiple)))
    return [f"{size} columns are no multiple of the {multiple} {said}{flag}" for size, flag in sizes if size % multiple]


def tp(geometry: Geometry, multiple: int) -> str:
    """The flag to change where a rank's share of the width is no multiple, and all of it is one."""
    return TP if geometry.width % multiple and geometry.width * geometry.ranks % multiple == 0 else ""
