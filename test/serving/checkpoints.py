"""Small random checkpoints of every MoE architecture worth serving, two layers each, a few megabytes.

The tensors' names and shapes come from ``transformers`` (it saves a model under the names that its publisher used, and those
are the names upstream's loaders expect); the values come from here. Each tensor is drawn from a generator seeded with its own
name, and each row has a gain of its own, so that a row, an expert or a layer that lands in the wrong place changes the answer.

Nothing here starts a server. A new architecture is a row in ``ARCHITECTURES``: its ``model_type`` in ``transformers`` and
what its config needs beyond ``COMMON``. ``python checkpoints.py DIR [NAME…]`` writes them by hand.
"""

import argparse
import dataclasses
import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fourbit
import quantized

VOCABULARY = 2048  # of the recite model, whose tokenizer the checkpoints borrow
TOKENIZER = Path(__file__).resolve().parents[2] / "launch" / "models" / "recite-moe"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(intermediate_size=192, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
LOCAL = dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)
ROUTED = dict(
    intermediate_size=192, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
    n_group=1, topk_group=1, first_k_dense_replace=1, moe_layer_freq=1, routed_scaling_factor=2.5, norm_topk_prob=True,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, head_dim=16, kv_lora_rank=64, q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
)  # fmt: skip
YARN = dict(rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128,
                                 beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0))  # fmt: skip
GROUPED = dict(n_group=4, topk_group=2, num_experts_per_tok=3)
SHARED = dict(shared_expert_intermediate_size=96)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row of the support matrix: what to write, and the flags that its server needs."""

    name: str
    model_type: str
    config: dict
    auto: str = "AutoModelForCausalLM"
    grid: str = ""  # "mxfp4", "nvfp4" or a row of ``quantized.FORMATS``: expert weights are rounded to what that format can hold
    packed: bool = False  # the experts are stored in that format (else, of the same values, as BF16)
    upstream_class: str = ""  # where upstream registers the model under another name than transformers
    publisher: dict = dataclasses.field(default_factory=dict)  # what its config.json has and transformers does not write
    drop: str = ""  # tensors that transformers saves and this publisher does not
    tensors: Callable[[dict], dict[str, tuple[int, ...]]] | None = None  # names and shapes, for a model that transformers lacks
    note: str = ""  # what the table should say beside the figures
    float32: bool = True  # upstream's model computes in float32, too
    zero_centred_norms: bool = False  # the norm multiplies by 1 + weight
    serve: dict = dataclasses.field(default_factory=dict)  # further arguments of the engine

    @property
    def twin(self) -> str:
        """The row that holds the same values as BF16, for one that is packed."""
        return f"{self.name}_twin" if self.grid in quantized.FORMATS else self.name.removesuffix(f"_{self.grid}")


# Stock leaves Ling's routed scaling factor out on a CPU (the model relies on the GPU's runner), so the comparison is made without one.
BAILING = dict(
    **EXPERTS, num_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=1.0, norm_topk_prob=True,
    score_function="sigmoid", router_type="topN", moe_router_enable_expert_bias=True, use_qk_norm=True, use_bias=False,
    use_qkv_bias=False, norm_head=False, hidden_act="silu", rms_norm_eps=1e-6, partial_rotary_factor=0.5, embedding_dropout=0.0,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
)  # fmt: skip


def _bailing(config: dict) -> dict[str, tuple[int, ...]]:
    """Ling's names: one matrix for queries, keys and values, and a bias beside the router."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]

    def mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        up = {f"{prefix}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
        return up | {f"{prefix}.down_proj.weight": (hidden, width)}

    shapes = {f"{name}.weight": (config["vocab_size"], hidden) for name in ("model.word_embeddings", "lm_head")}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        shapes |= {f"{p}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{p}.attention.{norm}_layernorm.weight": (head,) for norm in ("query", "key")}
        shapes[f"{p}.attention.query_key_value.weight"] = (heads * head, hidden)
        shapes[f"{p}.attention.dense.weight"] = (hidden, config["num_attention_heads"] * head)
        if layer < config["first_k_dense_replace"]:
            shapes |= mlp(f"{p}.mlp", config["intermediate_size"])
            continue
        shapes |= {f"{p}.mlp.gate.weight": (config["num_experts"], hidden), f"{p}.mlp.gate.expert_bias": (config["num_experts"],)}
        shapes |= mlp(f"{p}.mlp.shared_experts", config["moe_intermediate_size"])
        for expert in range(config["num_experts"]):
            shapes |= mlp(f"{p}.mlp.experts.{expert}", config["moe_intermediate_size"])
    return shapes


def _rows() -> list[Architecture]:
    a = Architecture
    linear = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32, linear_value_head_dim=32)
    hybrid = dict(layer_types=["linear_attention", "full_attention"], **linear)
    sliding = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=64)
    llama4 = dict(intermediate_size=64, intermediate_size_mlp=192, num_local_experts=8, num_experts_per_tok=1,
                  moe_layers=[0, 1], no_rope_layers=[1, 1])  # upstream leaves the rotation out of every fourth layer, whatever the config says
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
                  vision_output_dim=32, projector_input_dim=32, projector_output_dim=32)
    return [
        a("qwen3_moe", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, grid="nvfp4"),
        a("qwen3_moe_nvfp4", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, grid="nvfp4", packed=True),
        a("qwen2_moe", "qwen2_moe", {**EXPERTS, **SHARED}),
        a("qwen3_next", "qwen3_next", {**EXPERTS, **SHARED, **hybrid, "full_attention_interval": 2}, zero_centred_norms=True,
          serve=dict(mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)),
        a("mixtral", "mixtral", LOCAL),
        a("olmoe", "olmoe", dict(intermediate_size=64, num_experts=8, num_experts_per_tok=2, num_key_value_heads=4)),
        a("phimoe", "phimoe", LOCAL, upstream_class="PhiMoEForCausalLM"),
        a("granitemoe", "granitemoe", {**LOCAL, "logits_scaling": 2.0, "residual_multiplier": 0.7}),
        a("granitemoeshared", "granitemoeshared", {**LOCAL, "shared_intermediate_size": 96}),
        a("granitemoehybrid", "granitemoehybrid",
          {**LOCAL, "shared_intermediate_size": 96, "layer_types": ["attention", "attention"], "position_embedding_type": "rope"}),
        a("glm4_moe", "glm4_moe", {**ROUTED, "use_qk_norm": True}),
        a("glm4_moe_lite", "glm4_moe_lite", {**ROUTED, **LATENT}),
        a("dots1", "dots1", ROUTED),
        a("deepseek_v2", "deepseek_v2", {**ROUTED, **LATENT, **YARN, "topk_method": "greedy", "norm_topk_prob": False,
                                          "scoring_func": "softmax"}),
        a("deepseek_v3", "deepseek_v3", {**ROUTED, **LATENT, **YARN, **GROUPED, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
        a("minimax_m2", "minimax_m2", {**LOCAL, "rotary_dim": 16, "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True}),
        a("minimax_m2_no_qk_norm", "minimax_m2",
          {**LOCAL, "rotary_dim": 16, "use_qk_norm": False, "scoring_func": "sigmoid", "use_routing_bias": True}),
        a("gpt_oss", "gpt_oss", {**LOCAL, **sliding}, grid="mxfp4", float32=False),
        a("gpt_oss_mxfp4", "gpt_oss", {**LOCAL, **sliding}, grid="mxfp4", packed=True, float32=False),
        a("ernie4_5_moe", "ernie4_5_moe",
          dict(intermediate_size=192, moe_intermediate_size=64, moe_num_experts=8, moe_k=2, moe_num_shared_experts=1,
               moe_layer_start_index=1)),
        a("hunyuan_v1_moe", "hunyuan_v1_moe", dict(intermediate_size=64, moe_intermediate_size=64, num_experts=8, moe_topk=2, use_qk_norm=True,
                                                   use_mixed_mlp_moe=True, num_shared_expert=1, use_cla=False)),
        a("hunyuan_v1_moe_no_qk_norm", "hunyuan_v1_moe",
          dict(intermediate_size=64, moe_intermediate_size=64, num_experts=8, moe_topk=2, use_qk_norm=False, use_mixed_mlp_moe=True,
               num_shared_expert=1, use_cla=False), drop="(query|key)_layernorm"),
        a("llama4", "llama4", dict(text_config={**COMMON, **llama4}, vision_config=vision), auto="AutoModelForImageTextToText", float32=False,
          note="upstream and transformers differ here without hybrid, too; with the missing branch put into stock: 11 tokens equal, 0.0243, 0.1139, 0.1845"),
        a("exaone_moe", "exaone_moe", {**ROUTED, "num_experts": 8, "num_shared_experts": 1}),
        a("cohere2_moe", "cohere2_moe", EXPERTS),
        a("lfm2_moe", "lfm2_moe", {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
        a("afmoe", "afmoe", {**EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1}),
        a("laguna", "laguna", {**EXPERTS, **sliding}),
        a("hy_v3", "hy_v3", {**EXPERTS, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
          publisher=dict(route_norm=True, first_k_dense_replace=1, qk_norm=True)),
        a("longcat_flash", "longcat_flash",
          {**LATENT, "num_layers": 2, "ffn_hidden_size": 192, "expert_ffn_hidden_size": 64, "moe_topk": 3, "n_routed_experts": 8,
           "zero_expert_num": 4, "routed_scaling_factor": 2.5}, publisher=dict(rope_theta=10000.0, zero_expert_type="identity", rope_parameters=None)),
        a("nemotron_h", "nemotron_h",
          {**ROUTED, "layers_block_type": ["mamba", "attention", "moe"], "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2,
           "moe_shared_expert_intermediate_size": 64}, publisher=dict(hybrid_override_pattern="M*E", num_hidden_layers=3, layers_block_type=None, layer_types=None),
          serve=dict(mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)),
        a("qwen3_5_moe", "qwen3_5_moe_text", {**EXPERTS, **SHARED, **hybrid}, zero_centred_norms=True,
          serve=dict(mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)),
        a("solar_open", "solar_open", ROUTED),
        a("bailing_moe_v2", "bailing_moe", BAILING, tensors=_bailing, upstream_class="BailingMoeV2ForCausalLM",
          serve=dict(trust_remote_code=True), note="stock leaves out `routed_scaling_factor`; compared with a factor of 1"),
    ]  # fmt: skip


ARCHITECTURES = {row.name: row for row in _rows()}


def _formats() -> list[Architecture]:
    """One small model in every format, and each time its twin."""
    rows = []
    for grid, how in quantized.FORMATS.items():
        config = {**EXPERTS, "norm_topk_prob": True, **how.model}
        rows.append(Architecture(f"qwen3_moe_{grid}", "qwen3_moe", config, grid=grid, packed=True))
        rows.append(Architecture(rows[-1].twin, "qwen3_moe", config, grid=grid))
    return rows


FORMATS = {row.name: row for row in _formats()}


def write(architecture: Architecture, directory: Path, tokenizer: Path) -> Path:
    """Writes the checkpoint into ``directory`` (made if missing) and returns it; an existing one is replaced."""
    directory = Path(directory)
    shutil.rmtree(directory, ignore_errors=True)
    class_name = (_save_ours if architecture.tensors else _save_theirs)(architecture, directory)
    wanted = [(n, t) for n, t in _saved(directory) if not (architecture.drop and re.search(architecture.drop, n))]
    tensors = {name: _values(name, like, architecture) for name, like in wanted}
    quantization = {}
    if architecture.grid:
        pack = {"mxfp4": _gpt_oss_mxfp4, "nvfp4": _compressed_tensors_nvfp4}.get(architecture.grid)
        quantization, tensors = (pack or _quantized(architecture.grid))(tensors, architecture.packed)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _finish_config(directory, architecture.upstream_class or class_name, architecture.publisher | quantization)
    for name in TOKENIZER_FILES:
        shutil.copyfile(Path(tokenizer) / name, directory / name)
    return directory


def _save_theirs(architecture: Architecture, directory: Path) -> str:
    import transformers

    config = transformers.AutoConfig.for_model(architecture.model_type, **{**COMMON, **architecture.config})
    model = getattr(transformers, architecture.auto).from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return type(model).__name__


def _save_ours(architecture: Architecture, directory: Path) -> str:
    """A config with its own code beside it, as its publisher ships it, and tensors of the listed shapes."""
    config = {**COMMON, **architecture.config, "model_type": architecture.model_type, "torch_dtype": "bfloat16"}
    directory.mkdir(parents=True)
    code = f"from transformers import PretrainedConfig\n\n\nclass Config(PretrainedConfig):\n    model_type = {architecture.model_type!r}\n"
    (directory / "configuration.py").write_text(code)
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration.Config"}}))
    shapes = architecture.tensors(config)
    save_file({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, directory / "model.safetensors")
    return architecture.upstream_class


def _finish_config(directory: Path, class_name: str, additions: dict) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(architectures=[class_name], **additions)
    config = {name: value for name, value in config.items() if value is not None or name not in additions}
    path.write_text(json.dumps(config, indent=1))


def _saved(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


def _values(name: str, like: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """Values for one tensor, by what its name says it is; decays and convolutions keep what their publisher's code drew."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    normal = torch.randn(like.shape, generator=generator)
    if re.search(r"A_log|dt_bias|conv", name):
        return like
    if like.dim() == 1 and "norm" in name and name.endswith("weight"):
        value = 0.1 * normal + (0.0 if architecture.zero_centred_norms and "linear_attn" not in name else 1.0)
    elif "bias" in name or like.dim() == 1:
        value = 0.1 * normal
    elif re.search("embed_tokens|word_embeddings", name):
        value = normal
    else:
        rows = torch.rand((*like.shape[:-1], 1), generator=generator) + 0.5
        value = normal * rows * _gain(name) / _fan_in(name, like) ** 0.5
    return value.to(like.dtype).contiguous()


def _fan_in(name: str, like: torch.Tensor) -> int:
    """gpt-oss and llama4 store their experts as [expert, input, output]; everybody else has the input last."""
    return like.shape[1] if like.dim() == 3 and name.endswith("_proj") else like.shape[-1]


def _gain(name: str) -> float:
    """Wide gaps where a near tie would turn rounding into another answer: between experts and between tokens."""
    if "lm_head" in name:
        return 4.0
    if re.search(r"(gate|router|layer|wg)\.weight$", name):
        return 3.0
    return 2.0 if re.search(r"experts|block_sparse_moe", name) else 1.0


def _gpt_oss_mxfp4(tensors: dict, packed: bool) -> tuple[dict, dict]:
    """gpt-oss: BF16 experts are ``[expert, input, output]``, MXFP4 ones ``[expert, output, input]`` as blocks of 32 and scales."""
    out = {}
    for name, value in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = value
        elif not packed:
            out[name] = fourbit.snap(value.mT, "mxfp4").to(value.dtype).mT.contiguous()
        else:
            codes, scales = fourbit.encode(value.mT, "mxfp4")
            out[f"{name}_blocks"] = codes.reshape(*scales.shape, 16).contiguous()
            out[f"{name}_scales"] = scales
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return ({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ignored}} if packed else {}), out


def _compressed_tensors_nvfp4(tensors: dict, packed: bool) -> tuple[dict, dict]:
    """compressed-tensors' weight-only NVFP4: ``weight_packed``, ``weight_scale`` and a global scale that divides."""
    divisor = 4.0
    out = {}
    for name, value in tensors.items():
        if ".experts." not in name:
            out[name] = value
        elif not packed:
            out[name] = (fourbit.snap(value.float() * divisor, "nvfp4") / divisor).to(value.dtype)
        else:
            codes, scales = fourbit.encode(value.float() * divisor, "nvfp4")
            out |= {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_global_scale": torch.tensor([divisor])}
    weights = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic=False)
    group = dict(targets=["Linear"], weights=weights, input_activations=None, output_activations=None)
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    config = dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized", config_groups={"group_0": group},
                  ignore=ignored, quantization_status="compressed")  # fmt: skip
    return ({"quantization_config": config} if packed else {}), out


def _quantized(grid: str) -> Callable[[dict, bool], tuple[dict, dict]]:
    how = quantized.FORMATS[grid]

    def pack(tensors: dict, packed: bool) -> tuple[dict, dict]:
        out = {}
        for name, value in tensors.items():
            if not re.search(r"\.experts\.|self_attn\.\w_proj" if how.attention else r"\.experts\.", name):
                out[name] = value
                continue
            values, held = how.make(value)
            if packed:
                out |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in held.items()}
            else:
                out[name] = values.to(how.twin)
                assert torch.equal(out[name].float(), values), f"{how.twin} does not hold these values"
        if not packed:
            return {}, out
        return {"quantization_config": how.config} if how.config else {"dtype": "float16"}, out

    return pack


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes small random MoE checkpoints.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES | FORMATS)}; all architectures by default")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="directory with the tokenizer's files")
    arguments = parser.parse_args()
    for name in arguments.names or ARCHITECTURES:
        write((ARCHITECTURES | FORMATS)[name], arguments.directory / name, arguments.tokenizer)


if __name__ == "__main__":
    main()
