"""From upstream's loaders to the store: which part of which expert a tensor is, and this rank's share of it.

The loaders stand on empty stub parameters under the names that upstream's model code looks up. Every mishap names layer,
expert, part and, where the checkpoint's headers tell, tensor and file. Nothing is computed here; ``store`` packs.

A checkpoint that stacks experts in another way is a branch in ``ExpertLoader._pieces``.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from sglang.srt.lk import checkpoint
from sglang.srt.lk.formats import BIAS, CODES, GLOBAL, SCALES, UNUSED, Field, FormatError
from sglang.srt.lk.kernels import KernelError
from sglang.srt.lk.store import LayerStore

SHARDS = {"w1": ("gate",), "w3": ("up",), "w2": ("down",), "w13": ("gate", "up")}
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
        pattern = _pattern(layer_id, expert, part, what)
        return next(((name, file) for name, file in self._file_of.items() if pattern.search(name)), None)

    def _missing_shards(self, folder: Path) -> list[str]:
        index = folder / "model.safetensors.index.json"
        if not index.is_file():
            return []
        try:
            listed = checkpoint.read_index(index)
        except ValueError as error:
            return [f"{index.name} is damaged ({error})"]
        # An entry that other files make up for is only stale.
        absent = {file for name, file in listed.items() if name not in self._file_of and not (folder / file).is_file()}
        return [f"{', '.join(sorted(absent))} of {len(set(listed.values()))} shards in the index is missing"] if absent else []


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
        cut = self._presharded or shard_id is None  # then upstream's model code has taken this rank's share
        for expert, part, tensor in self._pieces(loaded_weight, shard_id, expert_id):
            try:
                self._store.put(expert, part, self._field.what, self._share(tensor, part, cut=cut))
            except (FormatError, KernelError) as error:
                raise self._error(expert, part, str(error)) from error

    def _pieces(
        self, tensor: torch.Tensor, shard: str | None, expert: int | None
    ) -> Iterator[tuple[int, str, torch.Tensor]]:
        """(expert, part, tensor) of one checkpoint tensor; a stacked one holds all experts of the layer."""
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
                yield e, part, self._half(one, part, len(parts))

    def _half(self, tensor: torch.Tensor, part: str, parts: int) -> torch.Tensor:
        """The rows of gate or up in a tensor that holds both, one after the other or by turns."""
        if parts == 1 or tensor.dim() == 0:
            return tensor
        which = ("gate", "up").index(part)
        if self._interleaved:
            return tensor[which::2]
        return tensor.chunk(2)[which] if tensor.shape[0] % 2 == 0 else tensor

    def _share(self, tensor: torch.Tensor, part: str, *, cut: bool) -> torch.Tensor:
        """This rank's rows of gate and up, or columns of down; always a view."""
        what, geometry = self._field.what, self._store.geometry
        if what == GLOBAL:
            return tensor
        if what == CODES and tensor.dim() == 3:  # gpt-oss cuts rows into blocks
            tensor = tensor.flatten(1)
        share = self._store.shape(part, what)
        axis = 1 if part == "down" else 0
        split = geometry.ranks > 1 and not cut and axis < len(share)
        whole = [size * geometry.ranks if split and i == axis else size for i, size in enumerate(share)]
        if list(tensor.shape) != whole:
            raise FormatError(f"the shape is {list(tensor.shape)}; expected {whole}")
        return tensor.narrow(axis, geometry.rank * share[axis], share[axis]) if split else tensor

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
    return LoadError(f"{store.name}: the checkpoint has no {shown}{more}; {AGAIN}")


_PART = {
    "gate": r"(?:gate_proj|w1|gate_up_proj|w13)",
    "up": r"(?:up_proj|w3|gate_up_proj|w13)",
    "down": r"(?:down_proj|w2)",
}
_WHAT = {
    CODES: r"(?:[._](?:weight|weight_packed|blocks))?$",
    SCALES: r"[._](?:weight_scale|weight_scale_inv|scales?)$",
    GLOBAL: r"[._](?:weight_scale_2|weight_global_scale)$",
    BIAS: r"[._](?:bias|weight_bias)$",
}


def _pattern(layer_id: int, expert: int, part: str, what: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:layers|stages|blocks|h)\.{layer_id}\.(?:.*\.)?experts\.(?:{expert}\.)?{_PART[part]}{_WHAT[what]}")
