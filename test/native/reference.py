"""The slow truth: experts in float64, one short function per format.

Every kernel is compared with this and never only with another kernel. A new format adds a function that
makes random checkpoint bytes and one that decodes them; nothing here is fast or clever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = {"mxfp4": 32, "nvfp4": 16}


def bf16_to_f64(bits: np.ndarray) -> np.ndarray:
    """uint16 bf16 patterns -> float64, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Finite float values -> uint16 bf16 patterns, round to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3_to_f64(codes: np.ndarray) -> np.ndarray:
    """uint8 E4M3 patterns -> float64 (the NaN pattern is not expected)."""
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7))
    return np.where(codes & 0x80, -value, value)


def e2m1_to_f64(packed: np.ndarray) -> np.ndarray:
    """[N, K/2] bytes, low nibble = even k -> [N, K] float64."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return E2M1[codes]


@dataclass
class Matrix:
    """One checkpoint matrix: the bytes a kernel packs, and its float64 values."""

    codes: np.ndarray
    values: np.ndarray
    scales: np.ndarray | None = None
    global_scale: float = 1.0


def random_matrix(format: str, rows: int, columns: int, rng: np.random.Generator) -> Matrix:
    """Random checkpoint bytes of one matrix, about unit variance over the square root of the columns."""
    size = columns**-0.5
    if format == "bf16":
        codes = to_bf16(rng.standard_normal((rows, columns)) * size)
        return Matrix(codes, bf16_to_f64(codes))
    codes = rng.integers(0, 256, (rows, (columns + 1) // 2), dtype=np.uint8)
    values = e2m1_to_f64(codes)[:, :columns]
    group = GROUP[format]
    groups = -(-columns // group)
    if format == "mxfp4":
        scales = rng.integers(118, 124, (rows, groups), dtype=np.uint8)
        factor, second = 2.0 ** (scales.astype(np.float64) - 127), 1.0
    else:
        scales = rng.integers(0, 0x7F, (rows, groups), dtype=np.uint8)
        second = float(np.float32(size / 300 * rng.uniform(0.2, 5)))
        factor = e4m3_to_f64(scales) * second
    return Matrix(codes, values * np.repeat(factor, group, axis=1)[:, :columns], scales, second)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gate(kind: str, alpha: float, g: np.ndarray) -> np.ndarray:
    """The gate's function as the activation names it."""
    if kind == "silu":
        return g * sigmoid(alpha * g)
    if kind == "relu2":
        return np.maximum(g, 0) ** 2
    if kind == "gelu_tanh":
        return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    if kind == "gelu":
        from math import erf

        return 0.5 * g * (1 + np.vectorize(erf)(g / np.sqrt(2)))
    raise ValueError(kind)


@dataclass
class Activation:
    """Arguments of the native layer of the same names."""

    activation: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    limit_after: bool = False
    up_bias: float = 0.0

    def __call__(self, g: np.ndarray, u: np.ndarray) -> np.ndarray:
        if self.limit and not self.limit_after:
            g = np.minimum(g, self.limit)
        g = gate(self.activation, self.alpha, g)
        if self.limit and self.limit_after:
            g = np.minimum(g, self.limit)
        if self.limit:
            u = np.clip(u, -self.limit, self.limit)
        return g * (u + self.up_bias)


@dataclass
class Layer:
    """All experts of one layer in checkpoint form: ``weights[expert][part]`` is a ``Matrix``."""

    format: str
    hidden: int
    width: int
    weights: list[dict[str, Matrix]]
    activation: Activation = field(default_factory=Activation)
    biases: list[dict[str, np.ndarray]] | None = None

    def forward(self, x, ids, weights, scale=1.0, weight_on_input=False, step=2.0**-8) -> tuple[np.ndarray, np.ndarray]:
        """float64 output [T, H] and the error allowed to a kernel, of the same shape (see ``_expert``); ``step`` is
        the relative step of an activation, 2^-15 where float32 activations are split in two."""
        out, bound = np.zeros((len(x), self.hidden)), np.full((len(x), self.hidden), 1e-30)
        for t, row in enumerate(x):
            for k, e in enumerate(ids[t]):
                if not 0 <= e < len(self.weights):
                    continue
                y, allowed = self._expert(row, int(e), weights[t][k] if weight_on_input else 1.0, step)
                w = 1.0 if weight_on_input else weights[t][k]
                out[t] += w * y
                bound[t] += abs(w) * allowed
        return out * scale, bound * abs(scale)

    def _expert(self, x, e, input_weight, step):
        """One expert's output and its error bound: the one rounding of the intermediate (half a step, taken
        twice for the roundings that follow), and f32 sums (2^-24 a term) that reach the output
        through both factors of the activation."""
        bias = self.biases[e] if self.biases else dict.fromkeys(("gate", "up", "down"), 0.0)
        m = {part: self.weights[e][part].values for part in ("gate", "up", "down")}
        g, u = m["gate"] @ x * input_weight + bias["gate"], m["up"] @ x * input_weight + bias["up"]
        act = self.activation(g, u)
        factor = 1 + np.abs(self.activation.up_bias) + np.abs(g) + np.abs(u)
        reach = (np.abs(m["gate"]) @ np.abs(x) + np.abs(m["up"]) @ np.abs(x)) * abs(input_weight) + np.abs(bias["gate"] + bias["up"]) + 1
        down = np.abs(m["down"])
        terms = self.hidden + self.width + 64
        allowed = down @ (np.abs(act) * step + reach * factor * (4 * terms * 2.0**-24 + (step if step < 2.0**-8 else 0))) + np.abs(bias["down"]) * 2.0**-20
        return m["down"] @ act + bias["down"], allowed


def random_layer(format, experts, hidden, width, rng, activation=None, bias=False) -> Layer:
    """A layer of random checkpoint bytes; gate and up have different second scales where the format has one."""
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    weights = [{p: random_matrix(format, *s, rng) for p, s in shapes.items()} for _ in range(experts)]
    biases = None
    if bias:
        biases = [{p: rng.standard_normal(s[0]).astype(np.float32) for p, s in shapes.items()} for _ in range(experts)]
    return Layer(format, hidden, width, weights, activation or Activation(), biases)
