"""What this computer has, and every reason why the quick start cannot run on it, each with its remedy.

Facts are read in ``look``; ``problems`` only judges them, so that it is tested on made-up machines.
A new requirement means a field of ``Facts`` and a line in ``problems``.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

GB = 1 << 30
DISK_GB = {True: 14, False: 2}  # by whether the dependencies are still to come
MEMORY_GB = 6
PYTHONS = ((3, 11), (3, 12), (3, 13))
COMPILER = 11


@dataclass(frozen=True)
class Facts:
    python: tuple[int, int]
    venv: bool
    headers: bool
    compiler: str | None
    compiler_version: int
    disk: int
    memory: int
    gpu: bool
    taken_ports: tuple[int, ...] = ()


def has_module(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def compiler() -> tuple[str | None, int]:
    """The C++ compiler that the build will find, and its major version (0: it does not say)."""
    name = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if name is None or shutil.which(name) is None:
        return None, 0
    text = subprocess.run([name, "-dumpversion"], capture_output=True, text=True, check=False).stdout
    match = re.match(r"\d+", text)
    return name, int(match[0]) if match else 0


def number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such control group, or "max"


def memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: what the system has left, or its control group if that is less."""
    text = (root / "proc/meminfo").read_text()
    left = int(re.search(r"^MemAvailable:\s+(\d+)", text, re.MULTILINE)[1]) << 10
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = number(root / limit), number(root / used)
        if most is not None and now is not None:
            left = min(left, most - now)
    return left


def disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def look(*, environment: Path, ports: list[int] = ()) -> Facts:
    name, version = compiler()
    return Facts(
        python=sys.version_info[:2],
        venv=has_module("venv") and has_module("ensurepip"),
        headers=(Path(__import__("sysconfig").get_path("include")) / "Python.h").exists(),
        compiler=name,
        compiler_version=version,
        disk=disk(environment),
        memory=memory(),
        gpu=Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None,
        taken_ports=tuple(port for port in ports if not is_free(port)),
    )


def problems(facts: Facts, *, builds: bool, downloads: bool) -> list[str]:
    """One sentence each; empty when nothing stands in the way of what is still to do."""
    found = []
    python = ".".join(map(str, facts.python))
    if facts.python not in PYTHONS:
        found.append(f"Python {python} is not supported: install Python 3.11, 3.12 or 3.13, or set PYTHON to one")
    if builds:
        if not facts.venv:
            found.append(f"Python {python} cannot make environments: apt-get install python{python}-venv")
        if not facts.headers:
            found.append(f"the headers of Python {python} are missing: apt-get install python{python}-dev")
        if facts.compiler is None:
            found.append("there is no C++ compiler: apt-get install g++ (or set CXX to one)")
        elif facts.compiler_version < COMPILER and "clang" not in facts.compiler:
            found.append(
                f"{facts.compiler} is version {facts.compiler_version}, and the kernels need {COMPILER} or newer:"
                " apt-get install g++-12 and set CXX=g++-12"
            )
    needed = DISK_GB[downloads]
    if facts.disk < needed * GB:
        found.append(
            f"{facts.disk / GB:.1f} GB of disk are free and {needed} GB are needed:"
            " free some, or set LK_VENV to a folder on a larger disk"
        )
    if facts.memory < MEMORY_GB * GB:
        found.append(f"{facts.memory / GB:.1f} GB of memory are available and {MEMORY_GB} GB are needed: end other programs")
    for port in facts.taken_ports:
        found.append(f"port {port} is taken: set QUICKSTART_PORT to a free one, or unset it")
    return found
