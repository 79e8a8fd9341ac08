"""Usable CPUs and memory on made-up machines: a directory stands for ``/``."""

import os
from pathlib import Path

import pytest

from sglang.srt.lk import cpus
from sglang.srt.lk.config import Config

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


class Machine:
    """A directory with just the files that a test is about; every method adds some."""

    def __init__(self, root: Path):
        self.root = root

    def file(self, path: str, text: str) -> "Machine":
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")
        return self

    def smt(self, *cores: tuple[int, ...]) -> "Machine":
        for core in cores:
            for cpu in core:
                self.file(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, core)))
        return self

    def nodes(self, *lists: str) -> "Machine":
        for node, cpulist in enumerate(lists):
            self.file(f"sys/devices/system/node/node{node}/cpulist", cpulist)
        return self

    def usable(self, affinity, *, threads=None, rank=0, ranks=1, gpu=False) -> cpus.Cpus:
        return cpus.usable(Config(threads=threads), root=self.root, affinity=affinity, rank=rank, ranks=ranks, gpu=gpu)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_a_system_that_tells_nothing_is_one_node_of_single_cores(machine):
    found = machine.usable({0, 1, 2})
    assert (found.cpus, found.nodes, found.warnings) == ([0, 1, 2], [0, 0, 0], [])
    assert found.why == [
        "affinity: CPUs 0-2",
        "topology: 3 cores, 0 SMT siblings, 1 NUMA node",
        "workers: 3 on CPUs 0-2",
    ]


def test_the_real_machine_stays_within_its_affinity():
    found = cpus.usable(Config())
    assert 1 <= len(found.cpus) <= len(os.sched_getaffinity(0))
    assert set(found.cpus) <= os.sched_getaffinity(0)
    assert cpus.memory().available > 0


def test_cpu_lists_with_holes_are_read(machine):
    machine.file("sys/devices/system/cpu/online", "0-1,4,6-7")
    found = machine.usable(range(8))
    assert found.cpus == [0, 1, 4, 6, 7]
    assert "online: leaves CPUs 0-1,4,6-7" in found.why


# thr6: one worker per physical core, inside the mask that was inherited.


def test_siblings_are_left_out(machine):
    machine.smt((0, 4), (1, 5), (2, 6), (3, 7))
    assert machine.usable(range(8)).cpus == [0, 1, 2, 3]


def test_taskset_on_odd_cpus_is_respected(machine):
    machine.smt((0, 1), (2, 3), (4, 5), (6, 7))
    assert machine.usable({1, 3, 5, 7}).cpus == [1, 3, 5, 7]


def test_more_threads_than_cores_take_siblings_last(machine):
    machine.smt((0, 4), (1, 5), (2, 6), (3, 7))
    found = machine.usable(range(8), threads=6)
    assert (found.cpus, found.warnings) == ([0, 1, 2, 3, 4, 5], [])


def test_newer_kernels_name_the_siblings_otherwise(machine):
    for cpu in (0, 1):
        machine.file(f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", "0-1")
    assert machine.usable({0, 1}).cpus == [0]


# thr5: quotas, and LK_THREADS above them.

V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def test_a_quota_limits_the_threads(machine):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/").file("sys/fs/cgroup/cpu.max", "400000 100000")
    found = machine.usable(range(8))
    assert found.cpus == [0, 1, 2, 3]
    assert "quota of cgroup /sys/fs/cgroup: 4 CPUs' worth of time" in found.why


@pytest.mark.parametrize(
    ("limit", "threads"),
    [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8), ("20000 10000", 2)],
)
def test_a_quota_is_rounded_down_but_never_to_nothing(machine, limit, threads):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/").file("sys/fs/cgroup/cpu.max", limit)
    assert len(machine.usable(range(8)).cpus) == threads


def test_the_tightest_of_nested_quotas_counts(machine):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/user.slice/app.scope")
    machine.file("sys/fs/cgroup/user.slice/cpu.max", "200000 100000")
    machine.file("sys/fs/cgroup/user.slice/app.scope/cpu.max", "600000 100000")
    found = machine.usable(range(8))
    assert found.cpus == [0, 1]
    assert "quota of cgroup /sys/fs/cgroup/user.slice: 2 CPUs' worth of time" in found.why


def test_a_quota_of_cgroup_v1_counts(machine):
    machine.file("proc/self/mountinfo", V1_CPU).file("proc/self/cgroup", "5:cpu,cpuacct:/job\n0::/")
    machine.file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "300000")
    machine.file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    machine.file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    assert machine.usable(range(8)).cpus == [0, 1, 2]


def test_a_container_that_sees_the_path_of_its_host_finds_its_quota(machine):
    mount = "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
    machine.file("proc/self/mountinfo", mount).file("proc/self/cgroup", "4:cpu:/docker/abc/inner")
    machine.file("sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us", "200000")
    machine.file("sys/fs/cgroup/cpu/inner/cpu.cfs_period_us", "100000")
    assert machine.usable(range(8)).cpus == [0, 1]
    machine.file("proc/self/mountinfo", mount.replace("/docker/abc ", "/ ")).file("proc/self/cgroup", "4:cpu:/docker/gone")
    machine.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000").file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert machine.usable(range(8)).cpus == [0]


def test_without_mountinfo_the_usual_places_are_tried(machine):
    machine.file("proc/self/cgroup", "0::/job").file("sys/fs/cgroup/job/cpu.max", "200000 100000")
    assert machine.usable(range(8)).cpus == [0, 1]


def test_too_many_threads_are_cut_to_the_quota_with_one_line(machine):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/").file("sys/fs/cgroup/cpu.max", "400000 100000")
    found = machine.usable(range(8), threads=64)
    assert found.cpus == [0, 1, 2, 3]
    assert found.warnings == ["LK_THREADS=64 exceeds the CPU quota: 4 threads"]
    assert found.warnings[0] in found.why


def test_too_many_threads_are_cut_to_the_cpus_there_are(machine):
    machine.smt((0, 2), (1, 3))
    found = machine.usable(range(4), threads=5)
    assert found.cpus == [0, 1, 2, 3]
    assert found.warnings == ["LK_THREADS=5 exceeds the CPUs this process may use: 4 threads"]


def test_fewer_threads_are_taken_as_asked(machine):
    found = machine.usable(range(4), threads=3)
    assert (found.cpus, found.warnings) == ([0, 1, 2], [])
    assert "LK_THREADS=3" in found.why


# thr8: cpusets.

V1_CPUSET = "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"


@pytest.mark.parametrize(
    ("mount", "group", "file"),
    [
        (V2, "0::/box", "sys/fs/cgroup/box/cpuset.cpus.effective"),
        (V1_CPUSET, "3:cpuset:/box", "sys/fs/cgroup/cpuset/box/cpuset.cpus"),
        (V1_CPUSET, "3:cpuset:/box", "sys/fs/cgroup/cpuset/box/cpuset.effective_cpus"),
    ],
)
def test_a_cpuset_smaller_than_the_affinity_counts(machine, mount, group, file):
    machine.file("proc/self/mountinfo", mount).file("proc/self/cgroup", group).file(file, "8-11,14")
    found = machine.usable(range(16))
    assert found.cpus == [8, 9, 10, 11, 14]
    assert f"cpuset /{Path(file).parent}: leaves CPUs 8-11,14" in found.why


def test_a_cpuset_outside_the_affinity_is_not_believed(machine):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/").file("sys/fs/cgroup/cpuset.cpus.effective", "8-9")
    found = machine.usable({0, 1})
    assert found.cpus == [0, 1]
    assert "cpuset /sys/fs/cgroup: CPUs 8-9, none of them in the affinity mask: not applied" in found.why


def test_two_servers_in_two_cpusets_share_no_core(machine):
    machine.smt(*((c, c + 16) for c in range(16)))
    first, second = machine.usable([*range(8), *range(16, 24)]), machine.usable([*range(8, 16), *range(24, 32)])
    assert (first.cpus, second.cpus) == (list(range(8)), list(range(8, 16)))


# Ranks on one host, nodes.


@pytest.mark.parametrize("nodes", [("0-11",), ("0-5", "6-11"), ("0-3", "4-7", "8-11")])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 12])
def test_ranks_divide_the_cores_without_overlap(machine, nodes, ranks):
    machine.nodes(*nodes)
    shares = [machine.usable(range(12), rank=rank, ranks=ranks).cpus for rank in range(ranks)]
    assert sorted(cpu for share in shares for cpu in share) == list(range(12))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_of_two_ranks_gets_its_node_even_if_cpu_ids_alternate(machine):
    machine.nodes("0,2,4,6", "1,3,5,7")
    assert machine.usable(range(8), rank=0, ranks=2).cpus == [0, 2, 4, 6]
    second = machine.usable(range(8), rank=1, ranks=2)
    assert (second.cpus, second.nodes) == ([1, 3, 5, 7], [1, 1, 1, 1])
    assert "rank 1 of 2: CPUs 1,3,5,7" in second.why


def test_siblings_stay_with_the_rank_of_their_core(machine):
    machine.smt((0, 4), (1, 5), (2, 6), (3, 7))
    shares = [machine.usable(range(8), threads=4, rank=rank, ranks=2).cpus for rank in (0, 1)]
    assert shares == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_ranks_share_the_quota_too(machine):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/").file("sys/fs/cgroup/cpu.max", "400000 100000")
    assert [machine.usable(range(8), rank=rank, ranks=2).cpus for rank in (0, 1)] == [[0, 1], [4, 5]]


def test_more_ranks_than_cores_fall_back_to_siblings(machine):
    machine.smt((0, 2), (1, 3))
    assert [machine.usable(range(4), rank=rank, ranks=4).cpus for rank in range(4)] == [[0], [2], [1], [3]]


def test_more_ranks_than_cpus_is_an_error_with_a_remedy(machine):
    with pytest.raises(ValueError) as error:
        machine.usable({0, 1}, rank=0, ranks=4)
    assert "4 ranks share 2 usable CPUs" in str(error.value) and "--tp-size" in str(error.value)


def test_a_rank_that_does_not_exist_is_an_error(machine):
    with pytest.raises(ValueError) as error:
        machine.usable({0, 1}, rank=2, ranks=2)
    assert "rank 2 is outside 0 to 1" in str(error.value)


def test_few_threads_use_the_memory_of_every_node(machine):
    machine.nodes("0-3", "4-7")
    found = machine.usable(range(8), threads=5)
    assert (found.cpus, found.nodes) == ([0, 1, 2, 4, 5], [0, 0, 0, 1, 1])


def test_siblings_are_taken_from_every_node_and_stay_beside_their_node(machine):
    machine.nodes("0-1,4-5", "2-3,6-7").smt((0, 4), (1, 5), (2, 6), (3, 7))
    found = machine.usable(range(8), threads=6)
    assert (found.cpus, found.nodes) == ([0, 1, 4, 2, 3, 6], [0, 0, 0, 1, 1, 1])


def test_node_numbers_and_their_cpu_lists_may_have_holes(machine):
    machine.file("sys/devices/system/node/node2/cpulist", "0,3-4").file("sys/devices/system/node/node10/cpulist", "8,11")
    found = machine.usable([0, 3, 4, 8, 11])
    assert (found.cpus, found.nodes, found.memory_nodes) == ([0, 3, 4, 8, 11], [2, 2, 2, 10, 10], 2)


def test_cpus_of_a_node_without_memory_count_to_the_nearest_that_has_some(machine):
    machine.nodes("0-1", "2-3", "4-5", "6-7").file("sys/devices/system/node/has_memory", "0,2")
    for node, distances in enumerate(("10 12 21 22", "22 10 12 21", "21 22 10 12", "12 21 22 10")):
        machine.file(f"sys/devices/system/node/node{node}/distance", distances)
    found = machine.usable(range(8))
    assert (found.cpus, found.nodes) == ([0, 1, 6, 7, 2, 3, 4, 5], [0, 0, 0, 0, 2, 2, 2, 2])
    assert found.memory_nodes == 2
    assert "NUMA node 1 has no memory for this process: its CPUs are counted to node 2, the nearest that has" in found.why


def test_memory_that_a_cpuset_forbids_is_none(machine):
    machine.nodes("0-1", "2-3").file("proc/self/status", "Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t1")
    found = machine.usable(range(4))
    assert (found.nodes, found.memory_nodes) == ([1, 1, 1, 1], 1)


def test_a_node_without_cpus_has_no_workers_and_does_not_disturb(machine):
    machine.nodes("0-1", "").file("sys/devices/system/node/has_memory", "0-1")
    found = machine.usable(range(2))
    assert (found.cpus, found.nodes, found.memory_nodes) == ([0, 1], [0, 0], 2)


def test_the_engine_is_told_the_nodes_where_there_are_several_and_whether_to_split_over_them(machine):
    assert machine.usable(range(4)).placement(Config()) == {"nodes": [], "split": False, "place": False}
    machine.nodes("0-1", "2-3")
    assert machine.usable(range(4)).placement(Config()) == {"nodes": [0, 0, 1, 1], "split": True, "place": True}
    assert machine.usable(range(4)).placement(Config(numa_interleave=False)) == {"nodes": [0, 0, 1, 1], "split": False, "place": False}
    second = machine.usable(range(4), rank=1, ranks=2)  # a rank on one node of two still wants its memory there
    assert second.placement(Config()) == {"nodes": [1, 1], "split": True, "place": True}


@pytest.mark.parametrize("nodes", [("0-11",), ("0-5", "6-11"), ("0-3", "4-7", "8-11")])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_workers_of_a_node_are_neighbours_on_every_rank(machine, nodes, ranks):
    machine.nodes(*nodes).smt(*((c, c + 2) for c in (0, 1, 4, 5, 8, 9)))
    for rank in range(ranks):
        found = machine.usable(range(12), threads=12 // ranks, rank=rank, ranks=ranks)
        assert found.nodes == sorted(found.nodes) and len(set(found.cpus)) == len(found.cpus)


# mem6: memory inside a container.


def memory(machine, **meminfo: int) -> cpus.Memory:
    machine.file("proc/meminfo", "\n".join(f"{name}:   {size >> 10} kB" for name, size in meminfo.items()))
    return cpus.memory(machine.root)


def test_memory_without_cgroups_is_what_the_host_has_available(machine):
    found = memory(machine, MemTotal=64 * GIB, MemFree=1 * GIB, MemAvailable=50 * GIB)
    assert (found.available, found.total, found.why) == (50 * GIB, 64 * GIB, ["host: 50.0 GiB of 64.0 GiB available"])


def test_the_limit_of_a_cgroup_counts(machine):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/a/b")
    machine.file("sys/fs/cgroup/a/memory.max", str(8 * GIB)).file("sys/fs/cgroup/a/memory.current", str(3 * GIB))
    machine.file("sys/fs/cgroup/a/b/memory.max", "max").file("sys/fs/cgroup/a/b/memory.current", str(1 * GIB))
    found = memory(machine, MemTotal=64 * GIB, MemAvailable=50 * GIB)
    assert (found.available, found.total) == (5 * GIB, 8 * GIB)
    assert found.why[1] == "cgroup /sys/fs/cgroup/a: 5.0 GiB of 8.0 GiB left"


def test_page_cache_that_can_be_dropped_is_free(machine):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/")
    machine.file("sys/fs/cgroup/memory.max", str(8 * GIB)).file("sys/fs/cgroup/memory.current", str(8 * GIB))
    machine.file("sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file {6 * GIB}\nactive_file {GIB}")
    assert memory(machine, MemTotal=64 * GIB, MemAvailable=50 * GIB).available == 6 * GIB


@pytest.mark.parametrize(("limit", "available"), [(str(8 * GIB), 6 * GIB), (NO_LIMIT_V1, 50 * GIB)])
def test_the_limit_of_a_v1_cgroup_counts(machine, limit, available):
    machine.file("proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory")
    machine.file("proc/self/cgroup", "4:memory:/job")
    machine.file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", limit)
    machine.file("sys/fs/cgroup/memory/job/memory.usage_in_bytes", str(3 * GIB))
    machine.file("sys/fs/cgroup/memory/job/memory.stat", f"total_inactive_file {GIB}")
    assert memory(machine, MemTotal=64 * GIB, MemAvailable=50 * GIB).available == available


def test_a_group_over_its_limit_has_nothing_left(machine):
    machine.file("proc/self/mountinfo", V2).file("proc/self/cgroup", "0::/")
    machine.file("sys/fs/cgroup/memory.max", str(GIB)).file("sys/fs/cgroup/memory.current", str(2 * GIB))
    assert memory(machine, MemTotal=64 * GIB, MemAvailable=50 * GIB).available == 0


def test_memory_of_a_node_counts_the_cache_that_can_be_dropped(machine):
    lines = "Node 1 MemTotal: 2048 kB\nNode 1 MemFree: 512 kB\nNode 1 Inactive(file): 256 kB"
    machine.file("sys/devices/system/node/node1/meminfo", lines)
    found = cpus.node_memory(1, machine.root)
    assert (found.available, found.total) == (768 * 1024, 2048 * 1024)
    unknown = cpus.node_memory(0, machine.root)
    assert (unknown.available, unknown.total) == (None, None)


def test_a_system_that_tells_nothing_about_memory_says_unknown(machine):
    assert cpus.memory(machine.root) == cpus.Memory(None, None, ["host: unknown of unknown available"])


@pytest.mark.parametrize("cores, workers", [(1, 1), (2, 2), (3, 3), (4, 3), (7, 6), (8, 6), (16, 14)])
def test_beside_a_gpu_some_cores_are_left_to_the_threads_that_drive_it(machine, cores, workers):
    found = machine.usable(set(range(cores)), gpu=True)
    assert found.cpus == list(range(workers))
    assert any("left to the threads that drive the GPU" in line for line in found.why) == (workers < cores)


def test_beside_a_gpu_every_rank_leaves_cores_of_its_own_share(machine):
    shares = [machine.usable(set(range(16)), rank=rank, ranks=2, gpu=True).cpus for rank in range(2)]
    assert shares == [list(range(6)), list(range(8, 14))]


def test_beside_a_gpu_a_number_of_threads_is_taken_as_given(machine):
    assert len(machine.usable(set(range(16)), threads=16, gpu=True).cpus) == 16
