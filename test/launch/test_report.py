"""The verdict: sure prompts must agree, the others are only counted."""

from launch import report
from launch.report import Prompt, Run

PROMPTS = [Prompt("a", (1, 2, 3), 0.05), Prompt("b", (4, 5, 6), 0.049), Prompt("c", (7, 8, 9), 0.5)]


def run(*ids: tuple[int, ...]) -> Run:
    return Run("Hybrid", ids=list(ids), decode=20, prefill_one=300, prefill_many=400)


def test_a_sure_prompt_that_differs_fails_and_is_named_with_its_token():
    wrong = run((1, 2, 3), (4, 5, 6), (7, 0, 9))
    assert not report.agrees(wrong, PROMPTS)
    assert report.differences(wrong, PROMPTS) == ["Hybrid: 'c' differs at token 1 (0 instead of 8)"]


def test_an_unsure_prompt_may_differ_and_is_counted():
    other = run((1, 2, 3), (4, 0, 0), (7, 8, 9))
    assert report.agrees(other, PROMPTS)
    assert report.same(other, PROMPTS) == (2, 2, 0, 1)


def test_no_sure_prompt_at_all_is_no_agreement():
    assert not report.agrees(Run("x", ids=[(4, 5, 6)]), [PROMPTS[1]])


def test_rates_are_shown_as_multiples_of_stock():
    stock = Run("Stock", ids=[p.ids for p in PROMPTS], decode=10, prefill_one=100, prefill_many=100)
    text = report.results([stock, run(*stock.ids)], PROMPTS)
    decode = next(line for line in text.splitlines() if line.strip().startswith("decode"))
    assert decode.split("  ")[1:] and "10 (1.00 x)" in decode and "20 (2.00 x)" in decode
    assert "300 (3.00 x)" in text and "400 (4.00 x)" in text


def test_the_time_table_ends_with_the_total():
    assert report.spent({"build": 2.0, "start": 3.5}, 5.5).splitlines()[-1].split() == ["total", "5.5"]
