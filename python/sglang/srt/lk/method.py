"""The fused-MoE method that stands where upstream's stood, for layers whose experts our kernels compute.

``make_for_layer`` is what the edit in ``FusedMoE.__init__`` calls: it gives a layer its role, refuses what cannot be
served and wraps upstream's method, which is kept only to say what it was. Upstream's own storage for the experts is
never allocated. ``finish`` closes a model's load: every MoE layer taken over and whole, then one table in the log.

A new role is a branch in ``make_for_layer``; routing and activation facts belong to ``compat``.
"""

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch

from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.lk import boot, compat, driver, formats, handover, kernels, loading, padding, roles, telemetry
from sglang.srt.lk.formats import Geometry
from sglang.srt.lk.store import LayerStore, Progress

logger = logging.getLogger(__name__)

# What a user can be told in one message; everything else is a bug and keeps its traceback.
PROBLEMS = (compat.Refusal, loading.LoadError, roles.RolesError, kernels.KernelError, driver.DriverError)

# Models that apply the routed scaling factor after the experts wherever these do not run on a GPU, although they hand it to
# the layer as well. Everywhere else the layer's runner applies it, and so do we.
SCALE_THEMSELVES_ON_CPU = frozenset(f"sglang.srt.models.{name}" for name in ("deepseek_v2", "glm4_moe", "glm4_moe_lite"))

_progress = Progress()
_layers: dict[roles.Key, tuple[roles.Layer, LayerStore | None]] = {}
_drafts = 0  # that are loaded; several (multi-layer MTP) are built and loaded one after the other
_handover: handover.Handover | None = None


class HybridMoEMethod(FusedMoEMethodBase, torch.nn.Module):
    """Experts in host memory, computed by the CPU kernels.

    An ``nn.Module`` because the methods it replaces may be one, and a layer lets only a module follow a module.
    """

    runner = None

    def __init__(self, base_method: Any, *, name: str, format: formats.ExpertFormat):
        torch.nn.Module.__init__(self)
        self.base_method = base_method
        self.name = name
        self.format = format
        self.store: LayerStore | None = None
        self.scale = 1.0
        self.weight_on_input = False

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Take the packed memory, and register an empty parameter under each name that the model's loader looks up."""
        bias = bool(extra.get("with_bias"))
        geometry = Geometry(
            experts=num_experts,
            hidden=hidden_size,
            width=intermediate_size_per_partition,
            rank=layer.moe_tp_rank,
            ranks=layer.moe_tp_size,
            dtype=params_dtype,
            stored=loading.stored_types(_folder(is_draft=_is_draft(layer)), layer.layer_id),
        )
        self.store = _store(layer, name=self.name, format=self.format, geometry=geometry, bias=bias)
        config = layer.moe_runner_config
        interleaved = config.gemm1_alpha is not None and getattr(config, "gate_up_interleaved", True)
        for name, field in self.format.fields(bias=bias).items():
            stub = torch.nn.Parameter(torch.empty(0, dtype=field.dtype, device="cpu"), requires_grad=False)
            stub.weight_loader = loading.ExpertLoader(
                self.store, name, field, interleaved=interleaved, presharded=bool(layer.use_presharded_weights)
            )
            layer.register_parameter(name, stub)
        layer._derived_weight_cache_error = (
            "Hybrid MoE: experts are packed in host memory and cannot be replaced while serving; restart the server"
        )

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """No runner of upstream's: only what the routed sum needs to know is kept."""
        self.weight_on_input = bool(moe_runner_config.apply_router_weight_on_input)
        self.scale = moe_runner_config.routed_scaling_factor or 1.0

    @property
    def rest(self) -> dict[str, Any]:
        """What a forward pass needs to know beside rows and routing."""
        return {"scale": self.scale, "weight_on_input": self.weight_on_input}

    def get_moe_runner_backend(self, layer: Any) -> None:
        """None: a direct kernel that reads standard routing with this rank's expert ids."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """The layer is whole, or the start ends here."""
        store = self.store
        assert store is not None, f"{self.name}: create_weights has not run"
        if store.complete:
            return
        if boot.current().ts_skipgemm:
            store.complete = True
            return
        if _args().load_format == "dummy":
            store.fill_with_samples(seed=layer.layer_id)
        problem = loading.missing_error(store)
        if problem is not None:
            raise problem
        store.complete = True

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
        from sglang.srt.layers.moe.topk import TopKOutputChecker

        topk = dispatch_output.topk_output
        if TopKOutputChecker.format_is_bypassed(topk):
            topk = topk.to_standard(layer_id=layer.layer_id)
        if not TopKOutputChecker.format_is_standard(topk):
            raise kernels.KernelError(f"Hybrid MoE: {self.name}: routing came as {type(topk).__name__}, not as a standard top-k")
        hidden, routing = dispatch_output.hidden_states, (topk.topk_ids, topk.topk_weights)
        on_gpu = hidden.device.type != "cpu"
        if boot.current().ts_skipgemm or (on_gpu and _warms_up()):
            return StandardCombineInput(hidden_states=torch.zeros_like(hidden))
        if not on_gpu:
            return StandardCombineInput(hidden_states=self.store.experts.forward(hidden, *routing, **self.rest))
        real = padding.real_rows(hidden.shape[0])
        with _range(self.name):
            out = _handover.forward(self.store.experts, hidden, *routing, name=self.name, real=real, **self.rest)
        return StandardCombineInput(hidden_states=out)


def make_for_layer(layer: Any, base_method: Any, prefix: str) -> Any:
    """The method for one layer: upstream's own for a resident layer, ours for every other."""
    args, config = _args(), boot.current()
    is_draft = _is_draft(layer)
    name = "draft model's " * is_draft + (prefix or f"MoE layer {layer.layer_id}")
    if all(key.is_draft != is_draft for key in _layers):
        count = None if is_draft else _layer_count()
        roles.check_list(config, device=compat.device(args), layer_count=count, draft=_draft_kind(args) if is_draft else None)
    format, reason = _format(base_method, getattr(layer, "scheme", None))
    facts = _facts(layer, format.label if format else type(base_method).__name__)
    if roles.role_of(facts, config, device=compat.device(args)) is roles.Role.RESIDENT:
        _layers[facts.key] = (facts, None)
        return base_method
    compat.check(layer=layer, name=name, method=base_method, format=format, args=args, reason=reason)
    if compat.device(args) == "cuda":
        _without_prefill_graphs()
    assert format is not None, "compat.check refuses unknown formats"
    return HybridMoEMethod(base_method, name=name, format=format)


def _format(base_method: Any, scheme: Any) -> tuple[formats.ExpertFormat | None, str | None]:
    """The layer's format, or why one that is nearly known is none; a resident layer may be anything."""
    try:
        return formats.format_for(base_method, scheme), None
    except formats.FormatError as error:
        return None, str(error)


def _without_prefill_graphs() -> None:
    """Prefill runs eagerly beside CPU experts: they take milliseconds a layer there, next to which launches cost nothing,
    and a captured prefill would compute its padding. Upstream reads this after the model's layers are built."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec

    prefill = get_exec().graph.cuda_graph_config.prefill
    # DeepSeek V4.1's own graphs of a prompt's last rows (0.5.23), which upstream captures in the middle of a request
    tail = getattr(envs, "SGLANG_DSV4_DECODER_TAIL_GRAPH_MAX_ROWS", None)
    if prefill.backend == "disabled" and (tail is None or tail.get() <= 0):
        return
    prefill.backend = "disabled"
    if tail is not None:
        tail.set(0)
    logger.info("Hybrid MoE: prefill runs without CUDA graphs beside CPU experts; decode keeps them")


def _warms_up() -> bool:
    """Whether this is a forward that only warms a capture up: its result is dropped, so the CPU is not asked. Upstream's
    ``get_is_capture_mode`` is true in replays of graphs in pieces, too, whose results count."""
    from sglang.srt.model_executor.runner_utils import capture_mode

    return capture_mode.is_capture_mode and not torch.cuda.is_current_stream_capturing()


def _range(name: str) -> contextlib.AbstractContextManager:
    """An NVTX range around a layer's hand-over where upstream marks layers, too; a graph that replays has none."""
    return torch.cuda.nvtx.range(f"lk {name}") if getattr(_args(), "enable_layerwise_nvtx_marker", False) else contextlib.nullcontext()


def finish(model: torch.nn.Module, *, is_draft: bool) -> None:
    """After a model's load: no MoE layer may have been missed, none may be unfinished; then say who does what."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    global _drafts
    number = _drafts if is_draft else 0
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FusedMoE)]
    known = {key: found for key, found in _layers.items() if (key.is_draft, key.model) == (is_draft, number)}
    if is_draft and not modules and not known:
        return _dense_draft()
    missed = [name for name, m in modules if roles.Key(is_draft, m.layer_id, number) not in known]
    if missed:
        raise compat.Refusal(missed[0], [f"{len(missed)} of {len(modules)} MoE layers were built without hybrid MoE; reinstall sglang-lk"])
    unfinished = [store.name for _, store in known.values() if store is not None and not store.complete]
    if unfinished:
        raise loading.LoadError(f"{', '.join(unfinished)}: not loaded to the end")
    for name, module in modules:
        key = roles.Key(is_draft, module.layer_id, number)
        if known[key][1] is None:  # its experts exist only now
            size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
            known[key] = _layers[key] = (dataclasses.replace(known[key][0], bytes=size), None)
        if isinstance(module.quant_method, HybridMoEMethod) and _scales_itself(model.get_submodule(name.rpartition(".")[0])):
            module.quant_method.scale = 1.0
    layer_count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    count = {"draft_layer_count" if is_draft else "layer_count": layer_count}
    planned = [facts for facts, _ in _layers.values() if facts.is_draft == is_draft]
    table = roles.plan(planned, boot.current(), device=compat.device(_args()), **count).table()
    _drafts += is_draft
    stores = [store for _, store in known.values() if store is not None]
    if stores and boot.current().ts_skipgemm:
        logger.warning("Hybrid MoE: LK_TS_SKIPGEMM=1 leaves the CPU experts out: every answer is wrong, only times mean something")
    elif stores and compat.device(_args()) == "cuda":
        _prepare_handover(stores, [m for _, m in modules if isinstance(m.quant_method, HybridMoEMethod)])
    if not stores:
        logger.info("%s", table)
        return
    engine = kernels.engine()
    logger.info("%s\n  %s\n  %d threads, %s kernels", table, _progress.summary(), engine.threads, engine.isa)


def _dense_draft() -> None:
    """A draft model without experts (EAGLE's, for one) is upstream's alone, so nobody may have asked for some of them."""
    name, listed = boot.current().resident_layers(draft=_draft_kind(_args()))
    if listed:
        raise roles.RolesError([f"{name}={listed}: the draft model has no MoE layers: unset it"])
    logger.info("Hybrid MoE: the draft model has no MoE layers; it runs as upstream runs it")


def _prepare_handover(stores: list[LayerStore], layers: list[Any]) -> None:
    """Pinned memory for this model's requests, and one request to see that they work, before any graph is captured."""
    global _handover
    top_k = max(layer.top_k or 8 for layer in layers)  # where a model does not tell, larger routings only come in pieces
    dtype = stores[0].geometry.dtype
    sizes = handover.Sizes(
        rows=min(_largest_batch(_args()), handover.MOST_ROWS), hidden=max(store.geometry.hidden for store in stores), top_k=top_k
    )
    engine = kernels.engine()
    if _handover is None:
        config = boot.current()
        _handover = handover.Handover(
            sizes=sizes,
            device=torch.device("cuda", torch.cuda.current_device()),
            mailbox=config.hf_mbox,
            engine=engine,
            spin_us=0 if config.power_saving else 2 * kernels.GPU_SPIN_US,
            bind=config.thread_binding == "CPU_CORE",
        )
        handover.watch(_handover.native, end=handover.end_server(_handover.native))
        telemetry.start(_handover.native, **_telemetry())
    else:
        _handover.reserve(sizes)
    first = layers[0].quant_method
    _handover.check(first.store.experts, name=first.name, top_k=top_k, dtype=dtype, **first.rest)


def _telemetry() -> dict[str, Any]:
    """What the server's arguments ask for, and where the metrics find the roles."""
    args = _args()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    every = getattr(args, "decode_log_interval", None) or 40
    return {"every": every, "metrics": bool(args.enable_metrics), "rank": rank, "roles": _by_role}


def _by_role() -> dict[str, tuple[int, int]]:
    """Layers and bytes of each role, of all models loaded so far."""
    found = {"resident": (0, 0), "cpu": (0, 0)}
    for facts, store in list(_layers.values()):  # a draft model may be loading in another thread
        role = "resident" if store is None else "cpu"
        found[role] = found[role][0] + 1, found[role][1] + facts.bytes
    return found


def _largest_batch(args: Any) -> int:
    """Rows of the largest batch that is captured or that a prefill brings; a larger one is handed over in pieces."""
    from sglang.srt.runtime_context import get_exec

    decode = get_exec().graph.cuda_graph_config.decode
    requests = max([decode.max_bs or 0, *(decode.bs or ())])
    return max(256, requests * (getattr(args, "speculative_num_draft_tokens", None) or 1), args.chunked_prefill_size or 0)


def _store(layer: Any, *, name: str, format: formats.ExpertFormat, geometry: Geometry, bias: bool) -> LayerStore:
    device = compat.device(_args())
    activation, _ = compat.activation(layer.moe_runner_config, device=device)
    rank, ranks = _share_of_host()
    experts = kernels.Experts(
        kernels.engine(rank=rank, ranks=ranks, gpu=device == "cuda", batch_invariant=_deterministic()),
        packing=format.packing(geometry),
        experts=geometry.experts,
        hidden=geometry.hidden,
        width=geometry.width,
        activation=activation,
        bias=bias,
    )
    store = LayerStore(
        name=name, layer_id=layer.layer_id, format=format, experts=experts, geometry=geometry, bias=bias, progress=_progress
    )
    facts = _facts(layer, format.label, experts.bytes)
    _layers[facts.key] = (facts, store)
    return store


def _facts(layer: Any, label: str, size: int = 0) -> roles.Layer:
    is_draft = _is_draft(layer)
    return roles.Layer(layer.layer_id, is_draft, label, size, draft=_draft_kind(_args()), model=_drafts if is_draft else 0)


def _deterministic() -> bool:
    """``--enable-deterministic-inference``."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().deterministic.enable_deterministic_inference


def _scales_itself(block: torch.nn.Module) -> bool:
    """Whether the MoE block around a layer applies the routed scaling factor on a CPU; it may be a subclass."""
    return compat.device(_args()) == "cpu" and any(kind.__module__ in SCALE_THEMSELVES_ON_CPU for kind in type(block).__mro__)


def _args() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def _folder(*, is_draft: bool) -> Path:
    """Where the model's checkpoint is. One that is named as on a hub is fetched now, which upstream does only when the model is
    built: its headers say how experts are packed. A dummy start has no checkpoint to fetch."""
    args = _args()
    name, revision, load_format = (getattr(args, field, None) for field in ("model_path", "revision", "load_format"))
    if is_draft:
        load_format = getattr(args, "speculative_draft_load_format", None) or load_format
        if own := getattr(args, "speculative_draft_model_path", None):
            name, revision = own, getattr(args, "speculative_draft_model_revision", None)
    if load_format == "dummy" or Path(name).is_dir():
        return Path(name)
    return loading.fetched(name, revision=revision, download_dir=getattr(args, "download_dir", None), load_format=load_format or "auto")


def _layer_count() -> int | None:
    from sglang.srt.runtime_context import process_model_config

    return getattr(process_model_config(), "num_hidden_layers", None)


def _is_draft(layer: Any) -> bool:
    """0.5.23 writes it on the layer, before that it is only known while the model is built."""
    from sglang.srt.runtime_context import get_flags

    return bool(layer.is_draft if hasattr(layer, "is_draft") else get_flags().moe.in_speculative_scope)


def _draft_kind(args: Any) -> str:
    algorithm = (getattr(args, "speculative_algorithm", None) or "").lower()
    return "dspark" if "dspark" in algorithm else "mtp" if algorithm in ("nextn", "mtp") else "spec"


def _share_of_host() -> tuple[int, int]:
    """This rank and all ranks among those that share the host."""
    if not torch.distributed.is_initialized():
        return 0, 1
    ranks = max(1, torch.distributed.get_world_size() // (getattr(_args(), "nnodes", None) or 1))
    return torch.distributed.get_rank() % ranks, ranks
