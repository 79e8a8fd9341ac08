"""What doctor reports, refuses and advises, on this machine and on others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import double
import headers
import pytest
from sglang.srt.lk import cli, doctor, doctor_text, install_check, machine
from sglang.srt.lk.term import Style

PLAIN = Style(colour=False)


@pytest.fixture(autouse=True)
def ext(monkeypatch):
    """A machine with every instruction set, an installation without faults, huge pages at hand, no GPU and no LK_* of the caller's."""
    extension = double.Extension()
    monkeypatch.setitem(sys.modules, doctor.EXTENSION, extension)
    monkeypatch.setattr(install_check, "problems", lambda: [])
    monkeypatch.setattr(machine, "gpus", lambda: machine.Gpus(None, False, []))
    monkeypatch.setattr(machine, "busy", lambda cpus: 0.0)
    monkeypatch.setattr(machine, "_granted", lambda *_: 1.0)
    for name in list(doctor_environ()):
        monkeypatch.delenv(name)
    return extension


def doctor_environ():
    import os

    return {name for name in os.environ if name.startswith(("LK_", "LVLLM_"))}


def examine(model=None, environ=None, **options):
    return doctor.examine(model, environ or {}, **options)


def stops(report):
    return [problem.what for problem in report.problems if problem.stops]


def shows_cards(monkeypatch, *cards):
    monkeypatch.setattr(machine, "gpus", lambda: machine.Gpus("1.2", True, list(cards)))


CARD = {"index": 0, "name": "Card", "compute": "9.0", "total_bytes": 80 << 30, "free_bytes": 79 << 30}


def test_a_sound_machine_is_ready(ext):
    report = examine()
    assert stops(report) == []
    assert report.ok
    facts = report.as_dict()
    assert facts["cpu"]["isa"] == "avx512_bf16"
    assert facts["memory"]["read_gb_per_s"] == ext.read
    assert facts["memory"]["available_bytes"] > 0
    assert len(facts["cpu"]["cpus"]) >= 1


@pytest.mark.parametrize("cache, least", [(None, 512), (32 << 20, 512), (300 << 20, 1200)])
def test_the_reader_goes_over_more_than_the_caches_hold(ext, monkeypatch, cache, least):
    asked = []
    monkeypatch.setattr(machine, "l3_bytes", lambda *_: cache)
    monkeypatch.setattr(double.Engine, "read_gb_per_s", lambda self, megabytes, seconds: asked.append(megabytes) or ext.read)
    examine()
    assert asked == [least]


def test_missing_instruction_sets_are_named_with_what_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, doctor.EXTENSION, double.Extension(supported=("scalar", "avx2")))
    report = examine()
    assert report.facts["cpu"]["isa"] == "avx2"
    text = "\n".join(doctor_text.render(report, PLAIN))
    assert "✗ avx512_bf16  ✗ avx512  ✓ avx2 (used)  ✓ scalar" in text
    assert "avx512_bf16 needs avx512_bf16_flag" in text


def test_a_forced_instruction_set_is_used_or_refused(monkeypatch):
    assert examine(environ={"LK_ISA": "avx2"}).facts["cpu"]["isa"] == "avx2"
    monkeypatch.setitem(sys.modules, doctor.EXTENSION, double.Extension(supported=("scalar",)))
    report = examine(environ={"LK_ISA": "avx2"})
    (problem,) = stops(report)
    assert problem.startswith("LK_ISA=avx2: this machine runs scalar")


def test_all_wrong_settings_are_said_at_once_even_with_the_switch_off():
    report = examine(environ={"LK_POOL_SLOT": "3", "LK_THREADS": "abc", "LK_ISA": "avx1024"})
    assert [problem.split("=")[0].split(":")[0] for problem in stops(report)] == ["LK_POOL_SLOT", "LK_ISA", "LK_THREADS"]
    assert all(problem.remedy for problem in report.problems)


@pytest.mark.parametrize("environ, line", [
    ({}, "LK_MOE_HYBRID_ENABLED is not set: sglang serves stock; checked as if it were 1"),
    ({"LK_MOE_HYBRID_ENABLED": " "}, "LK_MOE_HYBRID_ENABLED is not set: sglang serves stock; checked as if it were 1"),
    ({"LK_MOE_HYBRID_ENABLED": "0"}, "LK_MOE_HYBRID_ENABLED=0: sglang serves stock; checked as if it were 1"),
    ({"LK_MOE_HYBRID_ENABLED": " 1"}, "hybrid is on"),
    ({"LVLLM_MOE_NUMA_ENABLED": "1"}, "hybrid is on"),
    ({"LVLLM_MOE_NUMA_ENABLED": "0"}, "LVLLM_MOE_NUMA_ENABLED=0: sglang serves stock; checked as if it were 1"),
    ({"LVLLM_MOE_NUMA_ENABLED": "1", "LK_MOE_HYBRID_ENABLED": "0"}, "LK_MOE_HYBRID_ENABLED=0: sglang serves stock; checked as if it were 1"),
])  # fmt: skip
def test_the_switch_is_read_as_a_server_reads_it(environ, line):
    report = examine(environ=environ)
    text = doctor_text.render(report, PLAIN)
    assert report.ok and f"Settings  {line}" in text
    said = [words.strip() for words in text if "legacy names" in words]
    read, ignored = "LVLLM_* are legacy names: read LVLLM_MOE_NUMA_ENABLED as LK_MOE_HYBRID_ENABLED", "LVLLM_* are legacy names: read none; ignored"
    assert len(said) == ("LVLLM_MOE_NUMA_ENABLED" in environ)
    assert all(words.startswith(ignored if len(environ) > 1 else read) for words in said)


@pytest.mark.parametrize("name", ["LK_MOE_HYBRID_ENABLED", "LVLLM_MOE_NUMA_ENABLED"])
def test_a_switch_that_is_neither_0_nor_1_is_not_called_on(name):
    report = examine(environ={name: "yes"})
    assert stops(report) == [f"{name}='yes': expected 0 or 1"]
    assert f"Settings  {name} is neither 0 nor 1" in doctor_text.render(report, PLAIN)


def test_a_machine_without_the_kernels_says_so_and_shows_the_rest(monkeypatch):
    monkeypatch.setitem(sys.modules, doctor.EXTENSION, None)  # import raises ImportError
    report = examine()
    (problem,) = stops(report)
    assert problem.startswith("the kernels (sgl_kernel_ext) do not load")
    assert report.facts["memory"]["total_bytes"] > 0


def test_a_faulty_installation_stops_serving(monkeypatch):
    monkeypatch.setattr(install_check, "problems", lambda: ["a stock sglang is installed too"])
    assert stops(examine()) == ["a stock sglang is installed too"]


def test_huge_pages_that_are_off_come_with_the_command_that_turns_them_on(tmp_path):
    switch = tmp_path / machine.HugePages.switch.lstrip("/")
    switch.parent.mkdir(parents=True)
    switch.write_text("always madvise [never]\n")
    report = examine(root=tmp_path)
    (problem,) = report.problems
    assert (problem.stops, problem.remedy) == (
        False,
        "as root on the host: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )
    assert examine(environ={"LK_NUMA_HUGE": "0"}, root=tmp_path).problems == []


def test_a_model_is_planned_layer_by_layer(tmp_path, ext):
    folder = headers.checkpoint(tmp_path / "m", {**headers.mxfp4(layers=(0,)), **headers.bf16(layers=(1,))})
    report = examine(folder)
    model = report.facts["model"]
    assert stops(report) == []
    assert [(row["layer_id"], row["role"], row["format"], row["host_bytes"]) for row in model["layers"]] == [
        (0, "cpu", "mxfp4", 4 * ext.packed_bytes("mxfp4", 64, 32)),
        (1, "cpu", "bf16", 4 * ext.packed_bytes("bf16", 64, 32)),
    ]
    size = (folder / "model.safetensors").stat().st_size
    assert model["needed_bytes"] == model["host_bytes"] + 100 * 64 * 2 + size
    assert model["fits"]


def test_a_model_that_does_not_fit_is_refused_with_both_figures(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    report = examine(folder, root=tmp_path)
    (problem,) = stops(report)
    assert problem == "loading needs 220 KiB of host memory and 64 KiB are free (host: 64 KiB of 100 KiB available)"


def test_a_format_that_is_not_served_is_refused_with_those_that_are(tmp_path):
    kinds = {"weight": lambda r, c: ("I8", (r, c)), "weight_scale": lambda r, c: ("F32", (r, 1))}
    (problem,) = stops(examine(headers.checkpoint(tmp_path / "m", headers.per_expert(kinds))))
    assert problem == "layers 0-1 of the main model: int8 experts are not served on the CPU; supported are " + ", ".join(double.Extension().formats())


@pytest.mark.parametrize("more", [{"quantization_config": None}, {"quantization_config": "mxfp4"}], ids=str)
def test_quantised_experts_that_the_config_does_not_declare_stop_serving(tmp_path, more):
    (problem,) = stops(examine(headers.checkpoint(tmp_path / "m", headers.mxfp4(), more)))
    assert problem == "m: the experts are mxfp4, and config.json does not declare it (no quantization_config): the server takes them for bf16"
    assert examine(headers.checkpoint(tmp_path / "m", headers.bf16(), more)).ok


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_file_beside_the_config_may_declare_them(tmp_path, name):
    folder = headers.checkpoint(tmp_path / "m", headers.mxfp4(), {"quantization_config": None})
    (folder / name).write_text("{}")
    assert examine(folder).ok


@pytest.mark.parametrize("outer, nested", [({}, None), (None, {})], ids=str)
def test_a_multimodal_config_may_declare_them_in_either_place(tmp_path, outer, nested):
    more = {"quantization_config": outer, "text_config": {"quantization_config": nested}}
    assert examine(headers.checkpoint(tmp_path / "m", headers.mxfp4(), more)).ok


def test_the_source_of_the_quick_start_is_no_checkpoint_to_serve_and_what_it_writes_is(tmp_path):
    recite = Path(__file__).parents[2] / "launch"
    (problem,) = stops(examine(recite / "models/recite-moe"))
    assert problem.startswith("recite-moe: the experts are mxfp4, and config.json does not declare it")
    subprocess.run([sys.executable, "-m", "launch.recite", "mxfp4", tmp_path / "written"], cwd=recite.parent, check=True, timeout=60)
    assert examine(tmp_path / "written").ok


@pytest.mark.parametrize("group, type, said", [
    (16, "BF16", "int4 experts with a scale for 16 columns are not served on the CPU; multiples of 32 are"),
    (48, "BF16", "int4 experts with a scale for 48 columns are not served on the CPU; multiples of 32 are"),
    (32, "F8_E4M3", "int4 (f8_e4m3 scales) experts are not served on the CPU; supported are bf16"),
    (192, "F8_E4M3", "int4 (f8_e4m3 scales) experts are not served on the CPU; supported are bf16"),
])  # fmt: skip
def test_scales_that_the_start_refuses_are_a_problem_of_the_layer_in_the_report(tmp_path, group, type, said):
    kinds = {"weight_packed": lambda r, c: ("I32", (r, c * 3 // 8)), "weight_scale": lambda r, c: (type, (r, -(-c * 3 // group)))}
    report = examine(headers.checkpoint(tmp_path / "m", headers.per_expert(kinds), {"hidden_size": 192}))
    (problem,) = stops(report)
    assert problem.startswith(f"layers 0-1 of the main model: {said}")
    assert "\n".join(doctor_text.render(report, PLAIN)).endswith("1 problem would stop serving.")


def test_fp8_blocks_of_no_multiple_of_32_columns_are_refused_too(tmp_path):
    kinds = {"weight": lambda r, c: ("F8_E4M3", (r, c)), "weight_scale_inv": lambda r, c: ("F32", (1, -(-c // 12)))}
    (problem,) = stops(examine(headers.checkpoint(tmp_path / "m", headers.per_expert(kinds))))
    assert problem.startswith("layers 0-1 of the main model: fp8 experts with a scale for about 11 columns are not served on the CPU")


def test_the_packed_size_follows_what_the_scales_say(tmp_path, ext, monkeypatch):
    asked = []
    monkeypatch.setattr(ext, "packed_bytes", lambda *sizes, **coding: asked.append((sizes, coding)) or 1000)
    kinds = {"weight": lambda r, c: ("F8_E4M3", (r, c)), "weight_scale_inv": lambda r, c: ("F32", (r // 16, c // 32))}
    report = examine(headers.checkpoint(tmp_path / "m", headers.per_expert(kinds)))
    assert [row["host_bytes"] for row in report.facts["model"]["layers"]] == [4000, 4000]
    assert asked == [(("fp8", 64, 32), {"group": 32, "scales": "f32_shared"})] * 2
    assert report.ok


def test_tensors_that_are_in_two_files_are_a_warning_with_a_remedy(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    headers.write_file(folder / "old.safetensors", headers.bf16(layers=(1,)))
    report = examine(folder)
    (problem,) = report.problems
    assert report.ok and not problem.stops
    assert problem.what.startswith("m: 12 tensors of old.safetensors are in model.safetensors, too")
    assert problem.remedy.startswith("fetch the checkpoint again")


def test_a_checkpoint_is_looked_at_without_the_kernels_too(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, doctor.EXTENSION, None)
    report = examine(headers.checkpoint(tmp_path / "m", headers.bf16()))
    (problem,) = stops(report)
    assert problem.startswith("the kernels (sgl_kernel_ext) do not load")
    assert [row["format"] for row in report.facts["model"]["layers"]] == ["bf16", "bf16"]


def test_resident_layers_take_no_host_memory_and_must_exist(tmp_path, monkeypatch):
    shows_cards(monkeypatch, CARD)
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    report = examine(folder, {"LK_GPU_RESIDENT_MOE_LAYERS": "0-1"})
    assert [(row["role"], row["host_bytes"]) for row in report.facts["model"]["layers"]] == [("resident", 0)] * 2
    assert report.ok
    (problem,) = stops(examine(folder, {"LK_GPU_RESIDENT_MOE_LAYERS": "0-7"}))
    assert problem.startswith("LK_GPU_RESIDENT_MOE_LAYERS=0-7: ")


def test_damage_to_the_checkpoint_is_refused_by_name(tmp_path):
    tensors = headers.bf16()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    folder = headers.checkpoint(tmp_path / "m", tensors)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    said = stops(examine(folder))
    assert said[0].endswith("it is cut off")
    assert said[1] == "m: layer 1 lacks experts.2.up"
    (problem,) = stops(examine(tmp_path / "none"))
    assert "is not a folder" in problem


def test_the_folder_is_named_however_it_is_given(tmp_path, monkeypatch):
    tensors = headers.bf16()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    monkeypatch.chdir(headers.checkpoint(tmp_path / "m", tensors))
    assert stops(examine(Path("."))) == ["m: layer 1 lacks experts.2.up"]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    os.mkfifo(folder / "more.safetensors")
    assert stops(examine(folder)) == ["m: more.safetensors is no file, or a link to one that is not there"]
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert stops(examine(folder)) == [f"{folder} holds no readable config.json; give a checkpoint's own folder"]


@pytest.mark.parametrize("shape", [(), (0, 64), (2**60, 64)])
def test_experts_of_an_impossible_shape_are_refused_by_name(tmp_path, shape, ext):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for name, tensor in header.items():
        tensor["shape"] = list(shape) if ".experts." in name else tensor["shape"]
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    said = stops(examine(folder))
    assert len(said) == 2 and all("has experts of 64 x" in problem for problem in said), said


def test_text_ends_with_every_problem_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: machine.Gpus(None, True, [], "the driver does not answer: why"))
    report = examine(tmp_path, {"LK_THREADS": "abc"})
    text = doctor_text.render(report, PLAIN)
    for problem in report.problems:
        assert any(line.endswith(problem.what) for line in text)
        assert not problem.remedy or any(line.endswith(problem.remedy) for line in text)
    assert text[-1] == "2 problems would stop serving."
    assert len(report.problems) == 3


def test_colour_changes_no_word(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    report = examine(folder)
    from sglang.srt.lk import term

    coloured = doctor_text.render(report, Style(colour=True))
    assert [term._ESCAPE.sub("", line).rstrip() for line in coloured] == [
        line.rstrip() for line in doctor_text.render(report, PLAIN)
    ]
    assert any("\x1b[" in line for line in coloured)


@pytest.mark.parametrize("threads, status", [("1", 0), ("abc", 1)])
def test_the_command_prints_one_json_object_and_exits_by_it(capsys, monkeypatch, threads, status):
    monkeypatch.setenv("LK_THREADS", threads)
    assert cli.main(["doctor", "--json", "--no-bandwidth"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (status == 0)
    assert found["memory"]["read_gb_per_s"] is None
    assert {"install", "settings", "cpu", "memory", "gpu", "problems"} <= found.keys()


def test_the_command_imports_neither_torch_nor_the_server():
    root = Path(cli.__file__).parents[3]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); import sglang_lk; sglang_lk.light_package('sglang')\n"
        f"sys.modules['sglang'].__path__ = [{str(root / 'sglang')!r}, *sys.modules['sglang'].__path__]\n"
        "sglang_lk.main(['doctor', '--json', '--no-bandwidth'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'sglang.srt.server_args'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["problems"] is not None


def two_nodes(root: Path, free_kb: int) -> None:
    """A machine of two NUMA nodes; the CPUs are the ones this process has."""
    cpu_list = sorted(os.sched_getaffinity(0))
    for node, cpus in ((0, cpu_list[:1]), (1, cpu_list[1:])):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, cpus)) + "\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal: {4 << 20} kB\nNode {node} MemFree: {free_kb} kB\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU makes one node")
def test_numa_nodes_are_shown_with_their_workers_and_memory(tmp_path):
    two_nodes(tmp_path, 2 << 20)
    report = examine(root=tmp_path)
    assert [row["node"] for row in report.facts["cpu"]["nodes"]] == [0, 1] and report.facts["cpu"]["split"]
    text = "\n".join(doctor_text.render(report, PLAIN))
    assert "2 NUMA nodes" in text and "every expert is split over them" in text
    assert "node 0: 1 worker on CPU " in text and text.count("2.0 GiB free of 4.0 GiB") == 2
    text = "\n".join(doctor_text.render(examine(environ={"LK_NUMA_INTERLEAVE": "0"}, root=tmp_path), PLAIN))
    assert "experts are not split (LK_NUMA_INTERLEAVE=0)" in text


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU makes one node")
def test_a_node_too_full_for_its_part_is_said(tmp_path):
    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    two_nodes(tmp_path, 0)
    report = examine(folder, root=tmp_path)
    said = [problem.what for problem in report.problems if problem.what.startswith("NUMA")]
    assert [what.split(" has ")[0] for what in said] == ["NUMA node 0", "NUMA node 1"] and stops(report) == []
    assert all("will lie on another node" in what for what in said)


@pytest.mark.parametrize("device, gpu", [("cuda", True), ("cpu", False), (None, False)])
def test_workers_are_those_of_the_server_beside_a_gpu_or_without(monkeypatch, device, gpu):
    asked = []
    usable = doctor.cpus.usable
    monkeypatch.setattr(doctor.cpus, "usable", lambda *args, **more: (asked.append(more["gpu"]), usable(*args, **more))[1])
    examine(device=device)
    assert asked == [gpu]
