"""One upstream wheel as a verified file: from a folder, from the cache, or fetched with pip.

``LK_UPSTREAM_WHEELS=DIR`` makes that folder the only source, for builds without a network. Otherwise
wheels are kept in ``$XDG_CACHE_HOME/sglang-lk/wheels`` and fetched through pip as it is configured.
A file whose checksum differs from the pin is refused and never used.
"""

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from overlay import OverlayError
from overlay.pins import Pins

PYTHONS = ("cp311", "cp312", "cp313")
MACHINES = ("x86_64", "aarch64")


def here() -> tuple[str, str]:
    """The Python tag and the machine that run this."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}", platform.machine()


def sha256(data: bytes) -> str:
    """The checksum as the pins spell it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def cache() -> Path:
    """Where fetched wheels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-lk" / "wheels"


def get(*, pins: Pins, version: str, python: str = "", machine: str = "") -> Path:
    """The wheel of one release for one Python and machine, verified if the release is pinned."""
    python, machine = python or here()[0], machine or here()[1]
    _refuse_unbuilt(python=python, machine=machine)
    offline = os.environ.get("LK_UPSTREAM_WHEELS")
    folder = Path(offline) if offline else cache()
    path = _find(folder=folder, version=version, python=python, machine=machine)
    if path is None and offline:
        raise OverlayError(
            f"LK_UPSTREAM_WHEELS={offline}: no wheel of sglang {version} for {python} on {machine} in it"
            " (put one there, or unset the variable to fetch it)"
        )
    if path is None:
        path = _fetch(folder=folder, version=version, python=python, machine=machine)
    _verify(path=path, pins=pins, version=version)
    return path


def _refuse_unbuilt(*, python: str, machine: str) -> None:
    problems = []
    if python not in PYTHONS:
        problems.append(f"Python {python} has no upstream wheel (use Python 3.11, 3.12 or 3.13)")
    if machine not in MACHINES:
        problems.append(f"machine {machine} has no upstream wheel (supported are {', '.join(MACHINES)})")
    if problems:
        raise OverlayError("; ".join(problems))


def _find(*, folder: Path, version: str, python: str, machine: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"sglang-{version}-{python}-*_{machine}.whl"))), None)


def _fetch(*, folder: Path, version: str, python: str, machine: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python.removeprefix("cp")]
        for glibc in range(17, 40):
            command += ["--platform", f"manylinux_2_{glibc}_{machine}"]
        done = subprocess.run(
            [*command, "--dest", scratch, f"sglang=={version}"], capture_output=True, text=True, check=False
        )
        path = _find(folder=Path(scratch), version=version, python=python, machine=machine)
        if done.returncode or path is None:
            raise OverlayError(
                f"sglang {version} for {python} on {machine} could not be fetched; pip said:\n{done.stderr.strip()}\n"
                "(without a network, put the wheel into a folder and set LK_UPSTREAM_WHEELS to it)"
            )
        # Renamed only when whole: an interrupted download leaves nothing that looks like a wheel.
        return path.rename(folder / path.name)


def _verify(*, path: Path, pins: Pins, version: str) -> None:
    if version not in pins.tags:
        return
    wanted = pins.tags[version].wheels.get(path.name)
    found = sha256(path.read_bytes())
    if wanted is None:
        raise OverlayError(f"{path.name} is not among the pinned wheels of {version} in python/upstream.toml")
    if wanted != found:
        raise OverlayError(
            f"{path}: checksum differs from the pin (pinned {wanted}, found {found}); delete the file and build again"
        )
