"""Whether what is installed as ``sglang`` is this project's build, whole: asked by the start and by ``doctor``.

Two distributions own the package ``sglang``: the stock one and ours. With both installed the one that came last has
overwritten files of the other, and removing either breaks what is left. Only files, their checksums and package metadata
are looked at; nothing of SGLang or torch is imported. A new thing to check is a function that returns its problems.
"""

import hashlib
import importlib
import importlib.metadata
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path

# What this package speaks; the extension says what it was built with.
ABI = 4
EXTENSION = "sgl_kernel_ext"
STAMP = "lk-build.json"
REMEDY = "pip uninstall -y sglang sglang-lk, then install the sglang-lk wheel again"


def problems() -> list[str]:
    """Every problem with its remedy; empty also where no SGLang is installed at all (a bare checkout)."""
    package = installed_package()
    if package is None:
        return []
    stamp = package / STAMP
    if not stamp.is_file():
        return [f"{package} is stock SGLang, not a build of sglang-lk: {REMEDY}"]
    build = json.loads(stamp.read_text(encoding="utf-8"))
    return [*_changed_files(package, build), *_distributions(package, build), *_extension()]


def installed_package() -> Path | None:
    """The folder ``sglang`` that Python would import, wherever this file itself lies (editable: in the checkout)."""
    spec = PathFinder.find_spec("sglang", sys.path)
    if spec is None:
        return None
    if spec.origin:
        return Path(spec.origin).parent
    # Without its __init__.py: what is left of ours after the stock distribution was removed.
    return next((Path(path) for path in spec.submodule_search_locations if (Path(path) / STAMP).is_file()), None)


def _changed_files(package: Path, build: dict) -> list[str]:
    """Edited files that are not as built: what a stock SGLang installed over ours leaves behind."""
    changed = [file for file, wanted in build["edited"].items() if _sha256(package.parent / file) != wanted]
    if not changed:
        return []
    return [
        f"{', '.join(changed)} in {package.parent}: not as sglang-lk {build['version']} installed"
        f" (was stock SGLang installed over it?): {REMEDY}"
    ]


def _sha256(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else "missing"


def _distributions(package: Path, build: dict) -> list[str]:
    """Metadata beside the package: a stock distribution, or another version of ours."""
    folder = package.parent
    found = {dist.name: dist.version for dist in importlib.metadata.distributions(path=[str(folder)])}
    said = []
    if "sglang" in found:
        said.append(
            f"stock sglang {found['sglang']} is installed in {folder} beside sglang-lk {build['version']},"
            f" and both own the package sglang: {REMEDY}"
        )
    ours = found.get("sglang-lk", build["version"])
    if ours != build["version"]:
        said.append(f"sglang-lk {ours} is installed in {folder}, but its files are of {build['version']}: {REMEDY}")
    return said


def _extension() -> list[str]:
    """The kernels load and speak the ABI of this package."""
    try:
        found = importlib.import_module(EXTENSION).ABI
    except ImportError as error:
        return [f"the kernels ({EXTENSION}) do not load ({error}): {REMEDY}"]
    if found != ABI:
        return [f"the kernels ({EXTENSION}) have ABI {found} and this package needs {ABI}: {REMEDY}"]
    return []
