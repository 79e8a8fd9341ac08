"""The load test's own parts: what it asks is known, and what it reports is what it saw."""

import pytest

pytest.importorskip("tokenizers", reason="needs what SGLang needs")

import soak  # noqa: E402

from launch.recite import MODEL  # noqa: E402

TEXTS = soak.known(MODEL, MODEL / "tokenizer.json")


def test_only_prompts_without_near_ties_are_asked():
    assert len(TEXTS) > 10
    assert all(len(answer) == soak.LONGEST for _, answer in TEXTS)


def test_each_case_continues_its_text_within_the_known_answer():
    known = {tuple(ids + answer) for ids, answer in TEXTS}
    for case in soak.cases(TEXTS, 500, cancelled=0.05, seed=7):
        whole = tuple(case.ids + case.expected)
        assert any(text[: len(whole)] == whole for text in known)
        assert case.expected


def test_about_the_wanted_share_hangs_up():
    cancelled = sum(case.cancel_after is not None for case in soak.cases(TEXTS, 4000, cancelled=0.05, seed=1))
    assert 140 < cancelled < 260


def test_the_summary_says_what_went_wrong():
    memory = {when: dict(rss=9.0, own=mb, pinned=2.5) for when, mb in dict(start=1.0, warm=2.0, middle=3.0, end=4.0).items()}
    figures = dict(requests=9, cancelled=1, at_once=2, tokens=30, seconds=1.5, wrong=1, failed=0, problems=["a"])
    figures |= dict(stopped=5.0, memory_mb=memory)
    assert soak.line(figures) == (
        "soak: 9 requests (1 cancelled), 2 at a time, 30 tokens in 1.5 s and a stop of 5 s; 1 wrong, 0 failed; "
        "the server's own memory in MB: 1.0 start, 2.0 warm, 3.0 middle, 4.0 end (at the end rss 9.0, pinned 2.5): 1 problems, first: a"
    )


def test_memory_of_every_kind_must_stay_flat():
    warm = dict(own=1000.0, rss=10.0, locked=0.0, pinned=64.0, card=5.0)
    assert soak.growth(warm, warm | dict(own=1031.0, rss=9000.0, card=9000.0)) == []
    assert soak.growth(warm, warm | dict(own=1033.0, pinned=100.0)) == [
        "memory grew from 1000.0 to 1033.0 MB", "pinned memory grew from 64.0 to 100.0 MB"
    ]
    assert soak.growth(warm | dict(gpu=500.0), warm | dict(gpu=600.0)) == ["memory on the GPU grew from 500.0 to 600.0 MB"]


def test_without_a_number_cases_never_end():
    endless = soak.cases(TEXTS, None, cancelled=0.05, seed=1)
    assert [next(endless) for _ in range(30)] == list(soak.cases(TEXTS, 30, cancelled=0.05, seed=1))
