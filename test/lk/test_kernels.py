"""The engine of a process, as far as the machine decides about it."""

import logging
import threading

import pytest

pytest.importorskip("torch")

from sglang.srt.lk import boot, config, cpus, kernels  # noqa: E402


class Native:
    """An extension whose engine reports what the test says."""

    ABI = kernels.ABI

    def __init__(self, unbound: int):
        self.unbound, self.made = unbound, 0

    def Engine(self, cpus, **options):  # noqa: N802  (the extension's spelling)
        self.made += 1
        self.threads = len(cpus)
        return self


@pytest.fixture
def engine_on(monkeypatch):
    """``engine_on(unbound)`` makes the process's engine, on CPUs 0 to 3."""

    def make(unbound):
        native = Native(unbound)
        monkeypatch.setattr(kernels, "_engine", None)
        monkeypatch.setattr(kernels, "extension", lambda: native)
        monkeypatch.setattr(boot, "current", lambda: config.Config())
        monkeypatch.setattr(boot, "affinity", lambda: {0, 1, 2, 3})
        monkeypatch.setattr(cpus, "usable", lambda *_, **__: cpus.Cpus(cpus=[0, 1, 2, 3], nodes=[0], why=[], warnings=[]))
        return native

    return make


def test_threads_that_could_not_be_bound_are_warned_about_once_with_the_remedy(engine_on, caplog):
    native = engine_on(2)
    with caplog.at_level(logging.WARNING):
        threads = [threading.Thread(target=kernels.engine) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert native.made == 1
    assert [record.message for record in caplog.records] == [
        "Hybrid MoE: the system refused to bind 2 of 4 threads to their CPUs, so they run wherever it puts them and decode is slower; "
        "let the process use these CPUs (taskset, the container's cpuset), or set LK_THREAD_BINDING=NUMA_NODE"
    ]


def test_an_engine_whose_threads_are_bound_says_nothing(engine_on, caplog):
    engine_on(0)
    with caplog.at_level(logging.WARNING):
        assert kernels.engine().threads == 4
    assert not caplog.records
