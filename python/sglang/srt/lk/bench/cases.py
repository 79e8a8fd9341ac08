"""What is measured: shape × format × rows, and the experts that each call visits.

Pure arithmetic: nothing is allocated, timed or printed here.
"""

from __future__ import annotations

import math
import re
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


DEFAULT_SHAPES = (Shape(2048, 768, 128, 8), Shape(4096, 2048, 32, 6))
DEFAULT_ROWS = ("1", "128/expert")
MOST = 1 << 20  # of each number of a shape, as the kernels have it
MOST_ROWS = 1 << 24


def parse_shape(text: str) -> Shape:
    try:
        shape = Shape(*(int(part) for part in text.split(",")))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--shape {text}: four numbers HIDDEN,WIDTH,EXPERTS,TOP_K are needed, as in {DEFAULT_SHAPES[0]}"
        ) from error
    numbers = (shape.hidden, shape.width, shape.experts, shape.top_k)
    if min(numbers) < 1 or max(numbers) > MOST or shape.top_k > shape.experts:
        raise ValueError(f"--shape {text}: every number must be from 1 to {MOST} and TOP_K at most EXPERTS")
    return shape


def parse_rows(text: str) -> str:
    """``8`` is a batch of 8 tokens; ``128/expert`` as many tokens as give every expert 128 rows."""
    number, _, unit = text.partition("/")
    counts = re.fullmatch("[0-9]{1,18}", number) and 1 <= int(number) <= MOST_ROWS
    if not counts or unit not in ("", "expert") or ("/" in text and not unit):
        raise ValueError(f"--rows {text}: give tokens (8) or rows for each expert (128/expert), from 1 to {MOST_ROWS}")
    return text


def tokens(rows: str, shape: Shape) -> int:
    number, _, unit = rows.partition("/")
    return math.ceil(int(number) * shape.experts / shape.top_k) if unit else int(number)


def buffer_bytes(shape: Shape, batch: int) -> int:
    """Inputs and results of a call while they are made, and what its experts hand on: not all, but most of it."""
    return batch * (10 * shape.hidden + shape.top_k * (24 + 4 * shape.width))


def layers_needed(layer_bytes: int, cache_bytes: int, at_least: int = 2) -> int:
    """Layers to rotate through so that the weights between two visits are eight times the caches."""
    return max(at_least, math.ceil(8 * cache_bytes / layer_bytes))


def routes(shape: Shape, batch: int, seed: int = 0) -> list[np.ndarray]:
    """Expert ids of successive calls on one layer, each ``[batch, top_k]`` int32.

    The ids walk through a fixed shuffle of the experts, so a token's experts are distinct, every expert gets the
    same number of rows (±1), and a call begins where the one before ended: nothing is visited twice in a row.
    """
    order = np.random.default_rng(seed).permutation(shape.experts).astype(np.int32)
    step = batch * shape.top_k
    calls = math.ceil(shape.experts / step)
    return [order[(np.arange(step) + call * step) % shape.experts].reshape(batch, shape.top_k) for call in range(calls)]


def flops(shape: Shape, batch: int) -> int:
    return 2 * batch * shape.top_k * shape.weights
