"""Named benchmarks: the prompt for a row, how an answer is read from a response, and when the answer is correct.

    name           columns                                              scored by
    aime24         problem, answer                                      integer equality
    math500        problem, answer, level, subject                      math-verify
    gpqa_diamond   Question, Correct Answer, Incorrect Answer 1 to 3    letter; choices are shuffled per problem
    geometry3k     problem, images, answer                              math-verify
    vqa_rad        question, answer, image, (answer_type)               closed: exact; open: exact, word recall and F1
    mme            question_id, image, question, answer, category       yes, no or other; summed by `mme_ratios`
    mmstar         question, image, answer, category, l2_category       letter; averaged by `by_category`
    mathvista      question, decoded_image, choices, unit, precision,   extractor on a server, then equality
                   answer, question_type, answer_type
    mathverse      question, image, answer, question_type, query_wo     letter or math-verify, then a judge on a server

Before a benchmark reads a response, the response's think block is removed and its answer block is unwrapped. An empty
or unreadable answer is wrong. Without a server, mathvista and mathverse are scored by rule, and all output says so.
"""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from common import console, distributed
from common.errors import UserError
from common.records import Sample
from config import DataFlags
from data import Processor, validate_rows
from grading.answers import (
    LETTERS,
    SHORT,
    answer_part,
    balanced,
    chosen_letter,
    extract_choice,
    math_answers,
    short_answer,
    whole_number,
    words,
)
from grading.verifier import Verifier
from inputs.rows import Locate, Problem, RowError, add_image_tags, drop_images, raw_rows, resolve_image
from rewards import same_answer, vqa_exact_match, vqa_reward

Row = dict[str, Any]
CHOOSE = "Answer with the letter of the right choice alone."
PERCEPTION = ("existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR")
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
MAY_BE_EMPTY = ("choices", "unit", "precision", "level", "subject", "query_wo")
RULE_SCORED = "rule-scored"


@dataclass
class Judgement:
    """The answer read from a response, and whether it is correct."""

    answer: str | None
    """Answer as it was read; None when the response has no readable answer."""
    correct: bool
    measures: dict[str, float] = field(default_factory=dict)
    """Additional numbers about the response, by name."""


@dataclass(frozen=True)
class Benchmark:
    """How the rows of one benchmark are read, turned into prompts and scored."""

    hub: str
    """Name on the hub, with the split that is scored."""
    columns: tuple[str, ...]
    """Columns that the prompt and the scoring need."""
    image_column: str | None
    """Column of the images; None for text-only benchmarks."""
    prompt: Callable[[Row], str]
    gold: Callable[[Row], str]
    judge: Callable[[str, Row, Verifier | None], Judgement]
    """Judges the answer part of a response."""
    subset_columns: tuple[str, ...] = ()
    """Optional columns whose values get separate scores."""
    server_role: str | None = None
    """Role of a server's model in the official scoring: `extractor` or `judge`; None if answers are scored by rule."""


def judge_math(text: str, row: Row, _: Verifier | None) -> Judgement:
    """Compare the answers with math-verify, as the math reward does."""
    answers, gold = math_answers(text), str(row["answer"]).replace("°", "^\\circ")
    if short_answer(text)[0] == str(row["answer"]).strip():
        return Judgement(short_answer(text)[0], True)
    for answer in answers:
        if balanced(answer) and same_answer(answer.replace("°", "^\\circ"), gold):
            return Judgement(answer, True)
    return Judgement(answers[0] if answers else None, False)


def judge_integer(text: str, row: Row, _: Verifier | None) -> Judgement:
    """Compare the answers as integers: "025" equals 25."""
    number = whole_number(text)
    correct = number is not None and number == whole_number(str(row["answer"]))
    return Judgement(None if number is None else str(number), correct)


def judge_letter(text: str, row: Row, _: Verifier | None) -> Judgement:
    """Compare the chosen letter with the gold letter."""
    letter = chosen_letter(text)
    return Judgement(letter, letter is not None and letter == gold_letter(row))


def gold_letter(row: Row) -> str:
    """Return "A" for a gold answer of "A", "(A)" or "a."."""
    return extract_choice(str(row["answer"])) or str(row["answer"]).strip()


# --- the individual benchmarks ----------------------------------------------------------------------------------------


def gpqa_choices(row: Row) -> list[str]:
    """Return the four choices in an order that depends only on the question, not on the row's position in the file."""
    choices = [str(row["Correct Answer"]), *(str(row[f"Incorrect Answer {i}"]) for i in (1, 2, 3))]
    seed = hashlib.sha256(str(row["Question"]).encode()).hexdigest()
    order = list(range(4))
    random.Random(seed).shuffle(order)
    return [choices[i].strip() for i in order]


def gpqa_prompt(row: Row) -> str:
    """Return the question with its lettered choices."""
    return f"{str(row['Question']).strip()}\n\n{lettered(gpqa_choices(row))}\n\n{CHOOSE}"


def gpqa_gold(row: Row) -> str:
    """Return the letter of the correct choice."""
    return LETTERS[gpqa_choices(row).index(str(row["Correct Answer"]).strip())]


def judge_gpqa(text: str, row: Row, _: Verifier | None) -> Judgement:
    """Compare the chosen letter with the letter of the correct choice."""
    letter = chosen_letter(text)
    return Judgement(letter, letter == gpqa_gold(row))


def lettered(choices: list[str]) -> str:
    """Return "(A) first", "(B) second", …, one choice per line."""
    return "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices))


def is_closed(row: Row) -> bool:
    """Return whether a VQA-RAD question is closed, from its `answer_type` or, without one, from a yes or no answer."""
    kind = str(row.get("answer_type") or "").strip().upper()
    return kind == "CLOSED" if kind in ("OPEN", "CLOSED") else words(str(row["answer"])) in (["yes"], ["no"])


def judge_vqa_rad(text: str, row: Row, _: Verifier | None) -> Judgement:
    """Compare the answers exactly. For open questions, also measure word recall and word F1 against the gold answer."""
    answer_words, gold_words = words(text), words(str(row["answer"]))
    completion = f"<think>-</think><answer>{text}</answer>"  # the format that `vqa_reward` expects
    gold = str(row["answer"])
    correct = bool(answer_words) and vqa_exact_match(completion, gold, vqa_reward(completion, gold))
    if is_closed(row):
        return Judgement(text or None, correct)
    num_common = (Counter(answer_words) & Counter(gold_words)).total()
    recall = num_common / max(len(gold_words), 1)
    f1 = 2 * num_common / max(len(answer_words) + len(gold_words), 1)
    return Judgement(text or None, correct, {"open_recall": recall, "open_f1": f1})


def judge_mme(text: str, row: Row, _: Verifier | None) -> Judgement:
    """Look for "yes" or "no" in the first four characters, as the official script does; anything else is wrong."""
    start = text.strip().lower()[:4]
    answer = "yes" if "yes" in start else "no" if "no" in start else None
    return Judgement(answer, answer == str(row["answer"]).strip().lower())


def mathvista_prompt(row: Row) -> str:
    """Return the question with its unit and the expected form of the answer."""
    text = str(row["question"]).strip()
    if unit := str(row.get("unit") or "").strip():
        text += f" (Unit: {unit})"
    if choices := choices_of(row):
        return f"{text}\n\n{lettered(choices)}\n\n{CHOOSE}"
    if row["answer_type"] == "float":
        return f"{text}\n\nAnswer with a number of {precision(row)} decimals."
    return f"{text}\n\nAnswer with a {'whole number' if row['answer_type'] == 'integer' else row['answer_type']}."


def choices_of(row: Row) -> list[str]:
    """Return the choices of a row, or an empty list for a free-form question."""
    choices = row.get("choices")
    if isinstance(choices, str):  # some tables store the list as text
        try:
            choices = json.loads(choices.replace("'", '"'))
        except ValueError:
            choices = None
    return [str(choice) for choice in choices] if isinstance(choices, list) else []


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
        return answer.strip()
    number = re.sub(r"[$%°,]|\\[a-z]+\{[^{}]*\}|\\[()]", "", answer).strip()
    match = re.match(r"[-−]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!.*\d)", number)
    if not match:
        return answer.strip() if row["answer_type"] == "text" else None
    value = float(match[0].replace("−", "-"))
    if value in (float("inf"), float("-inf")):
        return None
    return str(int(value)) if row["answer_type"] == "integer" else str(round(value, precision(row)))


def _match_choice(answer: str, choices: list[str]) -> str | None:
    """Return the choice that `answer` names, or None. The first of these forms that matches decides: "(B)"; the exact
    text of a choice; a letter in another form; an answer that contains the text of exactly one choice.

    MathVista's official scorer picks the choice nearest in edit distance; this function requires an exact mention.
    """

    def bare(text: str) -> str:
        return re.sub(r"\^?\\circ|[$°{}\\]|\.$", "", text).strip().lower()

    bracketed = re.fullmatch(r"\s*\(([A-Z])\)\s*", answer)
    if bracketed and LETTERS.index(bracketed[1]) < len(choices):
        return choices[LETTERS.index(bracketed[1])]
    if exact := [choice for choice in choices if bare(choice) == bare(answer)]:
        return exact[0]
    letter = chosen_letter(answer)
    if letter and LETTERS.index(letter) < len(choices):
        return choices[LETTERS.index(letter)]
    mentioned = [choice for choice in choices if re.search(rf"(?<!\w){re.escape(bare(choice))}(?!\w)", bare(answer))]
    return mentioned[0] if len(mentioned) == 1 else None


def judge_mathvista(text: str, row: Row, extractor: Verifier | None) -> Judgement:
    """Extract the answer from the text, by server or by rule, convert it to the gold answer's form, and compare."""
    answer = short_answer(text)[0]
    if extractor and text:
        answer = extractor.extract(str(row["question"]), text)
        if answer is None:
            return Judgement(None, False, {"no_verdict": 1.0})
    normalised, gold = normalise_mathvista(answer, row) if text else None, str(row["answer"])
    golds = {gold} if choices_of(row) else {gold, normalise_mathvista(gold, row)}
    return Judgement(normalised, normalised is not None and normalised in golds)


def judge_mathverse(text: str, row: Row, judge: Verifier | None) -> Judgement:
    """Compare letters, or compare formulas with math-verify. If this finds a difference, the judge (if any) decides."""
    judge_by_rule = judge_letter if row["question_type"] == "multi-choice" else judge_math
    by_rule = judge_by_rule(text, row, None)
    if by_rule.correct or judge is None or not text:
        return by_rule
    answer = short_answer(text)[0][-20 * SHORT :]
    question = row.get("question_for_eval") or row["question"] or row["query_wo"]  # some questions are in the image
    verdict = judge(str(question), str(row["answer"]), answer)
    return Judgement(answer, bool(verdict), {"no_verdict": float(verdict is None)})


def _column(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


BENCHMARKS = {
    "aime24": Benchmark(
        hub="HuggingFaceH4/aime_2024@train",
        columns=("problem", "answer"),
        image_column=None,
        prompt=_column("problem"),
        gold=_column("answer"),
        judge=judge_integer,
    ),
    "math500": Benchmark(
        hub="HuggingFaceH4/MATH-500@test",
        columns=("problem", "answer", "level", "subject"),
        image_column=None,
        prompt=_column("problem"),
        gold=_column("answer"),
        judge=judge_math,
        subset_columns=("level", "subject"),
    ),
    "gpqa_diamond": Benchmark(
        hub="Idavidrein/gpqa:gpqa_diamond@train",
        columns=("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        image_column=None,
        prompt=gpqa_prompt,
        gold=gpqa_gold,
        judge=judge_gpqa,
        subset_columns=("High-level domain", "Subdomain"),
    ),
    "geometry3k": Benchmark(
        hub="hiyouga/geometry3k@test",
        columns=("problem", "answer"),
        image_column="images",
        prompt=_column("problem"),
        gold=_column("answer"),
        judge=judge_math,
    ),
    "vqa_rad": Benchmark(
        hub="flaviagiammarino/vqa-rad@test",
        columns=("question", "answer"),
        image_column="image",
        prompt=_column("question"),
        gold=_column("answer"),
        judge=judge_vqa_rad,
        subset_columns=("answer_type",),
    ),
    "mme": Benchmark(
        hub="lmms-lab/MME@test",
        columns=("question_id", "question", "answer", "category"),
        image_column="image",
        prompt=_column("question"),
        gold=_column("answer"),
        judge=judge_mme,
        subset_columns=("category",),
    ),
    "mmstar": Benchmark(
        hub="Lin-Chen/MMStar@val",
        columns=("question", "answer", "category", "l2_category"),
        image_column="image",
        prompt=_column("question"),
        gold=_column("answer"),
        judge=judge_letter,
        subset_columns=("category", "l2_category"),
    ),
    "mathvista": Benchmark(
        hub="AI4Math/MathVista@testmini",
        columns=("question", "choices", "unit", "precision", "answer", "question_type", "answer_type"),
        image_column="decoded_image",
        prompt=mathvista_prompt,
        gold=_column("answer"),
        judge=judge_mathvista,
        subset_columns=("question_type", "answer_type"),
        server_role="extractor",
    ),
    "mathverse": Benchmark(
        hub="AI4Math/MathVerse:testmini@testmini",
        columns=("answer", "question", "question_type", "query_wo"),
        image_column="image",
        prompt=lambda row: str(row["query_wo"] or row["question"]),
        gold=_column("answer"),
        judge=judge_mathverse,
        subset_columns=("question_type", "problem_version", "subject"),
        server_role="judge",
    ),
}


# --- rows -------------------------------------------------------------------------------------------------------------


def load_benchmark(name: str, flags: DataFlags, processor: Processor, limit: int = 0) -> list[Sample]:
    """Load the first `limit` rows of a benchmark (0: all) as samples whose `fields` hold the columns.

    The rows are checked like training rows. Raises a UserError that names the first missing column or the bad rows.
    """
    benchmark = BENCHMARKS[name]
    data, usual_split = flags.data or benchmark.hub, benchmark.hub.rpartition("@")[2]
    rows = [_sample(benchmark, *row) for row in _check_first_row(name, raw_rows(data, flags.image_dir, usual_split))]
    samples = validate_rows(
        rows,
        data,
        task=None,
        processor=processor,
        max_prompt_length=flags.max_prompt_length,
        skip_bad_rows=flags.skip_bad_rows,
        keep_repeats=True,
    )
    samples = samples[: limit or None]
    if name == "mme":
        check_pairs(samples)
    return samples


def _check_first_row(name: str, rows: Iterator) -> Iterator[tuple]:
    """Yield `rows`. Raises UserError when the first readable row lacks a column that the benchmark needs."""
    benchmark = BENCHMARKS[name]
    needed = [*benchmark.columns, *([benchmark.image_column] if benchmark.image_column else [])]
    checked = False
    for source, row, locate in rows:
        if isinstance(row, dict) and not checked:
            checked = True
            if missing := [column for column in needed if column not in row]:
                raise UserError(
                    f"{source}: no column '{missing[0]}', which --benchmark {name} needs (columns: {', '.join(row)})"
                )
        yield source, row, locate


def _sample(benchmark: Benchmark, source: str, row: Row | RowError, locate: Locate) -> Sample | Problem:
    if isinstance(row, RowError):
        return Problem(source, str(row))
    try:
        check_columns(benchmark, row)
        value = row.get(benchmark.image_column) if benchmark.image_column else None
        cells = value if isinstance(value, list) else [] if value in (None, "") else [value]
        if benchmark.image_column and not cells:
            raise RowError(f"no image in column '{benchmark.image_column}'")
        images = [resolve_image(cell, locate) for cell in cells]
        return add_image_tags(Sample(benchmark.prompt(row), benchmark.gold(row), images, source, drop_images(row)))
    except RowError as error:
        return Problem(source, str(error))


def check_columns(benchmark: Benchmark, row: Row) -> None:
    """Raise RowError when a column that the benchmark needs is missing, empty or of the wrong type in this row."""
    for column in benchmark.columns:
        if column not in row:
            raise RowError(f"no column '{column}'")
        value = row[column]
        may_be_empty = (*MAY_BE_EMPTY, "question") if "query_wo" in benchmark.columns else MAY_BE_EMPTY
        if column not in may_be_empty and (value is None or value == "" or value != value):  # only NaN != itself
            raise RowError(f"column '{column}' is empty")
        if isinstance(value, dict) or (isinstance(value, list) and column != "choices"):
            raise RowError(f"column '{column}' is neither text nor a number")
    if benchmark is BENCHMARKS["aime24"] and whole_number(str(row["answer"])) is None:
        raise RowError(f"the answer {str(row['answer'])[:40]!r} is not a whole number, so no response can equal it")
    if not benchmark.prompt(row).strip():
        raise RowError("the question is empty")


def check_pairs(samples: list[Sample]) -> None:
    """Raise UserError unless every MME image has two questions and a known category."""
    counts = Counter((str(s.fields["category"]), str(s.fields["question_id"])) for s in samples)
    for (category, image), count in counts.items():
        if count != 2:
            raise UserError(f"mme has two questions for each image, but {category} {image} has {count}: check --limit")
        if category not in PERCEPTION + COGNITION:
            raise UserError(f"mme has no category {category!r}")


def subset_value(row: Row, column: str) -> str | None:
    """Return the row's value in a column of `Benchmark.subset_columns`. The column may be nested in `metadata`."""
    if column == "answer_type" and "question" in row and "answer_type" not in row and "choices" not in row:
        return "closed" if is_closed(row) else "open"
    value = row.get(column)
    if value is None and isinstance(row.get("metadata"), dict):
        value = row["metadata"].get(column)
    return None if value is None else str(value).strip()


# --- judging ----------------------------------------------------------------------------------------------------------


def judge_benchmark(
    name: str, samples: list[Sample], outputs: list[dict], server: Verifier | None = None
) -> list[dict]:
    """Return the predictions: each row with its output and the `answers`, `exact` and `measures` of its responses.

    Each process judges a shard of the rows, but the result is the same on every process.
    """
    judge = BENCHMARKS[name].judge
    local_rows = distributed.shard([(sample, output["responses"]) for sample, output in zip(samples, outputs)])
    work = [(answer_part(text), sample.fields) for sample, responses in local_rows for text in responses]
    if server:
        server.reset_failures()
    with ThreadPoolExecutor(server.flags.verifier_concurrency if server else 8) as pool:
        results = pool.map(lambda args: judge(*args, server), work)
        results = iter(list(console.progress(results, "scoring", total=len(work), unit="response", leave=False)))
    judgements = [[next(results) for _ in responses] for _, responses in local_rows]
    judgements = distributed.gather_shards(judgements)
    return [
        sample.fields
        | {"source": sample.source, "prompt": sample.prompt, "gold": sample.answer}
        | output
        | {"answers": [j.answer for j in row_judgements], "exact": [j.correct for j in row_judgements]}
        | {"measures": [j.measures for j in row_judgements]}
        for sample, output, row_judgements in zip(samples, outputs, judgements)
    ]
