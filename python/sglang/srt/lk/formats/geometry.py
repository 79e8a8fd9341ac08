"""Sizes of a layer's matrices, this rank's window on them, and checkpoint tensors cut to that window.

Matrices are ``[rows, columns]``: outputs by inputs. Tensors are cut by views alone; no value is looked at.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

ROWS, COLUMNS = "rows", "columns"
WHOLE = 1 << 30  # ``Axis.per`` of an axis whose one element stands for the whole matrix


class FormatError(ValueError):
    """Something that a format cannot take; the message says what it is and what is expected."""


@dataclass(frozen=True)
class Axis:
    """One axis of a checkpoint tensor: it runs along the matrix' rows or columns, ``per`` of them to an element."""

    along: str
    per: int = 1

    def length(self, size: int) -> int:
        return -(-size // self.per)


@dataclass(frozen=True)
class Window:
    """The rows and columns of a matrix that are packed: where they begin, and how many there are."""

    row: int
    rows: int
    column: int
    columns: int

    def span(self, axis: Axis) -> tuple[int, int]:
        """First element along the axis that the window touches, and how many."""
        begin, size = (self.row, self.rows) if axis.along == ROWS else (self.column, self.columns)
        first = begin // axis.per
        return first, axis.length(begin + size) - first


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer; ``width`` is this rank's share of ``width * ranks``. ``dtype`` is the model's type, ``stored``
    the checkpoint's for each kind of tensor, as far as it is known before loading."""

    experts: int
    hidden: int
    width: int
    rank: int = 0
    ranks: int = 1
    dtype: torch.dtype = torch.bfloat16
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)

    def window(self, part: str, *, alone: bool = False) -> Window:
        """This rank's window on a part's matrix; ``alone``: on a matrix that holds nothing but the rank's share."""
        begin = 0 if alone else self.rank * self.width
        return Window(0, self.hidden, begin, self.width) if part == "down" else Window(begin, self.width, 0, self.hidden)

    def whole(self, part: str, *, alone: bool = False) -> Window:
        """The part's matrix over all ranks."""
        width = self.width * (1 if alone else self.ranks)
        return Window(0, self.hidden, 0, width) if part == "down" else Window(0, width, 0, self.hidden)

    def common(self, group: int) -> int:
        """Columns that share a scale on every rank, where the checkpoint shares one between ``group`` of them: a rank's
        share of the columns may begin inside a group, which then falls apart into equal smaller ones."""
        return math.gcd(group, self.width) if self.ranks > 1 else group


def shape(axes: tuple[Axis, ...], window: Window) -> tuple[int, ...]:
    """Of the tensor that covers the window."""
    return tuple(window.span(axis)[1] for axis in axes)


def cut(tensor: torch.Tensor, axes: tuple[Axis, ...], *, whole: Window, window: Window) -> torch.Tensor:
    """The elements that the window touches, of a tensor that must cover the whole matrix."""
    expected = list(shape(axes, whole))
    if list(tensor.shape) != expected:
        raise FormatError(f"the shape is {list(tensor.shape)}; expected {expected}")
    for number, axis in enumerate(axes):
        tensor = tensor.narrow(number, *window.span(axis))
    return tensor
