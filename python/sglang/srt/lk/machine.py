"""Facts about this machine that decide how fast experts run: caches, huge pages, GPUs.

Reads files and asks the driver's management library; starts nothing and changes nothing. Which cores and how much
memory may be used is ``cpus``'s business. Every file is looked up below ``root``, so that tests can show another machine.
A fact that the system does not tell is ``None``: a missing file is an answer here, not an error.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class HugePages:
    """Transparent huge pages: ``mode`` is always, madvise or never; ``granted`` the share of a test block we got."""

    mode: str | None
    granted: float | None
    switch: str = "/sys/kernel/mm/transparent_hugepage/enabled"


def huge_pages(root: Path = ROOT, probe: bool = True) -> HugePages:
    chosen = re.search(r"\[(\w+)\]", _text(root / HugePages.switch.lstrip("/")) or "")
    return HugePages(chosen[1] if chosen else None, _granted() if probe else None)


def _granted(megabytes: int = 64) -> float | None:
    """Ask for 2 MB pages and look how much came: a fragmented machine grants less than its mode promises."""
    before = _anon_huge()
    size = megabytes << 20
    with mmap.mmap(-1, size + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        try:
            block.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # the kernel has no huge pages at all: nothing is granted
            return 0.0
        for offset in range(0, len(block), 4096):
            block[offset] = 1
        after = _anon_huge()
    return None if before is None or after is None else max(0.0, min(1.0, (after - before) / size))


def _anon_huge() -> int | None:
    found = re.search(r"^AnonHugePages:\s+(\d+)", _text(Path("/proc/self/smaps_rollup")) or "", re.MULTILINE)
    return int(found[1]) << 10 if found else None


def l3_bytes(cpus: list[int], root: Path = ROOT) -> int | None:
    """All last-level cache that these CPUs can reach, each cache counted once."""
    seen: dict[str, int] = {}
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        size = re.match(r"(\d+)([KM])", _text(folder / "size") or "")
        if size:
            seen[(_text(folder / "shared_cpu_list") or str(cpu)).strip()] = int(size[1]) << (10 if size[2] == "K" else 20)
    return sum(seen.values()) or None


def read_megabytes(cache_bytes: int, at_least: int) -> int:
    """What a plain reader must go over, so that no cache of this size serves a part of it worth speaking of."""
    return max(at_least, 4 * cache_bytes >> 20)


@dataclass(frozen=True)
class Gpus:
    """``driver`` is the version, ``cuda`` whether libcuda.so.1 loads (upstream's GPU imports need it)."""

    driver: str | None
    cuda: bool
    cards: list[dict]
    trouble: str | None = None


def gpus() -> Gpus:
    """Asks NVML, which creates no context: the cards stay as they are."""
    cuda = _library("libcuda.so.1") is not None
    nvml = _library("libnvidia-ml.so.1")
    if nvml is None:
        return Gpus(None, cuda, [])
    status = nvml.nvmlInit_v2()
    if status:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        return Gpus(None, cuda, [], f"the driver does not answer: {nvml.nvmlErrorString(status).decode()}")
    try:
        version = ctypes.create_string_buffer(80)
        nvml.nvmlSystemGetDriverVersion(version, 80)
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return Gpus(version.value.decode(), cuda, [_card(nvml, i) for i in range(count.value)])
    finally:
        nvml.nvmlShutdown()


def _card(nvml: ctypes.CDLL, index: int) -> dict:
    class Bytes(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    handle, name, size = ctypes.c_void_p(), ctypes.create_string_buffer(96), Bytes()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, 96)
    own = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(size)) == 0  # a chip that shares the host's memory refuses
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return {
        "index": index,
        "name": name.value.decode(),
        "compute": f"{major.value}.{minor.value}",
        "total_bytes": size.total if own else None,
        "free_bytes": size.free if own else None,
    }


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:  # not on this machine: the answer, not a failure
        return None


def busy(cpus: list[int], seconds: float = 0.2) -> float | None:
    """The share of these CPUs that others take right now, hypervisor included; the load average would still show
    what this command itself did a minute ago."""
    before = _ticks(cpus)
    time.sleep(seconds)
    after = _ticks(cpus)
    total = sum(after[i] - before[i] for i in range(2)) if before and after else 0
    return (after[0] - before[0]) / total if total else None


def _ticks(cpus: list[int]) -> tuple[int, int] | None:
    """Busy and idle ticks of these CPUs since boot."""
    rows = re.findall(r"^cpu(\d+) (.*)$", _text(Path("/proc/stat")) or "", re.MULTILINE)
    mine = [[int(value) for value in values.split()[:8]] for cpu, values in rows if int(cpu) in cpus]
    idle = sum(values[3] + values[4] for values in mine)
    return (sum(map(sum, mine)) - idle, idle) if mine else None


def system() -> dict:
    return {"arch": platform.machine(), "kernel": platform.release(), "python": platform.python_version()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # not there or not readable: unknown
        return None
