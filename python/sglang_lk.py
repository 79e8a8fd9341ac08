"""The command ``sglang-lk``: a light way into ``sglang.srt.lk``.

``sglang/__init__.py`` imports torch and takes seconds; looking at a machine or timing kernels needs
neither. So this module puts an empty ``sglang`` package with the right search path in place and imports
our own modules below it. Only for this command: a server must import the real package.
"""

from __future__ import annotations

import importlib.util
import sys


def main(argv: list[str] | None = None) -> int:
    light_package("sglang")
    from sglang.srt.lk.cli import main as run

    return run(argv)


def light_package(name: str) -> None:
    """Make ``name`` importable as a package without running its ``__init__``; no effect if it is loaded."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit(f"sglang-lk: the package {name} is not installed here; install the sglang-lk wheel")
    sys.modules[name] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    sys.exit(main())
