"""Four-bit expert weights for the checkpoints: values that both a 4-bit and a BF16 file can hold, and the 4-bit file's bytes.

Rows of the last dimension are cut into groups that share a scale. ``mxfp4`` groups 32 columns under a power of two (e8m0),
``nvfp4`` 16 columns under an e4m3 number. Every product of a code and its scale has at most 6 significant bits, so BF16 holds
it exactly and a BF16 checkpoint of ``snap(values)`` and a 4-bit one of ``encode(values)`` are the same model.
"""

import torch

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = {"mxfp4": 32, "nvfp4": 16}


def snap(values: torch.Tensor, grid: str) -> torch.Tensor:
    """The nearest values that the grid can hold, as float32."""
    codes, scales = _codes(values, grid)
    magnitude = LEVELS[(codes & 7).long()]
    signed = torch.where(codes >= 8, -magnitude, magnitude)
    return (signed * scales).reshape(values.shape)


def encode(values: torch.Tensor, grid: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``[…, columns/2]`` bytes (low nibble = even column) and ``[…, columns/group]`` scales (uint8 e8m0, or e4m3)."""
    codes, scales = _codes(values, grid)
    codes = codes.reshape(*values.shape[:-1], -1, 2)
    packed = codes[..., 0] | (codes[..., 1] << 4)
    scales = scales.reshape(*values.shape[:-1], -1)
    if grid == "mxfp4":
        return packed, (torch.log2(scales) + 127).to(torch.uint8)
    return packed, scales.to(torch.float8_e4m3fn)


def _codes(values: torch.Tensor, grid: str) -> tuple[torch.Tensor, torch.Tensor]:
    groups = values.float().reshape(*values.shape[:-1], -1, GROUP[grid])
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-6)
    if grid == "mxfp4":
        scales = torch.exp2(torch.ceil(torch.log2(largest / 6)))
    else:
        scales = (largest / 6).to(torch.float8_e4m3fn).float()
    distance = (groups.abs() / scales).unsqueeze(-1) - LEVELS
    codes = distance.abs().argmin(-1).to(torch.uint8)
    return codes | ((groups < 0).to(torch.uint8) << 3), scales
