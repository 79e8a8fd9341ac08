"""Which CPUs, and how much memory, this process may really use, and why.

Reads the affinity mask, cpusets, CPU quotas (cgroup v1 and v2, every level above the process) and the topology in sysfs;
starts no thread and pins none. Whatever is missing limits nothing: a host without NUMA files is one node, a CPU without
topology is its own core. Each decision leaves a line in ``why`` for ``sglang-lk doctor``.

A new limit is a function like ``_quota`` that returns the limit and its line, and a call in ``usable``. Tests hand in
``root``, a directory that stands for ``/``.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.lk.config import Config
from sglang.srt.lk.term import gib, ranges

UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


@dataclass(frozen=True)
class Cpus:
    """``cpus`` in worker order, node by node: ``cpus[0]`` is the calling thread. ``nodes`` holds the NUMA node of each, or
    the nearest with memory where that has none."""

    cpus: list[int]
    nodes: list[int]
    why: list[str]
    warnings: list[str]  # lines of ``why`` that the user should see without asking
    memory_nodes: int = 1  # NUMA nodes whose memory this process may use

    def placement(self, config: Config) -> dict[str, Any]:
        """What the native engine is told about nodes: none where there is one; without a split they only bind workers."""
        several = self.memory_nodes > 1
        split = several and config.numa_interleave
        return {"nodes": self.nodes if several else [], "split": split, "place": split}


@dataclass(frozen=True)
class Memory:
    """Bytes that can still be taken; None where the system does not say."""

    available: int | None
    total: int | None
    why: list[str]


# Beside a GPU: from so many cores of a rank on, so many are left to Python, whose threads wait for the card awake; a
# worker that must share its core holds all others up at the next barrier.
SPARE = ((8, 2), (4, 1), (0, 0))


def usable(
    config: Config,
    *,
    rank: int = 0,
    ranks: int = 1,
    root: str | Path = "/",
    affinity: Iterable[int] | None = None,
    gpu: bool = False,
) -> Cpus:
    """The CPUs of one rank out of ``ranks`` that share this host. Ranks never share a CPU.

    Workers take one CPU of each physical core first; SMT siblings serve only an ``LK_THREADS`` above the cores.
    ``affinity`` is the mask the process was given (``boot.affinity``); by default the calling thread's, which is
    another one once a worker pool has pinned it. ``gpu``: the workers stay awake while a GPU works, so without an
    ``LK_THREADS`` some cores are left to the threads that drive it (``SPARE``).
    """
    root = Path(root)
    why: list[str] = []
    allowed = _allowed(root, os.sched_getaffinity(0) if affinity is None else affinity, why)
    quota = _quota(root, why)
    node_of, memory_nodes = _nodes(root, why)
    cores = _cores(root, allowed, node_of)
    smt = len(allowed) - len(cores)
    nodes = {node_of.get(cpu, 0) for cpu in allowed}
    why.append(f"topology: {_count(len(cores), 'core')}, {_count(smt, 'SMT sibling')}, {_count(len(nodes), 'NUMA node')}")
    mine = _share(cores, rank, ranks)
    if ranks > 1:
        why.append(f"rank {rank} of {ranks}: CPUs {_spans(cpu for core in mine for cpu in core)}")
    threads, warnings = _threads(config, mine, quota, ranks, why, gpu=gpu)
    chosen = _spread([core[0] for core in mine], node_of, threads)
    chosen += _spread([cpu for core in mine for cpu in core[1:]], node_of, threads - len(chosen))
    chosen.sort(key=lambda cpu: node_of.get(cpu, 0))
    why.append(f"workers: {threads} on CPUs {_spans(chosen)}")
    return Cpus(chosen, [node_of.get(cpu, 0) for cpu in chosen], why + warnings, warnings, memory_nodes)


def node_memory(node: int, root: str | Path = "/") -> Memory:
    """Of one NUMA node. Page cache that can be dropped counts as free."""
    text = _text(Path(root) / f"sys/devices/system/node/node{node}/meminfo") or ""
    info = {name: int(kb) * 1024 for name, kb in re.findall(r"^Node \d+ (\S+):\s+(\d+) kB", text, re.MULTILINE)}
    available = info["MemFree"] + info.get("Inactive(file)", 0) if "MemFree" in info else None
    total = info.get("MemTotal")
    return Memory(available, total, [f"node {node}: {_size(available)} of {_size(total)} available"])


def memory(root: str | Path = "/") -> Memory:
    """The least of what the host has free and what each cgroup above this process leaves.

    Page cache that a cgroup can drop (``inactive_file``) counts as free: reading a checkpoint does not use memory up.
    """
    root = Path(root)
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo") or "", re.MULTILINE))
    available = int(info["MemAvailable"]) * 1024 if "MemAvailable" in info else None
    total = int(info["MemTotal"]) * 1024 if "MemTotal" in info else None
    why = [f"host: {_size(available)} of {_size(total)} available"]
    for group in _groups(root, "memory"):
        v2 = (group / "memory.max").exists()
        limit = _number(group / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _number(group / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is None or limit >= UNLIMITED:
            continue
        stat = dict(re.findall(r"^(\w+) (\d+)$", _text(group / "memory.stat") or "", re.MULTILINE))
        cache = int(stat.get("inactive_file" if v2 else "total_inactive_file", 0))
        left = max(0, limit - max(0, (used or 0) - cache))
        why.append(f"cgroup {_name(root, group)}: {_size(left)} of {_size(limit)} left")
        available = left if available is None else min(available, left)
        total = limit if total is None else min(total, limit)
    return Memory(available, total, why)


def _allowed(root: Path, affinity: Iterable[int], why: list[str]) -> list[int]:
    allowed = set(affinity)
    why.append(f"affinity: CPUs {_spans(allowed)}")
    online = _list(root / "sys/devices/system/cpu/online")
    limits = [("online", online)] if online else []
    for group in _groups(root, "cpuset"):
        for file in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if cpus := _list(group / file):
                limits.append((f"cpuset {_name(root, group)}", cpus))
                break
    for name, cpus in limits:
        if not allowed & cpus:
            why.append(f"{name}: CPUs {_spans(cpus)}, none of them in the affinity mask: not applied")
        elif not allowed <= cpus:
            allowed &= cpus
            why.append(f"{name}: leaves CPUs {_spans(allowed)}")
    return sorted(allowed)


def _quota(root: Path, why: list[str]) -> float | None:
    """CPUs' worth of time that the tightest CPU quota above this process allows."""
    quotas = []
    for group in _groups(root, "cpu"):
        if text := _text(group / "cpu.max"):
            quota, _, period = text.partition(" ")
        else:
            quota, period = _text(group / "cpu.cfs_quota_us") or "", _text(group / "cpu.cfs_period_us") or ""
        if quota.isdecimal() and int(quota) > 0:
            quotas.append((int(quota) / int(period or 100_000), _name(root, group)))
    if not quotas:
        return None
    cpus, name = min(quotas)
    why.append(f"quota of cgroup {name}: {cpus:g} CPUs' worth of time")
    return cpus


def _threads(
    config: Config, mine: list[list[int]], quota: float | None, ranks: int, why: list[str], *, gpu: bool
) -> tuple[int, list[str]]:
    """How many workers, and the warning if ``LK_THREADS`` asked for more than there is."""
    share = float("inf") if quota is None else quota / ranks
    limit = int(max(1, min(sum(len(core) for core in mine), share)))
    default = int(max(1, min(len(mine), share)))
    if config.threads is None:
        spare = next(count for cores, count in SPARE if default >= cores) if gpu else 0
        if spare:
            why.append(f"{_count(spare, 'core')} left to the threads that drive the GPU")
        return default - spare, []
    if config.threads > limit:
        reason = "the CPU quota" if share < sum(len(core) for core in mine) else "the CPUs this process may use"
        return limit, [f"LK_THREADS={config.threads} exceeds {reason}: {_count(limit, 'thread')}"]
    why.append(f"LK_THREADS={config.threads}")
    return config.threads, []


def _share(cores: list[list[int]], rank: int, ranks: int) -> list[list[int]]:
    """The cores of one rank: a contiguous part, so that ranks divide nodes before they divide a node."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is outside 0 to {ranks - 1}")
    if len(cores) < ranks:
        cores = [[cpu] for core in cores for cpu in core]
    if len(cores) < ranks:
        raise ValueError(
            f"{ranks} ranks share {_count(len(cores), 'usable CPU')}; each needs one of its own: "
            "lower --tp-size or allow more CPUs (sglang-lk doctor says what limits them)"
        )
    return cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]


def _spread(cpus: list[int], node_of: dict[int, int], count: int) -> list[int]:
    """``count`` of ``cpus``, as many from each node as possible (each brings its own memory bandwidth), in node order."""
    by_node: dict[int, list[int]] = {}
    for cpu in cpus:
        by_node.setdefault(node_of.get(cpu, 0), []).append(cpu)
    ranked = sorted((place, node, cpu) for node, members in by_node.items() for place, cpu in enumerate(members))
    return [cpu for _, _, cpu in sorted(ranked[:count], key=lambda entry: (entry[1], entry[2]))]


def _cores(root: Path, allowed: list[int], node_of: dict[int, int]) -> list[list[int]]:
    """Allowed CPUs grouped by physical core, in node order; within a core the lowest id first."""
    cores: dict[int, list[int]] = {}
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _list(topology / "core_cpus_list") or _list(topology / "thread_siblings_list") or {cpu}
        cores.setdefault(min(siblings), []).append(cpu)
    return sorted(cores.values(), key=lambda core: (node_of.get(core[0], 0), core[0]))


def _nodes(root: Path, why: list[str]) -> tuple[dict[int, int], int]:
    """The node of each CPU, and how many nodes have memory for this process. CPUs of a node without are counted to the
    nearest that has some, where their memory comes from anyway."""
    folder = root / "sys/devices/system/node"
    nodes = sorted(int(file.name.removeprefix("node")) for file in folder.glob("node[0-9]*") if file.is_dir())
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", _text(root / "proc/self/status") or "", re.MULTILINE)
    memory = set(nodes)
    for limit in (_list(folder / "has_memory"), _parsed(allowed[1]) if allowed else set()):
        memory = memory & limit or memory
    node_of = {}
    for node in nodes:
        home, cpus = node, _list(folder / f"node{node}/cpulist")
        if cpus and node not in memory:
            distances = dict(zip(nodes, (_text(folder / f"node{node}/distance") or "").split()))
            home = min(memory, key=lambda other: (int(distances.get(other, 0)), other))
            why.append(f"NUMA node {node} has no memory for this process: its CPUs are counted to node {home}, the nearest that has")
        node_of.update(dict.fromkeys(cpus, home))
    return node_of, max(1, len(memory))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories that limit this process for ``controller``, innermost first, v2 and v1.

    A container may see the path of the host although only its own part is mounted, so levels that do not exist are
    passed over and the mount itself is always tried.
    """
    mounts = _mounts(root)
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for fs, options, origin, point in mounts:
            v2 = fs == "cgroup2" and controllers == ""
            v1 = fs == "cgroup" and controller in controllers.split(",") and controller in options.split(",")
            if not v1 and not v2:
                continue
            base = root / point.lstrip("/")
            group = base / os.path.relpath(path, origin if f"{path}/".startswith(f"{origin.rstrip('/')}/") else "/")
            for level in (group, *group.parents):
                if level.is_dir() and level.is_relative_to(base):
                    yield level


def _mounts(root: Path) -> list[tuple[str, str, str, str]]:
    """(file system, super options, mounted part, mount point) of each cgroup mount; the usual places if unknown."""
    found = []
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup"):
            _, _, _, origin, point, *_ = before.split(" ")
            fs, _, options = after.split(" ", 2)
            found.append((fs, options, origin, point))
    if found:
        return found
    usual = [("cgroup", name, "/", f"/sys/fs/cgroup/{name}") for name in ("cpu", "cpu,cpuacct", "cpuset", "memory")]
    return [("cgroup2", "", "/", "/sys/fs/cgroup"), *usual]


def _text(file: Path) -> str | None:
    """The stripped content, None if the file is missing or the system does not let it be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _number(file: Path) -> int | None:
    text = _text(file) or ""
    return int(text) if text.isdecimal() else None


def _list(file: Path) -> set[int]:
    """The CPUs or nodes of a kernel list such as ``0-2,7``; empty if there is none."""
    return _parsed(_text(file) or "")


def _parsed(text: str) -> set[int]:
    cpus: set[int] = set()
    for item in text.split(","):
        first, _, last = item.partition("-")
        if first.isdecimal():
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _spans(cpus: Iterable[int]) -> str:
    return ranges(cpus) or "none"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(size: int | None) -> str:
    return "unknown" if size is None else gib(size)


def _name(root: Path, group: Path) -> str:
    return f"/{group.relative_to(root)}"
