"""The numbers that the hand-over says of itself."""

import logging

import pytest

from sglang.srt.lk import telemetry

SUMS = {"calls": 0, "steps": 0, "rows": 0, "busy_us": 0.0, "wait_us": 0.0}


def after(steps, **more):
    return SUMS | {"steps": steps, "calls": 4 * steps, "rows": 8 * steps, "busy_us": 500.0 * steps} | more


def test_a_line_comes_once_enough_steps_have_passed_and_speaks_of_those(caplog):
    say = telemetry.Line(every=40)
    with caplog.at_level(logging.INFO):
        say(SUMS)
        say(after(39))
        assert not caplog.records
        say(after(50, wait_us=30_000.0))
        say(after(60, wait_us=36_000.0))
    assert [record.getMessage() for record in caplog.records] == [
        "Hybrid MoE: [decode] 50 steps, 2.0 rows a layer; ms a step: CPU experts 0.500, GPU waited 0.600, handing over 0.100 of it"
    ]


def test_host_functions_do_not_know_how_long_the_gpu_waited():
    assert telemetry.line(after(10)).endswith("CPU experts 0.500")


def test_metrics_follow_the_sums_and_never_fall():
    client = pytest.importorskip("prometheus_client")
    roles = {"cpu": (3, 900), "resident": (2, 0)}
    metrics = telemetry.Metrics(rank=3, roles=lambda: roles)

    def value(name, **labels):
        return client.REGISTRY.get_sample_value(f"sglang_lk_{name}", {"tp_rank": "3", **labels})

    metrics(after(10, wait_us=6000.0))
    roles["cpu"] = (4, 1000)  # a draft model's layer
    metrics(after(20, wait_us=12_500.0))
    metrics(after(20, wait_us=12_000.0))
    assert (value("steps_total"), value("rows_total"), value("requests_total")) == (20, 160, 80)
    assert value("cpu_busy_seconds_total") == pytest.approx(0.01) and value("handover_seconds_total") == pytest.approx(0.0025)
    assert (value("layers", role="cpu"), value("layers", role="resident"), value("expert_bytes", role="cpu")) == (4, 2, 1000)


def test_the_thread_reports_until_the_hand_over_fails(caplog):
    class Native:
        asked = 0

        def failure(self, ms):
            self.asked += 1
            return "layer 1: gone" if self.asked > 3 else ""

        def stats(self):
            return after(100 * self.asked)

    with caplog.at_level(logging.INFO):
        telemetry.start(Native(), every=40, metrics=False, rank=0, roles=dict).join(10)
    assert sum("[decode] 100 steps" in record.getMessage() for record in caplog.records) == 2
