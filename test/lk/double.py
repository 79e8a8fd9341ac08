"""A stand-in for the native extension: the same interface, any machine one likes, experts in plain numpy.

For tests of the commands around the kernels. Kernels themselves are never tested against it.
"""

import ctypes
import time

import numpy as np

from sglang.srt.lk.install_check import ABI

BITS = {"bf16": 16, "f16": 16, "fp8": 8, "mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5, "int4": 4}
NAMES = ("scalar", "avx2", "avx512", "avx512_bf16")


class Extension:
    ABI = ABI

    def __init__(self, supported=NAMES, read=50.0, dot=400.0, formats=tuple(BITS), broken=False):
        self.supported, self.read, self.dot, self._formats, self.broken = supported, read, dot, formats, broken
        self.visited = []  # (layer, ids) of every call, in order

    def isas(self):
        return [
            {
                "name": n,
                "supported": n in self.supported,
                "missing": [] if n in self.supported else [f"{n}_flag"],
                "lane": True,
            }
            for n in NAMES
        ]

    def formats(self):
        return list(self._formats)

    def cpu(self):
        return {"brand": "Test CPU", "features": ["avx2"]}

    def packed_bytes(self, format, hidden, width, group=0, scales="", zeros=False):
        return int(3 * hidden * width * BITS[format] / 8)

    def Engine(self, cpus, isa="", bind="core", spin_us=200, huge=True, nodes=(), split=True, place=False):  # noqa: N802  (the extension's spelling)
        return Engine(self, list(cpus), isa or self.supported[-1])

    def Experts(self, engine, format, experts, hidden, width, **coding):  # noqa: N802
        return Experts(self, format, experts, hidden, width)


class Engine:
    def __init__(self, ext, cpus, isa):
        self.ext, self.cpus, self.isa, self.threads = ext, cpus, isa, len(cpus)
        self.unplaced = ""

    def read_gb_per_s(self, megabytes, seconds):
        return self.ext.read

    def dot_gflop_per_s(self, seconds):
        return self.ext.dot

    def call_us(self, seconds):
        return 3.21


class Experts:
    def __init__(self, ext, fmt, experts, hidden, width):
        self.ext, self.format, self.experts, self.hidden, self.width = ext, fmt, experts, hidden, width
        self.bytes = experts * ext.packed_bytes(fmt, hidden, width)
        self.packed = []

    def pack_codes(self, expert, part, ptr, row_bytes):
        self.packed.append((expert, part))
        return 0

    def pack_scales(self, expert, part, ptr, row_bytes):
        return 0

    def pack_zeros(self, expert, part, ptr, row_bytes):
        return 0

    def set_global_scale(self, expert, part, value):
        pass

    def forward(self, x, x_row, x_type, tokens, ids, ids_row, ids_type, w, w_row, top_k, out, out_row, out_type, **more):
        chosen = np.ctypeslib.as_array((ctypes.c_int32 * (tokens * top_k)).from_address(ids)).reshape(tokens, top_k)
        self.ext.visited.append((self, chosen.copy()))
        result = np.ctypeslib.as_array((ctypes.c_float * (tokens * self.hidden)).from_address(out))
        if not self.ext.broken:
            result[:] = 1.0
        time.sleep(0.0002)
