"""The start: the environment is read once, before anything heavy is imported.

SGLang's ``__init__`` calls ``start`` when the switch is set. Every problem is one message and exit status 2; lines worth
knowing are said by the first process only, since every child process imports SGLang again. Variables are read here and in
``cli``, which hands the environment on; everything else takes ``current()``. (``term`` asks ``NO_COLOR`` and ``TERM``.)
"""

import importlib
import logging
import os
import sys
import zlib
from typing import NoReturn

from sglang.srt.lk import config, install_check, patches
from sglang.srt.lk.config import Config, ConfigError, Loaded

logger = logging.getLogger(__name__)

# Which lines this process or a parent has said. Not an LK_ name: it is no variable for users.
SAID = "_SGLANG_LK_SAID"
EXTENSION = "sgl_kernel_ext"

_current: Config | None = None
_affinity: frozenset[int] | None = None


def start() -> Config:
    """Read the environment, or end the program with every problem. Sets the switch to exactly ``0`` or ``1``."""
    global _affinity, _current
    try:
        loaded = read()
    except ConfigError as error:
        _exit(error)
    _current = loaded.config
    os.environ[config.SWITCH] = str(int(loaded.config.moe_hybrid_enabled))
    if loaded.config.moe_hybrid_enabled:
        _refuse_broken_install()
        _affinity = frozenset(os.sched_getaffinity(0))
        # Upstream would confine each rank, and with it our workers and their memory, to one NUMA node.
        os.environ.setdefault("SGLANG_AUTO_NUMA_BIND", "0")
        _let_go_of_cores()
        patches.install()
        _say_once(loaded.notes)
    return _current


def current() -> Config:
    """The configuration of this process; read now if ``start`` has not run (then problems are a ``ConfigError``)."""
    global _current
    if _current is None:
        _current = read().config
    return _current


def affinity() -> frozenset[int]:
    """The CPUs this process was given; later the thread that asks may have been pinned to one of them."""
    return _affinity if _affinity is not None else frozenset(os.sched_getaffinity(0))


def read() -> Loaded:
    """The environment as it is now, without side effects: configuration and lines to tell the user."""
    return config.read(os.environ, isas=_machine_isas)


def _machine_isas() -> tuple[str, ...]:
    """What the machine runs; loads the extension, so ``config`` asks only when an instruction set is forced."""
    extension = importlib.import_module(EXTENSION)
    return tuple(isa["name"] for isa in extension.isas() if isa["supported"])


def _let_go_of_cores() -> None:
    """On a CPU torch and our workers take turns on the same cores, layer by layer. libgomp's threads would stay awake
    for milliseconds after each parallel region, and our next layer would wait for them: a batch of 8 tokens took 1.2 ms
    a layer instead of 0.6. A user's own setting stays."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _refuse_broken_install() -> None:
    problems = install_check.problems()
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        _exit("\n  ".join([f"Hybrid MoE: {count} in the installation", *problems]))


def _exit(message: object) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    raise SystemExit(2)


def _say_once(notes: tuple[str, ...]) -> None:
    said = f"{zlib.crc32(chr(10).join(notes).encode(errors='backslashreplace')):08x}"
    if notes and os.environ.get(SAID) != said:
        os.environ[SAID] = said
        for note in notes:
            logger.warning("Hybrid MoE: %s", note)
