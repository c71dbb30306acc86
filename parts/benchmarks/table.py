"""Named benchmarks: the prompt for a row, how an answer is read from a response, and when the answer is correct.

`BENCHMARKS` is the table of all benchmarks. docs/evaluation.md explains their scores, which scores.py computes.

Before a benchmark reads a response, the response's think block is removed and its answer block is unwrapped. An empty
or unreadable answer is wrong. Without a server, mathvista and mathverse are scored by rule, and all output says so.
"""

import ast
import contextlib
import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any

from common.errors import UserError, dataclass, takes
from common.records import Sample, Turn
from grading import answers
from inputs.rows import Locate, Problem, RowError, drop_images, place_images, resolve_image
from parts.benchmarks import screenspot
from parts.benchmarks.choices import LETTERS, chosen_letter, extract_choice, is_part, whole_number
from rewards import mathematics, vqa_reward

Row = dict[str, Any]
Server = Any  # a `parts.math.verifier.Verifier`, or None
PERCEPTION = ("existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR")
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


@dataclass
class Judgement:
    """The answer read from a response (None if unreadable), whether it is correct, and other measures."""

    answer: str | None
    correct: bool
    measures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """How the rows of one benchmark are read, turned into prompts and scored."""

    hub: str  # name on the hub, with the split that is scored
    judge: Annotated[Callable[[str, str, Row, Server], Judgement], takes("text, gold, row, server")]
    """Judges the answer part of a response; the other arguments are the gold answer, the row and the server."""
    columns: tuple[str, ...]  # columns that the prompt and the scoring need
    image_column: str | None = None  # column of the images; None for text-only benchmarks
    subset_columns: tuple[str, ...] = ()  # optional columns whose values get separate scores
    may_be_empty: tuple[str, ...] = ()  # which of `columns` may be empty
    prompt: Annotated[Callable[[Row], str], takes("row")] = lambda row: str(row["question"])
    gold: Annotated[Callable[[Row], str], takes("row")] = lambda row: str(row["answer"])
    prepare: Annotated[Callable[[Sample, Any], None], takes("sample, processor")] = lambda sample, processor: None
    """Adds to the columns of a row what the judge needs of the model's `data.Processor`."""
    convention: Annotated[Callable[[Row], str], takes("row")] = lambda row: ""
    """How the answers are read, if that depends on the model; it is printed at the start, and is in `scoring`."""
    server_role: str | None = None
    """Role of a server's model in the official scoring: `extractor` or `judge`; None if answers are scored by rule."""


# --- judging by rule --------------------------------------------------------------------------------------------------


def judge_math(text: str, gold: str, row: Row, _: Server) -> Judgement:
    """Compare the answers as the math reward does."""
    return Judgement(*mathematics().read_answer(text, gold))


def judge_integer(text: str, gold: str, row: Row, _: Server) -> Judgement:
    """Compare the answers as integers: "025" equals 25."""
    number = whole_number(text)
    if number is None:
        return Judgement(None, False)
    return Judgement(str(number), number == whole_number(gold))


def judge_letter(text: str, gold: str, row: Row, _: Server) -> Judgement:
    """Compare the chosen letter with the gold letter, which may be written "A", "(A)" or "a."."""
    letter = chosen_letter(text)
    return Judgement(letter, letter is not None and letter == (extract_choice(gold) or gold.strip()))


# --- the individual benchmarks ----------------------------------------------------------------------------------------


def gpqa_choices(row: Row) -> list[str]:
    """Return the four choices in an order that depends only on the question, not on the row's position in the file."""
    choices = [str(row["Correct Answer"]), *(str(row[f"Incorrect Answer {i}"]) for i in (1, 2, 3))]
    random.Random(hashlib.sha256(str(row["Question"]).encode()).hexdigest()).shuffle(choices)
    return [choice.strip() for choice in choices]


def gpqa_gold(row: Row) -> str:
    """Return the letter of the correct choice."""
    return LETTERS[gpqa_choices(row).index(str(row["Correct Answer"]).strip())]


def lettered(choices: list[str]) -> str:
    """Return the choices as lines "(A) first", "(B) second", … and ask for a letter."""
    lines = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices))
    return f"{lines}\n\nAnswer with the letter of the right choice alone."


def is_closed(row: Row) -> bool:
    """Return whether a VQA-RAD question is closed, as its `answer_type` says or, if it has none, its yes/no answer."""
    kind = str(row.get("answer_type") or "").strip().upper()
    return kind == "CLOSED" if kind in ("OPEN", "CLOSED") else answers.words(str(row["answer"])) in (["yes"], ["no"])


def judge_vqa_rad(text: str, gold: str, row: Row, _: Server) -> Judgement:
    """Compare the answers exactly. For open questions, also measure word recall and word F1 against the gold answer."""
    answer_words, gold_words = answers.words(text), answers.words(gold)
    correct = vqa_reward(f"<think>-</think><answer>{text}</answer>", gold) == 1.0
    if is_closed(row):
        return Judgement(text or None, correct)
    num_common = (Counter(answer_words) & Counter(gold_words)).total()
    recall = num_common / max(len(gold_words), 1)
    f1 = 2 * num_common / max(len(answer_words) + len(gold_words), 1)
    return Judgement(text or None, correct, {"open_recall": recall, "open_f1": f1})


def judge_mme(text: str, gold: str, row: Row, _: Server) -> Judgement:
    """Look for "yes" or "no" in the first four characters, as the official script does; anything else is wrong."""
    answer = next((word for word in ("yes", "no") if word in text.strip().lower()[:4]), None)
    return Judgement(answer, answer == gold.strip().lower())


def mathvista_prompt(row: Row) -> str:
    """Return the question with its unit and the expected form of the answer."""
    text = str(row["question"]).strip()
    if unit := str(row.get("unit") or "").strip():
        text += f" (Unit: {unit})"
    if choices := choices_of(row):
        return f"{text}\n\n{lettered(choices)}"
    if row["answer_type"] == "float":
        return f"{text}\n\nAnswer with a number of {precision(row)} decimals."
    return f"{text}\n\nAnswer with a {'whole number' if row['answer_type'] == 'integer' else row['answer_type']}."


def question_with_choices(row: Row) -> str:
    """Return the question, after its hint and with its choices (as MMBench and MMMU have them) unless it lists them."""
    question, hint = str(row["question"]).strip(), row.get("hint")
    if isinstance(hint, str) and hint.strip() and hint.strip() not in question:
        question = f"{hint.strip()}\n\n{question}"
    choices = choices_of(row)
    if not choices and str(row.get("options") or "").strip() not in ("", "nan", "[]"):
        raise RowError(f"column 'options' is no list of choices: {str(row['options'])[:40]!r}")
    prefixes = [re.match(rf"\s*\(?{letter}[.):]\s*(?=\S)", choice) for letter, choice in zip(LETTERS, choices)]
    if all(prefixes):  # "A. cat"
        choices = [choice[prefix.end() :] for choice, prefix in zip(choices, prefixes)]
    lines = zip(LETTERS, choices)
    is_complete = all(re.search(rf"\b{letter}\W{{1,4}}{re.escape(choice)}", question) for letter, choice in lines)
    return question if is_complete else f"{question}\n\n{lettered(choices)}"


def choices_of(row: Row) -> list[str]:
    """Return the choices of a row, from `choices`, `options` or columns A, B, …; none for a free-form question."""
    choices = row.get("choices", row.get("options"))
    if isinstance(choices, str):  # some tables store the list as text
        with contextlib.suppress(ValueError, SyntaxError):
            choices = ast.literal_eval(choices)  # reads Python's form and JSON's
    if not isinstance(choices, list):
        columns = choices if isinstance(choices, dict) else row
        choices = [columns[letter] for letter in LETTERS if isinstance(columns.get(letter), str | int | float)]
    return [str(choice) for choice in choices if choice == choice]  # NaN is an empty cell


def precision(row: Row) -> int:
    """Return the number of decimals of a float answer, or 1 if the row does not state it."""
    try:
        return int(float(row.get("precision")))
    except (TypeError, ValueError, OverflowError):  # None, NaN or infinity
        return 1


def normalise_mathvista(answer: str, row: Row) -> str | None:
    """Return `answer` in the form of the gold answers: the text of a choice, an integer, a number rounded to the row's
    precision, or text. Returns None when the answer cannot be converted."""
    if choices := choices_of(row):
        return _match_choice(answer, choices)
    if row["answer_type"] == "list":
        items = "".join((re.findall(r"\[([^\[\]]*)\]", answer) or [answer])[-1].split())
        return f"[{', '.join(items.split(','))}]" if items else None
    value = _only_number(answer)
    if row["answer_type"] == "text" and (value is None or not re.match(r"[$(\s]*[-−.]?\d", answer)):
        return answer.strip() or None
    if value is None or not math.isfinite(value):
        return None
    return str(int(value)) if row["answer_type"] == "integer" else str(round(value, precision(row)))


def _only_number(answer: str) -> float | None:
    """Return the only number in an answer, in an equation on the right-hand side; None if there are more, or none.

    A fraction, a power or a product with a symbol is no number ("1/10", "3\\pi"), nor is the exponent of a unit.
    """
    text = re.sub(r"=\s*[-−]\s*(?=\d)", "=-", answer).rpartition("=")[2]
    unit = r"\\(?:text|math)[a-z]*\s*\{[^{}\d]*\}(?:\^\{?\d\}?)?|(?<=[a-z])\^\{?\d\}?|\^\{?\\circ\}?|[$%°]"
    text = re.sub(rf"{unit}|\\[,;:! ()]|(?<=\d),(?=\d{{3}}(?!\d))", "", text)
    found = list(re.finditer(r"(?<![\w.])[-−]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", text))
    if len(found) != 1 or is_part(text, *found[0].span()):
        return None
    return float(found[0][0].replace("−", "-"))


def _match_choice(answer: str, choices: list[str]) -> str | None:
    """Return the choice that `answer` names, or None. The first of these forms that matches decides: "(B)"; the exact
    text of a choice; a letter in another form; an answer that contains the text of exactly one choice.

    MathVista's official scorer picks the choice nearest in edit distance; this function requires an exact mention.
    """

    def bare(text: str) -> str:
        text = re.sub(r"\^?\\circ|[$°{}\\]|\.$", "", text).strip().lower().replace("−", "-")
        return re.sub(r"=\s*-\s+(?=\d)", "=-", text)

    def is_mentioned(choice: str) -> bool:  # but not as a part of another number: -10, 1/10, 10.5, 10^2
        before = r"(?<![-–/^*×·])(?<![/^*×·] )(?<!\d[.,:])" if choice[:1].isdigit() else ""
        after = r"(?! ?[/^*×·]|[.,:–-]\d)" if choice[-1:].isdigit() else ""
        return bool(re.search(rf"(?<!\w){before}{re.escape(choice)}{after}(?!\w)", bare(answer)))

    by_letter = dict(zip(LETTERS, choices))
    bracketed = re.fullmatch(r"\s*\(([A-Z])\)\s*", answer)
    if bracketed and bracketed[1] in by_letter:
        return by_letter[bracketed[1]]
    if exact := [choice for choice in choices if bare(choice) == bare(answer)]:
        return exact[0]
    letter = chosen_letter(answer)
    if letter in by_letter:
        return by_letter[letter]
    mentioned = [choice for choice in choices if is_mentioned(bare(choice))]
    return mentioned[0] if len(mentioned) == 1 else None


def judge_mathvista(text: str, gold: str, row: Row, extractor: Server) -> Judgement:
    """Extract the answer from the text, by server or by rule, convert it to the gold answer's form, and compare."""
    if not text:
        return Judgement(None, False)
    answer = extractor.extract(str(row["question"]), text) if extractor else answers.short_answer(text)[0]
    if answer is None:
        return Judgement(None, False, {"no_verdict": 1.0})
    normalised = normalise_mathvista(answer, row)
    golds = {gold} if choices_of(row) else {gold, normalise_mathvista(gold, row)}
    return Judgement(normalised, normalised is not None and normalised in golds)


def judge_mathverse(text: str, gold: str, row: Row, judge: Server) -> Judgement:
    """Compare letters, or compare formulas with math-verify. If the answers differ, the judge (if any) decides."""
    judge_by_rule = judge_letter if row["question_type"] == "multi-choice" else judge_math
    by_rule = judge_by_rule(text, gold, row, None)
    if by_rule.correct or judge is None or not text:
        return by_rule
    answer = answers.short_answer(text)[0][-20 * answers.SHORT :]
    question = row.get("question_for_eval") or row["question"] or row["query_wo"]  # some questions are in the image
    verdict = judge(str(question), gold, answer)
    return Judgement(answer, bool(verdict), {"no_verdict": float(verdict is None)})


def judge_screenspot(text: str, gold: str, row: Row, _: Server) -> Judgement:
    """Look whether the only point of the answer is in the row's box; see screenspot.py."""
    return Judgement(*screenspot.hits(text, row))


def _problem(row: Row) -> str:
    return str(row["problem"])


BENCHMARKS = {
    "aime24": Benchmark("HuggingFaceH4/aime_2024@train", judge_integer, ("problem", "answer"), prompt=_problem),
    "math500": Benchmark(
        "HuggingFaceH4/MATH-500@test",
        judge_math,
        ("problem", "answer", "level", "subject"),
        subset_columns=("level", "subject"),
        may_be_empty=("level", "subject"),
        prompt=_problem,
    ),
    "gpqa_diamond": Benchmark(
        "Idavidrein/gpqa:gpqa_diamond@train",
        judge_letter,
        ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        subset_columns=("High-level domain", "Subdomain"),
        prompt=lambda row: f"{str(row['Question']).strip()}\n\n{lettered(gpqa_choices(row))}",
        gold=gpqa_gold,
    ),
    "geometry3k": Benchmark("hiyouga/geometry3k@test", judge_math, ("problem", "answer"), "images", prompt=_problem),
    "vqa_rad": Benchmark(
        "flaviagiammarino/vqa-rad@test", judge_vqa_rad, ("question", "answer"), "image", ("answer_type",)
    ),
    "mme": Benchmark(
        "lmms-lab/MME@test", judge_mme, ("question_id", "question", "answer", "category"), "image", ("category",)
    ),
    "mmstar": Benchmark(
        "Lin-Chen/MMStar@val",
        judge_letter,
        ("question", "answer", "category", "l2_category"),
        "image",
        subset_columns=("category", "l2_category"),
        prompt=question_with_choices,
    ),
    "mathvista": Benchmark(
        "AI4Math/MathVista@testmini",
        judge_mathvista,
        ("question", "choices", "unit", "precision", "answer", "question_type", "answer_type"),
        "decoded_image",
        subset_columns=("question_type", "answer_type"),
        may_be_empty=("choices", "unit", "precision"),
        prompt=mathvista_prompt,
        server_role="extractor",
    ),
    "mathverse": Benchmark(
        "AI4Math/MathVerse:testmini@testmini",
        judge_mathverse,
        ("answer", "question", "question_type", "query_wo"),
        "image",
        subset_columns=("question_type", "problem_version", "subject"),
        may_be_empty=("question", "query_wo"),
        prompt=lambda row: str(row["query_wo"] or row["question"]),
        server_role="judge",
    ),
    "screenspot": Benchmark(
        "rootsautomation/ScreenSpot@test",
        judge_screenspot,
        ("instruction", "bbox"),
        "image",
        subset_columns=("data_type", "data_source"),
        prompt=lambda row: str(row["instruction"]),
        gold=screenspot.gold_box,
        prepare=screenspot.prepare,
        convention=screenspot.convention,
    ),
}


# --- rows -------------------------------------------------------------------------------------------------------------


def read_row(name: str, source: str, row: Row | RowError, locate: Locate) -> Sample | Problem:
    """Return a row of benchmark `name` as a sample, or why it cannot be used."""
    image_column = BENCHMARKS[name].image_column
    try:
        if isinstance(row, RowError):
            raise row
        sample, images = to_sample(name, source, row), []
        if image_column:
            _check_present(name, row, image_column)
            cells = row[image_column] if isinstance(row[image_column], list) else [row[image_column]]
            images = [resolve_image(cell, locate) for cell in cells]
        return place_images(sample, images)
    except RowError as error:
        return Problem(source, str(error))


def to_sample(name: str, source: str, row: Row) -> Sample:
    """Return a row of benchmark `name` as a sample without its images.

    Raises RowError when a column that the benchmark needs is missing, empty or of the wrong type.
    """
    benchmark = BENCHMARKS[name]
    for column in benchmark.columns:
        _check_present(name, row, column)
        if isinstance(row[column], dict) or (isinstance(row[column], list) and column not in ("choices", "bbox")):
            raise RowError(f"column '{column}' is neither text nor a number")
    if name == "aime24" and whole_number(str(row["answer"])) is None:
        raise RowError(f"the answer {str(row['answer'])[:40]!r} is not a whole number, so no response can equal it")
    prompt, gold = benchmark.prompt(row), benchmark.gold(row)
    if not (isinstance(prompt, str) and isinstance(gold, str)):
        raise UserError(f"--benchmark {name}: its prompt and its gold must return texts")
    if not prompt.strip():
        raise RowError("the question is empty")
    return Sample([Turn("user", [prompt])], gold, source, drop_images(row))


def _check_present(name: str, row: Row, column: str) -> None:
    if column not in row:
        raise RowError(f"no column '{column}', which --benchmark {name} needs (columns: {', '.join(row)})")
    value = row[column]
    is_empty = value in (None, "", []) or value != value  # only NaN differs from itself
    if is_empty and column not in BENCHMARKS[name].may_be_empty:
        raise RowError(f"column '{column}' is empty")


def check_pairs(samples: list[Sample]) -> None:
    """Raise UserError unless every MME image has two questions and a known category."""
    counts = Counter((str(s.fields["category"]), str(s.fields["question_id"])) for s in samples)
    for (category, image), count in counts.items():
        if count != 2:
            raise UserError(f"mme has two questions for each image, but {category} {image} has {count}: check --limit")
        if category not in PERCEPTION + COGNITION:
            raise UserError(f"mme has no category {category!r}")


def subset_value(name: str, row: Row, column: str) -> str | None:
    """Return the row's value in a column of `Benchmark.subset_columns`. The column may be nested in `metadata`."""
    if name == "vqa_rad" and column not in row:
        return "closed" if is_closed(row) else "open"
    value = row.get(column)
    if value is None and isinstance(row.get("metadata"), dict):
        value = row["metadata"].get(column)
    return None if value is None or value != value else str(value).strip() or None  # NaN is an empty cell, too
