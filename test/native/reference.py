"""The slow truth: experts in float64, one short function per format.

Every kernel is compared with this and never only with another kernel. A new format adds a function that
makes random checkpoint bytes and one that decodes them; nothing here is fast or clever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Coding:
    """A format with what it leaves open; the fields are the native layer's arguments of the same names."""

    format: str
    group: int = 0
    scales: str = ""
    zeros: bool = False
    column_scales: bool = False

    @property
    def native(self) -> dict:
        """What the format leaves open."""
        return {name: value for name in ("group", "scales", "zeros") if (value := getattr(self, name))}

    @property
    def k_of_a_scale(self) -> int:
        return {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(self.format, self.group)


CODINGS = {
    "bf16": Coding("bf16"),
    "f16": Coding("f16"),
    "fp8": Coding("fp8"),
    "fp8_channel": Coding("fp8", column_scales=True),
    "fp8_block128": Coding("fp8", 128, "f32_shared"),
    "fp8_group32": Coding("fp8", 32, "f32"),
    "mxfp8": Coding("mxfp8"),
    "mxfp4": Coding("mxfp4"),
    "nvfp4": Coding("nvfp4"),
    "int4_channel": Coding("int4", column_scales=True),
    "int4_group32": Coding("int4", 32, "bf16"),
    "int4_group64_f32": Coding("int4", 64, "f32"),
    "int4_group64_zeros": Coding("int4", 64, "f16", zeros=True),
    "int4_group128_zeros": Coding("int4", 128, "f16", zeros=True),
    "int4_group32_zeros": Coding("int4", 32, "f16", zeros=True),
}


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
    return E2M1[nibbles(packed)]


def nibbles(packed: np.ndarray) -> np.ndarray:
    """[N, K/2] bytes, low nibble = even k -> [N, K] codes."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


@dataclass
class Matrix:
    """One checkpoint matrix: the bytes a kernel packs, and its float64 values."""

    codes: np.ndarray
    values: np.ndarray
    scales: np.ndarray | None = None
    global_scale: float = 1.0
    zeros: np.ndarray | None = None
    columns: np.ndarray | None = None


def random_codes(coding: Coding, rows: int, columns: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Checkpoint codes of one matrix and their float64 values, about unit variance; int4 less 8."""
    if coding.format == "bf16":
        codes = to_bf16(rng.standard_normal((rows, columns)))
        return codes, bf16_to_f64(codes)
    if coding.format == "f16":
        halves = (rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-6, 1, (rows, columns))).astype(np.float16)
        return halves.view(np.uint16), halves.astype(np.float64)
    if coding.format in ("fp8", "mxfp8"):
        codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x08
        codes[rng.random((rows, columns)) < 0.8] &= 0xBF  # mostly below 2, as in real checkpoints
        return codes, e4m3_to_f64(codes)
    codes = rng.integers(0, 256, (rows, (columns + 1) // 2), dtype=np.uint8)
    values = nibbles(codes)[:, :columns]
    return codes, values.astype(np.float64) - 8 if coding.format == "int4" else E2M1[values]


def random_scales(coding: Coding, rows: int, groups: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Group scales as the checkpoint has them and their float64 values."""
    if coding.format in ("mxfp4", "mxfp8"):
        scales = rng.integers(118, 124, (rows, groups), dtype=np.uint8)
        return scales, 2.0 ** (scales.astype(np.float64) - 127)
    if coding.format == "nvfp4":
        scales = rng.integers(0, 0x7F, (rows, groups), dtype=np.uint8)
        return scales, e4m3_to_f64(scales)
    values = rng.uniform(0.002, 0.02, (rows, groups))
    if coding.scales == "bf16":
        bits = to_bf16(values)
        return bits, bf16_to_f64(bits)
    scales = values.astype(np.float16 if coding.scales == "f16" else np.float32)
    if coding.scales == "f32_shared":
        scales = np.repeat(scales[::16], 16, axis=0)[:rows].copy()
    return scales, scales.astype(np.float64)


def random_matrix(coding: Coding, rows: int, columns: int, rng: np.random.Generator) -> Matrix:
    """Random checkpoint bytes of one matrix, about unit variance over the square root of the columns."""
    size = columns**-0.5
    codes, values = random_codes(coding, rows, columns, rng)
    if coding.format in ("bf16", "f16"):
        return Matrix(codes, values)
    m = Matrix(codes, values)
    if not coding.format.startswith("mx"):  # those have no second scale
        m.global_scale = float(np.float32(size * rng.uniform(0.2, 5) / (300 if coding.format == "nvfp4" else 3)))
    if coding.k_of_a_scale:
        groups = -(-columns // coding.k_of_a_scale)
        m.scales, factor = random_scales(coding, rows, groups, rng)
        spread = np.repeat(np.arange(groups), coding.k_of_a_scale)[:columns]
        if coding.zeros:
            m.zeros = rng.integers(0, 17, (rows, groups), dtype=np.uint8)
            m.values = m.values + 8 - m.zeros[:, spread]
        m.values = m.values * factor[:, spread]
    if coding.column_scales:
        m.columns = rng.uniform(0.2, 2, rows).astype(np.float32)
        m.values = m.values * m.columns[:, None].astype(np.float64)
    m.values = m.values * m.global_scale
    return m


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

    coding: Coding
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


def random_layer(coding, experts, hidden, width, rng, activation=None, bias=False) -> Layer:
    """``coding``: a name in ``CODINGS``. A layer of random checkpoint bytes; gate and up have different second scales where the format has one."""
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    coding = CODINGS[coding]
    weights = [{p: random_matrix(coding, *s, rng) for p, s in shapes.items()} for _ in range(experts)]
    biases = None
    if bias:
        biases = [{p: rng.standard_normal(s[0]).astype(np.float32) for p, s in shapes.items()} for _ in range(experts)]
    return Layer(coding, hidden, width, weights, activation or Activation(), biases)
