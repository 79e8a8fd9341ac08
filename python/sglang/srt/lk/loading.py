"""From upstream's loaders to the store: which part of which expert a tensor is, and this rank's share of it.

The loaders stand on empty stub parameters under the names that upstream's model code looks up. Every mishap names layer,
expert, part and, where the checkpoint's headers tell, tensor and file. Nothing is computed here; ``store`` packs.

A checkpoint that stacks experts in another way is a branch in ``ExpertLoader._pieces``.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import torch

from sglang.srt.lk import checkpoint
from sglang.srt.lk.formats import BIAS, CHANNEL, CODES, GLOBAL, ORDER, SCALES, UNUSED, ZEROS, Field, FormatError, Unquantized
from sglang.srt.lk.formats.geometry import ROWS, cut
from sglang.srt.lk.kernels import KernelError
from sglang.srt.lk.store import LayerStore

SHARDS = {"w1": ("gate",), "w3": ("up",), "w2": ("down",), "w13": ("gate", "up")}
QUANTISED = ("weight_packed", "qweight")  # names of codes that are never plain weights
AGAIN = "fetch or convert the checkpoint again"


class LoadError(RuntimeError):
    """Why the experts cannot be loaded, in one message for the user."""

    def __init__(self, message: str):
        super().__init__(f"Hybrid MoE: {message}")


class Files:
    """The safetensors files that this process reads: checked before the first byte, asked when something is wrong."""

    def __init__(self) -> None:
        self._file_of: dict[str, str] = {}

    def check(self, folder: Path, files: Iterable[Path]) -> None:
        """Raise one ``LoadError`` with every file that is damaged, and every shard of the index that is missing."""
        problems = []
        for file in files:
            tensors, problem = checkpoint.read_header(file)
            problems += [problem] if problem else []
            self._file_of |= dict.fromkeys(tensors, file.name)
        problems += self._missing_shards(folder)
        if problems:
            raise LoadError(f"the checkpoint in {folder} is not whole: {'; '.join(problems)}. {AGAIN.capitalize()}.")

    def find(self, layer_id: int, expert: int, part: str, what: str) -> tuple[str, str] | None:
        """Tensor and file that hold this part of an expert, as far as their names tell."""
        patterns = _patterns(str(layer_id), expert, part, what)
        return next(((name, file) for pattern in patterns for name, file in self._file_of.items() if pattern.search(name)), None)

    def _missing_shards(self, folder: Path) -> list[str]:
        index = folder / checkpoint.INDEX
        if not index.is_file():
            return []
        try:
            listed = checkpoint.read_index(index)
        except ValueError as error:
            return [f"{index.name} is damaged ({error})"]
        return checkpoint.missing_shards(folder, listed, self._file_of)


files = Files()


class ExpertLoader:
    """The ``weight_loader`` of one stub parameter."""

    def __init__(self, store: LayerStore, name: str, field: Field, *, interleaved: bool, presharded: bool = False):
        self._store = store
        self._name = name
        self._field = field
        self._interleaved = interleaved
        self._presharded = presharded

    def __call__(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
    ) -> None:
        if self._store.complete:
            raise LoadError(f"{self._store.name}: experts in host memory cannot be replaced while serving; restart the server")
        if self._field.what == UNUSED:
            return
        alone = self._presharded or shard_id is None  # then upstream's model code has taken this rank's share
        for expert, part, parts, tensor in self._pieces(loaded_weight, shard_id, expert_id):
            try:
                self._pack(expert, part, self._half(tensor, part, parts), alone=alone)
            except (FormatError, KernelError) as error:
                raise self._error(expert, part, str(error)) from error

    def _pieces(
        self, tensor: torch.Tensor, shard: str | None, expert: int | None
    ) -> Iterator[tuple[int, str, int, torch.Tensor]]:
        """(expert, part, parts in the tensor, tensor) of one checkpoint tensor; a stacked one holds all experts of the layer."""
        parts = SHARDS.get(shard or self._field.half)
        if parts is None or (parts == ("down",)) != (self._field.half == "w2"):
            raise LoadError(f"{self._store.name}.{self._name}: {shard!r} is no part of it that can be loaded")
        experts = self._store.geometry.experts
        if expert is not None and not 0 <= expert < experts:
            raise LoadError(f"{self._store.name}.{self._name}: expert {expert} does not exist, the layer has {experts}")
        if expert is None and (tensor.dim() == 0 or tensor.shape[0] != experts):
            raise LoadError(
                f"{self._store.name}.{self._name}: shape {list(tensor.shape)} does not stack the layer's {experts} experts; {AGAIN}"
            )
        for e, one in enumerate(tensor) if expert is None else [(expert, tensor)]:
            for part in parts:
                yield e, part, len(parts), one

    def _half(self, tensor: torch.Tensor, part: str, parts: int) -> torch.Tensor:
        """The rows of gate or up in a tensor that holds both, one after the other or by turns."""
        store, what = self._store, self._field.what
        tensor = store.format.view(what, tensor)
        if parts == 1:
            return tensor
        which = ("gate", "up").index(part)
        if what == GLOBAL:  # one number for both, or one for each
            return tensor.flatten()[which] if tensor.numel() == 2 else tensor
        along, per = next(((n, axis.per) for n, axis in enumerate(store.axes(what)) if axis.along == ROWS), (None, 1))
        if along is None or along >= tensor.dim():
            return tensor
        if per != 1 and (self._interleaved or store.geometry.width * store.geometry.ranks % per):
            raise FormatError("rows of gate and up share scales or words, which is not supported")
        if self._interleaved:
            return tensor[(slice(None),) * along + (slice(which, None, 2),)]
        return tensor.chunk(2, along)[which] if tensor.shape[along] % 2 == 0 else tensor

    def _pack(self, expert: int, part: str, tensor: torch.Tensor, *, alone: bool) -> None:
        """This rank's share of one part's tensor, by a view, into the store."""
        what, geometry = self._field.what, self._store.geometry
        window = geometry.window(part, alone=alone)
        if what == ORDER:  # every rank looks at all of it
            window = geometry.whole(part, alone=alone)
        if what != GLOBAL:
            tensor = cut(tensor, self._store.axes(what), whole=geometry.whole(part, alone=alone), window=window)
        self._store.put(expert, part, what, tensor, window)

    def _error(self, expert: int, part: str, reason: str) -> LoadError:
        what = self._field.what
        found = files.find(self._store.layer_id, expert, part, what)
        where = f" (tensor {found[0]} in {found[1]})" if found else ""
        return LoadError(f"{self._store.name}: expert {expert}, {part}, {what}: {reason}{where}; {AGAIN}")


def missing_error(store: LayerStore) -> LoadError | None:
    """What the checkpoint did not bring for this layer, if anything."""
    missing = store.missing()
    if not missing:
        return None
    shown = ", ".join(f"expert {expert} {part} {what}" for expert, part, what in missing[:4])
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    tensor, file = files.find(store.layer_id, *missing[0]) or ("", "")
    if isinstance(store.format, Unquantized) and tensor.endswith(QUANTISED):
        return LoadError(
            f"{store.name}: the experts are quantised (tensor {tensor} in {file}), which config.json does not declare; "
            "give a checkpoint with its quantization_config"
        )
    return LoadError(f"{store.name}: the checkpoint has no {shown}{more}; {AGAIN}")


_PART = {
    "gate": r"(?:gate_proj|w1|gate_up_proj|w13)",
    "up": r"(?:up_proj|w3|gate_up_proj|w13)",
    "down": r"(?:down_proj|w2)",
}
_SCALE = r"[._](?:weight_scale|weight_scale_inv|scales?)$"
_WHAT = {
    CODES: r"(?:[._](?:weight|weight_packed|qweight|blocks))?$",
    SCALES: _SCALE,
    CHANNEL: _SCALE,
    ZEROS: r"[._](?:qzeros|weight_zero_point)$",
    ORDER: r"[._](?:g_idx|weight_g_idx)$",
    GLOBAL: r"[._](?:weight_scale_2|weight_global_scale)$",
    BIAS: r"[._](?:bias|weight_bias)$",
}
_OTHERWISE = {GLOBAL: _SCALE}  # where the format has no other scales


def _patterns(layer: str, expert: int, part: str, what: str) -> list[re.Pattern[str]]:
    begin = rf"\b(?:layers|stages|blocks|h)\.{layer}\.(?:.*\.)?experts\.(?:{expert}\.)?{_PART[part]}"
    return [re.compile(begin + _WHAT[what])] + ([re.compile(begin + _OTHERWISE[what])] if what in _OTHERWISE else [])


@lru_cache(maxsize=4)
def fetched(name: str, *, revision: str | None, download_dir: str | None, load_format: str) -> Path:
    """The folder of a checkpoint with a name of a hub, fetched if need be, by upstream's loader and with its settings: it finds the
    same files there when it reads them, and compares ``--model-checksum`` only then, since that reads every byte."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import get_model

    loader = DefaultModelLoader(LoadConfig(load_format=load_format, download_dir=download_dir))
    with get_model().override(model_checksum=None):
        folder, _, _ = loader._prepare_weights(name, revision, fall_back_to_pt=True)
    return Path(folder)


STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def stored_types(folder: Path, layer_id: int) -> dict[str, torch.dtype]:
    """Float types of a layer's codes and scales in the checkpoint of a folder, as the headers tell: {} where they do not (files
    that are no safetensors), and no complaint, since a damaged checkpoint is refused when it is read."""
    found = {}
    for what, (name, file) in _first_tensors(folder).get(layer_id, {}).items():
        tensor = _header(file).get(name)
        if tensor is not None and tensor.dtype in STORED:
            found[what] = STORED[tensor.dtype]
    return found


@lru_cache(maxsize=4)
def _first_tensors(folder: Path) -> dict[int, dict[str, tuple[str, Path]]]:
    """By layer: name and file of the first expert's gate codes and scales."""
    patterns = [(what, _patterns(r"(?P<layer>\d+)", 0, "gate", what)[0]) for what in (CODES, SCALES)]
    found: dict[int, dict[str, tuple[str, Path]]] = {}
    for name, file in _listed(folder):
        for what, pattern in patterns:
            match = pattern.search(name)
            if match:
                found.setdefault(int(match["layer"]), {}).setdefault(what, (name, file))
    return found


def _listed(folder: Path) -> list[tuple[str, Path]]:
    index = folder / checkpoint.INDEX
    try:
        if index.is_file():
            return [(name, folder / file) for name, file in checkpoint.read_index(index).items()]
    except ValueError:  # ``Files.check`` says so when the files are read
        return []
    return [(name, file) for file in sorted(folder.glob("*.safetensors")) for name in _header(file)]


@lru_cache(maxsize=4)
def _header(file: Path) -> dict[str, checkpoint.Tensor]:
    return checkpoint.read_header(file)[0]
