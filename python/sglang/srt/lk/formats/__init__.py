"""How a checkpoint writes experts down, one ``ExpertFormat`` per way, and what becomes of each tensor.

A format recognises upstream's quantization method (or the scheme of methods that have one), names the parameters that
upstream's model code looks up, and turns a checkpoint tensor into what the kernels read.

- ``geometry``     sizes, this rank's window on a matrix, tensors cut to it
- ``base``         what a format owes the loader
- ``unquantized``  bf16, f16
- ``fp8``          blocks, per tensor, per channel, MXFP8
- ``fp4``          MXFP4, NVFP4
- ``int4``         AWQ, GPTQ, compressed-tensors

Adding a format means adding a subclass to ``FORMATS``; one that needs another kernel adds that to the extension first.
"""

from sglang.srt.lk.formats.base import (
    BIAS,
    CHANNEL,
    CODES,
    GLOBAL,
    ORDER,
    SCALES,
    UNUSED,
    ZEROS,
    ExpertFormat,
    Field,
    Packing,
)
from sglang.srt.lk.formats.fp4 import CompressedTensorsNvfp4, DeepseekMxfp4, ModelOptNvfp4, Mxfp4
from sglang.srt.lk.formats.fp8 import Fp8Block, Fp8Channel, Fp8Tensor, Mxfp8
from sglang.srt.lk.formats.geometry import FormatError, Geometry
from sglang.srt.lk.formats.int4 import Awq, CompressedTensorsInt4, Gptq
from sglang.srt.lk.formats.unquantized import Unquantized

__all__ = [
    "BIAS", "CHANNEL", "CODES", "FORMATS", "GLOBAL", "ORDER", "SCALES", "UNUSED", "ZEROS", "ExpertFormat", "Field", "FormatError",
    "Geometry", "Packing", "format_for",
]  # fmt: skip

FORMATS: tuple[type[ExpertFormat], ...] = (
    Unquantized,
    Fp8Block,
    Fp8Tensor,
    Fp8Channel,
    Mxfp8,
    Mxfp4,
    DeepseekMxfp4,
    ModelOptNvfp4,
    CompressedTensorsNvfp4,
    Awq,
    Gptq,
    CompressedTensorsInt4,
)


def format_for(method: object, scheme: object | None) -> ExpertFormat | None:
    """The format of a layer by what upstream chose for it, None if there is none; ``FormatError`` if it is one that cannot
    be taken over as it is."""
    return next((made for known in FORMATS if (made := known.of(method, scheme)) is not None), None)
