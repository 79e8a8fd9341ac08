"""Upstream is changed as its modules are imported, or the start fails by name."""

import importlib
import sys
import types

import pytest

from sglang.srt.lk import patches


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """A made-up upstream module ``upstream_under_test`` and a finder that patches it; nothing is left behind."""
    (tmp_path / "upstream_under_test.py").write_text("class Runner:\n    def load(self, path):\n        return path\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, patches._Finder)])
    monkeypatch.setattr(patches, "PATCHES", {"upstream_under_test": ()})
    yield
    sys.modules.pop("upstream_under_test", None)


def doubled(module):
    original = patches.expect(module.Runner, "load", ["self", "path"])
    module.Runner.load = lambda self, path: original(self, path) * 2


def test_a_module_is_patched_when_it_is_imported(upstream, monkeypatch):
    monkeypatch.setitem(patches.PATCHES, "upstream_under_test", (doubled, doubled))
    patches.install()
    patches.install()
    module = importlib.import_module("upstream_under_test")
    assert module.Runner().load("ab") == "abababab"
    assert sum(isinstance(finder, patches._Finder) for finder in sys.meta_path) == 1


def test_a_module_that_is_already_there_is_patched_at_once(upstream, monkeypatch):
    module = importlib.import_module("upstream_under_test")
    monkeypatch.setitem(patches.PATCHES, "upstream_under_test", (doubled,))
    patches.install()
    assert module.Runner().load("ab") == "abab"


def test_other_modules_are_nobodys_business(upstream):
    assert patches._Finder().find_spec("json", None) is None


@pytest.mark.parametrize("body", ["def load(self, path, more): ...", "load = None", "pass"], ids=str)
def test_a_changed_upstream_fails_by_name(upstream, body):
    module = types.ModuleType("changed")
    exec(f"class Runner:\n    {body}", module.__dict__)
    with pytest.raises(patches.PatchError) as caught:
        doubled(module)
    assert "Runner.load" in str(caught.value)
    assert "reinstall sglang-lk" in str(caught.value)


def test_outside_a_scheduler_a_problem_is_raised_as_it_is():
    with pytest.raises(ValueError) as caught:
        patches.stop(ValueError("one message"))
    assert str(caught.value) == "one message"


@pytest.mark.upstream
def test_every_patch_fits_the_upstream_of_this_build():
    patches.install()
    for name in patches.PATCHES:
        if importlib.util.find_spec(name):
            assert importlib.import_module(name)
    runner = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner
    loader = importlib.import_module("sglang.srt.model_loader.loader").DefaultModelLoader
    layer = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer").FusedMoE
    for function in (runner.load_model, loader._prepare_weights, layer.__init__):
        assert function.__wrapped__.__module__ == function.__module__ and "lk/patches" in function.__code__.co_filename
    backends = importlib.import_module("sglang.srt.model_executor.runner_backend")
    for backend in (backends.FullCudaGraphBackend, backends.BreakableCudaGraphBackend):
        assert all("lk/padding" in function.__code__.co_filename for function in (backend.capture_one, backend.replay))


@pytest.mark.upstream
def test_files_are_read_one_at_a_time_unless_the_user_says_how():
    patches.install()
    loader = importlib.import_module("sglang.srt.model_loader.loader").DefaultModelLoader
    config = importlib.import_module("sglang.srt.configs.load_config").LoadConfig
    assert loader(config()).load_config.model_loader_extra_config == {"enable_multithread_load": False}
    chosen = {"num_threads": 4}
    assert loader(config(model_loader_extra_config=dict(chosen))).load_config.model_loader_extra_config == chosen
