"""What every engine offers to ``worker``: layers from random experts, calls bound to buffers, and a clock.

An engine derives from ``Engine`` and is named in ``ENGINES``; its module is imported in its own process only.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .cases import Shape, Variant
from .formats import Expert

ENGINES = {"lk": "lk", "kt": "kt", "llama": "llama"}  # engine -> module of this package with a class ``Native``


class Bound(ABC):
    """One layer with its input (bf16 patterns ``[tokens, hidden]``), routing weights and output in place."""

    @abstractmethod
    def at(self, ids: np.ndarray) -> Callable[[], None]:
        """The call with these expert ids ``[tokens, top_k]`` int32, with as little Python as possible."""

    @abstractmethod
    def poison(self) -> None:
        """Fill the output with NaN."""

    @abstractmethod
    def out(self) -> np.ndarray:
        """The output as float32 ``[tokens, hidden]``."""


class Layer(ABC):
    """The packed experts of one layer."""

    @abstractmethod
    def bind(self, x: np.ndarray, routing: np.ndarray) -> Bound: ...


class Clock:
    """Times one call. A clock belongs to one case, so it may learn from the calls before."""

    def time(self, call: Callable[[], None]) -> float | None:
        """Seconds, or None where this call taught the clock something but is no measurement."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class Engine(ABC):
    """One library with its threads. ``cache`` is the folder that ``install`` filled."""

    about: dict  # library, version, threads and the like, for the result

    @abstractmethod
    def __init__(self, threads: int, cache: Path) -> None: ...

    @abstractmethod
    def offers(self, variant: Variant) -> str:
        """Why the library cannot run this variant, or nothing."""

    @abstractmethod
    def layer(self, variant: Variant, shape: Shape, experts: list[Expert]) -> Layer:
        """``experts``: one for each of the shape, possibly the same object many times."""

    def quantiser(self):
        """An object with ``quantise(type, weights) -> Matrix`` for ggml's formats, where the engine has them."""
        return None

    def clock(self, guess: float | None) -> Clock:
        """For one case; ``guess``: seconds that a call may last, from the case before."""
        return Clock()


def make(name: str, threads: int, cache: Path) -> Engine:
    return importlib.import_module(f".{ENGINES[name]}", __package__).Native(threads, cache)


def alike(experts: list[Expert]) -> bool:
    """Are all experts one and the same object, as in a timed layer?"""
    return all(expert is experts[0] for expert in experts)


def stacked(experts: list[Expert], part: str) -> np.ndarray:
    """The codes of one part of all experts, contiguous in memory."""
    return np.concatenate([expert[part].codes for expert in experts])
