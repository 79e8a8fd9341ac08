"""Facts of machines that this one is not: a driver with cards, one that does not answer, none."""

import ctypes

import pytest
from sglang.srt.lk import machine


class Nvml:
    """The management library of a host with two cards, of which the second shares the host's memory."""

    def __init__(self, status=0):
        self.status, self.ended = status, False
        self.nvmlErrorString = self._error_string

    def nvmlInit_v2(self):
        return self.status

    def nvmlShutdown(self):
        self.ended = True

    @staticmethod
    def _error_string(status):
        return b"Driver/library version mismatch"

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"600.10"

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 100 + index

    def nvmlDeviceGetName(self, handle, text, size):
        text.value = b"Card A" if handle.value == 100 else b"Card B"

    def nvmlDeviceGetMemoryInfo(self, handle, size):
        if handle.value == 101:
            return 3
        size._obj.total, size._obj.free = 80 << 30, 79 << 30
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = (9, 0) if handle.value == 100 else (12, 1)


@pytest.fixture
def host(monkeypatch):
    def use(**libraries):
        monkeypatch.setattr(machine, "_library", lambda name: libraries.get(name.split(".")[0].replace("-", "_")))

    return use


def test_cards_are_listed_with_free_memory_and_the_library_is_left_again(host):
    nvml = Nvml()
    host(libnvidia_ml=nvml, libcuda=object())
    assert machine.gpus() == machine.Gpus(
        "600.10",
        True,
        [
            {"index": 0, "name": "Card A", "compute": "9.0", "total_bytes": 80 << 30, "free_bytes": 79 << 30},
            {"index": 1, "name": "Card B", "compute": "12.1", "total_bytes": None, "free_bytes": None},
        ],
    )
    assert nvml.ended


def test_a_driver_that_does_not_answer_is_trouble_and_none_is_not(host, monkeypatch):
    nvml = Nvml(status=18)
    nvml.nvmlErrorString = type("Function", (), {"__call__": staticmethod(Nvml._error_string)})()
    host(libnvidia_ml=nvml)
    assert machine.gpus().trouble == "the driver does not answer: Driver/library version mismatch"
    host()
    assert machine.gpus() == machine.Gpus(None, False, [])


def test_a_missing_library_is_an_answer():
    assert machine._library("libno-such-thing.so.9") is None
    assert isinstance(machine._library("libc.so.6"), ctypes.CDLL)


def test_each_cache_counts_once(tmp_path):
    for cpu, size, shared in ((0, "32768K", "0-1"), (1, "32768K", "0-1"), (2, "16M", "2")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size)
        (folder / "shared_cpu_list").write_text(shared)
    assert machine.l3_bytes([0, 1, 2], tmp_path) == 48 << 20
    assert machine.l3_bytes([7], tmp_path) is None


@pytest.mark.parametrize(
    "text, mode", [("always [madvise] never\n", "madvise"), ("always madvise [never]\n", "never"), (None, None)]
)
def test_the_mode_of_huge_pages_is_read(tmp_path, text, mode):
    if text:
        file = tmp_path / machine.HugePages.switch.lstrip("/")
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert machine.huge_pages(tmp_path, probe=False) == machine.HugePages(mode, None)


def test_the_probe_of_huge_pages_returns_a_share_or_nothing():
    granted = machine.huge_pages().granted
    assert granted is None or 0 <= granted <= 1


def test_cpus_that_others_use_count_as_busy(monkeypatch):
    readings = iter(
        [
            "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 10 0 0 90 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n",
            "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 11 0 1 95 1 0 0 2 0 0\ncpu1 50 0 0 0 0 0 0 0 0 0\n",
        ]
    )
    monkeypatch.setattr(machine, "_text", lambda path: next(readings))
    assert machine.busy([0], seconds=0) == 0.4  # 1 user, 1 system and 2 stolen of 10 ticks
    monkeypatch.setattr(machine, "_text", lambda path: None)
    assert machine.busy([0], seconds=0) is None
