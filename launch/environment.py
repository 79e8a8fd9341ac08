"""The virtual environment with the fork in it, made once and reused while nothing it depends on changed.

The environment lies in ``.venv`` or in ``$LK_VENV``. A stamp in it holds a hash of every file that the build reads and
of the settings that change its result; same stamp, no work. Runs on the system's Python, and for ``test/run.sh`` as a
program: ``python3 -m launch.environment [PACKAGE…]`` makes the environment and adds the packages that it lacks.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

from launch import machine, processes, progress

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "quickstart"
INPUTS = ("CMakeLists.txt", "pyproject.toml", "LICENSE", "NOTICE", "python", "sgl-kernel-ext")
SUFFIXES_NOT_READ = (".pyc", ".so", ".o")
STAMP = "lk-stamp"
# What pip reports on its way; the rest of its log only matters after a failure.
STEPS = re.compile(r"Collecting|Downloading|Building|Installing|Preparing|Getting|Using cached|\[\d+/\d+\]|-- Configuring")


def place() -> Path:
    return Path(os.environ.get("LK_VENV") or ROOT / ".venv").absolute()


def python(folder: Path) -> Path:
    return folder / "bin" / "python"


def inputs(root: Path) -> list[Path]:
    files = []
    for name in INPUTS:
        path = root / name
        files += [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in files if file.is_file() and file.suffix not in SUFFIXES_NOT_READ]


def stamp(root: Path, environ: dict[str, str]) -> str:
    """Changes when, and only when, an install could come out differently."""
    digest = hashlib.sha256()
    settings = [sys.version, *(f"{name}={environ.get(name, '')}" for name in ("LK_UPSTREAM", "CXX"))]
    for text in settings:
        digest.update(text.encode() + b"\0")
    for file in inputs(root):
        digest.update(str(file.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def recorded(folder: Path) -> list[str]:
    """The stamp of the last complete build, then the extra packages that calls have asked for."""
    file = folder / STAMP
    return file.read_text().split() if file.exists() else ["none"]


def record(folder: Path, build: str, extras: list[str]) -> None:
    (folder / STAMP).write_text("\n".join([build, *extras]) + "\n")


def step_of(tail: list[str]) -> str:
    return next((line for line in reversed(tail) if STEPS.match(line)), "")


def install(label: str, folder: Path, packages: list[str], log: str) -> None:
    environ = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONUNBUFFERED="1")
    environ.pop("PYTHONPATH", None)
    command = [str(python(folder)), "-m", "pip", "install", "-v", "--progress-bar", "off", *packages]
    progress.run(label, command, log=LOGS / log, environ=environ, folder=ROOT, detail=step_of)


def make(folder: Path, build: str) -> None:
    """Makes or renews the environment; a build that was interrupted leaves no stamp."""
    extras = recorded(folder)[1:]
    if folder.exists():
        record(folder, "none", extras)
    if not (folder / "bin" / "pip").exists():
        command = [sys.executable, "-m", "venv", str(folder)]
        progress.run("Making the environment", command, log=LOGS / "venv.log", environ=dict(os.environ), folder=ROOT)
    size = "with what changed" if has_torch(folder) else "with all dependencies, about 11 GB"
    install(f"Building and installing {size}", folder, ["."], "install.log")
    record(folder, build, extras)


def has_torch(folder: Path) -> bool:
    return any(folder.glob("lib/python3*/site-packages/torch/__init__.py"))


def ensure(extras: list[str], ports: list[int] = ()) -> tuple[Path, bool]:
    """The environment's folder, and whether it was there already. Checks the machine first."""
    folder = place()
    build = stamp(ROOT, dict(os.environ))
    current = recorded(folder)[0] == build
    facts = machine.look(environment=folder, ports=ports)
    found = machine.problems(facts, builds=not current, downloads=not has_torch(folder))
    if found:
        raise progress.StepFailed("This machine is not ready:\n" + "\n".join(f"  * {each}" for each in found))
    if not current:
        make(folder, build)
    missing = sorted({*extras} - {*recorded(folder)[1:]})
    if missing:
        install(f"Installing {', '.join(missing)}", folder, missing, "extras.log")
        record(folder, build, sorted({*extras, *recorded(folder)[1:]}))
    return folder, current


def main() -> int:
    processes.own_descendants()
    try:
        folder, _ = ensure(sys.argv[1:])
        progress.say(f"  Environment: {folder}")
    except progress.StepFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    except processes.Stopped as stopped:
        return stopped.status
    finally:
        processes.end_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
