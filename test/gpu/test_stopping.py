"""A server that ends, asked to or killed, leaves no process and gives back pinned memory and VRAM; the next one comes up as before."""

import os
import signal
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers", reason="needs what SGLang needs")
pytestmark = pytest.mark.gpu

from servers import processes  # noqa: E402

from sglang.srt.lk.bench import serving  # noqa: E402

LAYERS, GB = 4, 10**9
PINNED = LAYERS * 128 * 3 * 2048 * 768 * 2  # bytes of the routed experts
SLACK = GB // 2  # what the rest of the machine may take meanwhile
PATIENCE_S = 30
FLAGS = (
    "--device", "cuda", "--dtype", "bfloat16", "--max-total-tokens", "4096", "--context-length", "2048", "--max-running-requests", "4",
    "--cuda-graph-max-bs-decode", "4", "--moe-runner-backend", "triton",
)  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_stays_behind(number):
    before = free()
    more = os.environ.get("GPU_SERVE_FLAGS", "").split()
    with serving.Server(serving.config_of("qwen3-30b-a3b", experts="bf16", layers=LAYERS), [*FLAGS, *more], os.environ) as server:
        server.ready()
        assert server.seconds([[1, 2, 3, 4]], 8) > 0
        used = [was - now for was, now in zip(before, free())]
        assert used[0] > PINNED and used[1] > GB  # both gauges see what the server holds
        everything = {server.pid} | processes.descendants(server.pid)
        assert len(everything) > 1
        os.kill(server.pid, number)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and (everything & processes.parents().keys() or any(short(before))):
            time.sleep(0.2)
        assert not everything & processes.parents().keys(), server.tail()
        assert short(before) == [0, 0]


def free() -> tuple[int, int]:
    """Bytes of host memory and of VRAM that somebody could have now."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024, torch.cuda.mem_get_info()[0]


def short(before: tuple[int, int]) -> list[int]:
    """Bytes of each that are still missing, beyond the slack."""
    return [max(0, was - now - SLACK) for was, now in zip(before, free())]
