"""Both ends of the hand-over on a real GPU: the same bits as a direct call, eagerly, captured, padded and in pieces."""

import ctypes
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sgl_kernel_ext", reason="the extension is not built")
pytestmark = pytest.mark.gpu

import layers  # noqa: E402

from sglang.srt.lk import handover, kernels  # noqa: E402

EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 256, 96, 3
NAME = "model.layers.3.mlp.experts"
SMALL = 1e-3  # the random experts make numbers a thousand times as large


@pytest.fixture
def make(monkeypatch):
    """Hand-overs on an engine that gives a row the same bits in any batch: pieces of one are compared with all of it."""
    monkeypatch.setattr(kernels, "_engine", None)
    engine = kernels.engine(gpu=True, batch_invariant=True)
    made = []

    def build(*, mailbox=True, rows=64, hidden=HIDDEN):
        sizes = handover.Sizes(rows=rows, hidden=hidden, top_k=TOP_K)
        made.append(handover.Handover(
            sizes=sizes, device=torch.device("cuda"), mailbox=mailbox, engine=engine, spin_us=2000
        ))  # fmt: skip
        return made[-1]

    yield build
    for one in made:
        one.native.close()


def experts(*, seed=0, hidden=HIDDEN, width=WIDTH):
    case = layers.CASES["bf16"]
    layer = layers.random_layer(case, experts=EXPERTS, hidden=hidden, width=width, seed=seed)
    return layers.load(layers.empty_store(layer, case), layers.tensors(layer, case)).experts


def batch(rows, *, dtype=torch.bfloat16, hidden=HIDDEN, seed=1, ids=torch.int32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, hidden), generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)])
    return x, chosen.to(ids), torch.rand((rows, TOP_K), generator=generator)


def cuda(tensors):
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("mailbox", [True, False], ids=["mailbox", "host functions"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 33, 200])
def test_what_comes_back_has_the_bits_of_a_direct_call(make, rows, dtype, mailbox):
    layer, given = experts(), batch(rows, dtype=dtype)
    found = make(mailbox=mailbox).forward(layer, *cuda(given), name=NAME, scale=1.5)
    assert found.dtype is dtype and torch.equal(found.cpu(), layer.forward(*given, scale=1.5))


@pytest.mark.parametrize("hidden", [8, 40, 2048, 7168, 20480])
def test_rows_of_every_length_come_whole(make, hidden):
    layer, given = experts(hidden=hidden, width=32), batch(5, hidden=hidden)
    found = make(hidden=hidden).forward(layer, *cuda(given), name=NAME)
    assert torch.equal(found.cpu(), layer.forward(*given))


def test_rows_may_be_any_distance_apart_and_ids_of_either_type(make):
    layer, (x, ids, weights) = experts(), batch(7, ids=torch.int64)
    wide, more, apart = torch.zeros(7, HIDDEN + 3), torch.zeros(7, TOP_K + 2), torch.zeros(7, TOP_K + 5)
    wide, more, apart = wide.to(x.dtype).cuda(), more.to(ids.dtype).cuda(), apart.cuda()
    wide[:, 1 : HIDDEN + 1], more[:, :TOP_K], apart[:, 2 : TOP_K + 2] = x.cuda(), ids.cuda(), weights.cuda()
    found = make().forward(layer, wide[:, 1 : HIDDEN + 1], more[:, :TOP_K], apart[:, 2 : TOP_K + 2], name=NAME)
    assert torch.equal(found.cpu(), layer.forward(x, ids, weights))


def test_padding_comes_back_as_zeros_and_costs_the_cpu_nothing(make):
    layer, (x, ids, weights) = experts(), batch(48)
    ids[5:] = -1
    x[5:] = float("nan")
    hand = make()
    found = hand.forward(layer, *cuda((x, ids, weights)), name=NAME).cpu()
    assert torch.equal(found[:5], layer.forward(x[:5], ids[:5], weights[:5]))
    assert (found[5:] == 0).all() and hand.native.stats()["rows"] == 5


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_a_block_may_have_many_rows_some_of_them_padding(make, blocks):
    layer, (x, ids, weights) = experts(), batch(45)
    ids[::4] = -1
    hand = make()
    hand.blocks = blocks
    found = hand.forward(layer, *cuda((x, ids, weights)), name=NAME)
    assert torch.equal(found.cpu(), layer.forward(x, ids, weights)) and (found[::4] == 0).all()


@pytest.mark.parametrize("mailbox", [True, False], ids=["mailbox", "host functions"])
@pytest.mark.parametrize("rows", [6, 60])
def test_a_graph_is_told_at_every_replay_how_many_rows_are_real(make, mailbox, rows):
    """The others have experts, too, as upstream routes them; their numbers may be anything."""
    hand, layer = make(mailbox=mailbox, rows=16), experts()  # 60 rows come in pieces
    given = batch(rows)
    on_gpu, real = cuda(given), torch.zeros(1, dtype=torch.int32, device="cuda")
    hand.forward(layer, *on_gpu, name=NAME, real=real)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hand.forward(layer, *on_gpu, name=NAME, real=real)
    for count in (1, rows, rows // 2, 0, rows - 1, 20):
        on_gpu[0].copy_(given[0])
        on_gpu[0][count:] = float("nan")
        out.fill_(float("nan"))
        real.fill_(count)
        before = hand.native.stats()["rows"]
        graph.replay()
        found, kept = out.cpu(), min(count, rows)
        assert torch.equal(found[:kept], layer.forward(*(one[:kept] for one in given))) if kept else not found.any()
        assert (found[kept:] == 0).all() and hand.native.stats()["rows"] - before == kept


def test_requests_of_one_block_and_of_many_follow_each_other(make):
    hand, layer = make(), experts()
    given = [batch(rows, seed=i) for i, rows in enumerate([1, 64, 2, 200, 1, 1, 63, 3] * 20)]
    found = [hand.forward(layer, *one, name=NAME) for one in map(cuda, given)]
    assert all(torch.equal(out.cpu(), layer.forward(*one)) for out, one in zip(found, given))


def test_the_gpu_says_how_long_it_waited(make):
    hand, layer, given = make(), experts(), batch(9)
    began = time.monotonic()
    for _ in range(5):
        hand.forward(layer, *cuda(given), name=NAME)
    torch.cuda.synchronize()
    stats = hand.native.stats()
    assert 0 < stats["busy_us"] < stats["wait_us"] < 1e6 * (time.monotonic() - began)


def test_a_batch_beyond_the_buffers_is_handed_over_in_pieces(make):
    layer, given = experts(), batch(100)
    hand = make(rows=16)
    capacity = hand.native.capacity(hand._layer(layer, NAME, torch.bfloat16, TOP_K, 1.0, False).number)
    found = hand.forward(layer, *cuda(given), name=NAME)
    assert capacity < 100 and torch.equal(found.cpu(), layer.forward(*given))


@pytest.mark.parametrize("mailbox", [True, False], ids=["mailbox", "host functions"])
def test_a_graph_of_many_layers_replays_with_new_rows_every_time(make, mailbox):
    hand, stack = make(mailbox=mailbox), [experts(seed=seed) for seed in range(4)]
    x, ids, weights = cuda(batch(8))

    def step():
        y = x
        for i, layer in enumerate(stack):
            y = hand.forward(layer, y, ids, weights, name=f"layer {i}", scale=SMALL)
        return y

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(20):
        given = batch(8, seed=seed)
        for here, new in zip((x, ids, weights), given):
            here.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        expected = given[0]
        for layer in stack:
            expected = layer.forward(expected, *given[1:], scale=SMALL)
        assert expected.isfinite().all() and torch.equal(out.cpu(), expected)


def test_steps_queue_up_behind_each_other_without_waiting_for_the_host(make):
    hand, layer = make(), experts()
    given = [batch(3, seed=seed) for seed in range(50)]
    on_gpu = [cuda(one) for one in given]
    found = [hand.forward(layer, *one, name=NAME) for one in on_gpu]  # no synchronisation between them
    assert all(torch.equal(out.cpu(), layer.forward(*one)) for out, one in zip(found, given))


def test_work_on_another_stream_runs_while_the_cpu_computes(make):
    hand, layer = make(rows=2048, hidden=1024), experts(hidden=1024, width=1024)
    given = batch(2048, hidden=1024)
    on_gpu, other, beside = cuda(given), torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    hand.forward(layer, *on_gpu, name=NAME)
    a = torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    begin.record()
    other.wait_event(begin)
    found = hand.forward(layer, *on_gpu, name=NAME)
    with torch.cuda.stream(other):
        for _ in range(10):
            a = (a @ a).clamp(-1, 1)
        beside.record(other)
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(beside) < begin.elapsed_time(end), "the other stream had to wait for the experts"
    assert torch.equal(found.cpu(), layer.forward(*given))


@pytest.mark.parametrize("rows", [1, 2, 150])
def test_an_engine_that_stalls_is_named_and_the_gpu_goes_on_without_a_result(make, monkeypatch, rows):
    monkeypatch.setattr(handover, "PATIENCE_MS", 200)
    hand, layer = make(), experts()
    hand.native.close()  # nobody answers; the watch is gone too, so the failure is the test's own
    x = cuda(batch(rows))
    found = hand.forward(layer, *x, name=NAME)
    time.sleep(0.2)
    hand.native.abort()
    torch.cuda.synchronize()
    assert found.isnan().all()
    assert hand.forward(layer, *x, name=NAME).isnan().all(), "once let go, the GPU waits no more"


@pytest.mark.parametrize("rows", [1, 2, 150])
def test_the_gpu_has_a_limit_of_its_own_and_names_the_layer(make, monkeypatch, rows):
    monkeypatch.setattr(handover, "GPU_LIMIT_NS", 300_000_000)
    hand, layer = make(), experts()
    hand.native.close()
    began = time.monotonic()
    found = hand.forward(layer, *cuda(batch(rows)), name=NAME)
    torch.cuda.synchronize()
    assert found.isnan().all() and time.monotonic() - began < 20
    assert ctypes.c_uint64.from_address(hand.buffers.address["control"] + 128).value == 1


def test_the_check_at_the_start_finds_a_wrong_answer(make):
    hand, layer, other = make(), experts(seed=0), experts(seed=1)
    hand.check(layer, name=NAME, top_k=TOP_K, dtype=torch.bfloat16)
    (key,) = hand._layers
    hand._layers[key] = hand._layer(other, "another", torch.bfloat16, TOP_K, 1.0, False)
    with pytest.raises(kernels.KernelError) as error:
        hand.check(layer, name=NAME, top_k=TOP_K, dtype=torch.bfloat16)
    assert "differs from a direct call" in str(error.value)


def test_a_row_has_the_same_bits_alone_and_in_a_batch(make):
    hand, layer = make(), experts()
    x, ids, weights = batch(16)
    alone = torch.cat([hand.forward(layer, *cuda((x[i : i + 1], ids[i : i + 1], weights[i : i + 1])), name=NAME) for i in range(16)])
    assert torch.equal(hand.forward(layer, *cuda((x, ids, weights)), name=NAME), alone)


def test_a_layer_keeps_its_own_scale_and_place_of_the_routing_weight_after_the_check(make):
    hand, layer, given = make(), experts(), batch(4)
    hand.check(layer, name=NAME, top_k=TOP_K, dtype=torch.bfloat16)
    for rest in (dict(scale=2.5), dict(scale=1.0, weight_on_input=True), dict(scale=1.0)):
        assert torch.equal(hand.forward(layer, *cuda(given), name=NAME, **rest).cpu(), layer.forward(*given, **rest))
