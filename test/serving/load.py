"""How fast a large 4-bit checkpoint becomes a ready server, and how much memory that takes on the way.

Makes a random checkpoint (Qwen3-MoE, nearly all of it MXFP4 experts, in shards of equal size) in a scratch folder, reads
its files once without the page cache to know what the disk gives, and serves it twice: with the files on disk only, and
again with them in the page cache, where packing waits for nothing. What stock SGLang needs when idle is measured with the
recite model and the same flags. The values are noise, so answers are counted and not judged; figures of a busy machine
are too low, never too high.

    python test/serving/load.py FOLDER [--gb 4] [--json FILE]

needs the fork installed, ``--gb`` of space in FOLDER and twice as much memory and 4 GB more. Everything made in FOLDER is
deleted at the end. Exit status 0 only if, in both runs, the server answered and the resident sizes of its processes
together never exceeded packed experts + largest shard + idle stock with the model's other weights, and in the run from the
page cache experts were packed at ``PER_CORE`` GB/s per thread in the time that packing took (the loader's own time, which one
thread spends finding each tensor's place, is in "experts packed").

Another format is another ``parts`` and its entries in ``config``; another condition is a line in ``verdicts``.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch import client, processes, recite  # noqa: E402

import recite_server  # noqa: E402

GB = 1e9
PER_CORE = 1.0
HIDDEN, WIDTH, EXPERTS, HEADS, HEAD = 2048, 768, 128, 4, 128
SHARDS = 4
CHUNK = 8 << 20
TOKENS = 16
# The type that stock serves 4-bit checkpoints in, and a cache that does not hide the experts.
FLAGS = ("--dtype", "bfloat16", "--max-total-tokens", "4096")
PACKED = re.compile(
    r"([\d.]+) of ([\d.]+) GB of experts packed in ([\d.]+) s, [\d.]+ GB/s \(packing alone [\d.]+ s, ([\d.]+) GB/s; "
    r"the system gave their memory in ([\d.]+) s\)"
)
WEIGHTS = re.compile(r"Load weight end\. elapsed=([\d.]+) s")
THREADS = re.compile(r"(\d+) threads, (\w+) kernels")


Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def codes(noise: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(noise.bytes(math.prod(shape)), np.uint8)


def scales(noise: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """2^-10 to 2^-7: small enough for finite logits."""
    return noise.integers(117, 121, shape, np.uint8)


def weights(noise: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = noise.standard_normal(shape, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def ones(noise: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 0x3F80, np.uint16)


@dataclass(frozen=True)
class Part:
    """A tensor to write: its elements are bytes, or bf16 as two of them."""

    name: str
    shape: tuple[int, ...]
    draw: Draw

    @property
    def dtype(self) -> str:
        return "U8" if self.draw in (codes, scales) else "BF16"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * recite.DTYPES[self.dtype]().itemsize


@dataclass
class Memory:
    """Resident sizes in bytes, at most: of all processes together, and of the largest one (by kind of page)."""

    peak: int = 0
    idle: int = 0
    scheduler_peak: int = 0
    anonymous_peak: int = 0
    files_peak: int = 0
    files_idle: int = 0


@dataclass
class Run:
    label: str
    ready_s: float = 0.0
    weights_s: float = 0.0
    memory: Memory = field(default_factory=Memory)
    experts_gb: float = 0.0
    pack_s: float = 0.0
    packing_gb_per_s: float = 0.0
    memory_s: float = 0.0
    threads: int = 0
    isa: str = ""
    answered: int = 0

    @property
    def gb_per_s(self) -> float:
        return self.experts_gb / self.pack_s if self.pack_s else 0.0

    @property
    def per_core(self) -> float:
        return self.packing_gb_per_s / self.threads if self.threads else 0.0


def config(layers: int) -> dict:
    """Recite's, with wide experts and little else."""
    own = json.loads((recite.MODEL / "config.json").read_text())
    return own | dict(
        hidden_size=HIDDEN, intermediate_size=WIDTH, moe_intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=8,
        num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD,
        quantization_config=recite.MXFP4_CONFIG,
    )  # fmt: skip


def parts(layers: int, vocabulary: int) -> Iterator[Part]:
    """Every tensor, in the order of the layers."""
    yield Part("model.embed_tokens.weight", (vocabulary, HIDDEN), weights)
    yield Part("lm_head.weight", (vocabulary, HIDDEN), weights)
    yield Part("model.norm.weight", (HIDDEN,), ones)
    for layer in range(layers):
        own = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Part(f"{own}.{name}.weight", (HIDDEN,), ones)
        for name in ("q_norm", "k_norm"):
            yield Part(f"{own}.self_attn.{name}.weight", (HEAD,), ones)
        for name, rows in (("q_proj", HEADS * HEAD), ("k_proj", HEAD), ("v_proj", HEAD)):
            yield Part(f"{own}.self_attn.{name}.weight", (rows, HIDDEN), weights)
        yield Part(f"{own}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD), weights)
        yield Part(f"{own}.mlp.gate.weight", (EXPERTS, HIDDEN), weights)
        for expert in range(EXPERTS):
            for part, rows, columns in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
                name = f"{own}.mlp.experts.{expert}.{part}_proj"
                yield Part(f"{name}.weight_packed", (rows, columns // 2), codes)
                yield Part(f"{name}.weight_scale", (rows, columns // recite.MX_GROUP), scales)


def write_shard(path: Path, content: list[Part], noise: np.random.Generator) -> None:
    """Streams the tensors; the file is on the disk, not only in the page cache, when this returns."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for part in content:
        header[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [offset, offset + part.bytes]}
        offset += part.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in content:
            file.write(part.draw(noise, part.shape).tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_checkpoint(target: Path, gigabytes: float) -> tuple[list[Path], int]:
    """The files, and the bytes of all tensors that are not experts'."""
    per_layer = sum(part.bytes for part in parts(1, 0))
    layers = math.ceil(gigabytes * GB / per_layer)
    whole = config(layers)
    content = list(parts(layers, whole["vocab_size"]))
    target.mkdir()
    (target / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
    for name in recite.COPIED:
        shutil.copyfile(recite.MODEL / name, target / name)
    share = sum(part.bytes for part in content) / SHARDS
    files, noise, begin, size, weight_map = [], np.random.default_rng(1), 0, 0, {}
    for number, part in enumerate(content, 1):
        size += part.bytes
        if size >= share * (len(files) + 1) or number == len(content):
            path = target / f"model-{len(files) + 1:05d}-of-{SHARDS:05d}.safetensors"
            write_shard(path, content[begin:number], noise)
            weight_map |= {each.name: path.name for each in content[begin:number]}
            files, begin = [*files, path], number
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return files, sum(part.bytes for part in content if part.dtype == "BF16")


def evict(files: list[Path]) -> None:
    """Out of the page cache; the files must be on the disk and not mapped."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(files: list[Path]) -> float:
    buffer = bytearray(CHUNK)
    start = time.monotonic()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - start


def read_cold(files: list[Path]) -> float:
    evict(files)
    return read_once(files)


class Watch:
    """Samples the resident sizes of all processes below this one while it is open."""

    KINDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")

    def __init__(self, every_s: float = 0.02):
        self.memory = Memory()
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def at_rest(self) -> None:
        """Notes what is resident now."""
        found = self._sample()
        self.memory.idle = sum(each["VmRSS"] for each in found)
        self.memory.files_idle = max(found, key=lambda each: each["VmHWM"])["RssFile"]

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            if found := self._sample():
                largest, memory = max(found, key=lambda each: each["VmHWM"]), self.memory
                memory.peak = max(memory.peak, sum(each["VmRSS"] for each in found))
                memory.scheduler_peak = max(memory.scheduler_peak, largest["VmHWM"])
                memory.anonymous_peak = max(memory.anonymous_peak, largest["RssAnon"])
                memory.files_peak = max(memory.files_peak, largest["RssFile"] + largest["RssShmem"])

    def _sample(self) -> list[dict[str, int]]:
        found = []
        for pid in processes.descendants(os.getpid()):
            with contextlib.suppress(OSError):  # it ended while we looked
                rows = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                sizes = {row[0][:-1]: int(row[1]) * 1024 for row in rows if row and row[0][:-1] in self.KINDS}
                found += [sizes] if len(sizes) == len(self.KINDS) else []
        return found


def serve(label: str, model: Path, *, hybrid: bool) -> Run:
    """One server from start to one answer and gone."""
    run, start = Run(label), time.monotonic()
    with Watch() as watch, recite_server.serve(model, hybrid=hybrid, flags=FLAGS) as server:
        run.ready_s = time.monotonic() - start
        run.answered = len(client.generate(server.port, TOKENS, prompt="The experts").ids)
        watch.at_rest()
        log = server.log.read_text(errors="replace")
    run.memory = watch.memory
    run.weights_s = float(WEIGHTS.findall(log)[-1])
    if hybrid:
        done, total, run.pack_s, run.packing_gb_per_s, run.memory_s = map(float, PACKED.findall(log)[-1])
        if done != total:
            raise RuntimeError(f"the log says that {done} of {total} GB were packed")
        run.experts_gb = total
        run.threads, run.isa = int(THREADS.findall(log)[-1][0]), THREADS.findall(log)[-1][1]
    return run


def verdicts(stock: Run, runs: list[Run], largest_shard: int, other: int) -> dict[str, bool]:
    """What must hold, as a sentence with its figures, and whether it does. Stock would hold the other weights, too."""
    warm, found = runs[-1], {}
    found[f"packed at {warm.per_core:.2f} GB/s per core, at least {PER_CORE:.2f} wanted"] = warm.per_core >= PER_CORE
    for run in runs:
        allowed = run.experts_gb + (largest_shard + stock.memory.idle + other) / GB
        text = (
            f"{run.label}: peak {run.memory.peak / GB:.2f} GB, allowed {allowed:.2f} = experts {run.experts_gb:.2f} + "
            f"shard {largest_shard / GB:.2f} + idle stock {stock.memory.idle / GB:.2f} + other weights {other / GB:.2f}"
        )
        found[text] = run.memory.peak / GB <= allowed
    found["every server answered"] = all(run.answered == TOKENS for run in [stock, *runs])
    return found


def table(runs: list[Run], read_s: float, size: int) -> str:
    def gb(pick: Callable[[Memory], int]) -> list[str]:
        return [f"{pick(run.memory) / GB:.2f} GB" for run in runs]

    packing = [f"{run.gb_per_s:.2f} GB/s in {run.pack_s:.1f} s" if run.threads else "-" for run in runs]
    rows = [
        ("", [run.label for run in runs]),
        ("time to ready", [f"{run.ready_s:.1f} s" for run in runs]),
        ("of it, loading weights", [f"{run.weights_s:.1f} s" for run in runs]),
        ("experts packed", packing),
        ("of it, memory from the system", [f"{run.memory_s:.1f} s" if run.threads else "-" for run in runs]),
        ("packing alone, per core", [f"{run.per_core:.2f} GB/s, {run.isa}" if run.threads else "-" for run in runs]),
        ("all processes, peak RSS", gb(lambda memory: memory.peak)),
        ("all processes, RSS at rest", gb(lambda memory: memory.idle)),
        ("scheduler, VmHWM", gb(lambda memory: memory.scheduler_peak)),
        ("scheduler, RssAnon peak", gb(lambda memory: memory.anonymous_peak)),
        ("scheduler, RssFile peak", gb(lambda memory: memory.files_peak)),
        ("scheduler, RssFile at rest", gb(lambda memory: memory.files_idle)),
    ]
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(runs))]
    lines = [
        f"{head:30}" + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for head, cells in rows
    ]
    return "\n".join([f"{size / GB:.2f} GB on disk, read once in {read_s:.1f} s ({size / GB / read_s:.2f} GB/s)", *lines])


def hybrid(label: str, model: Path) -> Run:
    progress(f"serving {label}")
    run = serve(f"hybrid, {label}", model, hybrid=True)
    progress(f"ready in {run.ready_s:.0f} s")
    return run


def measure(folder: Path, gigabytes: float) -> tuple[str, dict]:
    recite.make("bf16", folder / "recite")
    begin = time.monotonic()
    files, other = write_checkpoint(folder / "large", gigabytes)
    sizes = [path.stat().st_size for path in files]
    progress(f"{sum(sizes) / GB:.2f} GB in {len(files)} files written in {time.monotonic() - begin:.0f} s")
    read_s = min(read_cold(files), read_cold(files))  # where the host caches the disk, the first is slower
    progress(f"read once in {read_s:.1f} s; serving stock")
    stock = serve("stock, recite", folder / "recite", hybrid=False)
    evict(files)
    cold = hybrid("from disk", folder / "large")
    read_once(files)
    warm = hybrid("from page cache", folder / "large")
    held = verdicts(stock, [cold, warm], max(sizes), other)
    lines = [f"{'ok' if good else 'NOT MET'}: {text}" for text, good in held.items()]
    runs = [asdict(run) | dict(gb_per_s=run.gb_per_s, gb_per_s_per_core=run.per_core) for run in (stock, cold, warm)]
    figures = dict(file_bytes=sizes, other_bytes=other, read_s=read_s, runs=runs, verdicts=held, load_average=os.getloadavg())
    return "\n".join([table([stock, cold, warm], read_s, sum(sizes)), *lines]), figures


def progress(text: str) -> None:
    sys.stderr.write(f"load: {text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint may lie while this runs")
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    processes.own_descendants()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="load-") as scratch:
            text, figures = measure(Path(scratch), arguments.gb)
    except (RuntimeError, client.RequestFailed) as failure:
        sys.stderr.write(f"load: {failure}\n")
        return 1
    except processes.Stopped as stopped:
        return stopped.status
    finally:
        processes.end_all()
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(figures["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
