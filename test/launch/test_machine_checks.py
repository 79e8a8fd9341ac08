"""Problems of made-up machines, each with its remedy."""

import dataclasses
import socket

import pytest

from launch import machine

GOOD = machine.Facts(
    python=(3, 11),
    venv=True,
    headers=True,
    compiler="g++",
    compiler_version=12,
    disk=20 * machine.GB,
    memory=16 * machine.GB,
    gpu=False,
)


def found(**changes) -> list[str]:
    return machine.problems(dataclasses.replace(GOOD, **changes), builds=True, downloads=True)


def test_a_good_machine_has_no_problems():
    assert found() == []


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"python": (3, 10)}, "install Python 3.11, 3.12 or 3.13"),
        ({"venv": False}, "apt-get install python3.11-venv"),
        ({"headers": False}, "apt-get install python3.11-dev"),
        ({"compiler": None}, "apt-get install g++"),
        ({"compiler_version": 10}, "apt-get install g++-12"),
        ({"disk": 13 * machine.GB}, "13.0 GB of disk are free and 14 GB are needed"),
        ({"memory": 2 * machine.GB}, "2.0 GB of memory are available and 6 GB are needed"),
        ({"taken_ports": (30000,)}, "port 30000 is taken: set QUICKSTART_PORT"),
    ],
)
def test_each_problem_is_one_sentence_with_its_remedy(changes, remedy):
    sentences = found(**changes)
    assert len(sentences) == 1
    assert remedy in sentences[0]
    assert "\n" not in sentences[0]


def test_all_problems_come_at_once():
    assert len(found(compiler=None, disk=0, memory=0, taken_ports=(1024, 1025))) == 5


def test_what_is_already_installed_is_not_asked_for_again():
    facts = dataclasses.replace(GOOD, compiler=None, venv=False, headers=False, disk=3 * machine.GB)
    assert machine.problems(facts, builds=False, downloads=False) == []
    assert len(machine.problems(facts, builds=True, downloads=False)) == 3


def test_a_control_group_with_less_memory_than_the_host_counts(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable:   67108864 kB\n")
    assert machine.memory(tmp_path) == 64 * machine.GB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text(str(3 * machine.GB))
    (group / "memory.max").write_text("max\n")
    assert machine.memory(tmp_path) == 64 * machine.GB
    (group / "memory.max").write_text(str(8 * machine.GB))
    assert machine.memory(tmp_path) == 5 * machine.GB


def test_a_port_somebody_listens_on_is_taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not machine.is_free(port)
        assert machine.look(environment=machine.Path("/"), ports=[port]).taken_ports == (port,)
    assert machine.is_free(port)


def test_free_ports_differ():
    ports = machine.free_ports(3)
    assert len(set(ports)) == 3
