"""The variables: what is accepted, what is refused and in which words. The reference is the table in the documentation."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.lk import config
from sglang.srt.lk.config import FIELDS, KNOWN, NOT_BUILT, VARIABLES, Config, ConfigError, load, read
from sglang.srt.lk.values import Layers, LayerSet

ROOT = Path(__file__).resolve().parents[2]
ON = {"LK_MOE_HYBRID_ENABLED": "1"}


def problems(**variables: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        load(ON | variables)
    assert all(problem in str(error.value) for problem in error.value.problems)
    return error.value.problems


def notes(**variables: str) -> tuple[str, ...]:
    return read(ON | variables).notes


def layers(*ids: int) -> LayerSet:
    return LayerSet(frozenset(ids))


def test_an_empty_environment_gives_every_default_and_says_nothing():
    loaded = read(ON)
    assert loaded == (Config(moe_hybrid_enabled=True), ())


def test_defaults_are_those_of_lsglang_but_for_huge_pages():
    c = load(ON)
    assert (c.threads, c.thread_binding, c.isa) == (None, "CPU_CORE", None)
    assert (c.numa_interleave, c.numa_ilp, c.power_saving, c.hf_mbox) == (True, False, False, True)
    assert (c.pool_slots, c.pool_decode, c.pool_window, c.pool_inflight, c.pool_no_stage) == (0, None, 32, 16, True)
    assert (c.gpu_prefill_min_tokens, c.gpu_prefill_wave_experts, c.gpu_prefill_d_slots) == (0, -1, 0)
    assert (c.verify_resident, c.verify_pump, c.nvme_cache_mb, c.engram_nvme_staging_mb) == (True, False, 1024, 128)
    assert c.numa_huge is True


def test_the_object_cannot_be_changed():
    with pytest.raises(FrozenInstanceError) as error:
        load(ON).threads = 4
    assert "threads" in str(error.value)


@pytest.mark.parametrize("text", ["abc", "8.5", "-1", "0", "1e3", "99999999999", "0x8", "8,", "٨", "1_0", "9" * 5000])
def test_a_bad_number_is_refused_with_name_value_and_range(text):
    (problem,) = problems(LK_THREADS=text)
    shown = text if len(text) <= 60 else text[:57] + "..."
    assert problem == (
        f"LK_THREADS={shown!r}: expected a whole number from 1 to 4096; unset means one per usable physical core"
    )


@pytest.mark.parametrize(("text", "threads"), [(" 8 ", 8), ("8\n", 8), ("", None), ("  ", None), ("08", 8), ("4096", 4096)])
def test_numbers_are_stripped_and_empty_is_unset(text, threads):
    assert load(ON | {"LK_THREADS": text}).threads == threads


@pytest.mark.parametrize("text", ["true", "yes", "2", "0x1", "on", "-1", "1.0"])
@pytest.mark.parametrize("name", ["LK_MOE_HYBRID_ENABLED", "LK_NUMA_HUGE", "LK_POWER_SAVING", "LK_POOL_DECODE"])
def test_a_switch_takes_only_0_and_1(name, text):
    (problem,) = problems(**{name: text})
    assert problem.startswith(f"{name}={text!r}: expected 0 or 1")


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), (" 1 ", True)])
def test_switches_of_features_that_work(text, value):
    c = load(ON | {"LK_NUMA_HUGE": text, "LK_POWER_SAVING": text})
    assert (c.numa_huge, c.power_saving) == (value, value)


def test_names_are_spelled_exactly():
    assert load(ON | {"LK_THREAD_BINDING": "NUMA_NODE"}).thread_binding == "NUMA_NODE"
    (problem,) = problems(LK_THREAD_BINDING="numa_node")
    assert problem == "LK_THREAD_BINDING='numa_node': expected CPU_CORE or NUMA_NODE"


def test_everything_wrong_is_said_at_once():
    found = problems(LK_THREADS="abc", LK_ISA="avx1024", LK_POOL_SLOT="64", LK_NUMA_HUGE="yes", LK_POOL_SLOTS="64")
    assert len(found) == 5
    for name in ("LK_THREADS", "LK_ISA", "LK_POOL_SLOT:", "LK_NUMA_HUGE", "LK_POOL_SLOTS=64"):
        assert sum(problem.startswith(name) for problem in found) == 1
    with pytest.raises(ConfigError) as error:
        load(ON | {"LK_THREADS": "abc"})
    assert str(error.value).splitlines()[0] == "Hybrid MoE: 1 problem in the environment"
    assert "LK_MOE_HYBRID_ENABLED=0" in str(error.value)


@pytest.mark.parametrize(
    ("typo", "name"),
    [
        ("LK_POOL_SLOT", "LK_POOL_SLOTS"),
        ("LK_THREAD", "LK_THREADS"),
        ("LK_threads", "LK_THREADS"),
        ("LK_GPU_PREFILL_MINTOKENS", "LK_GPU_PREFILL_MIN_TOKENS"),
        ("LK_GPU_RESIDENT_LAYERS", "LK_GPU_RESIDENT_MOE_LAYERS"),
        ("LK_NUMA_HUGEPAGES", "LK_NUMA_HUGE"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_known_one(typo, name):
    assert problems(**{typo: "1"}) == (f"{typo}: unknown variable; did you mean {name}?",)


def test_an_unknown_name_like_nothing_else_is_still_an_error():
    assert problems(LK_XYZZYQQQ="1") == ("LK_XYZZYQQQ: unknown variable; unset it",)


def test_every_known_name_keeps_its_meaning_in_an_error_message():
    assert {name for name in KNOWN if not name.startswith("LK_")} == set()
    assert "LK_UPSTREAM" in KNOWN and "LK_UPSTREAM_WHEELS" in KNOWN
    assert read(ON | {"LK_UPSTREAM": "0.5.21", "LK_UPSTREAM_WHEELS": "/wheels"}).notes == ()


ASKING = {
    "LK_POOL_SLOTS": "64",
    "LK_GPU_PREFILL_MIN_TOKENS": "999999",
    "LK_NVME_DIRECT": "1",
    "LK_ENGRAM_NVME": "1",
    "LK_PLE_BLOCK_MB": "512",
    "LK_SPEC_PROBE": "1",
    "LK_PLE_PROBE": "1",
    "LK_PLE_PROBE_DUMP": "rows.bin",
    "LK_DECODE_TS": "1",
    "LK_MBOX_STOPFILE": "stop",
    "LK_DISABLE_QSA_SHARE": "1",
}


def test_the_list_of_what_asks_for_a_missing_feature_is_complete():
    assert {name for name, row in VARIABLES.items() if row.feature in NOT_BUILT and row.asks} == set(ASKING)


@pytest.mark.parametrize(("name", "value"), ASKING.items())
def test_a_feature_that_is_missing_is_refused_by_name(name, value):
    (problem,) = problems(**{name: value})
    label = VARIABLES[name].feature.label
    assert problem.startswith(f"{name}={value} asks for {label}, which this build does not have: ")
    assert problem.endswith("unset it")


@pytest.mark.parametrize("name", [name for name in ASKING if FIELDS[name].default is not None])
def test_saying_off_is_fine_and_silent(name):
    assert read(ON | {name: "0"}) == read(ON)


def test_knobs_of_a_feature_that_is_off_get_one_line():
    assert notes(LK_POOL_WINDOW="16", LK_POOL_LOG="100", LK_POOL_NO_STAGE="0", LK_ROUTE_PROBE="1") == (
        "LK_POOL_LOG=100, LK_POOL_NO_STAGE=0, LK_POOL_WINDOW=16, LK_ROUTE_PROBE=1: no effect while LK_POOL_SLOTS is 0",
    )
    assert notes(LK_POOL_WINDOW="32", LK_POOL_LOG="0", LK_VERIFY_RESIDENT="1") == ()


def test_a_knob_of_a_missing_feature_must_still_be_a_legal_value():
    assert problems(LK_GPU_PREFILL_D_SLOTS="8191") == (
        "LK_GPU_PREFILL_D_SLOTS='8191': expected a whole number from 0 to 1048576, a multiple of 2",
    )


def test_a_short_pool_window_is_raised():
    loaded = read(ON | {"LK_POOL_WINDOW": "-3"})
    assert loaded.config.pool_window == 8
    assert loaded.notes[0] == "LK_POOL_WINDOW=-3 is raised to 8, the least that works"


@pytest.mark.parametrize("engine", ["cutlass", "flashinfer"])
def test_an_engine_of_another_build_stands_for_ours_and_says_so(engine):
    loaded = read(ON | {"LK_GPU_PREFILL_ENGINE": engine})
    assert loaded.config == read(ON).config
    assert loaded.notes == (f"LK_GPU_PREFILL_ENGINE={engine} is read as triton: upstream's grouped GEMM is the only engine",)
    assert notes(LK_GPU_PREFILL_ENGINE="triton") == ()


def test_an_allocator_mode_of_another_engine_stands_for_ours_and_says_so():
    loaded = read(ON | {"LK_NUMA_ILP": "1"})
    assert loaded.config.numa_ilp is False
    assert len(loaded.notes) == 1 and loaded.notes[0].startswith("LK_NUMA_ILP=1 is read as 0: ")


def test_a_retired_name_warns_and_does_nothing():
    loaded = read(ON | {"LK_POOL_LAYERS": "0-3"})
    assert loaded.config == read(ON).config
    assert loaded.notes == (f"LK_POOL_LAYERS is retired and has no effect: {config.RETIRED['LK_POOL_LAYERS']}",)


def test_legacy_names_are_renamed_with_one_line():
    loaded = read({"LVLLM_MOE_NUMA_ENABLED": "1", "LVLLM_GPU_RESIDENT_MOE_LAYERS": "0-1", "LK_THREADS": "4"})
    assert (loaded.config.moe_hybrid_enabled, loaded.config.gpu_resident_moe_layers) == (True, layers(0, 1))
    assert loaded.notes == (
        "LVLLM_* are legacy names: read LVLLM_GPU_RESIDENT_MOE_LAYERS as LK_GPU_RESIDENT_MOE_LAYERS, "
        "LVLLM_MOE_NUMA_ENABLED as LK_MOE_HYBRID_ENABLED",
    )


def test_the_new_name_wins_over_the_legacy_one():
    loaded = read(ON | {"LK_THREADS": "4", "LVLLM_THREADS": "8"})
    assert loaded.config.threads == 4
    assert len(loaded.notes) == 1 and "ignored because the new name is set too: LVLLM_THREADS (for LK_THREADS)" in loaded.notes[0]


def test_problems_use_the_name_that_the_user_wrote():
    assert problems(LVLLM_THREADS="abc")[0].startswith("LVLLM_THREADS='abc': expected")
    assert problems(LVLLM_THREAD="4") == ("LVLLM_THREAD: unknown legacy variable; did you mean LK_THREADS?",)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("0", [0]),
        ("0-1", [0, 1]),
        ("0,8-9", [0, 8, 9]),
        (" 3 , 1-2 ", [1, 2, 3]),
        ("5,5,4-5", [4, 5]),
        ("7-7", [7]),
    ],
)
def test_layer_lists_follow_the_grammar(text, ids):
    assert list(load(ON | {"LK_GPU_RESIDENT_MOE_LAYERS": text}).gpu_resident_moe_layers) == ids


@pytest.mark.parametrize("text", ["a", "0,,1", "0,", "-1", "1-", "3-1", "0:3", "1.5", "0-1-2", "999999999", "all"])
def test_a_layer_list_that_does_not_parse_names_the_item(text):
    (problem,) = problems(LK_GPU_RESIDENT_MOE_LAYERS=text)
    assert problem.startswith(f"LK_GPU_RESIDENT_MOE_LAYERS={text!r}: expected a layer list such as 0, 0-1 or 0,8-9 (")


def test_a_layer_set_prints_in_its_own_grammar():
    assert str(layers(9, 8, 0, 1, 2)) == "0-2,8-9"
    assert str(layers()) == ""
    assert 8 in layers(8) and 7 not in layers(8) and len(layers(1, 2)) == 2


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_a_layer_set_is_read_back_from_its_text(ids):
    assert Layers().parse(str(LayerSet(ids))) == LayerSet(ids)


def test_draft_models_follow_their_own_variable_only():
    lists = {"": "0-2", "_SPEC": "0", "_MTP": "1"}
    c = load(ON | {f"LK_GPU_RESIDENT_MOE_LAYERS{model}": ids for model, ids in lists.items()})
    assert c.resident_layers() == ("LK_GPU_RESIDENT_MOE_LAYERS", layers(0, 1, 2))
    assert c.resident_layers(draft="mtp") == ("LK_GPU_RESIDENT_MOE_LAYERS_MTP", layers(1))
    assert c.resident_layers(draft="dspark") == ("LK_GPU_RESIDENT_MOE_LAYERS_SPEC", layers(0))
    assert c.resident_layers(draft="eagle") == ("LK_GPU_RESIDENT_MOE_LAYERS_SPEC", layers(0))
    assert load(ON | {"LK_GPU_RESIDENT_MOE_LAYERS": "0-2"}).resident_layers(draft="mtp")[1] == layers()


def test_an_instruction_set_that_the_machine_lacks_is_an_error():
    assert load(ON | {"LK_ISA": "avx2"}, isas=lambda: ["scalar", "avx2"]).isa == "avx2"
    with pytest.raises(ConfigError) as error:
        load(ON | {"LK_ISA": "avx512"}, isas=lambda: ["scalar", "avx2"])
    assert "LK_ISA=avx512: this machine runs scalar, avx2; unset it" in str(error.value)


def test_the_instruction_sets_are_those_of_the_kernels():
    extension = pytest.importorskip("sgl_kernel_ext", reason="the kernels are not built here (pip install .)")
    names = [isa["name"] for isa in extension.isas()]
    assert names == [name for name in config.ISAS if name in names]


def test_the_build_has_a_row_for_every_instruction_set_in_the_same_order():
    rows = (ROOT / "sgl-kernel-ext" / "CMakeLists.txt").read_text()
    names = re.findall(r"lk_isa\(NAME (\w+)", rows)
    assert tuple(name for name in names if name != "soft_tiles") == config.ISAS  # that one is for tests


def test_the_machine_is_asked_only_when_an_instruction_set_is_forced():
    def never():
        raise AssertionError("asked")

    assert load(ON | {"LK_THREADS": "4"}, isas=never).threads == 4
    assert load({"LK_ISA": "avx2"}, isas=never) == Config()


def test_kernels_that_do_not_load_are_a_problem_among_the_others():
    def broken():
        raise ImportError("libfoo.so: cannot open")

    with pytest.raises(ConfigError) as error:
        load(ON | {"LK_ISA": "avx2", "LK_THREADS": "abc"}, isas=broken)
    assert len(error.value.problems) == 2
    assert "LK_ISA=avx2 cannot be checked, the kernels do not load: libfoo.so: cannot open" in str(error.value)


@pytest.mark.parametrize("switch", [None, "0", "", " 0 "])
def test_with_the_switch_off_nothing_matters(switch):
    environ = {"LK_THREADS": "abc", "LK_POOL_SLOT": "64", "LK_POOL_SLOTS": "64", "LVLLM_THREADS": "8", "LK_POOL_LAYERS": "1"}
    if switch is not None:
        environ["LK_MOE_HYBRID_ENABLED"] = switch
    assert read(environ) == (Config(), ())


def test_other_variables_are_left_alone():
    assert read(ON | {"SGLANG_FOO": "x", "MY_LK_THREADS": "abc", "OMP_NUM_THREADS": "abc"}) == read(ON)


def test_undecodable_bytes_in_the_environment_are_shown_not_raised():
    (problem,) = problems(LK_THREADS="\udcff8")
    assert problem.startswith("LK_THREADS='\\udcff8': expected")


# Once features exist, their knobs count; the test builds one in.


def test_a_built_feature_is_accepted_and_its_knobs_are_silent(monkeypatch):
    monkeypatch.setattr(config, "NOT_BUILT", NOT_BUILT - {config.POOL})
    loaded = read(ON | {"LK_POOL_SLOTS": "64", "LK_POOL_WINDOW": "16"})
    assert (loaded.config.pool_slots, loaded.config.pool_window, loaded.notes) == (64, 16, ())
    assert notes(LK_POOL_WINDOW="16") == ("LK_POOL_WINDOW=16: no effect while LK_POOL_SLOTS is 0",)


# The table and the text around it.


def test_one_field_is_one_variable_with_a_legal_default():
    assert len(fields(Config)) == len(VARIABLES)
    for name, row in VARIABLES.items():
        default = FIELDS[name].default
        assert row.about.endswith(".") and len(row.about) < 140, name
        assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+", row.since), name
        if default is not None and row.kind.show(default):
            assert row.kind.parse(row.kind.show(default)) == default, name


def test_the_reference_page_is_the_table():
    page = ROOT / "docs/reference/environment.md"
    made = subprocess.run([sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    rows = re.findall(r"^\| `(LK_\w+)` ", page.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(KNOWN)


def test_every_variable_that_the_project_names_exists():
    named = {}
    for pattern in ("*.md", "*.toml", "CMakeLists.txt", "docs/**/*.md", "launch/**/*", "python/**/*", "test/*.sh"):
        for file in ROOT.glob(pattern):
            if file.suffix in (".md", ".py", ".sh", ".toml", ".txt") and file.is_file():
                for name in re.findall(r"(?<![A-Z_$/{])\bLK_[A-Z0-9_]*[A-Z0-9]\b(?!_?\*|_?\{)", file.read_text()):
                    named.setdefault(name, str(file.relative_to(ROOT)))
    unknown = {name: file for name, file in named.items() if name not in KNOWN | {"LK_POOL_SLOT"}}
    assert unknown == {}


def test_only_the_start_and_the_command_line_read_our_variables():
    package = ROOT / "python/sglang/srt/lk"
    reads = re.compile(r"os\.(environ|getenv)\b(?!(?:\.get)?\W*[\"'](?!_?LK_))")  # a name of somebody else's is fine
    readers = {f.name for f in package.rglob("*.py") if f.name != "__init__.py" and reads.search(f.read_text())}
    assert readers - {"cli.py"} == {"boot.py"}


def test_the_map_of_the_package_names_every_module():
    package = ROOT / "python/sglang/srt/lk"
    named = set(re.findall(r"``(\w+)``", (package / "__init__.py").read_text()))
    modules = {f.stem for f in package.glob("*.py")} | {f.parent.name for f in package.glob("*/__init__.py")}
    assert modules - named == {"__init__"}


def test_the_package_imports_nothing_and_the_table_is_light():
    code = (
        "import sys; before = set(sys.modules); import sglang.srt.lk; first = set(sys.modules) - before;"
        "import sglang.srt.lk.config; print(sorted(first)); print({'torch', 'numpy', 'logging'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "python")}
    )
    assert run.stdout.splitlines() == ["['sglang', 'sglang.srt', 'sglang.srt.lk']", "set()"], run.stderr
