"""Our own CUDA kernels without a CUDA compiler: NVRTC builds them when a server starts, the driver launches them.

Both libraries are loaded by name with ctypes; torch's wheels bring NVRTC and the card's driver brings itself, so neither
the build of this package nor a user's machine needs nvcc. A launch goes to the context and stream that torch uses in the
calling thread, and a stream under capture captures it.

A new kernel is a function in a ``.cu`` file beside this and a ``Kernel`` made from its module.
"""

import ctypes
import logging
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SUCCESS = 0  # of both libraries


class DriverError(RuntimeError):
    """A CUDA library is missing or refused something; the message says which and what."""


@cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC of the CUDA release that torch was built for, from torch's own dependencies or the system."""
    import torch

    if torch.version.cuda is None:
        raise DriverError("this torch was built without CUDA: install the one that sglang-lk's dependencies name")
    major = torch.version.cuda.split(".")[0]
    names = [f"libnvrtc.so.{major}", *_wheel_files(f"libnvrtc.so.{major}")]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            last = error
    raise DriverError(f"NVRTC does not load ({last}): install nvidia-cuda-nvrtc for CUDA {major}, which torch's wheel asks for")


def _wheel_files(name: str) -> list[str]:
    """Where the wheels nvidia-* keep a library: nvidia/cu13/lib, before CUDA 13 nvidia/cuda_nvrtc/lib."""
    try:
        import nvidia
    except ImportError:
        return []
    return [str(file) for place in nvidia.__path__ for file in sorted(Path(place).glob(f"*/lib/{name}"))]


@cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the NVIDIA driver does not load: {error}") from error


def compile(source: str, *, name: str, architecture: str) -> bytes:
    """Machine code for ``architecture`` ("sm_90"); ``DriverError`` carries the compiler's log."""
    library = nvrtc()
    program = ctypes.c_void_p()
    _nvrtc("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    options = [b"--gpu-architecture=" + architecture.encode(), b"--std=c++17"]
    failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        raise DriverError(f"{name} does not compile for {architecture}: {_output(program, 'ProgramLog').decode().strip()}")
    code = _output(program, "CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code


def _output(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _nvrtc(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _nvrtc(f"nvrtcGet{what}", program, buffer)
    return buffer.raw


def _nvrtc(function: str, *arguments: Any) -> None:
    result = getattr(nvrtc(), function)(*arguments)
    if result != _SUCCESS:
        raise DriverError(f"{function} answered {result}")


def _check(function: str, result: int) -> None:
    if result != _SUCCESS:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        raise DriverError(f"{function}: {(text.value or b'unknown error').decode()} ({result})")


class Module:
    """The kernels of one ``.cu`` file on the current device; torch has made its context."""

    def __init__(self, path: Path, *, architecture: str):
        began = time.monotonic()
        code = compile(path.read_text(), name=path.name, architecture=architecture)
        self._handle = ctypes.c_void_p()
        _check("cuModuleLoadData", driver().cuModuleLoadData(ctypes.byref(self._handle), code))
        logger.debug("%s compiled for %s in %.2f s", path.name, architecture, time.monotonic() - began)

    def kernel(self, name: str) -> "Kernel":
        function = ctypes.c_void_p()
        _check(f"cuModuleGetFunction {name}", driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()))
        return Kernel(name, function)


class Kernel:
    """One function of a module. Arguments are ctypes values, in the order and of the types of its parameters."""

    def __init__(self, name: str, function: ctypes.c_void_p):
        self.name = name
        self._function = function

    def launch(self, arguments: Sequence[Any], *, blocks: int, threads: int, stream: int) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        result = driver().cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), pointers, None
        )
        if result != _SUCCESS:
            _check(f"launch of {self.name}", result)


def launch_host_function(function: int, data: int, *, stream: int) -> None:
    """``function(data)`` by a thread of the driver, in stream order; it must call no CUDA and take no lock of Python's."""
    result = driver().cuLaunchHostFunc(ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(data))
    if result != _SUCCESS:
        _check("cuLaunchHostFunc", result)
