"""Every variable of hybrid MoE, read once into one frozen object.

One field of ``Config`` is one variable (``pool_slots`` is ``LK_POOL_SLOTS``) and one row of the generated table in
``docs/reference/environment.md``. The environment is handed in (``boot`` does that); nothing is imported from upstream.

A new variable is a field. One that belongs to a feature names it; while the feature is in ``NOT_BUILT`` a value that
turns it on is refused by name, and a value that only tunes it is accepted with one line. Building the feature means
removing it there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from sglang.srt.lk.values import Choice, Kind, Layers, LayerSet, Switch, Text, Whole

SWITCH = "LK_MOE_HYBRID_ENABLED"
REFERENCE = "docs/reference/environment.md"
ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16")  # x86-64, then aarch64
MIB = 1 << 20


class Feature(NamedTuple):
    """``label`` completes "asks for …"; ``off`` completes "has no effect …" for a variable that only tunes it."""

    label: str
    off: str


POOL = Feature("the GPU pool", "while LK_POOL_SLOTS is 0")
PREFILL = Feature("super mix prefill on the GPU", "while LK_GPU_PREFILL_MIN_TOKENS is 0")
PLE = Feature("a bound on per-layer-embedding temporaries", "")
NVME = Feature("tables read straight from NVMe", "while LK_NVME_DIRECT is 0")
ENGRAM = Feature("Engram tables on NVMe", "while LK_ENGRAM_NVME is 0")
PROBE = Feature("a diagnostic of another engine", "")

NOT_BUILT = frozenset({POOL, PREFILL, PLE, NVME, ENGRAM, PROBE})

# Names that were variables of Lsglang or its predecessor: accepted, without effect, with the reason said once.
RETIRED = {
    "LK_POOL_LAYERS": "the pool covers every layer that is not resident; LK_POOL_SLOTS is its switch",
    "LK_GPU_PREFETCH_WINDOW": "prefill copies overlap without a knob",
    "LK_MOE_LAYERWISE_LOAD": "experts are packed as they are read; there is no other mode",
    "LK_MOE_USE_WEIGHT": "weights are used exactly as the checkpoint encodes them",
    "LK_MOE_QUANT_ON_GPU": "weights are used exactly as the checkpoint encodes them",
}

# Legacy names whose new name is more than a new prefix.
RENAMED = {
    "LVLLM_MOE_NUMA_ENABLED": SWITCH,
    "LVLLM_GPU_PREFILL_MIN_BATCH_SIZE": "LK_GPU_PREFILL_MIN_TOKENS",
    "LVLLM_ENABLE_NUMA_INTERLEAVE": "LK_NUMA_INTERLEAVE",
    "LVLLM_ENABLE_MOE_LAYERWISE_LOAD": "LK_MOE_LAYERWISE_LOAD",
}

# Read while building, before there is a package; known here so that they may stay set when serving.
BUILD = {
    "LK_UPSTREAM": ("version", "the pinned default", "SGLang release that the build wraps."),
    "LK_UPSTREAM_WHEELS": ("path", "unset", "Directory with upstream wheels for a build without network."),
    "LK_VENV": ("path", ".venv", "Environment that the launch and test scripts make and use."),
}


class ConfigError(Exception):
    """Everything that is wrong with the environment, as the one message a user needs."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(
            f"Hybrid MoE: {count} in the environment{lines}\nAll variables: {REFERENCE}. {SWITCH}=0 serves stock SGLang."
        )


@dataclass(frozen=True)
class Variable:
    """What the table says about one field.

    ``asks`` tells which values turn ``feature`` on; a variable without it only tunes the feature. ``alias`` maps
    values of another engine to the reason why the default stands in for them.
    """

    kind: Kind
    group: str
    about: str
    since: str
    feature: Feature | None
    asks: Callable[[Any], bool] | None
    alias: Mapping[Any, str]


def variable(
    group: str,
    kind: Kind,
    default: Any,
    about: str,
    *,
    feature: Feature | None = None,
    asks: Callable[[Any], bool] | None = None,
    alias: Mapping[Any, str] | None = None,
    since: str = "0.5.23.1",
) -> Any:
    row = Variable(kind, group, about, since, feature, asks, alias or {})
    return field(default=default, metadata={"variable": row})


def _given(value: Any) -> bool:
    return bool(value)


@dataclass(frozen=True)
class Config:
    moe_hybrid_enabled: bool = variable("Core", Switch(), False,
        "The switch: `1` gives every MoE layer a role, `0` is stock SGLang and no other variable has any effect.")

    threads: int | None = variable("CPU", Whole(1, 4096, unset="one per usable physical core"), None,
        "CPU threads of one rank; more than it may use is cut down, with one line. Unset, 2 cores stay free beside a GPU (below 8: "
        "1, below 4: 0).")
    thread_binding: str = variable("CPU", Choice(("CPU_CORE", "NUMA_NODE")), "CPU_CORE",
        "Pin each worker to its own CPU, or let it move among its rank's CPUs of the same NUMA node.")
    isa: str | None = variable("CPU", Choice(ISAS, unset="the best the machine runs"), None,
        "Instruction set of the kernels; one that the machine lacks is an error.")
    numa_interleave: bool = variable("CPU", Switch(), True,
        "Split every expert over the NUMA nodes of the workers, each part in its node's memory; `0`: no split, and memory "
        "where the system puts it.")
    numa_huge: bool = variable("CPU", Switch(), True,
        "Host weights in 2 MB pages.")
    numa_ilp: bool = variable("CPU", Switch(), False,
        "An allocator mode of Lsglang's engine.",
        alias={True: "each node reads its own part of an expert in order, so no allocator has to interleave"})
    power_saving: bool = variable("CPU", Switch(), False,
        "Workers sleep as soon as they wait instead of spinning for a short while first.")
    hf_mbox: bool = variable("CPU", Switch(), True,
        "Hand rows from the GPU to the CPU through a mailbox in pinned memory; `0` uses host functions, which are slower.")

    gpu_resident_moe_layers: LayerSet = variable("GPU-resident layers", Layers(), LayerSet(),
        "MoE layers of the main model that stay on the GPU as upstream runs them.")
    gpu_resident_moe_layers_spec: LayerSet = variable("GPU-resident layers", Layers(), LayerSet(),
        "The same for draft models, which never follow the list of the main model.")
    gpu_resident_moe_layers_mtp: LayerSet | None = variable("GPU-resident layers", Layers(unset="as `_SPEC`"), None,
        "The same for MTP (NEXTN) draft models alone.")
    gpu_resident_moe_layers_dspark: LayerSet | None = variable("GPU-resident layers", Layers(unset="as `_SPEC`"), None,
        "The same for DSPARK draft models alone.")

    gpu_prefill_min_tokens: int = variable("Super mix prefill", Whole(0, MIB), 0,
        "Batches of at least this many tokens stream the experts to the GPU; `0` is off.", feature=PREFILL, asks=_given)
    gpu_prefill_engine: str = variable("Super mix prefill", Choice(("triton", "cutlass", "flashinfer")), "triton",
        "What multiplies the streamed experts: upstream's grouped GEMM.",
        alias=dict.fromkeys(("cutlass", "flashinfer"), "upstream's grouped GEMM is the only engine"))
    gpu_prefill_sm120_w4a4: bool = variable("Super mix prefill", Switch(), False,
        "4-bit activations on SM120 cards, at different numerics.", feature=PREFILL)
    gpu_prefill_wave_experts: int = variable("Super mix prefill", Whole(-1, 4096), -1,
        "Experts of one wave; `-1` chooses, `0` takes all at once.", feature=PREFILL)
    gpu_prefill_d_slots: int = variable("Super mix prefill", Whole(0, MIB, step=2), 0,
        "Rows of the activation window; `0` is one window per pass.", feature=PREFILL)
    gpu_prefill_sub_m: int = variable("Super mix prefill", Whole(0, MIB), 0,
        "Tokens of a super-chunk, more than `--chunked-prefill-size`; `0` is chunk by chunk.", feature=PREFILL)

    pool_slots: int = variable("GPU pool", Whole(0, 4096), 0,
        "Experts of each layer that the GPU holds, at least top-k and at most all; `0` is off.", feature=POOL, asks=_given)
    pool_decode: bool | None = variable("GPU pool", Switch(unset="as the pool"), None,
        "Decode computes pooled experts on the GPU.", feature=POOL)
    pool_mbox_split: bool = variable("GPU pool", Switch(), False,
        "Start the GPU half of a decode step before joining the CPU half.", feature=POOL)
    pool_window: int = variable("GPU pool", Whole(-MIB, MIB, floor=8), 32,
        "Steps within which a second miss admits an expert.", feature=POOL)
    pool_inflight: int = variable("GPU pool", Whole(1, 1024), 16,
        "Copies in flight at once.", feature=POOL)
    pool_no_stage: bool = variable("GPU pool", Switch(), True,
        "Copy admitted experts straight from pinned host pages; `0` goes through a staging ring.", feature=POOL)
    verify_resident: bool = variable("GPU pool", Switch(), True,
        "Draft rows of a verify batch use the experts that the pool holds.", feature=POOL)

    ple_block_mb: int | None = variable("Tables", Whole(1, MIB, unset="from the chunk size"), None,
        "Megabytes for per-layer-embedding temporaries in prefill.", feature=PLE, asks=_given)
    nvme_direct: bool = variable("Tables", Switch(), False,
        "Read table rows straight from disk, past the page cache.", feature=NVME, asks=_given)
    nvme_cache_mb: int = variable("Tables", Whole(0, MIB), 1024,
        "Megabytes of hot rows kept for direct reads.", feature=NVME)
    engram_nvme: bool = variable("Tables", Switch(), False,
        "Serve Engram tables from the checkpoint file.", feature=ENGRAM, asks=_given)
    engram_nvme_cache_mb: int = variable("Tables", Whole(0, MIB), 1024,
        "Megabytes of Engram rows kept in memory.", feature=ENGRAM)
    engram_nvme_staging_mb: int = variable("Tables", Whole(1, MIB), 128,
        "Megabytes of pinned memory for Engram rows on their way.", feature=ENGRAM)

    pool_log: int = variable("Diagnostics", Whole(0, MIB), 0,
        "One `[pool]` line every so many decode steps; `0` is silent.", feature=POOL)
    verify_pump: bool = variable("Diagnostics", Switch(), False,
        "Draft rows count towards admission.", feature=POOL)
    pool_det_split: bool = variable("Diagnostics", Switch(), False,
        "Split every step at the same point.", feature=POOL)
    pool_split_probe: bool = variable("Diagnostics", Switch(), False,
        "Log the split of small batches, layer by layer.", feature=POOL)
    route_probe: bool = variable("Diagnostics", Switch(), False,
        "Trace the routing of every step (with the pool).", feature=POOL)
    pp_debug: bool = variable("Diagnostics", Switch(), False,
        "More `[prefill]` lines.", feature=PREFILL)
    spec_probe: bool = variable("Diagnostics", Switch(), False,
        "Timings of draft and verify stages.", feature=PROBE, asks=_given)
    ple_probe: bool = variable("Diagnostics", Switch(), False,
        "Locality of per-layer-embedding rows.", feature=PROBE, asks=_given)
    ple_probe_dump: str | None = variable("Diagnostics", Text(unset="unset"), None,
        "File for those rows.", feature=PROBE, asks=_given)
    decode_ts: bool = variable("Diagnostics", Switch(), False,
        "Time stamps of the decode path.", feature=PROBE, asks=_given)
    ts_skipgemm: bool = variable("Diagnostics", Switch(), False,
        "Leave the CPU experts out, to time what is around them: every answer is wrong, and the start says so.")
    mbox_stopfile: str | None = variable("Diagnostics", Text(unset="unset"), None,
        "File whose appearance ends the mailbox workers.", feature=PROBE, asks=_given)
    disable_qsa_share: bool = variable("Diagnostics", Switch(), False,
        "Draft worker without shared QSA.", feature=PROBE, asks=_given)

    def resident_layers(self, *, draft: str | None = None) -> tuple[str, LayerSet]:
        """The variable that decides for a model and its value; ``draft`` is None (main model), "mtp", "dspark" or any
        other kind of draft."""
        if draft is None:
            return "LK_GPU_RESIDENT_MOE_LAYERS", self.gpu_resident_moe_layers
        own = {"mtp": self.gpu_resident_moe_layers_mtp, "dspark": self.gpu_resident_moe_layers_dspark}.get(draft)
        if own is None:
            return "LK_GPU_RESIDENT_MOE_LAYERS_SPEC", self.gpu_resident_moe_layers_spec
        return f"LK_GPU_RESIDENT_MOE_LAYERS_{draft.upper()}", own


FIELDS = {f"LK_{f.name.upper()}": f for f in fields(Config)}
VARIABLES: dict[str, Variable] = {name: f.metadata["variable"] for name, f in FIELDS.items()}
SWITCHED = frozenset(row.feature for row in VARIABLES.values() if row.asks is not None)
KNOWN = frozenset(VARIABLES) | frozenset(RETIRED) | frozenset(BUILD)


class Loaded(NamedTuple):
    config: Config
    notes: tuple[str, ...]  # one line each, to be said once


def built_isas() -> tuple[str, ...]:
    return ISAS


def load(environ: Mapping[str, str], *, isas: Callable[[], Iterable[str]] = built_isas) -> Config:
    """The configuration, or ``ConfigError``. ``read`` also returns the lines to tell the user."""
    return read(environ, isas=isas).config


def read(environ: Mapping[str, str], *, isas: Callable[[], Iterable[str]] = built_isas) -> Loaded:
    """``isas`` tells which instruction sets the machine runs; it is called only when ``LK_ISA`` forces one."""
    problems: list[str] = []
    notes: list[str] = []
    given = _given_variables(environ, problems, notes)
    values = {name: _value(name, *spelled, problems, notes) for name, spelled in given.items() if name in VARIABLES}
    if values.get(SWITCH, False) is False:
        return Loaded(Config(), ())
    values = {name: value for name, value in values.items() if value is not None}
    _refuse_unbuilt(values, problems)
    _check_isa(values, isas, problems)
    if problems:
        raise ConfigError(problems)
    notes += [f"{name} is retired and has no effect: {RETIRED[name]}" for name in given if name in RETIRED]
    notes += _without_effect(values)
    return Loaded(Config(**{FIELDS[name].name: value for name, value in values.items()}), tuple(notes))


def switch(environ: Mapping[str, str]) -> tuple[str, str]:
    """The name under which the switch is set, a legacy one perhaps, and its text; "" where it is not."""
    return _given_variables(environ, [], []).get(SWITCH, (SWITCH, ""))


def _given_variables(
    environ: Mapping[str, str], problems: list[str], notes: list[str]
) -> dict[str, tuple[str, str]]:
    """Name → (name as the user spelled it, stripped text). An empty value is an unset one."""
    ours = {name: text.strip() for name, text in environ.items() if name.startswith(("LK_", "LVLLM_")) and text.strip()}
    given = {name: (name, text) for name, text in sorted(ours.items()) if name.startswith("LK_")}
    renamed, losing = [], []
    for legacy in sorted(set(ours) - set(given)):
        name = RENAMED.get(legacy, "LK_" + legacy.removeprefix("LVLLM_"))
        if name in given:
            losing.append(f"{legacy} (for {name})")
        else:
            given[name] = (legacy, ours[legacy])
            renamed.append(f"{legacy} as {name}")
    if renamed or losing:
        ignored = f"; ignored because the new name is set too: {', '.join(losing)}" if losing else ""
        notes.append(f"LVLLM_* are legacy names: read {', '.join(renamed) or 'none'}{ignored}")
    problems += [_unknown(spelled) for name, (spelled, _) in given.items() if name not in KNOWN]
    return given


def _unknown(name: str) -> str:
    from difflib import get_close_matches  # only on the way to an error

    legacy = name.startswith("LVLLM_")
    near = get_close_matches(name.upper().replace("LVLLM_", "LK_"), sorted(KNOWN), n=1)
    kind = "legacy variable" if legacy else "variable"
    return f"{name}: unknown {kind}; " + (f"did you mean {near[0]}?" if near else "unset it")


def _value(name: str, spelled: str, text: str, problems: list[str], notes: list[str]) -> Any:
    """The parsed value, or None after adding a problem."""
    kind = VARIABLES[name].kind
    try:
        value = kind.parse(text)
    except ValueError as error:
        unset = f"; unset means {kind.unset}" if kind.unset not in ("", "unset") else ""
        problems.append(f"{spelled}={_short(text)}: expected {error}{unset}")
        return None
    if value in VARIABLES[name].alias:
        default = FIELDS[name].default
        notes.append(f"{spelled}={text} is read as {kind.show(default)}: {VARIABLES[name].alias[value]}")
        return default
    floor = getattr(kind, "floor", None)
    if floor is not None and value < floor:
        notes.append(f"{spelled}={text} is raised to {floor}, the least that works")
        return floor
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _refuse_unbuilt(values: Mapping[str, Any], problems: list[str]) -> None:
    for name, value in values.items():
        row = VARIABLES[name]
        if row.feature in NOT_BUILT and row.asks is not None and row.asks(value):
            off = row.kind.show(FIELDS[name].default)
            remedy = "unset it" if FIELDS[name].default is None else f"set {name}={off} or unset it"
            problems.append(
                f"{name}={row.kind.show(value)} asks for {row.feature.label}, which this build does not have: {remedy}"
            )


def _check_isa(values: Mapping[str, Any], isas: Callable[[], Iterable[str]], problems: list[str]) -> None:
    isa = values.get("LK_ISA")
    if isa is None:
        return
    try:
        runs = tuple(isas())
    except ImportError as error:
        problems.append(f"LK_ISA={isa} cannot be checked, the kernels do not load: {error}; reinstall sglang-lk")
        return
    if isa not in runs:
        problems.append(f"LK_ISA={isa}: this machine runs {', '.join(runs)}; unset it for the best of them")


def _without_effect(values: Mapping[str, Any]) -> list[str]:
    """One line per feature that is off, naming the variables that would tune it."""
    on = {row.feature for name, value in values.items() if (row := VARIABLES[name]).asks and row.asks(value)}
    idle: dict[Feature, list[str]] = {}
    for name, value in values.items():
        row = VARIABLES[name]
        if row.feature is None or row.asks is not None or value == FIELDS[name].default:
            continue
        if row.feature in NOT_BUILT or (row.feature in SWITCHED and row.feature not in on):
            idle.setdefault(row.feature, []).append(f"{name}={row.kind.show(value)}")
    return [f"{', '.join(names)}: no effect {feature.off}" for feature, names in idle.items()]
