"""Letters and whole numbers in responses."""

import json

import pytest

pytest.importorskip("parts.benchmarks", reason="needs parts/benchmarks, which is not here")

from parts.benchmarks.choices import extract_choice
from tests.helpers.marks import slow
from tests.helpers.scripts import VECTORS
from tests.helpers.texts import TEXTS, check_with_any_text

CASES = [json.loads(line) for line in (VECTORS / "choice.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["completion"])
def test_choice_vectors(case):
    assert extract_choice(case["completion"]) == case["want"]


@pytest.mark.parametrize(
    ("completion", "want"),
    [
        ("The answer is A. No wait, the answer is C.", "C"),
        ("<answer>A</answer> hm <answer>(d)</answer>", "D"),
        ("\\boxed{\\text{B}} so the answer is C", "B"),
        ("b", "B"),
        ("C) because of the shadow", "C"),
        ("Answer: $B$", "B"),
        ("the answer is $\\text{B}$.", "B"),
        ("the answer is $b + 1$", None),
        ("(A) is too dark, so it must be (D)", "A"),
        ("it could be (B) or rather (C)", "C"),
        ("<think>the answer is A</think>\nB", "B"),
        ("The answer is A?</think>\nB", "B"),  # the chat template had put <think> in the prompt
        ("A dog and a cat", None),
        ("I think so", None),
        ("", None),
        ("the answer is a dog", None),
    ],
)
def test_choices_beyond_the_vectors(completion, want):
    assert extract_choice(completion) == want


@pytest.mark.parametrize("texts", ["random bytes", *slow("10,000 characters")])
def test_no_text_makes_a_choice_fail_or_wait(texts):
    check_with_any_text(
        lambda text, _: extract_choice(text), lambda v: v is None or (len(v) == 1 and "A" <= v <= "Z"), TEXTS[texts]
    )
