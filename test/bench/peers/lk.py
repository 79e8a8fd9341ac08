"""This project's extension, driven as the server drives it: bf16 in, bf16 out, all cores, 2 MB pages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import formats
from .cases import Shape, Variant
from .engine import Bound, Engine, Layer
from .formats import Expert

OPTIONS = {  # arguments of Experts beyond the format's name; {group} is the matrix's
    "fp8_block": {"group": 128, "scales": "f32_shared"},
    "fp8_channel": {"column_scales": True},
    "int4_g32": {"group": 32, "scales": "bf16"},
    "int4_zeros": {"scales": "f16", "zeros": True},
}


def extension():
    """The module: from ``PEERS_EXTENSION`` (a file or a folder), else the installed one."""
    place = os.environ.get("PEERS_EXTENSION")
    if not place:
        import sgl_kernel_ext

        return sgl_kernel_ext
    path = Path(place)
    files = [path] if path.is_file() else sorted(path.glob("sgl_kernel_ext*.so"))
    if len(files) != 1:
        raise FileNotFoundError(f"PEERS_EXTENSION={place}: one sgl_kernel_ext*.so is needed there, {len(files)} found")
    spec = importlib.util.spec_from_file_location("sgl_kernel_ext", files[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Native(Engine):
    def __init__(self, threads: int, cache: Path) -> None:
        self.ext = extension()
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        self.engine = self.ext.Engine(cpus)
        os.sched_setaffinity(0, {cpus[0]})  # the caller is the first worker
        self.about = {"library": "sgl_kernel_ext", "abi": self.ext.ABI, "isa": self.engine.isa, "threads": len(cpus)}

    def offers(self, variant: Variant) -> str:
        return "" if variant.kind in self.ext.formats() else f"this build has no {variant.kind}"

    def layer(self, variant: Variant, shape: Shape, experts: list[Expert]) -> Layer:
        options = dict(OPTIONS.get(variant.format, {}))
        if "zeros" in options:
            options["group"] = experts[0]["gate"].group
            if any(matrix.group != options["group"] for matrix in experts[0].values()):
                raise ValueError(f"{variant.name}: hidden and width need the same group size")
        native = self.ext.Experts(self.engine, variant.kind, shape.experts, shape.hidden, shape.width, **options)
        for index, expert in enumerate(experts):
            for part, matrix in expert.items():
                self._pack(native, variant.format, index, part, matrix)
        return LkLayer(native)

    def _pack(self, native, fmt: str, index: int, part: str, matrix: formats.Matrix) -> None:
        refused = native.pack_codes(index, part, matrix.codes.ctypes.data, matrix.codes.strides[0])
        if fmt == "fp8_channel":
            native.set_column_scales(index, part, matrix.scales.ctypes.data)
        elif matrix.scales is not None:
            scales = matrix.scales
            if fmt == "fp8_block":
                scales = np.ascontiguousarray(scales.repeat(128, axis=0)[: len(matrix.codes)])
            refused += native.pack_scales(index, part, scales.ctypes.data, scales.strides[0])
        if matrix.zeros is not None:
            native.pack_zeros(index, part, matrix.zeros.ctypes.data, matrix.zeros.strides[0])
        if fmt == "nvfp4":
            native.set_global_scale(index, part, matrix.global_scale)
        if refused:
            raise ValueError(f"{fmt}: {refused} values or scales of {part} were refused")

    def machine(self, cache_bytes: int, seconds: float) -> dict:
        """What the machine gives at this moment: GB/s of a plain reader of 2 MB pages."""
        return {"read": self.engine.read_gb_per_s(megabytes=max(256, 4 * cache_bytes >> 20), seconds=seconds)}

    def dot(self, seconds: float) -> float:
        """GFLOP/s of the dot product on registers."""
        return self.engine.dot_gflop_per_s(seconds=seconds)


class LkLayer(Layer):
    def __init__(self, native) -> None:
        self.native = native

    def bind(self, x: np.ndarray, routing: np.ndarray) -> Bound:
        return LkBound(self.native, x, routing)


class LkBound(Bound):
    def __init__(self, native, x: np.ndarray, routing: np.ndarray) -> None:
        self.native, self.x, self.routing, self.result = native, x, routing, np.empty_like(x)

    def at(self, ids: np.ndarray) -> Callable[[], None]:
        x, w, out, forward = self.x, self.routing, self.result, self.native.forward
        arguments = (
            x.ctypes.data, x.strides[0], "bf16", len(x), ids.ctypes.data, ids.strides[0], "i32",
            w.ctypes.data, w.strides[0], ids.shape[1], out.ctypes.data, out.strides[0], "bf16",
        )  # fmt: skip
        return lambda: forward(*arguments)

    def poison(self) -> None:
        self.result[:] = 0x7FC1

    def out(self) -> np.ndarray:
        return formats.from_bf16(self.result)
