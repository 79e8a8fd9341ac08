"""Which processor an instruction asks for, read from its disassembly. A new instruction set is a row in ``LEVELS``.

The rows of an architecture are tried in order; an instruction that fits none is part of the baseline, which every
processor of the architecture runs (x86-64 without suffix, Armv8.0-A).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

BASELINE = "baseline"

LEVELS = {
    "x86_64": [
        ("amx", r"^(t(dp|ile)|[ls]?ldtilecfg|sttilecfg)|%tmm"),
        ("avx512_bf16", r"^v(dpbf16ps|cvtne2?ps2?bf16|cvtneps2bf16)"),
        ("avx512_vbmi", r"^v(perm[it]?2?b|pmultishiftqb)\b"),
        ("avx512_more", r"^v(pdpbu|pdpws|pdpbs|p2inters|pshld|pshrd|pshufbitqmb|pcompressb|pexpandb|popcnt|gf2p8|aes)"),
        ("avx512", r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b|^v(pmov[us]*[qdw][bwd]|rndscale|pternlog|align[qd])"),
        ("bmi", r"^(andn|bextr|blsi|blsr|blsmsk|bzhi|lzcnt|pdep|pext|mulx|rorx|sarx|shlx|shrx|adcx|adox)[lq]?\b"),
        ("avx2", r"^v[a-z]"),
        ("sse4", r"^(popcnt|crc32|movbe|haddp|hsubp|addsubp|movddup|movs[hl]dup|lddqu|pshufb|phadd|phsub|pmaddubsw|pmulhrsw|psign|pabs|"
                 r"palignr|pmulld|pmuldq|pmin[su][bdw]$|pmax[su][bdw]$|ptest|pextr[bdq]|pinsr[bdq]|round[sp][sd]|blend|pblend|dpp[sd]|"
                 r"insertps|extractps|pmov[sz]x|packusdw|pcmpeqq|pcmpgtq|pcmp[ei]str|mpsadbw|phminposuw|movntdqa|aes|pclmul|sha)"),
    ],
    "aarch64": [
        ("neon_bf16", r"^(bfdot|bfmmla|bfmlal|bfcvt)"),
        ("i8mm", r"^(smmla|ummla|usmmla|usdot|sudot)\b"),
        ("dotprod", r"^(sdot|udot)\b"),
        ("sve", r"\b[zp]\d+(\.[bhsdq]|/[mz])"),
        ("lse", r"^(cas|swp|ld(add|clr|eor|set|smax|smin|umax|umin)|st(add|clr|eor|set|smax|smin|umax|umin))(a|l|al)?[bh]?\b"),
        ("rcpc", r"^ldapr"),
        ("fp16", r"^f(?!cvt|mov)[a-z]+\s.*(\bh\d+|\.[48]h\b)"),
        ("later", r"^(sqrdml|fcmla|fcadd|fjcvtzs|crc32|pac|aut|xpac|ret[ab][ab]|bra[ab]|fmlal|fmlsl|rnd|bti|aes|sha|eor3|bcax|rax1|sm[34])"),
    ],
}  # fmt: skip

# What a kernel object may use beyond the baseline; it must use its own name's level, if that is one.
ALLOWED = {
    "scalar": set(), "soft_tiles": set(), "neon": set(), "neon_bf16": {"neon_bf16"}, "avx2": {"avx2"}, "avx512": {"avx2", "avx512"},
    "avx512_bf16": {"avx2", "avx512", "avx512_vbmi", "avx512_bf16"}, "amx": {"avx2", "avx512", "avx512_vbmi", "avx512_bf16", "amx"},
}  # fmt: skip


def level(machine: str, instruction: str) -> str:
    """``instruction`` is mnemonic and operands as objdump prints them (AT&T on x86)."""
    return next((name for name, pattern in LEVELS[machine] if re.search(pattern, instruction)), BASELINE)


def functions(disassembly: str) -> Iterator[tuple[str, list[str]]]:
    """Name and instructions of every function in the output of ``objdump -d --no-show-raw-insn``."""
    for block in re.split(r"\n(?=[0-9a-f]+ <)", disassembly):
        head = re.search(r"^[0-9a-f]+ <(.+)>:$", block, re.MULTILINE)
        if head:
            yield head[1], re.findall(r"^ *[0-9a-f]+:\t(?:(?:lock|rep[nz]*|notrack|bnd|data16|cs) +)*(.+?)\s*$", block, re.MULTILINE)
