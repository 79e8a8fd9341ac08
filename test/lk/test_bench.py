"""The benchmark measures what it says: bytes, shares, rotation; and refuses what it cannot measure."""

import json
import os
import subprocess
import sys
import types

import double
import numpy as np
import pytest
from sglang.srt.lk import cli
from sglang.srt.lk.bench import cases, compare, kernels, plan, report, roofline, weights
from sglang.srt.lk.bench.cases import Shape
from sglang.srt.lk.term import Style, width

SMALL = Shape(64, 32, 10, 3)
PROMISED = (
    "isa format hidden width experts top_k rows threads seconds gb_per_s gflop_per_s read_gb_per_s read_ratio dot_ratio"
).split()


@pytest.fixture(autouse=True)
def ext(monkeypatch):
    extension = double.Extension()
    monkeypatch.setitem(sys.modules, "sgl_kernel_ext", extension)
    monkeypatch.setattr(kernels, "cache_bytes", lambda cpus: 4096)
    for name in [name for name in os.environ if name.startswith(("LK_", "LVLLM_"))]:
        monkeypatch.delenv(name)
    return extension


def small_plan(**changes):
    cpu = min(os.sched_getaffinity(0))
    return kernels.Plan(
        **{"isas": ["avx2"], "formats": ["bf16"], "shapes": [SMALL], "rows": ["1"], "cpus": [cpu], "seconds": 0.01} | changes
    )


def options(*arguments):
    return cli.parser().parse_args(["bench", "kernels", *arguments])


def refusals(ext, *arguments):
    with pytest.raises(ValueError) as error:
        plan.make(options(*arguments), {}, ext)
    return str(error.value)


@pytest.mark.parametrize("batch", [1, 2, 4, 7, 50])
def test_experts_of_a_token_are_distinct_and_all_experts_get_the_same_rows(batch):
    routes = cases.routes(SMALL, batch)
    ids = np.concatenate(routes)
    assert all(len(set(row)) == SMALL.top_k for row in ids)
    assert set(ids.ravel()) == set(range(SMALL.experts))
    counts = np.bincount(np.concatenate([route.ravel() for route in routes]), minlength=SMALL.experts)
    assert counts.max() - counts.min() <= 1
    assert all(route.dtype == np.int32 and route.shape == (batch, SMALL.top_k) for route in routes)


def test_rows_are_tokens_or_rows_of_each_expert():
    assert cases.tokens("5", SMALL) == 5
    assert cases.tokens("128/expert", Shape(2048, 768, 128, 8)) == 2048
    assert cases.tokens("128/expert", Shape(4096, 2048, 32, 6)) == 683


def test_weights_between_two_visits_are_eight_times_the_caches():
    assert cases.layers_needed(layer_bytes=100, cache_bytes=1000) == 80
    assert cases.layers_needed(layer_bytes=10**9, cache_bytes=1000) == 2


def test_no_expert_comes_again_before_all_others_were_visited(ext):
    list(kernels.run(ext, small_plan(rows=["2"])))
    layers = {id(layer) for layer, _ in ext.visited}
    assert len(layers) == cases.layers_needed(ext.visited[0][0].bytes, 4096)
    step = 2 * SMALL.top_k
    for first, second in zip(ext.visited, ext.visited[1:]):
        assert first[0] is not second[0]
    seen: dict[tuple, int] = {}
    for turn, (layer, ids) in enumerate(ext.visited):
        for expert in ids.ravel():
            if (id(layer), expert) in seen:
                assert turn - seen[id(layer), expert] >= len(layers) * (SMALL.experts // step)
            seen[id(layer), expert] = turn
    assert len(seen) == len(layers) * SMALL.experts


@pytest.mark.parametrize("fmt, bits", [
    ("bf16", 16), ("fp8", 8), ("fp8_block", 8 + 1 / 512), ("mxfp4", 4.25), ("nvfp4", 4.5), ("int4_zeros", 4.15625),
])  # fmt: skip
def test_rates_are_distinct_bytes_and_all_products_over_the_median(ext, fmt, bits):
    shape = Shape(256, 128, 10, 3)
    (row,) = kernels.run(ext, small_plan(formats=[fmt], rows=["2"], shapes=[shape]))
    values = shape.hidden * shape.width * 3
    assert row.gb_per_s * row.seconds * 1e9 == pytest.approx(6 * values * bits / 8)
    assert row.gflop_per_s * row.seconds * 1e9 == pytest.approx(2 * 2 * 3 * values)
    assert row.read_ratio == pytest.approx(row.gb_per_s / ext.read)
    assert row.dot_ratio == pytest.approx(row.gflop_per_s / ext.dot)
    assert (row.isa, row.format, row.rows, row.threads, row.repeats) == ("avx2", fmt, 2, 1, 7)
    assert row.seconds > 0.0002  # the stand-in sleeps that long


def test_experts_beyond_the_batch_are_counted_once(ext):
    (row,) = kernels.run(ext, small_plan(rows=["40"]))
    assert row.gb_per_s * row.seconds * 1e9 == pytest.approx(10 * 64 * 32 * 3 * 2)


def test_the_reader_runs_around_every_case(ext, monkeypatch):
    readings = iter([10.0, 30.0])
    monkeypatch.setattr(double.Engine, "read_gb_per_s", lambda self, megabytes, seconds: next(readings))
    (row,) = kernels.run(ext, small_plan())
    assert row.read_gb_per_s == 20.0


def test_a_kernel_that_writes_nothing_is_refused_instead_of_timed(monkeypatch):
    broken = double.Extension(broken=True)
    with pytest.raises(RuntimeError) as error:
        list(kernels.run(broken, small_plan()))
    assert str(error.value).startswith("avx2 bf16 64,32,10,3, 1 rows: the result is not finite")


def test_every_expert_is_packed_once(ext):
    engine = ext.Engine([0])
    for fmt in weights.FILLS:
        layer = weights.make_layer(ext, engine, fmt, SMALL)
        assert sorted(layer.packed) == sorted((e, p) for e in range(SMALL.experts) for p in weights.PARTS)


def test_the_calling_thread_is_put_on_the_first_core_and_back(ext, monkeypatch):
    before, during = os.sched_getaffinity(0), []
    monkeypatch.setattr(
        double.Engine, "dot_gflop_per_s", lambda self, seconds: during.append(os.sched_getaffinity(0)) or 400.0
    )
    list(kernels.run(ext, small_plan()))
    assert during == [{min(before)}] * 2
    assert os.sched_getaffinity(0) == before


def test_too_little_memory_is_said_before_anything_is_packed(ext, monkeypatch):
    from sglang.srt.lk import cpus

    monkeypatch.setattr(cpus, "memory", lambda: cpus.Memory(1000, 2000, []))
    with pytest.raises(MemoryError) as error:
        list(kernels.run(ext, small_plan()))
    assert "give a --shape with fewer experts" in str(error.value)
    assert ext.visited == []


def test_the_defaults_are_the_two_reference_shapes_with_one_row_and_128_per_expert(ext):
    made = plan.make(options(), {}, ext)
    assert [str(shape) for shape in made.shapes] == ["2048,768,128,8", "4096,2048,32,6"]
    assert made.rows == ["1", "128/expert"]
    assert made.formats == list(weights.FILLS)
    assert made.isas == ["avx512_bf16"]
    assert made.repeats >= 7


def test_settings_of_the_server_hold_for_the_benchmark(ext):
    made = plan.make(
        options(), {"LK_ISA": "avx2", "LK_NUMA_HUGE": "0", "LK_THREAD_BINDING": "NUMA_NODE", "LK_THREADS": "1"}, ext
    )
    assert (made.isas, made.huge, made.bind, len(made.cpus)) == (["avx2"], False, "node", 1)
    assert plan.make(options("--isa", "all"), {}, ext).isas == list(double.NAMES)


@pytest.fixture
def handed_over(monkeypatch):
    """``bench handover`` on a machine with a GPU, up to the engine: the configurations that it was asked for with, and what it then
    raises."""
    torch = pytest.importorskip("torch")
    from sglang.srt.lk import kernels as native

    asked = types.SimpleNamespace(settings=[], error=native.KernelError("Hybrid MoE: no threads"))

    def engine(*, config, gpu):
        asked.settings.append(config)
        raise asked.error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native, "engine", engine)
    return asked


@pytest.mark.parametrize("switch", [{}, {"LK_MOE_HYBRID_ENABLED": "1"}, {"LK_MOE_HYBRID_ENABLED": "0"}], ids=str)
def test_settings_of_the_server_hold_for_the_hand_over_whatever_the_switch_says(handed_over, monkeypatch, switch, capsys):
    for name, value in {"LK_THREADS": "1", "LK_ISA": "avx2", **switch}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["bench", "handover"]) == 1
    assert [(settings.threads, settings.isa) for settings in handed_over.settings] == [(1, "avx2")]
    assert capsys.readouterr().err == "sglang-lk: Hybrid MoE: no threads\n"


def test_a_driver_that_refuses_is_one_message_of_the_hand_over(handed_over, capsys):
    from sglang.srt.lk.driver import DriverError

    handed_over.error = DriverError("Hybrid MoE: no compiler")
    assert cli.main(["bench", "handover"]) == 1
    assert capsys.readouterr().err == "sglang-lk: Hybrid MoE: no compiler\n"


def test_wrong_settings_of_the_hand_over_are_said_at_once(handed_over, monkeypatch, capsys):
    monkeypatch.setenv("LK_THREADS", "many")
    monkeypatch.setenv("LK_ISA", "neon")
    assert cli.main(["bench", "handover"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sglang-lk: 2 problems") and "LK_THREADS='many'" in said and "LK_ISA=neon" in said
    assert handed_over.settings == []


def test_all_wrong_options_are_said_at_once(ext):
    said = refusals(
        ext,
        "--shape",
        "1,2,3",
        "--shape",
        "64,32,2,3",
        "--rows",
        "3/token",
        "--isa",
        "avx1024",
        "--format",
        "q4",
        "--threads",
        "0",
        "--repeats",
        "3",
        "--seconds",
        "0",
    )
    assert said.startswith("8 problems\n")
    for part in (
        "--shape 1,2,3",
        "--shape 64,32,2,3",
        "--rows 3/token",
        "--isa avx1024: this machine runs scalar, avx2",
        "--format q4: known are bf16",
        "--threads 0: a whole number from 1 to 4096 is needed",
        "--repeats 3",
        "--seconds 0",
    ):
        assert part in said


@pytest.mark.parametrize("arguments, said", [
    (["--seconds", "nan"], "--seconds nan: a number above 0 is needed"),
    (["--seconds", "inf"], "--seconds inf: a number above 0 is needed"),
    (["--threads", "-1"], "--threads -1: a whole number from 1 to 4096 is needed"),
    (["--threads", "99999"], "--threads 99999: a whole number from 1 to 4096 is needed"),
    (["--rows", "²"], "--rows ²: give tokens (8) or rows for each expert (128/expert), from 1 to 16777216"),
    (["--rows", "99999999999"], "--rows 99999999999: give tokens"),
    (["--rows", "16777217/expert"], "--rows 16777217/expert: give tokens"),
    (["--shape", "2000000,64,4,2"], "--shape 2000000,64,4,2: every number must be from 1 to 1048576 and TOP_K at most EXPERTS"),
])  # fmt: skip
def test_a_wrong_option_is_refused_by_its_name(ext, arguments, said):
    (line,) = refusals(ext, *arguments).splitlines()[1:]
    assert line.strip().startswith(said)


@pytest.mark.parametrize("arguments", [["--isa", "all", "--isa", "avx2"], ["--isa", "avx2", "--isa", "all"]], ids=str)
def test_all_instruction_sets_and_one_of_them_are_all(ext, arguments):
    assert plan.make(options(*arguments), {}, ext).isas == list(double.NAMES)


@pytest.mark.parametrize("arguments, environ, said", [
    (["--threads", "4096"], {}, "sglang-lk: --threads 4096 exceeds "),
    ([], {"LK_THREADS": "4096"}, "sglang-lk: LK_THREADS=4096 exceeds "),
    (["--threads", "1"], {"LK_THREADS": "4096"}, ""),
])  # fmt: skip
def test_threads_that_are_cut_down_are_said_in_one_line(capsys, monkeypatch, arguments, environ, said):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    few = ["--shape", "64,32,10,3", "--rows", "1", "--format", "bf16", "--seconds", "0.01"]
    assert cli.main(["bench", "kernels", *few, *arguments]) == 0
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == (said != "")


def test_rows_for_which_there_is_no_memory_are_said_before_anything_is_measured(ext):
    with pytest.raises(MemoryError) as error:
        list(kernels.run(ext, small_plan(shapes=[Shape(64, 32, 10, 3), Shape(1 << 20, 1, 1, 1)], rows=["1", "16777216"])))
    assert str(error.value).startswith("--rows 16777216 at shape ") and str(error.value).endswith("are free; give fewer")
    assert ext.visited == []


@pytest.mark.parametrize("where, said", [
    ("make_layer", "bf16 at --shape 64,32,10,3 does not fit into memory (std::bad_alloc)"),
    ("call", "--rows 1 of bf16 at --shape 64,32,10,3 does not fit into memory (std::bad_alloc)"),
])  # fmt: skip
def test_memory_that_runs_out_is_said_with_what_did_not_fit(ext, monkeypatch, where, said):
    def full(*_):
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(weights if where == "make_layer" else kernels.Buffers, where, full)
    with pytest.raises(MemoryError) as error:
        list(kernels.run(ext, small_plan()))
    assert str(error.value) == said


def test_threads_that_the_system_refuses_are_said_with_the_option(ext, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("only 3 of 9 threads could be made")

    monkeypatch.setattr(ext, "Engine", refused)
    with pytest.raises(ValueError) as error:
        list(kernels.run(ext, small_plan()))
    assert str(error.value) == "only 3 of 9 threads could be made (--threads or LK_THREADS sets the number of threads)"


def test_json_holds_the_promised_fields_beside_the_machine(tmp_path, capsys):
    file = tmp_path / "a.json"
    assert (
        cli.main(["bench", "kernels", "--shape", "64,32,10,3", "--rows", "1", "--seconds", "0.01", "--json", str(file)]) == 0
    )
    stored = json.loads(file.read_text())
    assert [row["format"] for row in stored["rows"]] == list(weights.FILLS)
    for row in stored["rows"]:
        assert [name for name in PROMISED if name not in row] == []
        assert (row["hidden"], row["width"], row["experts"], row["top_k"], row["rows"]) == (64, 32, 10, 3, 1)
    assert (stored["machine"]["cpu"], stored["machine"]["call_us"]) == ("Test CPU", 3.21)
    table = capsys.readouterr().out.splitlines()
    assert "an empty call 3.2 µs" in table[0]
    assert sum(line.startswith("64,32,10,3") for line in table) == len(stored["rows"])


COMMANDS = [["kernels"], ["handover"], ["decode", "--model-config", "qwen3-30b-a3b"], ["prefill", "--model-config", "qwen3-30b-a3b"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("place, why", [("none/a.json", "No such file or directory"), ("", "Is a directory"), ("n" * 300, "File name too long")])
def test_a_file_that_cannot_be_written_is_said_before_measuring(tmp_path, capsys, monkeypatch, ext, command, place, why):
    from sglang.srt.lk.bench import serving

    monkeypatch.setattr(serving, "Server", lambda *_: pytest.fail("a server was started"))
    options = ["--json"] + ["--plot"] * (command == ["kernels"])
    for option in options:
        assert cli.main(["bench", *command, option, str(tmp_path / place)]) == 2
        assert capsys.readouterr().err == f"sglang-lk: {option} {tmp_path / place} cannot be written: {why}\n"
    assert ext.visited == [] and list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_kept_until_there_is_something_to_store(tmp_path, capsys):
    (tmp_path / "a.json").write_text("before")
    assert cli.main(["bench", "kernels", "--shape", "1,2", "--json", str(tmp_path / "a.json")]) == 2
    assert (tmp_path / "a.json").read_text() == "before"


def test_a_measurement_that_is_stopped_keeps_its_rows(tmp_path, monkeypatch):
    def stopped(*given, rows=kernels.run):
        yield next(rows(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "run", stopped)
    assert cli.main(["bench", "kernels", "--shape", "64,32,10,3", "--rows", "1", "--seconds", "0.01", "--json", str(tmp_path / "a.json")]) == 130
    stored = json.loads((tmp_path / "a.json").read_text())
    assert len(stored["rows"]) == 1 and stored["machine"]["cpu"] == "Test CPU"


def test_a_disk_that_is_full_in_the_end_is_one_message(capsys):
    few = ["--shape", "64,32,10,3", "--rows", "1", "--format", "bf16", "--seconds", "0.01"]
    assert cli.main(["bench", "kernels", *few, "--json", "/dev/full"]) == 2
    assert capsys.readouterr().err == "sglang-lk: --json /dev/full cannot be written: No space left on device\n"


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}]
import double
from sglang.srt.lk import cli
from sglang.srt.lk.bench import kernels
sys.modules["sgl_kernel_ext"] = double.Extension()
kernels.cache_bytes = lambda cpus: 4096
sys.exit(cli.main(sys.argv[1:]))
"""


def command(*arguments, **options):
    """The command in a process of its own, on the stand-in."""
    script = SCRIPT.format(tests=os.path.dirname(__file__))
    return subprocess.run([sys.executable, "-c", script, *map(str, arguments)], stderr=subprocess.PIPE, text=True, timeout=60, **options)


FEW = ["bench", "kernels", "--shape", "64,32,10,3", "--rows", "1", "--seconds", "0.01"]


@pytest.fixture
def nobody():
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("arguments", [FEW, ["doctor", "--no-bandwidth"], ["doctor", "--json", "--no-bandwidth"]], ids=lambda a: a[0])
def test_without_a_reader_the_command_ends_quietly(nobody, arguments):
    done = command(*arguments, stdout=nobody)
    assert (done.returncode, done.stderr) == (141, "")


def test_without_a_reader_all_results_are_stored_all_the_same(nobody, tmp_path):
    done = command(*FEW, "--json", tmp_path / "a.json", stdout=nobody)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["format"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]] == list(weights.FILLS)


def test_output_to_a_full_disk_is_one_message():
    with open("/dev/full", "w") as full:
        done = command("doctor", "--no-bandwidth", stdout=full)
    assert (done.returncode, done.stderr) == (2, "sglang-lk: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("terminal", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=str)
def test_a_terminal_without_the_signs_gets_the_report_all_the_same(terminal, tmp_path):
    import headers

    folder = headers.checkpoint(tmp_path / "m", headers.bf16())
    (folder / "config.json").write_text(json.dumps({**headers.CONFIG, "author": "é"}, ensure_ascii=False), encoding="utf-8")
    done = command("doctor", "--no-bandwidth", "--device", "cpu", folder, stdout=subprocess.PIPE, encoding="latin-1", env={**os.environ, **terminal})
    assert (done.returncode, done.stderr) == (0, "")
    assert "? avx512_bf16 (used)" in done.stdout and done.stdout.endswith("Ready to serve.\n")


def test_columns_stand_under_their_headings(ext):
    (row,) = kernels.run(ext, small_plan())
    assert width(report.line(row, Style(True))) == width(report.heading(Style(False)))


def result(path, **changes):
    row = {
        "hidden": 1,
        "width": 2,
        "experts": 3,
        "top_k": 1,
        "format": "bf16",
        "isa": "avx2",
        "rows": 1,
        "threads": 2,
        "read_ratio": 0.8,
        "dot_ratio": 0.1,
    }
    path.write_text(json.dumps({"machine": {}, "rows": [row | changes]}))
    return str(path)


@pytest.mark.parametrize("after, status, word", [(0.8, 0, ""), (0.73, 0, ""), (0.7, 1, "slower"), (0.95, 0, "faster")])
def test_compare_judges_by_the_nearer_limit(tmp_path, capsys, after, status, word):
    a, b = result(tmp_path / "a.json"), result(tmp_path / "b.json", read_ratio=after, dot_ratio=0.01)
    assert cli.main(["bench", "compare", a, b]) == status
    line = capsys.readouterr().out.splitlines()[1]
    assert line.rstrip().endswith(word or f"{after / 0.8:.2f}")
    assert " read " in line


def test_compare_refuses_what_has_nothing_in_common(tmp_path, capsys):
    assert cli.main(["bench", "compare", result(tmp_path / "a.json"), result(tmp_path / "b.json", threads=3)]) == 2
    assert "no case in common" in capsys.readouterr().err
    (tmp_path / "c.json").write_text("[]")
    assert cli.main(["bench", "compare", str(tmp_path / "c.json"), str(tmp_path / "a.json")]) == 2
    assert "is no result of" in capsys.readouterr().err
    assert compare.compare(tmp_path / "a.json", tmp_path / "a.json")[0].ratio == 1


@pytest.mark.parametrize("changes, said", [
    ({"read_ratio": 0}, "read_ratio of the case 1 2 3 1 bf16 avx2 1 2 is 0, and must be a number above 0"),
    ({"dot_ratio": -1.0}, "dot_ratio of the case 1 2 3 1 bf16 avx2 1 2 is -1.0, and"),
    ({"dot_ratio": None}, "dot_ratio of the case 1 2 3 1 bf16 avx2 1 2 is None, and"),
    ({"read_ratio": "0.8"}, "read_ratio of the case 1 2 3 1 bf16 avx2 1 2 is 0.8, and"),
    ({"read_ratio": float("nan")}, "read_ratio of the case 1 2 3 1 bf16 avx2 1 2 is nan, and"),
    ({"read_ratio": 10**400}, "read_ratio of the case 1 2 3 1 bf16 avx2 1 2 is 1000"),
    ({"hidden": {}}, "TypeError"),
])  # fmt: skip
@pytest.mark.parametrize("turn", [1, -1])
def test_compare_refuses_what_is_no_share_with_file_and_case(tmp_path, capsys, changes, said, turn):
    files = [result(tmp_path / "a.json", **changes), result(tmp_path / "b.json")]
    assert cli.main(["bench", "compare", *files[::turn]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sglang-lk: {tmp_path}/a.json") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("content", ["[" * 200000, '{"rows": 3}', '{"rows": [3]}', "é", ""])
def test_compare_refuses_what_is_no_result(tmp_path, capsys, content):
    (tmp_path / "a.json").write_text(content, encoding="latin-1")
    assert cli.main(["bench", "compare", str(tmp_path / "a.json"), result(tmp_path / "b.json")]) == 2
    assert capsys.readouterr().err.startswith(f"sglang-lk: {tmp_path}/a.json is no result of `sglang-lk bench kernels --json`")


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-0.1", "1"])
def test_a_tolerance_that_tolerates_all_or_less_than_nothing_is_refused(tmp_path, capsys, tolerance):
    a = result(tmp_path / "a.json")
    assert cli.main(["bench", "compare", a, a, f"--tolerance={tolerance}"]) == 2
    assert capsys.readouterr().err.startswith(f"sglang-lk: --tolerance {float(tolerance)}: a number from 0 to less than 1 is needed")


def test_a_picture_needs_matplotlib_and_says_so_before_measuring(ext, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["bench", "kernels", "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert ext.visited == []


def test_the_picture_is_a_png(ext, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    made = small_plan(rows=["1", "128/expert"], formats=["bf16", "mxfp4"])
    rows = [row.as_dict() for row in kernels.run(ext, made)]
    roofline.draw(report.facts(ext, made), rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
