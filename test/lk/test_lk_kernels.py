"""The engine of a process, as far as the machine decides about it."""

import logging
import threading

import pytest

pytest.importorskip("torch")

from sglang.srt.lk import boot, config, cpus, kernels  # noqa: E402


class Native:
    """An extension whose engine reports what the test says."""

    ABI = kernels.ABI

    def __init__(self, unbound: int, unplaced: str):
        self.unbound, self.unplaced, self.made = unbound, unplaced, 0

    def Engine(self, cpus, **options):  # noqa: N802  (the extension's spelling)
        self.made += 1
        self.options = options
        self.threads = len(cpus)
        return self


@pytest.fixture
def engine_on(monkeypatch):
    """``engine_on(unbound, ...)`` makes the process's engine, on CPUs 0 to 3; ``nodes`` has their NUMA nodes."""

    def make(unbound, unplaced="", nodes=(0, 0, 0, 0), settings=config.Config()):
        native = Native(unbound, unplaced)
        share = cpus.Cpus([0, 1, 2, 3], list(nodes), why=[], warnings=[], memory_nodes=len(set(nodes)))
        monkeypatch.setattr(kernels, "_engine", None)
        monkeypatch.setattr(kernels, "extension", lambda: native)
        monkeypatch.setattr(boot, "current", lambda: settings)
        monkeypatch.setattr(boot, "affinity", lambda: {0, 1, 2, 3})
        monkeypatch.setattr(cpus, "usable", lambda *_, **__: share)
        return native

    return make


def said_by_the_engine() -> str:
    with pytest.raises(kernels.KernelError) as caught:
        kernels.engine(rank=1, ranks=3)
    return str(caught.value)


def test_more_ranks_than_cpus_are_a_problem_that_the_start_can_say(engine_on, monkeypatch):
    usable = cpus.usable
    engine_on(0)
    monkeypatch.setattr(cpus, "usable", lambda *args, **given: usable(*args, **{**given, "affinity": {0}}))
    said = said_by_the_engine()
    assert said.startswith("Hybrid MoE: 3 ranks share 1 usable CPU") and "lower --tp-size" in said


def test_threads_that_the_system_does_not_give_are_a_problem_that_the_start_can_say(engine_on):
    def refused(**options):
        raise RuntimeError("the system started 1 of 3 worker threads and refused the next; use fewer threads")

    engine_on(0).Engine = refused
    said = said_by_the_engine()
    assert said.startswith("Hybrid MoE: the system started 1 of 3 worker threads") and "LK_THREADS" in said


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


def test_the_engine_gets_the_nodes_of_its_workers_and_splits_over_them_unless_that_is_not_wanted(engine_on):
    def told(**given):
        native = engine_on(0, **given)
        kernels.engine()
        return {name: native.options[name] for name in ("nodes", "split", "place", "bind")}

    assert told() == {"nodes": [], "split": False, "place": False, "bind": "core"}
    assert told(nodes=(0, 0, 1, 1)) == {"nodes": [0, 0, 1, 1], "split": True, "place": True, "bind": "core"}
    alone = config.Config(numa_interleave=False, thread_binding="NUMA_NODE")
    assert told(nodes=(0, 0, 1, 1), settings=alone) == {"nodes": [0, 0, 1, 1], "split": False, "place": False, "bind": "node"}


def test_memory_that_cannot_be_placed_is_warned_about_once_and_the_engine_works_on(engine_on, caplog):
    native = engine_on(0, "Operation not permitted for node 1", nodes=(0, 0, 1, 1))
    with caplog.at_level(logging.WARNING):
        assert kernels.engine() is native and kernels.engine() is native
    assert [record.message for record in caplog.records] == [
        "Hybrid MoE: the system does not let memory be taken from a chosen NUMA node (Operation not permitted for node 1), so each "
        "node's workers touch theirs first, which is as good until a node is full; in a container: --cap-add SYS_NICE"
    ]
