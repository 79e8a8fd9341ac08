"""From checkpoint tensors to results with experts split over NUMA nodes, which this machine need not have."""

import logging

import pytest

pytest.importorskip("torch")
pytest.importorskip("sgl_kernel_ext")

pytest.register_assert_rewrite("layers")
import layers  # noqa: E402
import torch  # noqa: E402

from sglang.srt.lk import cpus, kernels  # noqa: E402


@pytest.fixture
def nodes(monkeypatch):
    """``nodes(0, 5, ...)``: the process's engine has a worker on each of these; all of them share one CPU."""

    def make(*ids):
        cpu = cpus.usable(kernels.boot.current()).cpus[0]
        share = cpus.Cpus([cpu] * len(ids), list(ids), why=[], warnings=[], memory_nodes=len(set(ids)))
        monkeypatch.setattr(kernels, "_engine", None)
        monkeypatch.setattr(cpus, "usable", lambda *_, **__: share)
        monkeypatch.setattr(kernels, "SPIN_US", 0)

    return make


@pytest.mark.parametrize("name", ["bf16", "fp8_block_128_128", "modelopt_nvfp4", "gptq_zeros", "compressed_int4_channel"])
def test_ranks_that_cut_a_block_and_nodes_that_cut_a_rank_add_up_to_the_whole_layer(nodes, name):
    """A width of 320 on two ranks is 160 each: a block of 128 and a part of one, on three and four nodes."""
    case = layers.CASES[name]
    layer = layers.random_layer(case, experts=3, hidden=128, width=320)
    loaded = layers.tensors(layer, case)
    x, ids, weights = layers.batch(layer, 9, dtype=torch.float32)
    found = []
    for ids_of_nodes in ((0,), (0, 1, 2), (0, 1, 1, 4, 6)):
        nodes(*ids_of_nodes)
        ranks = [layers.load(layers.empty_store(layer, case, rank=rank, ranks=2), loaded) for rank in range(2)]
        assert len(ranks[0].experts.native.shares) == len(set(ids_of_nodes))
        found.append(sum(rank.experts.forward(x, ids, weights) for rank in ranks))
    layers.assert_equals_reference(found[0], layer, x, ids, weights)
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def test_a_node_that_the_system_refuses_is_one_warning_and_the_layer_is_right(nodes, caplog):
    case = layers.CASES["mxfp4"]
    layer = layers.random_layer(case)
    x, ids, weights = layers.batch(layer, 3)
    nodes(0, 1023)
    with caplog.at_level(logging.WARNING):
        stores = [layers.load(layers.empty_store(layer, case), layers.tensors(layer, case)) for _ in range(2)]
    (record,) = caplog.records
    assert "does not let memory be taken from a chosen NUMA node" in record.message and "for node 1023" in record.message
    for store in stores:
        layers.assert_equals_reference(store.experts.forward(x, ids, weights), layer, x, ids, weights)
