"""The few places where upstream is changed while it runs, because they lie before or around the one edited line.

Nothing here is imported or changed with the switch off. Each patch waits for its module to be imported, checks that what
it replaces still has the expected arguments, and fails the start by name if it has not. This module imports nothing
heavy: ``boot`` calls ``install`` before torch is there.

A new patch is a function in ``PATCHES`` with the module it waits for; say in its docstring why an edit would not do.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from sglang.srt.lk import cpu_models

logger = logging.getLogger(__name__)


class PatchError(RuntimeError):
    """Upstream is not what a patch was written for."""


def end_the_start(module: ModuleType) -> None:
    """Around ``ModelRunner.load_model``: what keeps the experts from being served ends the process tree with one
    message, and a good load ends with the table of roles. Upstream would print a traceback per rank instead."""
    original = _expect(module.ModelRunner, "load_model", ["self"])

    @functools.wraps(original)
    def load_model(self: Any) -> Any:
        from sglang.srt.lk import method

        try:
            result = original(self)
            method.finish(self.model, is_draft=bool(self.is_draft_worker))
        except method.PROBLEMS as problem:
            stop(problem)
        return result

    module.ModelRunner.load_model = load_model


def check_files_first(module: ModuleType) -> None:
    """After ``DefaultModelLoader._prepare_weights``, the one place that knows which files will be read: a missing or
    cut-off file stops the start before any weight is loaded."""
    arguments = ["self", "model_name_or_path", "revision", "fall_back_to_pt", "allow_patterns_overrides"]
    original = _expect(module.DefaultModelLoader, "_prepare_weights", arguments)

    @functools.wraps(original)
    def _prepare_weights(self: Any, *args: Any, **kwargs: Any) -> tuple[str, list[str], bool]:
        from pathlib import Path

        from sglang.srt.lk import loading

        try:
            folder, names, use_safetensors = original(self, *args, **kwargs)
        except (RuntimeError, ValueError, OSError) as error:  # upstream's own checks, which differ between releases
            raise loading.LoadError(f"the checkpoint cannot be read: {error}") from error
        if use_safetensors:
            loading.files.check(Path(folder), [Path(name) for name in names])
        return folder, names, use_safetensors

    module.DefaultModelLoader._prepare_weights = _prepare_weights


def read_one_file_at_a_time(module: ModuleType) -> None:
    """After ``DefaultModelLoader.__init__``: files follow each other, unless ``--model-loader-extra-config`` says how to
    load. Upstream opens nine at once and touches every tensor of each, which keeps 64 KB per tensor of the waiting files
    resident (1.4 files of four, measured) and gains nothing where all threads pack one tensor together."""
    original = _expect(module.DefaultModelLoader, "__init__", ["self", "load_config"])

    @functools.wraps(original)
    def __init__(self: Any, load_config: Any) -> None:
        original(self, load_config)
        chosen = load_config.model_loader_extra_config
        if not chosen and load_config.load_format != "instanttensor":  # which takes no option that it does not know
            load_config.model_loader_extra_config = {"enable_multithread_load": False}

    module.DefaultModelLoader.__init__ = __init__


def say_what_cannot_be_chosen(module: ModuleType) -> None:
    """Around ``FusedMoE.__init__``: when upstream itself finds no method for the layer's format, the message is ours,
    with the layer and the formats that do work."""
    original = module.FusedMoE.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            if getattr(self, "quant_method", None) is not None or not hasattr(self, "moe_runner_config"):
                raise
            from sglang.srt.lk import compat

            raise compat.Refusal(
                getattr(self, "layer_name", None) or "a MoE layer",
                [f"upstream has no method for its format here ({error}); supported are {compat.labels()}"],
            ) from error

    module.FusedMoE.__init__ = __init__


def choose_nvfp4_without_a_gpu(module: ModuleType) -> None:
    """compressed-tensors asks the GPU's capability to choose between two schemes; without a GPU there is none to ask,
    and it is the weight-only scheme that the CPU experts read."""
    original = _expect(module.CompressedTensorsConfig, "_check_scheme_supported", ["self", "min_capability", "error"])

    @functools.wraps(original)
    def _check_scheme_supported(self: Any, min_capability: int, error: bool = True) -> bool:
        return False if _without_gpu() and not error else original(self, min_capability, error)

    module.CompressedTensorsConfig._check_scheme_supported = _check_scheme_supported


def accept_nvfp4_scheme(module: ModuleType) -> None:
    """0.5.21 knows one NVFP4 scheme, which refuses to exist off Blackwell; here it only says how the experts are written."""
    scheme = module.CompressedTensorsW4A4Nvfp4MoE
    original = _expect(scheme, "__init__", ["self"])

    @functools.wraps(original)
    def __init__(self: Any) -> None:
        if not _without_gpu():
            original(self)
            return
        self.group_size = 16
        self.use_flashinfer_trtllm = False

    scheme.__init__ = __init__


def accept_modelopt_nvfp4(module: ModuleType) -> None:
    """ModelOpt's NVFP4 method refuses to exist off Blackwell; here it only says how the experts are written."""
    method = module.ModelOptNvFp4FusedMoEMethod
    original = _expect(method, "__init__", ["self", "quant_config"])

    @functools.wraps(original)
    def __init__(self: Any, quant_config: Any) -> None:
        if not _without_gpu():
            original(self, quant_config)
            return
        self.quant_config = quant_config
        self.enable_flashinfer_trtllm_moe = False

    method.__init__ = __init__


def admit_float32(name: str) -> Callable[[ModuleType], None]:
    """Upstream's quantized kernels want 16-bit activations; ours take 32-bit ones too, and so do the unquantized layers
    around them on a CPU."""

    def patch(module: ModuleType) -> None:
        config = getattr(module, name)
        original = config.__dict__["get_supported_act_dtypes"]
        function = getattr(original, "__func__", original)

        @functools.wraps(function)
        def get_supported_act_dtypes(cls: Any) -> list[Any]:
            import torch

            admitted = list(function(cls))
            return [*admitted, torch.float32] if _without_gpu() and torch.float32 not in admitted else admitted

        config.get_supported_act_dtypes = classmethod(get_supported_act_dtypes)

    return patch


def list_modelopt_for_cpus(module: ModuleType) -> None:
    """On a CPU with AMX upstream admits only the formats that its own kernels have; the experts of this one are ours."""
    module.CPU_QUANTIZATION_METHODS.setdefault("modelopt_fp4", module.BASE_QUANTIZATION_METHODS["modelopt_fp4"])


_QUANTIZATION = "sglang.srt.layers.quantization"
PATCHES: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    "sglang.srt.model_executor.model_runner": (end_the_start,),
    "sglang.srt.model_loader.loader": (check_files_first, read_one_file_at_a_time),
    "sglang.srt.layers.moe.fused_moe_triton.layer": (say_what_cannot_be_chosen,),
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors": (
        choose_nvfp4_without_a_gpu,
        admit_float32("CompressedTensorsConfig"),
    ),
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe": (accept_nvfp4_scheme,),
    f"{_QUANTIZATION}.modelopt_quant": (accept_modelopt_nvfp4, admit_float32("ModelOptFp4Config")),
    f"{_QUANTIZATION}.mxfp4": (admit_float32("Mxfp4Config"),),
    _QUANTIZATION: (list_modelopt_for_cpus,),
    "sglang.srt.layers.attention.torch_native_backend": (cpu_models.attend_with_sinks,),
    "sglang.srt.models.deepseek_common.attention_backend_handler": (cpu_models.absorb_latent_attention,),
    "sglang.srt.models.minimax_m2": (cpu_models.normalise_queries_and_keys,),
    "sglang.srt.models.qwen2_moe": (cpu_models.gate_shared_expert,),
}


def install() -> None:
    """Patch each module as soon as it is imported; calling it again changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, patches in PATCHES.items():
        if name in sys.modules:
            _apply(patches, sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def stop(problem: BaseException) -> NoReturn:
    """End the server with one message. Only a scheduler has a launcher to tell; elsewhere the problem is raised."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is None:
        raise problem
    sys.stderr.write("\n")  # upstream's progress bar may have left the line open
    logger.error("%s", problem)
    os.kill(parent.pid, signal.SIGQUIT)  # as upstream's scheduler does: the launcher ends the whole tree
    os._exit(1)  # at once: unwinding would redraw the progress bar below the message


def _without_gpu() -> bool:
    from sglang.srt.utils import is_cpu

    return is_cpu()


def _expect(owner: type, name: str, arguments: Sequence[str]) -> Any:
    """The function to replace, if its arguments are still the expected ones."""
    function = owner.__dict__.get(name)
    found = list(inspect.signature(function).parameters) if inspect.isfunction(function) else None
    if found != list(arguments):
        raise PatchError(
            f"Hybrid MoE: upstream's {owner.__module__}.{owner.__name__}.{name} takes {found}, expected {list(arguments)}: "
            "this sglang is not the one that sglang-lk was built from; reinstall sglang-lk"
        )
    return function


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``PATCHES`` with everybody else's finders and has them patched after they ran."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, PATCHES[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    """Stands before the module's own loader until the module has run; one of its own, since loaders may be shared."""

    def __init__(self, own: Any, patches: Sequence[Callable[[ModuleType], None]]):
        self._own = own
        self._patches = patches

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        _apply(self._patches, module)


def _apply(patches: Sequence[Callable[[ModuleType], None]], module: ModuleType) -> None:
    for patch in patches:
        patch(module)
