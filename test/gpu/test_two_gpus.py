"""The recite model over two GPUs: experts split between the ranks, each with cores of its own."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers", reason="needs what SGLang needs")
pytestmark = pytest.mark.gpu

import servers  # noqa: E402
from servers import MIXED_TP, TP, server  # noqa: E402

TEXTS = servers.known()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    with servers.serve([TP, MIXED_TP], tmp_path_factory.mktemp("recite")) as up:
        yield up


@pytest.mark.parametrize("way", [TP, MIXED_TP], ids=lambda way: way.name)
def test_every_prompt_gets_its_known_answer_alone_and_in_one_batch(running, way):
    asked = server(running, way)
    together = asked.tokens([prompt for prompt, _ in TEXTS], 48)
    assert [i for i, (_, expected) in enumerate(TEXTS) if together[i] != expected] == []
    assert [i for i, (prompt, expected) in enumerate(TEXTS) if asked.tokens([prompt], 48)[0] != expected] == []


def test_every_rank_has_an_engine_and_a_table(running):
    log = server(running, TP).log.read_text()
    assert len(re.findall("4 MoE layers: 4 cpu", log)) == 2
