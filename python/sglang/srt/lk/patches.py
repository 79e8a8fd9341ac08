"""The few places where upstream is changed while it runs, because they lie before or around the one edited line.

Nothing here is imported or changed with the switch off. Each patch waits for its module to be imported. Most check that
what they replace is there with the expected arguments (``expect``), and fail the start by name if not; the rest only wrap
what they find by its name, and where that is gone Python's own error ends the start. This module imports nothing heavy:
``boot`` calls ``install`` before torch is there.

A new patch is a function in ``PATCHES`` with the module it waits for; say in its docstring why an edit would not do.
"""

import functools
import importlib.abc
import importlib.machinery
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from sglang.srt.lk import cpu_formats, cpu_models, padding
from sglang.srt.lk.cpu_formats import PatchError, expect

logger = logging.getLogger(__name__)


def end_the_start(module: ModuleType) -> None:
    """Around ``ModelRunner.load_model``: what keeps the experts from being served ends the process tree with one
    message, and a good load ends with the table of roles. Upstream would print a traceback per rank instead."""
    original = expect(module.ModelRunner, "load_model", ["self"])

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
    original = expect(module.DefaultModelLoader, "_prepare_weights", arguments)

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
    original = expect(module.DefaultModelLoader, "__init__", ["self", "load_config"])

    @functools.wraps(original)
    def __init__(self: Any, load_config: Any) -> None:
        original(self, load_config)
        chosen = load_config.model_loader_extra_config
        if not chosen and load_config.load_format != "instanttensor":  # which takes no option that it does not know
            load_config.model_loader_extra_config = {"enable_multithread_load": False}

    module.DefaultModelLoader.__init__ = __init__


def allow_cut_blocks(module: ModuleType) -> None:
    """Upstream refuses FP8 models whose ranks cut a block of scales, whoever computes the experts. Here each layer says so for
    itself: ours in ``compat``, upstream's own when its weights are created; the widths are asserted by ``FusedMoE``."""
    if not hasattr(module, "check_quantized_moe_compatibility"):
        raise PatchError(f"Hybrid MoE: upstream's {module.__name__} has no check_quantized_moe_compatibility; reinstall sglang-lk")
    module.check_quantized_moe_compatibility = lambda **sizes: None


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


_BACKENDS = "sglang.srt.model_executor.runner_backend"
_QUANTIZATION = "sglang.srt.layers.quantization"
PATCHES: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    "sglang.srt.model_executor.model_runner": (end_the_start,),
    "sglang.srt.model_executor.model_runner_components.moe_ep_setup": (allow_cut_blocks,),
    "sglang.srt.model_loader.loader": (check_files_first, read_one_file_at_a_time),
    f"{_BACKENDS}.full_cuda_graph_backend": (padding.tell_graphs("FullCudaGraphBackend"),),
    f"{_BACKENDS}.breakable_cuda_graph_backend": (padding.tell_graphs("BreakableCudaGraphBackend"),),
    "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner": (padding.tell_first_step,),
    "sglang.srt.layers.moe.fused_moe_triton.layer": (say_what_cannot_be_chosen,),
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors": (
        cpu_formats.choose_compressed_tensors,
        cpu_formats.decode_linear("CompressedTensorsConfig"),
        cpu_formats.admit_types("CompressedTensorsConfig"),
    ),
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe": (cpu_formats.accept_nvfp4_scheme,),
    f"{_QUANTIZATION}.modelopt_quant": (
        cpu_formats.accept_modelopt_nvfp4,
        cpu_formats.admit_types("ModelOptFp4Config"),
        cpu_formats.decode_linear("ModelOptFp8Config"),
        cpu_formats.admit_types("ModelOptFp8Config"),
    ),
    f"{_QUANTIZATION}.mxfp4": (cpu_formats.admit_types("Mxfp4Config"),),
    f"{_QUANTIZATION}.fp8": (cpu_formats.decode_linear("Fp8Config"), cpu_formats.admit_types("Fp8Config")),
    f"{_QUANTIZATION}.w8a8_fp8": (cpu_formats.admit_types("W8A8Fp8Config"),),
    f"{_QUANTIZATION}.awq.awq": (
        cpu_formats.choose_awq,
        cpu_formats.decode_linear("AWQConfig"),
        cpu_formats.admit_types("AWQConfig"),
        cpu_formats.admit_types("AWQCPUConfig"),
    ),
    f"{_QUANTIZATION}.gptq.gptq": (
        cpu_formats.choose_gptq,
        cpu_formats.decode_linear("CPUGPTQConfig"),
        cpu_formats.remember_symmetry,
        cpu_formats.admit_types("CPUGPTQConfig"),
    ),
    f"{_QUANTIZATION}.auto_round": (
        cpu_formats.allow_auto_round,
        cpu_formats.decode_linear("AutoRoundConfig"),
        cpu_formats.admit_types("AutoRoundConfig"),
    ),
    _QUANTIZATION: (cpu_formats.list_for_cpus,),
    "sglang.srt.configs.update_config": (cpu_formats.keep_expert_sizes,),
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
