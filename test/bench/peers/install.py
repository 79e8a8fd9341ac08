"""Puts the peers into a cache folder of their own: kt-kernel's wheel without its needs, llama.cpp's CPU backend built.

Packages come through pip by name and version, however pip is set up here; no address is kept. llama.cpp is on PyPI as the
source inside llama-cpp-python, so its backend is compiled, with the options of its own row for this processor. ``pack``
makes a folder for a machine without a network. A newer peer is a new version number here, and a run of the checks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from os import environ
from pathlib import Path

HERE = Path(__file__).resolve().parent
KT_VERSION, LLAMA_VERSION = "0.7.2", "0.3.36"
MOST_BYTES = 50 << 20  # of a packed folder

_AVX512 = {"avx512f", "avx512bw"}
KT_VARIANTS = {  # kt-kernel's extensions, best first, and the processor flags it asks for
    "amx": {"amxtile", "amxint8", "amxbf16", "avx512vnni", "avx512vbmi", "avx512bf16"} | _AVX512,
    "avx512_bf16": {"avx512vnni", "avx512vbmi", "avx512bf16"} | _AVX512,
    "avx512_vbmi": {"avx512vnni", "avx512vbmi"} | _AVX512,
    "avx512_vnni": {"avx512vnni"} | _AVX512,
    "avx512_base": _AVX512,
    "avx2": {"avx2"},
}
_HASWELL = ("SSE42", "AVX", "F16C", "FMA", "AVX2", "BMI2")
_ICELAKE = (*_HASWELL, "AVX512", "AVX512_VBMI", "AVX512_VNNI")
GGML_BUILDS = {  # rows of ggml's own table of CPU variants, best first
    "sapphirerapids": (*_ICELAKE, "AVX512_BF16", "AMX_TILE", "AMX_INT8"),
    "zen4": (*_ICELAKE, "AVX512_BF16"),
    "icelake": _ICELAKE,
    "skylakex": (*_HASWELL, "AVX512"),
    "haswell": _HASWELL,
}
_FLAG = {"SSE42": "sse42", "AVX512": "avx512f"}  # where the processor's flag is not the option's name


def cpu_flags() -> frozenset[str]:
    """Flags of the first processor, as they are and without underscores (systems differ in those)."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = line.split(":", 1)[1].split()
            return frozenset(flags) | {flag.replace("_", "") for flag in flags}
    raise RuntimeError("/proc/cpuinfo lists no flags: the peers are measured on x86-64 only")


def ggml_build(flags: frozenset[str]) -> str:
    """The best build for a processor with these flags."""
    for name, options in GGML_BUILDS.items():
        if all(_FLAG.get(option, option.lower().replace("_", "")) in flags for option in options):
            return name
    raise RuntimeError("the peers need AVX2, FMA, F16C and BMI2")


def cache_folder() -> Path:
    """``PEERS_CACHE``, else the folder beside this package where ``pack`` made it, else the user's cache."""
    if "PEERS_CACHE" in environ:
        return Path(environ["PEERS_CACHE"]).expanduser().resolve()
    packed = HERE.parent / "cache"
    if packed.is_dir():
        return packed
    return Path(environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "sglang-lk-peers"


def kt_folder(cache: Path, python: str = "") -> Path:
    return cache / f"kt-{KT_VERSION}-cp{(python or '%d.%d' % sys.version_info[:2]).replace('.', '')}"


def ggml_folder(cache: Path, build: str = "") -> Path:
    return cache / f"ggml-{LLAMA_VERSION}-{build or ggml_build(cpu_flags())}"


def ensure(cache: Path, say=lambda text: None) -> None:
    """Install what the cache lacks for this Python and this processor."""
    wanted = {
        kt_folder(cache): lambda: install_kt(cache),
        ggml_folder(cache): lambda: install_ggml(cache, ggml_build(cpu_flags())),
        cache / "park.so": lambda: install_park(cache),
    }
    missing = [path for path in wanted if not path.exists()]
    if missing:
        require_tools()
    for path in missing:
        say(f"installing {path.name} into {cache}")
        wanted[path]()


def require_tools() -> None:
    absent = [tool for tool in ("cmake", "c++", "cc") if shutil.which(tool) is None]
    if absent:
        raise RuntimeError(
            f"{', '.join(absent)} not found: building llama.cpp's backend needs cmake and a C++ compiler "
            "(apt-get install cmake g++); or carry a folder that `pack` made on another machine"
        )


def _download(folder: Path, requirement: str, *options: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *options, requirement]
    subprocess.run(command, check=True)
    (file,) = folder.iterdir()
    return file


def install_kt(cache: Path, python: str = "") -> None:
    """The extensions of kt-kernel's wheel and the libraries packed with it; ``python`` as in 3.12, this one by default."""
    options = ["--only-binary=:all:"]
    if python:
        options += ["--python-version", python, "--implementation", "cp", "--platform", "manylinux_2_35_x86_64"]
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download(Path(scratch), f"kt-kernel=={KT_VERSION}", *options)
        made = _fresh(kt_folder(cache, python))
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(("kt_kernel/_kt_kernel_ext_", "kt_kernel.libs/"))]
            archive.extractall(made, names)
    made.rename(kt_folder(cache, python))


def install_ggml(cache: Path, build: str) -> None:
    """llama.cpp's ggml from llama-cpp-python's source, as two shared libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "download").mkdir()
        source = _download(
            place / "download", f"llama-cpp-python=={LLAMA_VERSION}", "--no-binary=llama-cpp-python"
        )
        with tarfile.open(source) as archive:
            members = [m for m in archive.getmembers() if "/vendor/llama.cpp/ggml/" in m.name]
            archive.extractall(place, members)
        (ggml,) = place.glob("*/vendor/llama.cpp/ggml")
        _compile(place, ggml, build)
        made = _fresh(ggml_folder(cache, build))
        for name in ("libggml-base.so.0", "libggml-cpu.so.0"):
            (library,) = {path.resolve() for path in (place / "build").rglob(name)}
            shutil.copy(library, made / name)
    made.rename(ggml_folder(cache, build))


def _compile(place: Path, ggml: Path, build: str) -> None:
    # A project around ggml: its own needs files that the package leaves out.
    (place / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.14)\nproject(peer C CXX)\nadd_subdirectory({ggml} ggml)\n"
    )
    options = [f"-DGGML_{option}={'ON' if option in GGML_BUILDS[build] else 'OFF'}" for option in GGML_BUILDS["sapphirerapids"]]
    options += ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=OFF", "-DGGML_CCACHE=OFF"]
    options += ["-DGGML_LLAMAFILE=ON", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON", "-DCMAKE_BUILD_RPATH=$ORIGIN"]
    folder = str(place / "build")
    for command in (
        ["cmake", "-S", str(place), "-B", folder, *options],
        ["cmake", "--build", folder, "--target", "ggml-cpu", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def install_park(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / "park.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(HERE / "park.c")], check=True)


def _fresh(final: Path) -> Path:
    """A folder to fill; it gets its real name when it is complete, so a broken install is never taken for one."""
    made = final.with_name(final.name + ".part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    return made


def pack(target: Path, cache: Path, python: str, builds: list[str], extension: Path | None, say) -> int:
    """Fill ``target`` with this package and what it needs where nothing can be fetched; the bytes of it.

    ``python`` is that machine's, ``builds`` are names of ``GGML_BUILDS``; kt-kernel's extension of the same
    instruction set goes with each. Run it there as ``python3 peers run``, in ``target``.
    """
    require_tools()
    if not kt_folder(cache, python).exists():
        install_kt(cache, python)
    for build in builds:
        if not ggml_folder(cache, build).exists():
            say(f"building {ggml_folder(cache, build).name}")
            install_ggml(cache, build)
    install_park(cache)
    shutil.copytree(HERE, target / "peers", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    kept = target / "cache"
    kt, libraries = kt_folder(kept, python), "kt_kernel.libs"
    shutil.copytree(kt_folder(cache, python) / libraries, kt / libraries, dirs_exist_ok=True)
    (kt / "kt_kernel").mkdir(exist_ok=True)
    for build in builds:
        shutil.copytree(ggml_folder(cache, build), ggml_folder(kept, build), dirs_exist_ok=True)
        shutil.copy(_gomp(ggml_folder(cache, build)), ggml_folder(kept, build) / "libgomp.so.1")
        for file in (kt_folder(cache, python) / "kt_kernel").glob(f"_kt_kernel_ext_{kt_variant(build)}.*"):
            shutil.copy(file, kt / "kt_kernel")
    shutil.copy(cache / "park.so", kept)
    if extension:
        shutil.copy(extension, target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if size > MOST_BYTES:
        raise RuntimeError(f"{target} holds {size >> 20} MiB, more than {MOST_BYTES >> 20}: name fewer --cpu, or an empty folder")
    return size


def kt_variant(build: str) -> str:
    """kt-kernel's extension for the processors of a ggml build."""
    flags = {_FLAG.get(option, option.lower().replace("_", "")) for option in GGML_BUILDS[build]} | {"avx512bw", "amxbf16"}
    return next(name for name, needs in KT_VARIANTS.items() if needs <= flags)


def _gomp(folder: Path) -> Path:
    """The OpenMP runtime that the backend in ``folder`` is bound to."""
    listed = subprocess.run(["ldd", str(folder / "libggml-cpu.so.0")], check=True, capture_output=True, text=True).stdout
    return Path(next(line.split()[2] for line in listed.splitlines() if "libgomp" in line))
