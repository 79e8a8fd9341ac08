"""Which role each MoE layer plays: the configuration and facts about the layers in, one plan out.

Pure bookkeeping: no tensor, no environment variable, nothing from upstream. ``role_of`` answers for one layer while the
model is being built (``check_list`` just before); ``plan`` answers for all of them, checks the layer lists against the
model and makes the table that the start logs. A layer's ``Key`` names its model, too, since draft models reuse ids.

A new role is a member of ``Role`` and a branch in ``role_of``; nothing else switches on roles.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sglang.srt.lk.config import SWITCH, Config
from sglang.srt.lk.term import gib
from sglang.srt.lk.values import LayerSet


class Role(Enum):
    RESIDENT = "resident"  # upstream's own GPU path
    CPU = "cpu"  # experts in host memory, computed by our kernels
    POOL = "pool"  # some experts in VRAM slots, the rest as cpu


class Key(NamedTuple):
    is_draft: bool
    layer_id: int
    model: int = 0


@dataclass(frozen=True)
class Layer:
    """What the plan needs to know of one MoE layer.

    ``bytes`` are those of its experts; ``draft`` names the kind of draft model ("mtp", "dspark", or any other word), and
    ``model`` counts them from 0 where there are several (multi-layer MTP); ``refusal`` says why the CPU experts cannot take
    this layer over, if they cannot.
    """

    layer_id: int
    is_draft: bool = False
    format: str = ""
    bytes: int = 0
    draft: str = "spec"
    model: int = 0
    refusal: str | None = None

    @property
    def key(self) -> Key:
        return Key(self.is_draft, self.layer_id, self.model)


class RolesError(Exception):
    """Every reason why this model cannot start with these roles, as one message."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"Hybrid MoE: the roles of the layers do not work out{lines}")


@dataclass(frozen=True)
class Plan:
    layers: Mapping[Key, Layer]
    roles: Mapping[Key, Role]

    def table(self) -> str:
        """The start's log entry: layers per model and role, their format, and where their bytes lie."""
        counts = ", ".join(f"{n} {role.value}" for role in Role if (n := list(self.roles.values()).count(role)))
        rows = [("model", "role", "layers", "format", "host", "VRAM")]
        groups: dict[tuple[str, str, str], list[Layer]] = {}
        for key in sorted(self.layers):
            layer = self.layers[key]
            model = "main" if not key.is_draft else f"draft {key.model + 1}" if key.model else "draft"
            groups.setdefault((model, self.roles[key].value, layer.format), []).append(layer)
        for (model, role, layer_format), layers in groups.items():
            size = gib(sum(layer.bytes for layer in layers))
            host, vram = ("-", size) if role == Role.RESIDENT.value else (size, "-")
            rows.append((model, role, _set(_ids(layers)), layer_format or "-", host, vram))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n  ".join([f"Hybrid MoE: {len(self.roles)} MoE layers: {counts}", *lines])


def role_of(layer: Layer, config: Config, *, device: str) -> Role:
    """The role of one layer. ``device`` is the server's ``--device``; without a GPU every layer is ``cpu``."""
    if device == "cpu":
        return Role.CPU
    _, resident = _list(layer, config)
    if layer.layer_id in resident:
        return Role.RESIDENT
    return Role.POOL if config.pool_slots > 0 else Role.CPU


def check_list(config: Config, *, device: str, layer_count: int | None = None, draft: str | None = None) -> None:
    """What can be said of a model's layer list before its first layer exists, so that nobody waits for a load to hear it.

    ``plan`` says it again, and more, once the MoE layers are known.
    """
    name, listed = config.resident_layers(draft=draft)
    model = _model(draft is not None)
    problems = _needs_gpu(name, listed, device)
    beyond = [layer_id for layer_id in listed if layer_count is not None and layer_id >= layer_count]
    if beyond:
        problems.append(f"{name}={listed}: {_layers(beyond)} unknown; the layers of the {model} are {_set(range(layer_count))}")
    if problems:
        raise RolesError(problems)


def plan(
    layers: Iterable[Layer],
    config: Config,
    *,
    device: str,
    layer_count: int | None = None,
    draft_layer_count: int | None = None,
) -> Plan:
    """Roles of all MoE layers of this process, or ``RolesError``.

    The counts are those of all layers, dense ones included; they tell a layer without experts from one that does
    not exist. Draft layers may be planned together with the main model or alone.
    """
    known = {layer.key: layer for layer in layers}
    roles = {key: role_of(layer, config, device=device) for key, layer in known.items()}
    problems = _check_lists(known, config, device=device, counts={False: layer_count, True: draft_layer_count})
    taken_over = [layer for key, layer in known.items() if roles[key] is not Role.RESIDENT]
    problems += _grouped([layer for layer in taken_over if layer.refusal], lambda layer: layer.refusal or "")
    if not known:
        problems.append(
            f"no MoE layer was taken over, the model has none that hybrid MoE knows: {SWITCH}=0 serves it as stock"
        )
    if problems:
        raise RolesError(problems)
    return Plan(known, roles)


def _check_lists(
    known: Mapping[Key, Layer], config: Config, *, device: str, counts: Mapping[bool, int | None]
) -> list[str]:
    """One problem per variable whose list does not fit the model it is for."""
    models: dict[str, tuple[LayerSet, bool, set[int]]] = {}
    for layer in known.values():
        name, listed = _list(layer, config)
        models.setdefault(name, (listed, layer.is_draft, set()))[2].add(layer.layer_id)
    problems = []
    for name, (listed, is_draft, moe) in models.items():
        wrong = [layer_id for layer_id in listed if layer_id not in moe]
        if wrong:
            count = counts[is_draft]
            dense = [i for i in wrong if count is not None and i < count]
            absent = [i for i in wrong if i not in dense]
            said = [f"{_layers(dense)} without experts"] if dense else []
            said += [f"{_layers(absent)} unknown"] if absent else []
            problems.append(f"{name}={listed}: {', '.join(said)}; the MoE layers of the {_model(is_draft)} are {_set(moe)}")
        problems += _needs_gpu(name, listed, device)
    return problems


def _needs_gpu(name: str, listed: LayerSet, device: str) -> list[str]:
    return [f"{name}={listed} needs a GPU, and --device cpu has none: unset it"] if listed and device == "cpu" else []


def _list(layer: Layer, config: Config) -> tuple[str, LayerSet]:
    return config.resident_layers(draft=layer.draft if layer.is_draft else None)


def _grouped(layers: Iterable[Layer], reason: Callable[[Layer], str]) -> list[str]:
    """One line per model and reason instead of one per layer."""
    groups: dict[tuple[bool, str], list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.is_draft, reason(layer)), []).append(layer)
    return [f"{_layers(_ids(group))} of the {_model(draft)}: {why}" for (draft, why), group in groups.items()]


def _model(is_draft: bool) -> str:
    return "draft model" if is_draft else "main model"


def _ids(layers: Iterable[Layer]) -> list[int]:
    return [layer.layer_id for layer in layers]


def _layers(ids: list[int]) -> str:
    return f"layer{'s' if ids[1:] else ''} {_set(ids)}"


def _set(ids: Iterable[int]) -> str:
    return str(LayerSet(frozenset(ids)))
