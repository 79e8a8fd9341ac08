"""What a checkpoint's experts look like, read from ``config.json`` and the safetensors headers only.

Made for planning before anything starts: no weight is read, no torch is imported. How weights are really
interpreted is the loader's business; this module names a format from tensor names, types and shapes.
A new format is one line in ``_format``; a new spelling of expert tensors is one in ``_PART`` or ``_FUSED``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100 << 20  # safetensors' own limit
MOST = 1 << 20  # layers, experts, columns: a count in config.json beyond it is damage
DECLARATIONS = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")  # beside config.json, of ModelOpt, AWQ and GPTQ


class CheckpointError(Exception):
    """The folder is no checkpoint that can be planned; the message says why and what to give instead."""


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class MoeLayer:
    """The routed experts of one layer. ``draft`` is the kind of draft model they belong to, None in the main model;
    ``format`` is ``"mixed: a, b"`` when the experts do not all agree; ``packing`` says what else decides the packed size,
    as the extension's ``packed_bytes`` takes it."""

    layer_id: int
    draft: str | None
    format: str
    experts: int
    hidden: int
    width: int
    bytes: int
    missing: tuple[str, ...] = ()
    packing: dict[str, int | str | bool] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """``problems`` keep it from being read as it is; ``doubts`` do not. ``declared``: whether anything tells the server that
    weights are quantised; it does not look at their names and types."""

    path: Path
    architecture: str
    top_k: int | None
    declared_layers: int | None
    declared_experts: int | None
    declared: bool
    layers: list[MoeLayer] = field(default_factory=list)
    other_bytes: int = 0
    largest_file: int = 0
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def read(path: Path) -> Checkpoint:
    """Everything that the names and headers tell. Damaged or missing files are listed in ``problems``."""
    config = _config(path)
    found = Checkpoint(
        path=path,
        architecture=_architecture(config),
        top_k=_first(config, "num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token"),
        declared_layers=_first(config, "num_hidden_layers"),
        declared_experts=_first(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        declared=_declared(path, config),
    )
    groups: dict[tuple[str, int], _Group] = {}
    listed, files = _files(path, found.problems)
    file_of: dict[str, str] = {}
    for file in files:
        tensors, problem = read_header(file)
        found.problems += [problem] if problem else []
        found.largest_file = max(found.largest_file, file.stat().st_size if file.is_file() else 0)
        found.doubts += _repeated(file.name, [name for name in tensors if name in file_of], file_of)
        for name, tensor in tensors.items():
            if name not in file_of and not _collect(name, tensor, groups, found.declared_layers):
                found.other_bytes += tensor.bytes
        file_of |= dict.fromkeys(tensors, file.name)
    found.problems += missing_shards(path, listed, file_of)
    found.doubts += _ordered(config)
    hidden, symmetric = _first(config, "hidden_size"), _symmetric(config)
    found.layers = [group.layer(key, found.declared_experts, hidden, symmetric) for key, group in sorted(groups.items())]
    return found


def missing_shards(folder: Path, listed: Mapping[str, str], here: Container[str]) -> list[str]:
    """What an index lists and nobody has, in one line if anything. ``listed`` is tensor to file, ``here`` the tensors that
    were found: an entry whose tensor is in another file is only stale."""
    absent = {file for name, file in listed.items() if name not in here and not (folder / file).is_file()}
    if not absent:
        return []
    shown = ", ".join(sorted(absent)[:4]) + (" …" if len(absent) > 4 else "")
    return [f"{len(absent)} of {len(set(listed.values()))} shards in the index are missing: {shown}"]


def _repeated(file: str, names: list[str], file_of: Mapping[str, str]) -> list[str]:
    if not names:
        return []
    others = ", ".join(sorted({file_of[name] for name in names}))
    return [f"{len(names)} tensors of {file} are in {others}, too ({names[0]}): whichever is read last counts"]


def _ordered(config: dict) -> list[str]:
    match config.get("quantization_config"):
        case {"desc_act": True, "group_size": int(group)} if group > 0:
            return ["its columns may be grouped in act-order (desc_act), which the start refuses unless it is their own order"]
    return []


def _declared(path: Path, config: dict) -> bool:
    said = any(isinstance(config.get(key), dict) for key in ("quantization_config", "compression_config"))
    return said or any((path / name).is_file() for name in DECLARATIONS)


def _symmetric(config: dict) -> bool:
    """Whether zero points are all the middle of the range and need not be kept."""
    match config.get("quantization_config"):
        case {"sym": True}:
            return True
    return False


def read_header(file: Path) -> tuple[dict[str, Tensor], str | None]:
    """Names, types and shapes of one safetensors file, and what is wrong with the file if anything is."""
    if not file.is_file():
        return {}, f"{file.name} is no file, or a link to one that is not there"
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else None
        if length is None or length > min(HEADER_LIMIT, size - 8):
            return {}, f"{file.name} is not a safetensors file, or it is cut off in its header"
        try:
            tensors, end = _tensors(json.loads(stream.read(length)))
        except (ValueError, RecursionError) as error:
            return {}, f"{file.name} has a damaged header ({error})"
    wanted = 8 + length + end
    if size != wanted:
        return tensors, f"{file.name} has {size} bytes instead of {wanted}: " + (
            "it is cut off" if size < wanted else "something was appended"
        )
    return tensors, None


def _tensors(header: object) -> tuple[dict[str, Tensor], int]:
    """The tensors that a header describes and the bytes of data behind it; ``ValueError`` where it describes none."""
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    tensors, last = {}, 0
    for name, item in header.items():
        match item:
            case _ if name == "__metadata__":
                continue
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
                0 <= begin <= end and all(isinstance(size, int) and size >= 0 for size in shape)
            ):
                tensors[name] = Tensor(dtype, tuple(shape), end - begin)
                last = max(last, end)
            case _:
                raise ValueError(f"tensor {name!r} lacks a type, a shape or its place in the file")
    return tensors, last


def read_index(index: Path) -> dict[str, str]:
    """Tensor name to shard; ``ValueError`` where the index does not say that."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    match content:
        case {"weight_map": dict(listed)} if all(isinstance(shard, str) for shard in listed.values()):
            return listed
    raise ValueError("it has no weight_map from tensors to files")


def _config(path: Path) -> dict:
    """``config.json`` with a nested text model's values on top, as multimodal checkpoints store them."""
    try:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; give the folder that holds config.json and the safetensors files")
        file = path / "config.json"
        if not file.is_file():  # a pipe would be waited for
            raise FileNotFoundError
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} holds no readable config.json; give a checkpoint's own folder") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}/config.json is not JSON ({error}); fetch the file again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}/config.json is not a JSON object; fetch the file again")
    return {**config, **{key: value for key, value in text_model(config).items() if key != "architectures" and value is not None}}


def text_model(config: dict) -> dict:
    """The part of ``config.json`` that describes the text model: all of it, or what a multimodal checkpoint nests."""
    return next((config[key] for key in ("text_config", "llm_config", "language_config") if isinstance(config.get(key), dict)), config)


def _architecture(config: dict) -> str:
    match config.get("architectures"):
        case [str(name), *_]:
            return name
    return "unknown"


def _first(config: dict, *keys: str) -> int | None:
    """The first of these counts that is given."""
    key = next((key for key in keys if isinstance(config.get(key), int)), None)
    if key is None:
        return None
    if not 0 <= config[key] <= MOST:
        raise CheckpointError(f"config.json says {key} = {config[key]}, which no model has; fetch the file again")
    return config[key]


def _files(path: Path, problems: list[str]) -> tuple[dict[str, str], list[Path]]:
    """What the index lists, and the shards that the server reads: those it names, or all where there is none."""
    present = sorted(path.glob("*.safetensors"))
    index = path / INDEX
    listed: dict[str, str] = {}
    if index.is_file():
        try:
            listed = read_index(index)
        except ValueError as error:
            problems.append(f"{index.name} is damaged ({error})")
    elif not present:
        raise CheckpointError(f"{path} holds no *.safetensors file; convert the checkpoint to safetensors first")
    return listed, [file for file in present if not listed or file.name in listed.values()]


# One tensor of one expert, and one tensor of all experts of a layer.
_LAYER = r"^(?P<before>.*?)\b(?P<list>layers|stages|blocks|h)\.(?P<layer>\d{1,6})\.(?P<between>.*?)\bexperts\."
_PART = re.compile(_LAYER + r"(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<kind>\w+)$")
_FUSED = re.compile(_LAYER + r"(?P<part>gate_up_proj|gate_proj|up_proj|down_proj|w13|w2)[._]?(?P<kind>\w*)$")
_SAME = {
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "w13": "gate_up",
}
_CODES = ("weight", "weight_packed", "qweight", "blocks", "")  # the tensor that holds the weights themselves
_SCALES = ("weight_scale", "weight_scale_inv", "scale", "scales")


def _collect(name: str, tensor: Tensor, groups: dict, declared_layers: int | None) -> bool:
    """Add the tensor to its layer's group; False if it belongs to no routed expert."""
    match = _PART.match(name) or _FUSED.match(name)
    if match is None or "shared" in match["between"]:
        return False
    layer = int(match["layer"])
    group = groups.setdefault((_draft(match, layer, declared_layers), layer), _Group())
    group.add(match.groupdict().get("expert"), _SAME[match["part"]], match["kind"], tensor)
    return True


def _draft(match: re.Match, layer: int, declared_layers: int | None) -> str:
    """Kind of draft model, "" for the main one. Some checkpoints append MTP layers to the main model's."""
    if match["list"] == "stages":
        return "dspark"
    appended = declared_layers is not None and layer >= declared_layers
    return "mtp" if appended or re.search(r"\b(mtp|nextn)\b", match["before"]) else ""


class _Group:
    """The tensors of one layer's experts while they are being gathered."""

    def __init__(self) -> None:
        self.bytes = 0
        self.tensors: dict[tuple[str | None, str], dict[str, Tensor]] = {}

    def add(self, expert: str | None, part: str, kind: str, tensor: Tensor) -> None:
        self.bytes += tensor.bytes
        self.tensors.setdefault((expert, part), {})[kind] = tensor

    def layer(self, key: tuple[str, int], declared: int | None, hidden: int | None, symmetric: bool) -> MoeLayer:
        fused = any(expert is None for expert, _ in self.tensors)
        part, kinds = next(((p, k) for (_, p), k in self.tensors.items() if p in ("gate", "gate_up")), (None, {}))
        bits = _word_bits(kinds, hidden)
        formats = sorted({_format(kinds, bits) for kinds in self.tensors.values()})
        rows, columns, count = _shape(kinds, fused, hidden, bits)
        width = rows // 2 if part == "gate_up" else rows
        experts = count if fused else len({expert for expert, _ in self.tensors})
        return MoeLayer(
            layer_id=key[1],
            draft=key[0] or None,
            experts=experts,
            hidden=columns,
            width=width,
            bytes=self.bytes,
            format=formats[0] if len(formats) == 1 else "mixed: " + ", ".join(formats),
            missing=() if fused else self._missing(declared or experts),
            packing=_packing(formats[0], kinds, width, columns, symmetric) if len(formats) == 1 and not fused else {},
        )

    def _missing(self, experts: int) -> tuple[str, ...]:
        have = {key for key, kinds in self.tensors.items() if any(kind in kinds for kind in _CODES)}
        wanted = [(str(e), part) for e in range(experts) for part in ("gate", "up", "down")]
        return tuple(f"experts.{e}.{part}" for e, part in wanted if (e, part) not in have)


def _codes(kinds: dict[str, Tensor]) -> Tensor | None:
    return next((kinds[kind] for kind in _CODES if kind in kinds), None)


def _scale(kinds: dict[str, Tensor]) -> Tensor | None:
    return next((kinds[kind] for kind in _SCALES if kind in kinds), None)


def _word_bits(kinds: dict[str, Tensor], hidden: int | None) -> int:
    """Bits of an integer weight that is packed in words, by the size of a gate projection; 4 where it cannot be told."""
    codes, scale = _codes(kinds), _scale(kinds)
    if codes is None or not hidden or len(codes.shape) != 2:
        return 4
    if "qweight" in kinds and codes.shape[0] == hidden and scale is not None:  # AWQ packs rows
        return 32 * codes.shape[1] // (scale.shape[-1] or 1) or 4
    return 32 * codes.shape[0 if "qweight" in kinds else 1] // hidden or 4


def _format(kinds: dict[str, Tensor], bits: int) -> str:
    """The format's name, by the type of the codes and of the scales beside them; ``bits`` of weights packed in words."""
    codes, scale = _codes(kinds), _scale(kinds)
    if codes is None:
        return "no weights"
    scale_type = scale.dtype if scale else None
    match codes.dtype, scale_type:
        case "BF16", None:
            return "bf16"
        case "F32", None:
            return "f32"
        case "F16", None:
            return "f16"
        case (("U8" | "I8" | "F4"), ("U8" | "F8_E8M0")):
            return "mxfp4"
        case (("U8" | "I8" | "F4"), "F8_E4M3"):
            return "nvfp4"
        case "F8_E4M3", ("U8" | "F8_E8M0"):
            return "mxfp8"
        case "F8_E4M3", (None | "F32" | "BF16" | "F16"):
            return "fp8"
        case (("I32" | "I64"), (None | "F32" | "BF16" | "F16")):
            return f"int{bits}"
        case "I8", _:
            return "int8"
    name = f"int{bits}" if codes.dtype in ("I32", "I64") else codes.dtype.lower()
    return f"{name} ({scale_type.lower()} scales)" if scale_type else name


def _packing(format: str, kinds: dict[str, Tensor], width: int, hidden: int, symmetric: bool) -> dict[str, int | str | bool]:
    """How the format's open points are held, by the shape of the gate's scales."""
    scale = _scale(kinds)
    if format not in ("fp8", "int4") or scale is None:
        return {}
    shape = tuple(reversed(scale.shape)) if "scales" in kinds else scale.shape
    rows, groups = (*shape, 1, 1)[:2] if len(shape) < 2 else shape[:2]
    zeros = not symmetric and any(kind in kinds for kind in ("qzeros", "weight_zero_point"))
    if format == "fp8":
        blocks = groups > 1 or 1 < rows < width
        return {"group": _multiple(hidden, groups), "scales": "f32_shared" if rows * 16 <= width else "f32"} if blocks else {}
    if groups == 1 and not zeros:
        return {}
    group = _multiple(hidden, groups) if groups > 1 else _multiple(max(hidden, width), 1)
    return {"group": group, "scales": scale.dtype.lower(), "zeros": zeros}


def _multiple(size: int, parts: int) -> int:
    """The size of equal parts, all but perhaps the last of which are multiples of 32, or of any equal parts where there are no such."""
    least = -(-size // parts)
    multiple = -(-least // 32) * 32
    return multiple if (parts - 1) * multiple < size else least


def _shape(kinds: dict[str, Tensor], fused: bool, hidden: int | None, bits: int) -> tuple[int, int, int]:
    """Rows and columns of one expert's first projection, and the experts that the tensor stacks."""
    codes = _codes(kinds)
    if codes is None:
        return 0, hidden or 0, 0
    shape = codes.shape
    count, shape = (shape[0], shape[1:]) if fused else (1, shape)
    per_byte = 2 if _format(kinds, bits) in ("mxfp4", "nvfp4") else 1
    if not shape:
        return 0, hidden or 0, count
    if codes.dtype == "I32" and hidden:  # words hold rows or columns: the number of values tells the rows
        return math.prod(shape) * 32 // bits // hidden, hidden, count
    rows, columns = shape[0], math.prod(shape[1:]) * per_byte
    if hidden and columns != hidden and rows == hidden:  # stored [in, out]
        rows, columns = columns, rows
    return rows, columns, count
