"""The closing table and the verdict. Pure: measurements in, text out."""

from dataclasses import dataclass, field

SURE = 0.05  # a smaller gap between the best two logits may rightly fall either way


@dataclass(frozen=True)
class Prompt:
    """A prompt with its greedy continuation in float32, and the smallest gap between the best two logits on the way."""

    text: str
    ids: tuple[int, ...]
    margin: float

    @property
    def sure(self) -> bool:
        return self.margin >= SURE


@dataclass
class Run:
    """What one server showed. Rates are tokens per second; ``same`` holds one flag per prompt."""

    label: str
    start_s: float = 0.0
    ids: list[tuple[int, ...]] = field(default_factory=list)
    decode: float = 0.0
    prefill_one: float = 0.0
    prefill_many: float = 0.0
    prompts_s: float = 0.0


def same(run: Run, prompts: list[Prompt]) -> tuple[int, int, int, int]:
    """Sure prompts that agree and their number, other prompts that agree and their number."""
    pairs = list(zip(prompts, run.ids, strict=True))
    sure = [prompt.ids == ids for prompt, ids in pairs if prompt.sure]
    other = [prompt.ids == ids for prompt, ids in pairs if not prompt.sure]
    return sum(sure), len(sure), sum(other), len(other)


def agrees(run: Run, prompts: list[Prompt]) -> bool:
    right, count, *_ = same(run, prompts)
    return count > 0 and right == count


def differences(run: Run, prompts: list[Prompt]) -> list[str]:
    """One line for every sure prompt that differs, with the first token that does."""
    out = []
    for prompt, ids in zip(prompts, run.ids, strict=True):
        if prompt.sure and prompt.ids != ids:
            at = next(i for i, pair in enumerate(zip(prompt.ids, ids, strict=True)) if pair[0] != pair[1])
            out.append(f"{run.label}: {prompt.text!r} differs at token {at} ({ids[at]} instead of {prompt.ids[at]})")
    return out


def times(value: float, base: float) -> str:
    return f"{value:,.0f} ({value / base:.2f} x)" if base else "-"


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text.insert(1, "  " + "  ".join("-" * width for width in widths))
    return "\n".join(text)


def results(runs: list[Run], prompts: list[Prompt]) -> str:
    """One column per server; every rate also as a multiple of the first one's."""
    base = runs[0]
    counts = [same(run, prompts) for run in runs]
    rows = [["", *(run.label for run in runs)]]
    rows.append([f"prompts with margin >= {SURE}: identical", *(f"{c[0]} of {c[1]}" for c in counts)])
    rows.append(["other prompts: identical", *(f"{c[2]} of {c[3]}" for c in counts)])
    rows.append(["decode, tokens/s", *(times(run.decode, base.decode) for run in runs)])
    rows.append(["prefill 1 x 2,048, tokens/s", *(times(run.prefill_one, base.prefill_one) for run in runs)])
    rows.append(["prefill 16 x 128, tokens/s", *(times(run.prefill_many, base.prefill_many) for run in runs)])
    rows.append(["start, s", *(f"{run.start_s:.1f}" for run in runs)])
    rows.append(["prompts, s", *(f"{run.prompts_s:.1f}" for run in runs)])
    return table(rows)


def spent(steps: dict[str, float], total: float) -> str:
    """Where the time went."""
    rows = [["where the time went", "s"], *([name, f"{seconds:.1f}"] for name, seconds in steps.items())]
    rows.append(["total", f"{total:.1f}"])
    return table(rows)
