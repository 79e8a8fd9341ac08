"""Quantized experts on a CPU: upstream's configurations, where they refuse to say how experts are written or misread it.

Upstream's own kernels for these formats want a GPU or AMX; the experts' are ours, and of upstream's classes only what they know
of the checkpoint is used. Nothing changes with a GPU. Each function is a patch for the module that it names in
``patches.PATCHES``. Quantized layers beside the experts are ``cpu_linear``'s business.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


BLACKWELL = 100  # the compute capability that NVFP4 asks for


class PatchError(RuntimeError):
    """Upstream is not what a patch was written for."""


def choose_compressed_tensors(module: ModuleType) -> None:
    """compressed-tensors asks the GPU's capability to choose between schemes; without a GPU there is none to ask. Of NVFP4's
    two schemes the CPU experts read the weight-only one; what every GPU of the last years has is no obstacle."""
    original = expect(module.CompressedTensorsConfig, "_check_scheme_supported", ["self", "min_capability", "error"])

    @functools.wraps(original)
    def _check_scheme_supported(self: Any, min_capability: int, error: bool = True) -> bool:
        if not on_cpu() or (error and min_capability >= BLACKWELL):
            return original(self, min_capability, error)
        return min_capability < BLACKWELL

    module.CompressedTensorsConfig._check_scheme_supported = _check_scheme_supported


def accept_nvfp4_scheme(module: ModuleType) -> None:
    """0.5.21 knows one NVFP4 scheme, which refuses to exist off Blackwell; here it only says how the experts are written."""
    scheme = module.CompressedTensorsW4A4Nvfp4MoE
    original = expect(scheme, "__init__", ["self"])

    @functools.wraps(original)
    def __init__(self: Any) -> None:
        if not on_cpu():
            original(self)
            return
        self.group_size = 16
        self.use_flashinfer_trtllm = False

    scheme.__init__ = __init__


def accept_modelopt_nvfp4(module: ModuleType) -> None:
    """ModelOpt's NVFP4 method refuses to exist off Blackwell; here it only says how the experts are written."""
    method = module.ModelOptNvFp4FusedMoEMethod
    original = expect(method, "__init__", ["self", "quant_config"])

    @functools.wraps(original)
    def __init__(self: Any, quant_config: Any) -> None:
        if not on_cpu():
            original(self, quant_config)
            return
        self.quant_config = quant_config
        self.enable_flashinfer_trtllm_moe = False

    method.__init__ = __init__


def choose_awq(module: ModuleType) -> None:
    """On a CPU upstream's configuration leaves AWQ experts out, as if they were BF16, or asks for AMX."""
    for config in (module.AWQConfig, module.AWQCPUConfig):
        config.get_quant_method = _choosing(config, module.AWQMoEMethod, lambda self, prefix: _named(prefix, self.modules_to_not_convert))


def choose_gptq(module: ModuleType) -> None:
    """On a CPU upstream quantizes every layer of a GPTQ checkpoint, whatever its ``dynamic`` rules leave out, and its experts
    ask for AMX."""
    from sglang.srt.layers.quantization.utils import get_dynamic_override

    def left_out(self: Any, prefix: str) -> bool:
        return get_dynamic_override(self, layer_name=prefix) is False

    config = module.CPUGPTQConfig
    config.get_quant_method = _choosing(config, module.GPTQMoEMethod, left_out)


def _choosing(config: type, method: type, left_out: Callable[[Any, str], bool]) -> Any:
    original = expect(config, "get_quant_method", ["self", "layer", "prefix"])

    @functools.wraps(original)
    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        if not on_cpu() or not isinstance(layer, (FusedMoE, LinearBase)):
            return original(self, layer, prefix)
        if left_out(self, prefix):
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        return method(self) if isinstance(layer, FusedMoE) else original(self, layer, prefix)

    return get_quant_method


def decode_linear(name: str) -> Callable[[ModuleType], None]:
    """On a CPU without AMX upstream has no kernel for quantized layers beside the experts: they are decoded after loading."""

    def patch(module: ModuleType) -> None:
        config = getattr(module, name)
        original = config.get_quant_method

        @functools.wraps(original)
        def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
            from sglang.srt.layers.linear import LinearBase

            method = original(self, layer, prefix)
            if not isinstance(layer, LinearBase) or not on_cpu() or _with_amx():
                return method
            from sglang.srt.lk import cpu_linear

            return cpu_linear.decoded(method, layer)

        config.get_quant_method = get_quant_method

    return patch


def _with_amx() -> bool:
    from sglang.srt.utils import cpu_has_amx_support

    return cpu_has_amx_support()


def _named(prefix: str, modules: Sequence[str]) -> bool:
    return any(module in prefix for module in modules)


def allow_auto_round(module: ModuleType) -> None:
    """AutoRound wants AMX on a CPU, for kernels that are not used here."""
    original = expect(module.AutoRoundConfig, "check_cpu_support", ["self", "weight_bits"])

    @functools.wraps(original)
    def check_cpu_support(self: Any, weight_bits: int) -> None:
        if not on_cpu() or weight_bits != 4:
            original(self, weight_bits)

    module.AutoRoundConfig.check_cpu_support = check_cpu_support


def remember_symmetry(module: ModuleType) -> None:
    """Upstream's configuration forgets ``sym``, without which zero points would be kept that are all the same."""
    original = module.GPTQConfig.__dict__["from_config"].__func__

    @functools.wraps(original)
    def from_config(cls: Any, config: dict[str, Any]) -> Any:
        made = original(cls, config)
        made.is_sym = bool(config.get("sym"))
        return made

    module.GPTQConfig.from_config = classmethod(from_config)


def admit_types(name: str) -> Callable[[ModuleType], None]:
    """Upstream's quantized kernels want certain 16-bit activations; ours take every float type, and so do the unquantized
    layers around them on a CPU."""

    def patch(module: ModuleType) -> None:
        config = getattr(module, name)
        original = config.__dict__["get_supported_act_dtypes"]
        function = getattr(original, "__func__", original)

        @functools.wraps(function)
        def get_supported_act_dtypes(cls: Any) -> list[Any]:
            import torch

            admitted = list(function(cls))
            return list(dict.fromkeys([*admitted, torch.bfloat16, torch.float16, torch.float32])) if on_cpu() else admitted

        config.get_supported_act_dtypes = classmethod(get_supported_act_dtypes)

    return patch


def keep_expert_sizes(module: ModuleType) -> None:
    """On a CPU upstream widens experts until each rank has whole blocks, groups or 32 columns, and knows square blocks only.
    Ours are packed as wide as the checkpoint has them."""
    widen, padding = module.update_intermediate_size, module.get_moe_padding_size

    @functools.wraps(widen)
    def update_intermediate_size(model_config: Any, attr_name: str, intermediate_padding_size: int) -> Any:
        if attr_name == _expert_size(model_config):
            return model_config
        return widen(model_config, attr_name, intermediate_padding_size)

    @functools.wraps(padding)
    def get_moe_padding_size(weight_block_size: Sequence[int] | None) -> int:
        return padding([max(weight_block_size)] if weight_block_size else weight_block_size)

    module.update_intermediate_size = update_intermediate_size
    module.get_moe_padding_size = get_moe_padding_size


def _expert_size(model_config: Any) -> str | None:
    """The setting that holds the width of the experts, in a model that has any."""
    config = getattr(model_config, "hf_text_config", model_config)
    if getattr(config, "moe_intermediate_size", None):
        return "moe_intermediate_size"
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    return "intermediate_size" if any(getattr(config, name, None) for name in counts) else None


def list_for_cpus(module: ModuleType) -> None:
    """On a CPU with AMX upstream admits only the formats that its own kernels have; the experts of these are ours."""
    for name in ("modelopt_fp4", "modelopt_fp8", "mxfp8", "w8a8_fp8"):
        module.CPU_QUANTIZATION_METHODS.setdefault(name, module.BASE_QUANTIZATION_METHODS[name])


def on_cpu() -> bool:
    """Whether upstream runs its CPU platform, which ``SGLANG_USE_CPU_ENGINE`` chooses."""
    from sglang.srt.utils import is_cpu

    return is_cpu()


def expect(owner: type, name: str, arguments: Sequence[str]) -> Any:
    """The function to replace, if its arguments are still the expected ones."""
    function = owner.__dict__.get(name)
    found = list(inspect.signature(function).parameters) if inspect.isfunction(function) else None
    if found != list(arguments):
        raise PatchError(
            f"Hybrid MoE: upstream's {owner.__module__}.{owner.__name__}.{name} takes {found}, expected {list(arguments)}: "
            "this sglang is not the one that sglang-lk was built from; reinstall sglang-lk"
        )
    return function
