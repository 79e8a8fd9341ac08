"""Roles of layers: configuration and facts in, a plan or every problem out."""

import pytest

from sglang.srt.lk.config import Config
from sglang.srt.lk.roles import Key, Layer, Role, RolesError, check_list, plan, role_of
from sglang.srt.lk.values import LayerSet

MIB = 1 << 20


def listed(*ids: int) -> LayerSet:
    return LayerSet(frozenset(ids))


def moe(*ids: int, **facts) -> list[Layer]:
    return [Layer(layer_id, **{"format": "mxfp4", "bytes": 512 * MIB} | facts) for layer_id in ids]


def problems(*args, **kwargs) -> tuple[str, ...]:
    with pytest.raises(RolesError) as error:
        plan(*args, **kwargs)
    assert all(problem in str(error.value) for problem in error.value.problems)
    return error.value.problems


def test_without_a_gpu_every_layer_is_computed_on_the_cpu():
    found = plan(moe(1, 2, 3), Config(), device="cpu")
    assert found.roles == {Key(False, n): Role.CPU for n in (1, 2, 3)}


def test_listed_layers_stay_resident_on_a_gpu():
    config = Config(gpu_resident_moe_layers=listed(0, 1, 2))
    found = plan(moe(0, 1, 2), config, device="cuda")
    assert set(found.roles.values()) == {Role.RESIDENT}


def test_one_layer_is_decided_as_all_are():
    config = Config(gpu_resident_moe_layers=listed(0), gpu_resident_moe_layers_spec=listed(1))
    roles = [role_of(Layer(n, is_draft=d), config, device="cuda") for d in (False, True) for n in (0, 1)]
    assert roles == [Role.RESIDENT, Role.CPU, Role.CPU, Role.RESIDENT]
    assert role_of(Layer(5), Config(pool_slots=8), device="cuda") is Role.POOL
    assert role_of(Layer(0), Config(pool_slots=8, gpu_resident_moe_layers=listed(0)), device="cuda") is Role.RESIDENT


def test_layers_that_are_not_resident_have_cpu_experts_beside_a_gpu():
    found = plan(moe(0, 1, 2, 3), Config(gpu_resident_moe_layers=listed(0, 1)), device="cuda")
    assert list(found.roles.values()) == [Role.RESIDENT, Role.RESIDENT, Role.CPU, Role.CPU]


def test_a_resident_list_without_a_gpu_is_refused():
    assert problems(moe(0, 1), Config(gpu_resident_moe_layers=listed(0)), device="cpu") == (
        "LK_GPU_RESIDENT_MOE_LAYERS=0 needs a GPU, and --device cpu has none: unset it",
    )


def test_layers_that_do_not_exist_are_named_with_those_that_do():
    found = problems(moe(1, 2, 3), Config(gpu_resident_moe_layers=listed(0, 1, 2, 3, 40, 41)), device="cuda", layer_count=4)
    assert found == (
        "LK_GPU_RESIDENT_MOE_LAYERS=0-3,40-41: layer 0 without experts, layers 40-41 unknown; "
        "the MoE layers of the main model are 1-3",
    )


def test_without_a_count_a_layer_without_experts_is_unknown():
    found = problems(moe(1, 2, 3), Config(gpu_resident_moe_layers=listed(0, 1, 2, 3)), device="cuda")
    assert found == ("LK_GPU_RESIDENT_MOE_LAYERS=0-3: layer 0 unknown; the MoE layers of the main model are 1-3",)


def test_all_lists_are_checked_in_one_message():
    config = Config(gpu_resident_moe_layers=listed(9), gpu_resident_moe_layers_spec=listed(7))
    found = problems(moe(0, 1) + moe(0, is_draft=True), config, device="cuda", layer_count=2, draft_layer_count=1)
    assert [problem.split(":")[0] for problem in found] == [
        "LK_GPU_RESIDENT_MOE_LAYERS=9",
        "LK_GPU_RESIDENT_MOE_LAYERS_SPEC=7",
    ]


def test_a_draft_list_without_a_draft_model_is_fine():
    config = Config(gpu_resident_moe_layers=listed(0), gpu_resident_moe_layers_spec=listed(0, 1, 2))
    assert plan(moe(0), config, device="cuda").roles == {Key(False, 0): Role.RESIDENT}


def test_a_list_is_checked_before_the_first_layer_exists():
    config = Config(gpu_resident_moe_layers=listed(0, 39, 40), gpu_resident_moe_layers_spec=listed(1))
    with pytest.raises(RolesError) as error:
        check_list(config, device="cpu", layer_count=40)
    assert error.value.problems == (
        "LK_GPU_RESIDENT_MOE_LAYERS=0,39-40 needs a GPU, and --device cpu has none: unset it",
        "LK_GPU_RESIDENT_MOE_LAYERS=0,39-40: layer 40 unknown; the layers of the main model are 0-39",
    )
    with pytest.raises(RolesError) as error:
        check_list(config, device="cuda", layer_count=1, draft="mtp")
    assert error.value.problems == (
        "LK_GPU_RESIDENT_MOE_LAYERS_SPEC=1: layer 1 unknown; the layers of the draft model are 0",
    )
    assert check_list(config, device="cuda", layer_count=41) is None
    assert check_list(Config(), device="cpu", layer_count=1) is None


def test_draft_layers_follow_their_own_list():
    config = Config(
        gpu_resident_moe_layers=listed(0, 1),
        gpu_resident_moe_layers_spec=listed(0),
        gpu_resident_moe_layers_mtp=listed(1),
    )
    drafts = [Layer(0, is_draft=True, draft="mtp"), Layer(0, is_draft=True, draft="dspark")]
    assert [role_of(draft, config, device="cuda") for draft in drafts] == [Role.CPU, Role.RESIDENT]


def test_a_switch_that_takes_nothing_over_stops_the_start():
    assert problems([], Config(), device="cpu") == (
        "no MoE layer was taken over, the model has none that hybrid MoE knows: LK_MOE_HYBRID_ENABLED=0 serves it as stock",
    )


def test_layers_that_cannot_be_taken_over_are_grouped_by_reason():
    layers = moe(0, 2) + moe(1, 3, 4, refusal="int4 experts are not supported; supported are bf16, mxfp4, nvfp4")
    assert problems(layers, Config(), device="cpu") == (
        "layers 1,3-4 of the main model: int4 experts are not supported; supported are bf16, mxfp4, nvfp4",
    )


def test_a_refusal_does_not_matter_where_upstream_computes():
    layers = moe(0, refusal="int4 experts are not supported")
    assert plan(layers, Config(gpu_resident_moe_layers=listed(0)), device="cuda").roles == {Key(False, 0): Role.RESIDENT}


def test_the_table_shows_both_models_and_where_their_bytes_lie():
    layers = moe(1, 2, 3, 5) + moe(4, format="bf16", bytes=2048 * MIB)
    layers += moe(0, is_draft=True, format="bf16", bytes=100 * MIB)
    assert plan(layers, Config(), device="cpu").table().splitlines() == [
        "Hybrid MoE: 6 MoE layers: 6 cpu",
        "  model  role  layers  format  host     VRAM",
        "  main   cpu   1-3,5   mxfp4   2.0 GiB  -",
        "  main   cpu   4       bf16    2.0 GiB  -",
        "  draft  cpu   0       bf16    100 MiB  -",
    ]


def test_draft_models_that_share_layer_ids_are_counted_and_shown_one_by_one():
    layers = moe(3) + [layer for model in (0, 1, 2) for layer in moe(0, is_draft=True, model=model, bytes=(model + 1) * MIB)]
    assert plan(layers, Config(), device="cpu").table().splitlines() == [
        "Hybrid MoE: 4 MoE layers: 4 cpu",
        "  model    role  layers  format  host     VRAM",
        "  main     cpu   3       mxfp4   512 MiB  -",
        "  draft    cpu   0       mxfp4   1 MiB    -",
        "  draft 2  cpu   0       mxfp4   2 MiB    -",
        "  draft 3  cpu   0       mxfp4   3 MiB    -",
    ]


def test_the_table_of_resident_layers_counts_vram():
    config = Config(gpu_resident_moe_layers=listed(0, 1))
    assert plan(moe(0, 1), config, device="cuda").table().splitlines()[2] == "  main   resident  0-1     mxfp4   -     1.0 GiB"
