"""What this machine offers, what a model would need of it, and what stands in the way.

Starts nothing, loads no weights, imports no torch. Each ``_look_at_…`` adds the facts of one section to the report,
and what is wrong to its problems, each with its remedy. How a report looks is ``doctor_text``'s business. A new
section is a function here and one there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sglang.srt.lk import checkpoint, config, cpus, machine, roles
from sglang.srt.lk.term import gib

EXTENSION = "sgl_kernel_ext"
UNQUANTISED = ("bf16", "f16", "f32")
PACKED_AS = {"f32": "bf16"}  # checkpoint format -> ours, where the names differ
READ_MEGABYTES, READ_SECONDS = 512, 0.7


@dataclass(frozen=True)
class Problem:
    """``stops``: serving with the switch on fails; otherwise it is slower than the machine allows."""

    stops: bool
    what: str
    remedy: str


@dataclass
class Report:
    facts: dict = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(problem.stops for problem in self.problems)

    def stop(self, what: str, remedy: str) -> None:
        self.problems.append(Problem(True, what, remedy))

    def warn(self, what: str, remedy: str) -> None:
        self.problems.append(Problem(False, what, remedy))

    def as_dict(self) -> dict:
        return {"ok": self.ok, **self.facts, "problems": [asdict(problem) for problem in self.problems]}


def examine(
    model: Path | None,
    environ: Mapping[str, str],
    *,
    device: str | None = None,
    bandwidth: bool = True,
    root: Path = machine.ROOT,
) -> Report:
    """The whole report. ``environ`` is checked as if the switch were on; ``device`` is the server's, by default cuda
    where a card is and cpu elsewhere; ``root`` shows another machine to tests."""
    report = Report()
    ext = _look_at_install(report)
    settings = _look_at_settings(report, environ, ext)
    _look_at_gpus(report)
    device = device or ("cuda" if report.facts["gpu"]["cards"] else "cpu")
    usable = _look_at_cpu(report, ext, settings, root, device)
    _look_at_memory(report, root, settings)
    if bandwidth and ext is not None and report.facts["cpu"]["isa"]:
        report.facts["memory"]["read_gb_per_s"] = _read_bandwidth(report, ext, usable, settings)
    if model is not None:
        _look_at_model(report, model, device, settings, ext)
    return report


def _look_at_install(report: Report):
    """Versions and the state of the installed files. Returns the extension, or None where it does not load."""
    from sglang.srt.lk import install_check

    version = _version("sglang-lk")
    facts = {"sglang_lk": version, "upstream": version and version.rpartition(".")[0], "kernels_abi": None}
    report.facts["install"] = facts
    faults = install_check.problems()
    for problem in faults:
        report.stop(problem, "")
    try:
        ext = importlib.import_module(EXTENSION)
    except ImportError as error:
        if not any(EXTENSION in problem for problem in faults):  # a source tree: nothing is installed that could be whole
            report.stop(
                f"the kernels ({EXTENSION}) do not load: {error}",
                "install the sglang-lk wheel that was built for this Python and machine",
            )
        return None
    facts["kernels_abi"] = ext.ABI
    return ext


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return None


def _look_at_settings(report: Report, environ: Mapping[str, str], ext) -> config.Config:
    """Checks LK_* as a server would with the switch on. On problems the rest of the report uses the defaults."""
    name, switch = config.switch(environ)
    facts = {
        "switch": switch or "0",
        "switch_name": name if switch else None,
        "set": {k: v for k, v in sorted(environ.items()) if k.startswith(("LK_", "LVLLM_"))},
        "notes": [],
    }
    report.facts["settings"] = facts
    try:
        loaded = config.read({**environ, name: "1" if switch in ("", "0") else switch}, isas=lambda: _isas(ext))
    except config.ConfigError as error:
        for problem in error.problems:
            report.stop(problem, f"correct or unset it; all variables: {config.REFERENCE}")
        return config.Config(moe_hybrid_enabled=True)
    facts["notes"] = list(loaded.notes)
    return loaded.config


def _isas(ext) -> list[str]:
    return [isa["name"] for isa in ext.isas() if isa["supported"]] if ext else list(config.ISAS)


def _look_at_cpu(report: Report, ext, settings: config.Config, root: Path, device: str) -> cpus.Cpus:
    found = cpus.usable(settings, root=root, gpu=device == "cuda")
    for line in found.warnings:
        report.warn(line, "set LK_THREADS to that or unset it")
    report.facts["cpu"] = {
        **machine.system(),
        "brand": ext.cpu()["brand"] if ext else None,
        "cpus": found.cpus,
        "why": list(found.why),
        "isa": settings.isa or (_isas(ext)[-1] if ext else None),
        "isa_forced": settings.isa is not None,
        "isas": ext.isas() if ext else [],
        "numa_nodes": len(set(found.nodes)),
        "nodes": _nodes(found, root),
        "split": found.placement(settings)["place"],
        "l3_bytes": machine.l3_bytes(found.cpus, root),
        "busy": machine.busy(found.cpus),
    }
    return found


def _nodes(found: cpus.Cpus, root: Path) -> list[dict]:
    """One row per NUMA node with workers; they hold experts in proportion to these."""
    rows = []
    for node in sorted(set(found.nodes)):
        memory = cpus.node_memory(node, root)
        workers = [cpu for cpu, own in zip(found.cpus, found.nodes) if own == node]
        rows.append({"node": node, "cpus": workers, "available_bytes": memory.available, "total_bytes": memory.total})
    return rows


def _look_at_memory(report: Report, root: Path, settings: config.Config) -> None:
    memory, huge = cpus.memory(root), machine.huge_pages(root)
    report.facts["memory"] = {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "why": memory.why,
        "read_gb_per_s": None,
        "huge_pages": huge.mode,
        "huge_pages_granted": huge.granted,
        "huge_pages_wanted": settings.numa_huge,
    }
    if not settings.numa_huge:
        return
    if huge.mode is None or huge.mode == "never":
        report.warn(
            "2 MB pages are off, so experts are read 20 to 40 % slower", f"as root on the host: echo madvise > {huge.switch}"
        )
    elif huge.granted is not None and huge.granted < 0.9:
        report.warn(
            f"only {huge.granted:.0%} of a test block came in 2 MB pages: memory is fragmented or short",
            "as root on the host: echo 1 > /proc/sys/vm/compact_memory, or start the server soon after boot",
        )


def _look_at_gpus(report: Report) -> None:
    found = machine.gpus()
    report.facts["gpu"] = asdict(found)
    if found.trouble:
        report.warn(
            found.trouble,
            "load or restart the NVIDIA driver, or serve on the CPU: SGLANG_USE_CPU_ENGINE=1 sglang serve --device cpu",
        )


def _read_bandwidth(report: Report, ext, usable: cpus.Cpus, settings: config.Config) -> float:
    engine = ext.Engine(usable.cpus, isa=settings.isa or "", huge=settings.numa_huge, **usable.placement(settings))
    if engine.unplaced:
        report.warn(
            f"memory cannot be taken from a chosen NUMA node ({engine.unplaced}): each node's workers touch theirs first",
            "nothing to do unless a node gets full; in a container: --cap-add SYS_NICE",
        )
    megabytes = machine.read_megabytes(machine.l3_bytes(usable.cpus) or 0, READ_MEGABYTES)
    return engine.read_gb_per_s(megabytes=megabytes, seconds=READ_SECONDS)


def _look_at_model(report: Report, path: Path, device: str, settings: config.Config, ext) -> None:
    """Roles, formats and bytes of every MoE layer, and whether they fit."""
    try:
        found = checkpoint.read(path)
    except checkpoint.CheckpointError as error:
        report.stop(str(error), "give the folder of a Hugging Face checkpoint in safetensors")
        return
    name = path.resolve().name
    for problem in found.problems + _incomplete(found):
        report.stop(f"{name}: {problem}", "fetch the checkpoint again")
    for doubt in found.doubts:
        report.warn(f"{name}: {doubt}", "fetch the checkpoint again, or another one of the same model")
    served = ext.formats() if ext else None
    for problem in _undeclared(found, served):
        report.stop(f"{name}: {problem}", "give a checkpoint whose config.json has its quantization_config")
    layers = [_for_roles(layer, served) for layer in found.layers]
    try:
        roles.plan(layers, settings, device=device, layer_count=found.declared_layers)
    except roles.RolesError as error:
        for problem in error.problems:
            report.stop(problem, "")
    rows = [
        {
            **asdict(layer),
            "role": (role := roles.role_of(facts, settings, device=device)).value,
            "host_bytes": _host_bytes(layer, role, ext, facts),
        }
        for layer, facts in zip(found.layers, layers)
    ]
    host = sum(row["host_bytes"] for row in rows if not row["draft"])
    report.facts["model"] = {
        "path": str(path),
        "architecture": found.architecture,
        "top_k": found.top_k,
        "device": device,
        "layers": rows,
        "expert_bytes": sum(layer.bytes for layer in found.layers),
        "other_bytes": found.other_bytes,
        "host_bytes": host,
        "draft_host_bytes": sum(row["host_bytes"] for row in rows if row["draft"]),
        "largest_file_bytes": found.largest_file,
        "needed_bytes": host + found.largest_file + (found.other_bytes if device == "cpu" else 0),
    }
    _check_fit(report)


def _incomplete(found: checkpoint.Checkpoint) -> list[str]:
    problems = []
    for layer in found.layers:
        name = f"{layer.draft or ''} layer {layer.layer_id}".strip()
        if layer.missing:
            more = f" and {len(layer.missing) - 3} more" if layer.missing[3:] else ""
            problems.append(f"{name} lacks {', '.join(layer.missing[:3])}{more}")
        elif not _has_sizes(layer):
            problems.append(f"{name} has experts of {layer.hidden} x {layer.width} values, which no model has")
        elif found.declared_experts and layer.experts < found.declared_experts:
            problems.append(f"{name} has {layer.experts} experts, config.json says {found.declared_experts}")
    return problems


def _undeclared(found: checkpoint.Checkpoint, served: list[str] | None) -> list[str]:
    formats = {layer.format for layer in found.layers if served is None or layer.format in served}
    names = ", ".join(sorted(formats.difference(UNQUANTISED)))
    if found.declared or not names:
        return []
    return [f"the experts are {names}, and config.json does not declare it (no quantization_config): the server takes them for bf16"]


def _has_sizes(layer: checkpoint.MoeLayer) -> bool:
    return 1 <= layer.hidden <= checkpoint.MOST and 1 <= layer.width <= checkpoint.MOST


def _for_roles(layer: checkpoint.MoeLayer, served: list[str] | None) -> roles.Layer:
    """``served``: the extension's formats, None where it does not load and nothing can be said."""
    refusal, group = None, int(layer.packing.get("group", 0))
    if served is not None and PACKED_AS.get(layer.format, layer.format) not in served:
        refusal = f"{layer.format} experts are not served on the CPU; supported are {', '.join(served)}"
    elif group % 32:
        about = "about " if layer.hidden % group else ""
        refusal = f"{layer.format} experts with a scale for {about}{group} columns are not served on the CPU; multiples of 32 are"
    return roles.Layer(
        layer_id=layer.layer_id,
        is_draft=layer.draft is not None,
        format=layer.format,
        bytes=layer.bytes,
        draft=layer.draft or "spec",
        refusal=refusal,
    )


def _host_bytes(layer: checkpoint.MoeLayer, role: roles.Role, ext, facts: roles.Layer) -> int:
    """Packed size where the layer is served, else the checkpoint's as the best guess."""
    if role is roles.Role.RESIDENT:
        return 0
    if ext is None or facts.refusal or not _has_sizes(layer):
        return layer.bytes
    packed_as = PACKED_AS.get(layer.format, layer.format)
    return layer.experts * ext.packed_bytes(packed_as, layer.hidden, layer.width, **layer.packing)


def _check_nodes(report: Report) -> None:
    """Whether each NUMA node has room for its part of the experts; what has none lies on another and is read from there."""
    cpu, host = report.facts["cpu"], report.facts["model"]["host_bytes"]
    for row in cpu["nodes"] if cpu["split"] else ():
        part = host * len(row["cpus"]) // len(cpu["cpus"])
        if row["available_bytes"] is not None and part > row["available_bytes"]:
            report.warn(
                f"NUMA node {row['node']} has {gib(row['available_bytes'])} free and its part of the experts needs {gib(part)}: "
                "the rest will lie on another node and be read more slowly",
                "free memory on that node",
            )


def _check_fit(report: Report) -> None:
    model, memory = report.facts["model"], report.facts["memory"]
    needed, available = model["needed_bytes"], memory["available_bytes"]
    model["fits"] = available is None or needed <= available
    if model["fits"]:
        _check_nodes(report)
        return
    remedy = (
        "free memory, or raise the limit of the cgroup that is the tightest"
        if len(memory["why"]) > 1
        else "free memory or add some"
    )
    if model["device"] != "cpu":
        remedy += "; or keep layers on the GPU with LK_GPU_RESIDENT_MOE_LAYERS"
    report.stop(
        f"loading needs {gib(needed)} of host memory and {gib(available)} are free ({'; '.join(memory['why'])})", remedy
    )
