"""The benchmark over the real kernels: every instruction set and format that this machine runs."""

import os

import pytest
from sglang.srt.lk.bench import kernels, weights
from sglang.srt.lk.bench.cases import Shape

ext = pytest.importorskip("sgl_kernel_ext", reason="the native extension is not built")


def test_every_kernel_of_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(kernels, "READ_MEGABYTES", 4)
    monkeypatch.setattr(kernels, "READ_SECONDS", 0.001)
    monkeypatch.setattr(kernels, "DOT_SECONDS", 0.001)
    monkeypatch.setattr(kernels, "cache_bytes", lambda cpus: 1 << 20)
    isas = [isa["name"] for isa in ext.isas() if isa["supported"]]
    plan = kernels.Plan(
        isas=isas,
        formats=list(weights.FILLS),
        shapes=[Shape(128, 96, 8, 2)],
        rows=["1", "16/expert"],
        cpus=sorted(os.sched_getaffinity(0))[:1],
        seconds=0.001,
    )
    rows = list(kernels.run(ext, plan))
    assert [(row.isa, row.format, row.rows) for row in rows] == [
        (i, f, n) for i in isas for f in weights.FILLS for n in (1, 64)
    ]
    assert all(row.seconds > 0 and row.read_ratio > 0 and row.dot_ratio > 0 for row in rows)
    assert all(1 <= row.stored_bytes_ratio < 1.05 for row in rows)
