"""How the text of an environment variable becomes a value.

Knows kinds of values, not variables: ``config`` says which variable has which kind.
A new kind is a class with ``label`` (for the table), ``parse`` (``ValueError`` says what is accepted) and ``show`` (the
text that parses to a value again).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.lk.term import ranges

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?", re.ASCII)


@dataclass(frozen=True)
class Whole:
    """A whole number in a closed range. Below ``floor`` it is raised to ``floor`` (``config`` says so once)."""

    minimum: int
    maximum: int
    step: int = 1
    floor: int | None = None
    unset: str = ""

    @property
    def label(self) -> str:
        multiple = f", a multiple of {self.step}" if self.step > 1 else ""
        minimum = self.minimum if self.floor is None else self.floor
        return f"a whole number from {minimum} to {self.maximum}{multiple}"

    def parse(self, text: str) -> int:
        if _WHOLE.fullmatch(text):
            value = int(text)
            if self.minimum <= value <= self.maximum and value % self.step == 0:
                return value
        raise ValueError(self.label)

    def show(self, value: int | None) -> str:
        return self.unset if value is None else str(value)


@dataclass(frozen=True)
class Switch:
    """``0`` or ``1``. ``true`` or ``yes`` are refused: a reader must not wonder which spellings count."""

    unset: str = ""

    @property
    def label(self) -> str:
        return "0 or 1"

    def parse(self, text: str) -> bool:
        if text not in ("0", "1"):
            raise ValueError(self.label)
        return text == "1"

    def show(self, value: bool | None) -> str:
        return self.unset if value is None else str(int(value))


@dataclass(frozen=True)
class Choice:
    """One of a few names, spelled exactly."""

    names: tuple[str, ...]
    unset: str = ""

    @property
    def label(self) -> str:
        return " or ".join([", ".join(self.names[:-1]), self.names[-1]]) if self.names[1:] else self.names[0]

    def parse(self, text: str) -> str:
        if text not in self.names:
            raise ValueError(self.label)
        return text

    def show(self, value: str | None) -> str:
        return self.unset if value is None else value


@dataclass(frozen=True)
class Text:
    """Any text, such as a path."""

    label: str = "a path"
    unset: str = ""

    def parse(self, text: str) -> str:
        return text

    def show(self, value: str | None) -> str:
        return self.unset if value is None else value


@dataclass(frozen=True)
class LayerSet:
    """Layer ids of one model; prints in the grammar it was read from (``0,8-9``)."""

    ids: frozenset[int] = frozenset()

    def __contains__(self, layer_id: int) -> bool:
        return layer_id in self.ids

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        return ranges(self.ids)


@dataclass(frozen=True)
class Layers:
    """A list of layer ids. The model knows which exist, so ``roles`` checks that."""

    label: str = "a layer list such as 0, 0-1 or 0,8-9"
    unset: str = ""

    def parse(self, text: str) -> LayerSet:
        ids: set[int] = set()
        for item in text.split(","):
            match = _RANGE.fullmatch(item.strip())
            if match is None:
                raise ValueError(f"{self.label} ({item.strip()!r} is neither an id nor a range)")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ValueError(f"{self.label} ({item.strip()!r} runs backwards)")
            ids.update(range(first, last + 1))
        return LayerSet(frozenset(ids))

    def show(self, value: LayerSet | None) -> str:
        return self.unset if value is None else str(value)


Kind = Whole | Switch | Choice | Text | Layers
