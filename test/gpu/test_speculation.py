"""Speculative decoding beside a GPU: batches of TARGET_VERIFY, and draft models with experts of their own, in every role."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers", reason="needs what SGLang needs")
pytestmark = pytest.mark.gpu

import servers  # noqa: E402
from servers import DRAFTS_CPU, DRAFTS_EAGER, DRAFTS_RESIDENT  # noqa: E402

WAYS = [DRAFTS_CPU, DRAFTS_RESIDENT, DRAFTS_EAGER]
TEXTS = servers.known()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with servers.serve(WAYS, tmp_path_factory.mktemp("recite")) as up:
        yield up


def server(running, way):
    ready, started = running[way.name]
    assert ready, f"{way.name} did not come up:\n{started.tail()}"
    return ready


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_prompt_gets_its_known_answer_alone_and_in_one_batch(running, way):
    asked = server(running, way)
    together = asked.tokens([prompt for prompt, _ in TEXTS], 48)
    assert [i for i, (_, expected) in enumerate(TEXTS) if together[i] != expected] == []
    assert [i for i, (prompt, expected) in enumerate(TEXTS) if asked.tokens([prompt], 48)[0] != expected] == []


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_nearly_every_draft_is_accepted(running, way):
    """A verified batch of four rows must come to the tokens that the draft's single rows came to."""
    answers = server(running, way).answers([prompt for prompt, _ in TEXTS], 48)
    verified = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    assert max(verified) <= 48 / 4 + 4, verified


def test_the_draft_has_a_table_and_roles_of_its_own(running):
    log = server(running, DRAFTS_RESIDENT).log.read_text()
    assert "4 MoE layers: 4 cpu" in log
    assert "4 MoE layers: 4 resident" in log
