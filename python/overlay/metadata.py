"""Version and requirements of our distribution, for scikit-build-core (``[[tool.dynamic-metadata]]``).

Read from the pins and from the generated facts of the release that ``LK_UPSTREAM`` names: no download.
An extra of upstream that names ``sglang[…]`` means ours here; otherwise pip would install stock over us.
"""

import re
from collections.abc import Mapping

from overlay import facts, pins

OUR_EXTRAS = {"bench": ["matplotlib"]}  # `sglang-lk bench kernels --plot` draws with it; serving does not


def dynamic_metadata(settings: Mapping[str, object], project: Mapping[str, object]) -> dict[str, object]:
    """The fields of ``[project]`` that depend on the upstream release."""
    if settings:
        raise ValueError(f"overlay.metadata takes no settings, got {', '.join(settings)}")
    tag = pins.load().chosen()
    required, extras = requirements(facts.requires_path(tag.version).read_text(encoding="utf-8"))
    return {"version": tag.own_version, "dependencies": required, "optional-dependencies": extras | OUR_EXTRAS}


def requirements(lines: str) -> tuple[list[str], dict[str, list[str]]]:
    """Split upstream's lines into what everybody needs and what each extra adds."""
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in lines.splitlines():
        field, _, value = line.partition(": ")
        if field == "Provides-Extra":
            extras.setdefault(value, [])
            continue
        value = re.sub(r"^sglang(?=\[)", "sglang-lk", value)
        match = re.fullmatch(r"(.*?)(?:;| and) *extra == \"([^\"]+)\"", value)
        if match is None:
            required.append(value)
        else:
            extras.setdefault(match[2], []).append(match[1].strip())
    return required, extras
