"""A doctor's report as text for people: one look, no scrolling, problems last.

Facts come from ``doctor``; nothing is examined here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from sglang.srt.lk.config import SWITCH
from sglang.srt.lk.doctor import Report
from sglang.srt.lk.term import Style, gib, pad, ranges, table

LABEL = 10


def render(report: Report, style: Style) -> list[str]:
    facts = report.facts
    sections = [_install, _cpu, _memory, _gpu, _settings] + ([_model] if "model" in facts else [])
    lines: list[str] = []
    for section in sections:
        for label, text in section(facts, style):
            lines.append((style("bold", pad(label, LABEL)) + text).rstrip())
    return [*lines, "", *_problems(report, style)]


Lines = Iterator[tuple[str, str]]


def _install(facts: dict, style: Style) -> Lines:
    install, cpu = facts["install"], facts["cpu"]
    version = (
        f"sglang-lk {install['sglang_lk']} on SGLang {install['upstream']}"
        if install["sglang_lk"]
        else "sglang-lk from a source tree"
    )
    kernels = f"kernels with ABI {install['kernels_abi']}" if install["kernels_abi"] else style("red", "no kernels")
    yield "Install", f"{version} · {kernels} · Python {cpu['python']}"


def _cpu(facts: dict, style: Style) -> Lines:
    cpu = facts["cpu"]
    nodes = cpu["numa_nodes"]
    cache = f" · L3 {gib(cpu['l3_bytes'])}" if cpu["l3_bytes"] else ""
    yield "CPU", f"{cpu['brand'] or cpu['arch']} · {nodes} NUMA node{'s' * (nodes > 1)}{cache}"
    busy = style("yellow", f" · others take {cpu['busy']:.0%} of them now") if (cpu["busy"] or 0) > 0.1 else ""
    yield "  cores", f"{style('bold', str(len(cpu['cpus'])))} workers on CPUs {ranges(cpu['cpus'])}{busy}"
    for line in cpu["why"]:
        yield "", style("dim", line)
    if nodes > 1:
        yield "  nodes", "every expert is split over them" if cpu["split"] else "experts are not split (LK_NUMA_INTERLEAVE=0)"
        for row in cpu["nodes"]:
            free = f" · {gib(row['available_bytes'])} free of {gib(row['total_bytes'] or 0)}" if row["available_bytes"] else ""
            count = len(row["cpus"])
            yield "", f"node {row['node']}: {count} worker{'s' * (count > 1)} on CPU{'s' * (count > 1)} {ranges(row['cpus'])}{free}"
    if cpu["isas"]:
        yield "  kernels", "  ".join(_isa(isa, cpu, style) for isa in reversed(cpu["isas"]))
    for isa in cpu["isas"]:
        if not isa["supported"]:
            yield "", style("dim", f"{isa['name']} needs {', '.join(isa['missing'])}")


def _isa(isa: dict, cpu: dict, style: Style) -> str:
    if not isa["supported"]:
        return style("dim", f"✗ {isa['name']}")
    if isa["name"] != cpu["isa"]:
        return f"{style('green', '✓')} {isa['name']}"
    return style("green", f"✓ {isa['name']}") + style("bold", " (used, LK_ISA)" if cpu["isa_forced"] else " (used)")


def _memory(facts: dict, style: Style) -> Lines:
    memory = facts["memory"]
    read = (
        f" · read {memory['read_gb_per_s']:.1f} GB/s by {len(facts['cpu']['cpus'])} threads"
        if memory["read_gb_per_s"]
        else ""
    )
    yield "Memory", f"{gib(memory['available_bytes'] or 0)} free of {gib(memory['total_bytes'] or 0)}{read}"
    for line in memory["why"][1:]:  # the cgroups; the first line is the host's
        yield "", style("dim", line)
    granted = (
        f", {memory['huge_pages_granted']:.0%} of a test block granted" if memory["huge_pages_granted"] is not None else ""
    )
    wanted = "" if memory["huge_pages_wanted"] else " · not used (LK_NUMA_HUGE=0)"
    yield "  2 MB", f"transparent huge pages: {memory['huge_pages'] or 'none in this kernel'}{granted}{wanted}"


def _gpu(facts: dict, style: Style) -> Lines:
    gpu = facts["gpu"]
    if not gpu["cards"]:
        state = "no NVIDIA driver" if not gpu["driver"] else f"driver {gpu['driver']}, no card visible"
        yield "GPU", f"{state} · serve with SGLANG_USE_CPU_ENGINE=1 sglang serve --device cpu"
        return
    yield "GPU", f"driver {gpu['driver']}" + ("" if gpu["cuda"] else style("red", " · libcuda.so.1 does not load"))
    for card in gpu["cards"]:
        memory = (
            f"{gib(card['free_bytes'])} free of {gib(card['total_bytes'])}"
            if card["total_bytes"]
            else "shares the host's memory"
        )
        yield "", f"{card['index']}: {card['name']} (sm{card['compute'].replace('.', '')}) · {memory}"


def _settings(facts: dict, style: Style) -> Lines:
    settings = facts["settings"]
    name, value = settings["switch_name"], settings["switch"]
    stock = "sglang serves stock; checked as if it were 1"
    if name is None:
        yield "Settings", f"{SWITCH} is not set: {stock}"
    elif value == "0":
        yield "Settings", f"{name}=0: {stock}"
    else:
        yield "Settings", "hybrid is on" if value == "1" else style("red", f"{name} is neither 0 nor 1")
    for variable, text in settings["set"].items():
        if variable != SWITCH:
            yield "", f"{variable}={text}"
    for note in settings["notes"]:
        yield "", style("dim", note)


def _model(facts: dict, style: Style) -> Lines:
    model = facts["model"]
    layers = f"{len(model['layers'])} MoE layers, top-{model['top_k']}"
    yield "", ""
    yield "Model", f"{model['architecture']} · {layers} · --device {model['device']} · {model['path']}"
    for line in _layer_table(model["layers"], style):
        yield "", line
    parts = [f"{gib(model['host_bytes'])} experts"]
    if model["draft_host_bytes"]:
        parts[0] += f" (and {gib(model['draft_host_bytes'])} with speculative decoding)"
    if model["device"] == "cpu":
        parts.append(f"{gib(model['other_bytes'])} other weights")
    parts.append(f"{gib(model['largest_file_bytes'])} for the largest file while loading")
    yield "  memory", " + ".join(parts) + ": " + (style("green", "fits") if model["fits"] else style("red", "does not fit"))


def _layer_table(layers: list[dict], style: Style) -> list[str]:
    """One line for the layers that agree in everything."""
    heading = ("role", "layers", "format", "experts", "hidden × width", "host each", "host all")
    rows = [[style("dim", cell) for cell in heading]]
    key = lambda row: (row["draft"] or "", row["role"], row["format"], row["experts"], row["hidden"], row["width"])  # noqa: E731
    for (draft, role, fmt, experts, hidden, width), group in groupby(sorted(layers, key=key), key=key):
        members = list(group)
        ids = f"{draft} " * bool(draft) + ranges([row["layer_id"] for row in members])
        host = [row["host_bytes"] for row in members]
        rows.append([style("cyan", role), ids, fmt, str(experts), f"{hidden} × {width}", gib(max(host)), gib(sum(host))])
    return table(rows, "<<<>>>>")


def _problems(report: Report, style: Style) -> list[str]:
    lines = []
    for problem in sorted(report.problems, key=lambda p: not p.stops):
        mark = style("red", "✗") if problem.stops else style("yellow", "!")
        lines += [f"{mark} {problem.what}"] + [f"  {style('cyan', '→')} {problem.remedy}"] * bool(problem.remedy)
    stops = sum(problem.stops for problem in report.problems)
    if stops:
        return [*lines, "", style("red", f"{stops} problem{'s' * (stops > 1)} would stop serving.")]
    return [*lines, *([""] if lines else []), style("green", "Ready to serve.")]
