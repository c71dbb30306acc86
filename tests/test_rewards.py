"""Check the rewards against the test vectors in tests/vectors and against further edge cases."""

import json

import pytest

import rewards
from config import RewardFlags
from evaluation.scorer import Scorer
from grading import answers
from tests.helpers.marks import needs, slow
from tests.helpers.scripts import VECTORS
from tests.helpers.texts import TEXTS, check_with_any_text


def cases(name: str) -> list[dict]:
    return [json.loads(line) for line in (VECTORS / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", cases("format"), ids=lambda c: c["note"])
def test_format_vectors(case):
    assert rewards.format_reward(case["completion"]) == case["want"]


@pytest.mark.parametrize("case", cases("count"), ids=lambda c: c["note"])
def test_count_vectors(case):
    assert rewards.count_reward(case["completion"], case["answer"]) == pytest.approx(case["want"], abs=1e-9)


@pytest.mark.parametrize("case", cases("vqa"), ids=lambda c: c["note"])
def test_vqa_vectors(case):
    assert rewards.vqa_reward(case["completion"], case["answer"]) == pytest.approx(case["want"], abs=5e-5)


def think(answer: str) -> str:
    return f"<think>t</think>\n<answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1,234 apples", 1234),
        ("12,345,678", 12345678),
        ("1,2 and 3", 1),  # a list: the comma is not a thousands separator
        ("1234,567", 1234),  # four digits before the comma: not a thousands separator
        ("there are 3.", 3),  # a full stop, not a decimal point
        ("3.5 or 4", 4),  # a decimal is not a count
        (".5 of 6", 6),
        ("x3 y4z 5", 5),
        ("1,234, maybe", 1234),
        ("1,234.5 or 8", 8),
        ("1.2.3", None),
        ("3rd: 4", 4),
        ("A photo of 3apples", 3),
        ("3Apples.", 3),
        ("3D", None),
        ("x3", None),
        ("3D4 or 7cm or 3px_or or 9", 9),
        ("７", 7),
        ("有12隻", 12),
        ("<answer>none</answer> 4", None),  # only the answer block counts, even if it contains no number
        ("<think>First 9.</think>\n\nA photo of 3 cats", 3),
        ("First 9.</think>\n\nA photo of 3 cats", 3),  # the chat template has opened the thinking
        ("<think>Is it <answer>9</answer>?</think><answer>3</answer>", 3),
        ("<think>I see 3", None),  # cut off before an answer
        ("<think>I see 9, or 3 <answer>3</answer>", 3),  # not closed before the answer
        ("<answer>4", 4),  # an unclosed tag does not make an answer block
        ("10²", 10),
        ("count...12", 12),
        ("see No.5", 5),
        ("is .5 or 6", 6),
        ("١٢", 12),
        ("", None),
        ("-3", 3),
        ("0", 0),
        ("9" * 5000, int("9" * 18)),  # int() refuses 5,000 digits, so the number is cut; the exact limit is arbitrary
    ],
)
def test_first_count(text, want):
    assert answers.first_count(text) == want


def test_count_reward_by_distance():
    got = [rewards.count_reward(f"A photo of {10 + d} cats", 10) for d in range(8)]
    assert got == pytest.approx([1.0, 0.85, 0.7, 0.4, 0.3, 0.2, 0.0, 0.0])
    assert [rewards.count_reward(f"A photo of {10 - d} cats", 10) for d in range(8)] == pytest.approx(got)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("5.6cm.", ["5.6", "cm"]),
        ("T1-weighted", ["t", "1", "weighted"]),
        ("A.B", ["a", "b"]),
        ("don't_know", ["don", "t", "know"]),
        ("ＭＲＩ", ["mri"]),
        ("3.", ["3"]),
        (".5", ["0.5"]),
        ("-5", ["-5"]),
        ("(-0.50)", ["-0.5"]),
        ("3-4", ["3", "4"]),  # a range: the hyphen is not a minus
        ("x=−5", ["x", "-5"]),
        ("< 5", ["<5"]),
        ("5 <= 6", ["5", "≤6"]),
        ("3 : 4", ["3:4"]),
        ("½", ["1/2"]),
        ("2+", ["2+"]),
        ("1,000,000.0", ["1000000"]),
        ("007", ["7"]),
        ("5 Centimeters", ["5", "cm"]),
        ("second rib", ["second", "rib"]),  # not a unit without a number
        ("No.5", ["no", "5"]),
        ("The liver", ["liver"]),
        ("hepatitis A", ["hepatitis", "a"]),
        ("?!", []),
        ("1.2.3", ["1.2.3"]),
        ("肺炎", ["肺炎"]),
        ("हिन्दी", ["हिन्दी"]),
    ],
)
def test_words(text, want):
    assert answers.words(text) == want


@pytest.mark.parametrize(
    ("answer", "gold", "want"),
    [
        ("Yes, yes", "yes", 1.0),
        ("yes - not no", "yes", 0.0),
        ("right lung", "right upper lung", 0.8),
        ("-5", "5", 0.0),
        ("-0.5", "0.5", 0.0),
        ("<5", ">5", 0.0),
        ("3:4", "3/4", 0.0),
        ("1,000", "1000", 1.0),
        ("2.0", "2", 1.0),
        ("L4", "L5", 0.0),
        ("7 cm", "5 cm", 0.0),
        ("7 centimetres", "7cm", 1.0),
        ("12:30", "12:45", 0.0),
        ("not normal", "normal", 0.0),
        ("normal", "not normal", 0.0),
        ("absent bowel gas", "bowel gas", 0.0),
        ("right lower lobe", "right upper lobe", 2 / 3),
        ("brain brain brain ct", "ct", 0.0),  # F1 over multisets: 2·1/5 = 0.4, below 0.5
        ("yes", "yes it is", 0.5),  # a longer gold answer is scored by word overlap (F1): 2·1/4
        ("anything", "?!", 0.0),
    ],
)
def test_vqa_beyond_the_vectors(answer, gold, want):
    assert rewards.vqa_reward(think(answer), gold) == pytest.approx(want)


def test_exact_match_heeds_signs_and_writes_numbers_in_one_way():
    for answer, gold, want in [("-5", "5", False), ("<5", ">5", False), ("1,000", "1000", True), ("2.0", "2", True)]:
        assert exact_match("vqa", think(answer), gold) is want


def test_gold_problems_are_named():
    assert "no whole number" in rewards.gold_problem("count", "three apples")
    assert "no word" in rewards.gold_problem("vqa", "?!")
    assert "empty" in rewards.gold_problem("vqa", "  ") and "empty" in rewards.gold_problem("vqa", "\u200b \ufeff")
    assert rewards.gold_problem("count", "7個") is None
    assert "unbalanced braces" in rewards.gold_problem("math", "\\frac{1}{2")


@pytest.mark.parametrize("case", cases("vqa_signs"), ids=lambda c: ascii(c["answer"]))
def test_a_sign_that_may_carry_meaning_counts(case):
    assert (rewards.vqa_reward(think(case["answer"]), case["gold"]) == 1) is case["equal"]


@pytest.mark.parametrize("task", ["vqa", pytest.param("math", marks=needs("parts/math")), "count"])
def test_a_gold_answer_that_a_vector_has_can_be_matched(task):
    """What the reward gives 1 for must not be refused: else a good row is lost."""
    for case in cases(task):
        if case["want"] == 1 and not case.get("verifier_called"):
            assert rewards.gold_problem(task, str(case["answer"])) is None, case


@pytest.mark.parametrize(
    ("task", "gold"),
    [
        ("vqa", "<answer> 3"),
        ("vqa", "3</answer>"),
        pytest.param("math", "<answer>3", marks=needs("parts/math")),
        pytest.param("math", "<think>a</think>3", marks=needs("parts/math")),
        pytest.param("math", "The area is \\boxed{2}, so the sum is \\boxed{13}.", marks=needs("parts/math")),
        pytest.param("math", "so \\boxed{}", marks=needs("parts/math")),
    ],
)
def test_a_gold_answer_that_no_completion_can_match_is_refused(task, gold):
    assert "cannot be matched: write the final answer alone" in rewards.gold_problem(task, gold)


@needs("parts/math")
@pytest.mark.parametrize("gold", ["\\boxed{3}", "\\boxed{12}, \\boxed{13}", "x = \\boxed{\\frac12}", "?", "\\{1, 2\\}"])
def test_a_gold_answer_that_a_completion_can_match_is_kept(gold):
    assert rewards.gold_problem("math", gold) is None


@pytest.mark.parametrize(
    ("answer", "gold", "want"),
    [
        ("2024-06-05", "2024-05-06", 0.0),
        ("10-5 mm", "5-10 mm", 0.0),
        ("11:00 to 10:30", "10:30 to 11:00", 0.0),
        ("2 cats and 3 dogs", "3 cats and 2 dogs", 0.0),
        ("2 dogs and 3 cats", "3 cats and 2 dogs", 0.8),  # each number has its word
        ("L5 and L4", "L4 and L5", 0.8),
        ("right to left", "left to right", 2 / 3),
        ("a man bites a dog", "a dog bites a man", 2 / 3),
        ("May 6, 2024", "6 May 2024", 1.0),
        ("Left to right.", "left to right", 1.0),
    ],
)
def test_words_and_numbers_in_another_order(answer, gold, want):
    assert rewards.vqa_reward(think(answer), gold) == pytest.approx(want)


@pytest.mark.parametrize(
    ("answer", "gold", "want"),
    [
        ("2", "two", 1.0),
        ("Twelve cats.", "12 cats", 1.0),
        ("twenty-one", "21", 1.0),
        ("two hundred and five", "205", 1.0),
        ("1500", "one thousand five hundred", 1.0),
        ("a hundred", "100", 1.0),
        ("One", "1", 1.0),
        ("one lesion", "1 lesion", 1.0),
        ("the left one", "left", 2 / 3),  # a pronoun
        ("empty one", "1", 0.0),
        ("two, three", "5", 0.0),
        ("two lesions", "three lesions", 0.0),
        ("no", "zero", 0.0),
        ("1e-3", "0.001", 1.0),
        ("6.02 × 10^23", "6.02e+23", 1.0),
        ("1 x 10^{-3}", "0.001", 1.0),
        ("1e3", "1,000", 1.0),
        ("1e-3", "1e-4", 0.0),
        ("5 x 10 cm", "5 x 10 cm", 1.0),
        ("1e999999999", "1", 0.0),
    ],
)
def test_numbers_in_words_and_with_exponents(answer, gold, want):
    assert rewards.vqa_reward(think(answer), gold) == pytest.approx(want)


@pytest.mark.parametrize(
    ("answer", "gold", "is_same"),
    [
        ("influenza virus", "influenza A virus", False),
        ("influenza a virus", "influenza A virus", True),
        ("B", "A B", False),
        ("B", "A or B", False),
        ("vitamin deficiency", "vitamin A deficiency", False),
        ("type B blood", "type A blood", False),
        ("A dog", "dog", True),
        ("It is red. A dog", "it is red dog", True),
        ("THERE IS A DOG", "there is a dog", True),
        ("an X-ray of a hand", "X-ray of hand", True),
        ("a B cell", "B cell", True),
    ],
)
def test_the_letter_a_is_no_article(answer, gold, is_same):
    assert (rewards.vqa_reward(think(answer), gold) == 1) is is_same


@pytest.mark.parametrize(
    ("answer", "gold", "want"),
    [
        (r"\boxed{3}", "3", 1.0),
        (r"The answer is $\boxed{\text{left lung}}$.", "left lung", 1.0),
        (r"\boxed{Yes}", "yes", 1.0),
        (r"\boxed{no} yes", "yes", 0.0),
        (r"\text{red}", "red", 1.0),
        (r"\mathrm{CT}", "ct", 1.0),
        ("<b>3</b>", "3", 1.0),
        ('<span style="color: red">left</span><br/>lung', "left lung", 1.0),
        ("CO<sub>2</sub>", "CO2", 1.0),
        ("x &lt; 5&nbsp;cm", "x < 5 cm", 1.0),
        ("x <y and y> z", "x < y and y > z", 1.0),  # no tag
        ("3", r"\boxed{3}", 1.0),
    ],
)
def test_markup_around_an_answer(answer, gold, want):
    assert rewards.vqa_reward(think(answer), gold) == want


BOX = "<|begin_of_box|>{}<|end_of_box|>"


@pytest.mark.parametrize(
    ("task", "completion", "gold"),
    [
        ("vqa", think(BOX.format("Yes")), "yes"),
        ("vqa", think(BOX.format("\nleft lung\n")), "left lung"),
        ("vqa", f"<think>t</think>{BOX.format('<answer>3</answer>')}", "3"),
        pytest.param("math", think(BOX.format("3")), "3", marks=needs("parts/math")),
        pytest.param("math", think(f"It is {BOX.format('3')}."), "3", marks=needs("parts/math")),
        ("count", BOX.format("A photo of 3 cats"), "3"),
    ],
)
def test_marks_around_an_answer_are_no_part_of_it(task, completion, gold):
    """GLM-4.6V writes them."""
    assert rewards.TASKS[task].reward(completion, gold) == 1
    assert rewards.TASKS[task].format(completion) == 1


@pytest.mark.parametrize(
    ("completion", "want"),
    [
        ("There are three.</think>\n<answer>3</answer>", 1),
        ("\nthree</think><answer>3</answer>\n", 1),
        ("</think><answer>3</answer>", 0),  # no thought
        ("<answer>3</answer>", 0),
        ("a</think>b</think><answer>3</answer>", 0),
        ("a<think>b</think><answer>3</answer>", 0),
        ("three</think><answer>3</answer> or 4", 0),
    ],
)
def test_a_thought_that_the_prompt_has_opened(completion, want):
    """A saved response lacks the tag; `Rollout.text` has it. Only the reward for the format itself demands it."""
    assert rewards.vqa_reward(completion, "3") == want
    assert rewards.math_reward(completion, "3") == (1 if want else -1)
    assert rewards.format_reward(completion) == 0
    assert rewards.format_reward(f"<think>{completion}") == want


def test_only_a_full_reward_is_an_exact_match():
    assert not exact_match("vqa", think("right to left"), "left to right")
    assert exact_match("vqa", think("yes, clearly"), "yes")
    assert exact_match("count", "A photo of 3 cats", "3")
    assert not exact_match("count", "A photo of 4 cats", "3")


def exact_match(task: str, completion: str, answer: str) -> bool:
    return rewards.TASKS[task].exact_match(completion, answer, rewards.TASKS[task].reward(completion, answer))


def test_count_format():
    assert rewards.count_format("A photo of 1,234 grapes") == 1
    assert rewards.count_format("A photo of 3 red circles") == 1
    assert rewards.count_format("3") == 0


def test_the_format_is_measured_where_a_reward_depends_on_it(monkeypatch):
    assert Scorer("vqa", RewardFlags()).format("<think>1</think><answer>2</answer>")
    assert Scorer("count", RewardFlags()).format("A photo of 2 circles")
    assert Scorer("count", RewardFlags(reward=("count=0", "format"))).format is None
    own = rewards.Task(lambda completion, answer, **_: 1.0, template="{{ content }} Reply with a number only.")
    monkeypatch.setitem(rewards.TASKS, "own", own)
    assert Scorer("own", RewardFlags()).format is None, "this task does not ask for the tags"
    monkeypatch.setitem(rewards.TASKS, "own", rewards.Task(own.reward))
    assert Scorer("own", RewardFlags()).format("<think>1</think><answer>2</answer>")


def test_last_boxed():
    for text, want in [
        ("\\boxed{1}", "1"),
        ("\\boxed {2} \\boxed{3", "2"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{a}{b}", "a"),
        ("\\fbox{1}", None),
        ("}}}\\boxed{4}", "4"),
        ("\\boxed{1 {2} \\boxed{3} }", "3"),
        ("", None),
    ]:
        assert answers.last_boxed(text) == want, text


RANGES = {
    rewards.format_reward: lambda v: v in (0, 1),
    rewards.count_reward: lambda v: v in (0, 0.2, 0.3, 0.4, 0.7, 0.85, 1),
    rewards.vqa_reward: lambda v: v == 0 or 0.5 <= v <= 1,
}


@pytest.mark.parametrize("texts", ["random bytes", *slow("10,000 characters")])
@pytest.mark.parametrize("reward", RANGES)
def test_no_text_makes_a_reward_fail_or_wait(reward, texts):
    check_with_any_text(reward, RANGES[reward], TEXTS[texts])
