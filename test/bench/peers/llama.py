"""llama.cpp's CPU backend through ggml's C interface: the graph that llama.cpp builds for a layer of experts.

Gate and up by ``ggml_mul_mat_id``, ``ggml_swiglu_split``, down, times the routing weights, added up. float32 in and out,
as llama.cpp has it. Weights lie in the plain buffer type or in the backend's repacking one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path

import numpy as np

from . import formats, install
from .cases import Shape, Variant
from .engine import Bound, Engine, Layer, stacked
from .formats import PARTS, Expert, Matrix

F32, F16, BF16, I32 = 0, 1, 30, 26
TYPES = {"bf16": BF16, "f16": F16, **formats.GGML}
DEQUANTISE = {8: "q8_0", 2: "q4_0", 12: "q4_K", 39: "mxfp4", 40: "nvfp4"}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


P, L, Z = c_void_p, c_int64, c_size_t
BASE = {  # name: result, arguments
    "ggml_init": (P, [InitParams]),
    "ggml_free": (None, [P]),
    "ggml_new_tensor_2d": (P, [P, c_int, L, L]),
    "ggml_new_tensor_3d": (P, [P, c_int, L, L, L]),
    "ggml_mul_mat_id": (P, [P, P, P, P]),
    "ggml_swiglu_split": (P, [P, P, P]),
    "ggml_mul": (P, [P, P, P]),
    "ggml_add": (P, [P, P, P]),
    "ggml_cont": (P, [P, P]),
    "ggml_view_2d": (P, [P, P, L, L, Z, Z]),
    "ggml_new_graph_custom": (P, [P, Z, c_bool]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_get_data": (P, [P]),
    "ggml_nbytes": (Z, [P]),
    "ggml_row_size": (Z, [c_int, L]),
    "ggml_set_output": (None, [P]),
    "ggml_quantize_chunk": (Z, [c_int, POINTER(c_float), P, L, L, L, P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, [P, P]),
    "ggml_backend_buffer_free": (None, [P]),
    "ggml_backend_tensor_set": (None, [P, P, Z, Z]),
    "ggml_backend_graph_compute": (c_int, [P, P]),
    "ggml_backend_supports_op": (c_bool, [P, P]),
    "ggml_backend_get_device": (P, [P]),
    "ggml_backend_dev_backend_reg": (P, [P]),
    "ggml_backend_reg_get_proc_address": (P, [P, c_char_p]),
    "ggml_backend_buft_name": (c_char_p, [P]),
    "ggml_backend_cpu_buffer_type": (P, []),
    "ggml_gallocr_new": (P, [P]),
    "ggml_gallocr_alloc_graph": (c_bool, [P, P]),
    "ggml_gallocr_free": (None, [P]),
}
CPU = {"ggml_backend_cpu_init": (P, []), "ggml_backend_cpu_set_n_threads": (None, [P, c_int])}


def _declare(library: ctypes.CDLL, functions: dict) -> None:
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@lru_cache(maxsize=None)
def base(folder: Path) -> ctypes.CDLL:
    # Local: kt-kernel's extension has a ggml of its own, whose calls must not end up here.
    library = ctypes.CDLL(str(folder / "libggml-base.so.0"), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    _declare(library, BASE)
    return library


class Quantiser:
    """ggml's own quantisers and their inverse."""

    def __init__(self, cache: Path) -> None:
        self.lib = base(install.ggml_folder(cache))

    def quantise(self, kind: int, w: np.ndarray) -> Matrix:
        w = np.ascontiguousarray(w, np.float32)
        codes = np.empty((len(w), self.lib.ggml_row_size(kind, w.shape[1])), np.uint8)
        source = w.ctypes.data_as(POINTER(c_float))
        self.lib.ggml_quantize_chunk(kind, source, codes.ctypes.data, 0, len(w), w.shape[1], None)
        values = np.empty_like(w)
        inverse = getattr(self.lib, f"dequantize_row_{DEQUANTISE[kind]}")
        inverse.restype, inverse.argtypes = None, [P, P, L]
        inverse(codes.ctypes.data, values.ctypes.data, w.size)
        return Matrix(codes, values=values)


class Native(Engine):
    def __init__(self, threads: int, cache: Path) -> None:
        folder = install.ggml_folder(cache)
        self.lib, self.ggml = base(folder), Quantiser(cache)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so.0"))
        _declare(cpu, CPU)
        self.backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.buffers = {"plain": self.lib.ggml_backend_cpu_buffer_type(), **self._extra()}
        self.about = {
            "library": "llama.cpp", "version": f"llama-cpp-python {install.LLAMA_VERSION}", "build": folder.name,
            "threads": threads, "buffer_types": sorted(self.buffers),
        }  # fmt: skip

    def _extra(self) -> dict[str, int]:
        """The backend's further buffer types, by their last word: repack, amx."""
        registry = self.lib.ggml_backend_dev_backend_reg(self.lib.ggml_backend_get_device(self.backend))
        address = self.lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        listed = ctypes.CFUNCTYPE(POINTER(P), P)(address)(self.lib.ggml_backend_get_device(self.backend))
        found = {}
        for kind in listed:
            if not kind:
                return found
            found[self.lib.ggml_backend_buft_name(kind).decode().rsplit("_", 1)[-1].lower()] = kind

    def offers(self, variant: Variant) -> str:
        return "" if variant.kind in self.buffers else f"this build has no buffer type {variant.kind}"

    def quantiser(self):
        return self.ggml

    def layer(self, variant: Variant, shape: Shape, experts: list[Expert]) -> Layer:
        return LlamaLayer(self, variant, shape, experts)

    def context(self, tensors: int) -> int:
        return self.lib.ggml_init(InitParams(tensors * 1024 + (1 << 20), None, True))


class LlamaLayer(Layer):
    def __init__(self, native: Native, variant: Variant, shape: Shape, experts: list[Expert]) -> None:
        self.native, self.shape, lib = native, shape, native.lib
        self.context = native.context(8)
        kind, count = TYPES[variant.format], shape.experts
        sizes = {"gate": (shape.hidden, shape.width), "up": (shape.hidden, shape.width), "down": (shape.width, shape.hidden)}
        self.parts = {part: lib.ggml_new_tensor_3d(self.context, kind, *sizes[part], count) for part in PARTS}
        self.buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self.context, native.buffers[variant.kind])
        self._require(variant)
        for part, tensor in self.parts.items():
            codes = stacked(experts, part)
            if codes.nbytes != lib.ggml_nbytes(tensor):
                raise ValueError(f"{variant.name}: {codes.nbytes} bytes of {part}, ggml wants {lib.ggml_nbytes(tensor)}")
            lib.ggml_backend_tensor_set(tensor, codes.ctypes.data, 0, codes.nbytes)

    def _require(self, variant: Variant) -> None:
        """Asked before the weights are given: a buffer type crashes on a type that it cannot hold."""
        lib, probe = self.native.lib, self.native.context(8)
        x = lib.ggml_new_tensor_3d(probe, F32, self.shape.hidden, 1, 1)
        product = lib.ggml_mul_mat_id(probe, self.parts["up"], x, lib.ggml_new_tensor_2d(probe, I32, self.shape.top_k, 1))
        able = lib.ggml_backend_supports_op(self.native.backend, product)
        lib.ggml_free(probe)
        if not able:
            raise ValueError(f"ggml does not multiply {variant.format} experts in a {variant.kind} buffer on this processor")

    def bind(self, x: np.ndarray, routing: np.ndarray) -> Bound:
        return LlamaBound(self, x, routing)

    def __del__(self) -> None:
        self.native.lib.ggml_backend_buffer_free(self.buffer)
        self.native.lib.ggml_free(self.context)


class LlamaBound(Bound):
    def __init__(self, layer: LlamaLayer, x: np.ndarray, routing: np.ndarray) -> None:
        self.layer, self.lib, self.backend = layer, layer.native.lib, layer.native.backend
        tokens, shape = len(x), layer.shape
        self.size = (tokens, shape.hidden)
        self.context, lib = layer.native.context(64 + 4 * shape.top_k), self.lib
        plain = layer.native.buffers["plain"]
        # Inputs have memory of their own: the allocator below would reuse theirs within a call.
        self.inputs = layer.native.context(8)
        given = lib.ggml_new_tensor_3d(self.inputs, F32, shape.hidden, 1, tokens)
        self.ids = lib.ggml_new_tensor_2d(self.inputs, I32, shape.top_k, tokens)
        weights = lib.ggml_new_tensor_3d(self.inputs, F32, 1, shape.top_k, tokens)
        self.buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self.inputs, plain)
        for tensor, values in ((given, formats.from_bf16(x)), (weights, routing)):
            values = np.ascontiguousarray(values, np.float32)
            lib.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        self.result = self._graph(given, weights, shape, tokens)
        self.graph = lib.ggml_new_graph_custom(self.context, 256, False)
        lib.ggml_build_forward_expand(self.graph, self.result)
        self.allocator = lib.ggml_gallocr_new(plain)
        if not lib.ggml_gallocr_alloc_graph(self.allocator, self.graph):
            raise MemoryError("ggml could not allocate the graph")

    def _graph(self, given: int, weights: int, shape: Shape, tokens: int) -> int:
        lib, context, parts = self.lib, self.context, self.layer.parts
        up = lib.ggml_mul_mat_id(context, parts["up"], given, self.ids)
        gate = lib.ggml_mul_mat_id(context, parts["gate"], given, self.ids)
        active = lib.ggml_swiglu_split(context, gate, up)
        down = lib.ggml_mul_mat_id(context, parts["down"], active, self.ids)
        weighted = lib.ggml_mul(context, down, weights)
        row = 4 * shape.hidden
        views = [
            lib.ggml_view_2d(context, weighted, shape.hidden, tokens, row * shape.top_k, k * row) for k in range(shape.top_k)
        ]
        total = views[0] if len(views) > 1 else lib.ggml_cont(context, views[0])
        for view in views[1:]:
            total = lib.ggml_add(context, total, view)
        lib.ggml_set_output(total)
        return total

    def at(self, ids: np.ndarray) -> Callable[[], None]:
        compute, backend, graph = self.lib.ggml_backend_graph_compute, self.backend, self.graph
        target, source, size, move = self.lib.ggml_get_data(self.ids), ids.ctypes.data, ids.nbytes, ctypes.memmove

        def call(kept=ids) -> None:
            move(target, source, size)
            status = compute(backend, graph)
            if status != 0:
                raise RuntimeError(f"ggml returned {status}")

        return call

    def _view(self) -> np.ndarray:
        data = ctypes.cast(self.lib.ggml_get_data(self.result), POINTER(c_float))
        return np.ctypeslib.as_array(data, self.size)

    def poison(self) -> None:
        self._view()[:] = np.nan

    def out(self) -> np.ndarray:
        return self._view().copy()

    def __del__(self) -> None:
        self.lib.ggml_gallocr_free(self.allocator)
        self.lib.ggml_backend_buffer_free(self.buffer)
        self.lib.ggml_free(self.inputs)
        self.lib.ggml_free(self.context)
