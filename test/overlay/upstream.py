"""A tiny upstream to try the overlay on: one wheel is a dict of files, and a release changes a few lines."""

import zipfile
from pathlib import Path

from overlay.edits import Edit
from overlay.outcome import Outcome, Upstream, try_all

LAYER = "sglang/layer.py"
LAYER_TEXT = '''\
class Base:
    def __init__(self):
        self.create_weights(1)


class FusedMoE(Base):
    """A layer."""

    def __init__(
        self,
        size,
    ):
        self.size = size
        self.quant_method = None

        self.quant_method.create_weights(
            layer=self,
        )

    def forward(self, x):
        return x
'''


def wheel(folder: Path, version: str, files: dict[str, str]) -> Path:
    """Write a wheel as upstream's look: package files, metadata and a licence."""
    path = folder / f"sglang-{version}-cp311-cp311-manylinux_2_34_x86_64.whl"
    info = f"sglang-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/METADATA", f"Name: sglang\nVersion: {version}\nRequires-Dist: numpy\n\nReadme\n")
        archive.writestr(f"{info}/licenses/LICENSE", "Apache\n")
    return path


def edit(**changes) -> Edit:
    """The edit that the tests vary; its fields are those of a real one."""
    fields = {
        "file": LAYER,
        "id": "wrap-moe-method",
        "why": "Give each MoE layer its role before its weights are created.",
        "retire": "when upstream lets a plugin wrap quant_method",
        "within": ("class FusedMoE(", "def __init__("),
        "anchor": "self.quant_method.create_weights(",
        "op": "before",
        "text": "if size:\n    self.size = 2 * size\n",
        "seen": {},
    }
    return Edit(**{**fields, **changes})


def judge(folder: Path, text: str | None, *edits: Edit, version: str = "0.5.24") -> tuple[list[Outcome], dict[str, str]]:
    """The outcomes of some edits in a release whose layer file reads ``text`` (None: it is gone)."""
    files = {"sglang/__init__.py": ""} if text is None else {LAYER: text}
    path = wheel(folder, version, files)
    return try_all(edits=list(edits), upstream=Upstream(wheel=path, version=version))


def read_against(folder: Path, *edits: Edit, text: str = LAYER_TEXT, version: str = "0.5.23") -> list[Edit]:
    """The same edits, accepted in an earlier release."""
    outcomes, _ = judge(folder, text, *edits, version=version)
    return [edit(**{**vars(o.edit), "seen": {version: o.hash}}) for o in outcomes]
