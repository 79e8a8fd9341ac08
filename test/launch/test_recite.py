"""The two checkpoints of the recite model hold the same numbers."""

import json
import struct

import numpy as np
import pytest

from launch import recite

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def bf16(tensor: recite.Tensor) -> np.ndarray:
    return (tensor.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Column by column, in the order of the specification; nothing shared with the writer."""
    out = np.empty((packed.shape[0], 2 * packed.shape[1]))
    for column in range(out.shape[1]):
        code = (packed[:, column // 2] >> (4 * (column % 2))) & 15
        out[:, column] = np.array(E2M1)[code] * 2.0 ** (scale[:, column // 32].astype(np.float64) - 127)
    return out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recite")
    for form in recite.FORMS:
        recite.make(form, folder / form)
    return folder


def test_both_checkpoints_dequantise_to_identical_float64_values(checkpoints):
    wide = recite.read(checkpoints / "bf16" / "model.safetensors")
    narrow = recite.read(checkpoints / "mxfp4" / "model.safetensors")
    compared = 0
    for name, tensor in wide.items():
        stem = name.removesuffix(".weight")
        if name in narrow:
            other = bf16(narrow[name])
        else:
            other = mxfp4(narrow[f"{stem}.weight_packed"].data, narrow[f"{stem}.weight_scale"].data)
        assert np.array_equal(bf16(tensor), other), name
        compared += 1
    assert compared == len(wide) == len(narrow) - 4 * 32 * 3


def test_every_expert_of_every_layer_is_there_and_not_all_zero(checkpoints):
    wide = recite.read(checkpoints / "bf16" / "model.safetensors")
    for layer in range(4):
        for expert in range(32):
            for part, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
                tensor = wide[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"]
                assert tensor.data.shape == shape
                assert bf16(tensor).any()


def test_the_safetensors_library_reads_what_is_written(checkpoints):
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(checkpoints / "mxfp4" / "model.safetensors", framework="np") as file:
        name = "model.layers.0.mlp.experts.0.gate_proj.weight_packed"
        mine = recite.read(checkpoints / "mxfp4" / "model.safetensors")[name].data
        assert np.array_equal(file.get_tensor(name), mine)


def test_only_the_4_bit_config_names_a_quantisation(checkpoints):
    configs = {form: json.loads((checkpoints / form / "config.json").read_text()) for form in recite.FORMS}
    assert "quantization_config" not in configs["bf16"]
    assert configs["mxfp4"].pop("quantization_config")["format"] == "mxfp4-pack-quantized"
    assert configs["bf16"] == configs["mxfp4"]


def test_a_value_that_bf16_cannot_hold_stops_with_the_tensor_named():
    with pytest.raises(ValueError) as error:
        recite.to_bf16("layer.7.up", np.array([1.0, 1.0 + 2.0**-9], np.float32))
    assert str(error.value) == "layer.7.up: a value is not exact in bf16"


def test_a_checkpoint_that_could_not_be_finished_does_not_take_the_name(tmp_path, monkeypatch):
    def broken(tensors):
        raise ValueError("no")

    monkeypatch.setitem(recite.FORMS, "bf16", broken)
    with pytest.raises(ValueError):
        recite.make("bf16", tmp_path / "bf16")
    assert not (tmp_path / "bf16").exists()


def test_tensors_start_at_multiples_of_eight_bytes_after_the_header(checkpoints):
    raw = (checkpoints / "bf16" / "model.safetensors").read_bytes()[:8]
    assert struct.unpack("<Q", raw)[0] % 8 == 0
