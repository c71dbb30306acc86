"""Named benchmarks: what a row asks, what a response answers, and when that is right.

    name           columns                                              score
    aime24         problem, answer                                      integer equality
    math500        problem, answer, level, subject                      math-verify
    gpqa_diamond   Question, Correct Answer, Incorrect Answer 1 to 3    letter; choices shuffled once for each problem
    geometry3k     problem, images, answer                              math-verify
    vqa_rad        question, answer, image, (answer_type)               closed: exact; open: exact, word recall and F1
    mme            question_id, image, question, answer, category       yes, no or other: `mme_terms`
    mmstar         question, image, answer, category, l2_category       letter: `mmstar_terms`
    mathvista      question, decoded_image, choices, unit, precision, answer, question_type, answer_type
    mathverse      question, image, answer, question_type, query_wo

A response loses its think block and its answer block is unwrapped before the benchmark's own reading of it. Nothing, or
nothing that can be read, is wrong. mathvista needs a server that extracts answers from free text, mathverse one that
judges them; without one both are scored by rule, and every number says so.
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
from inputs.rows import Cell, Problem, RowError, add_image_tags, raw_rows, resolve_image
from rewards import exact_match, same_answer

Row = dict[str, Any]
CHOOSE = "Answer with the letter of the right choice alone."
PERCEPTION = ("existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR")
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
MAY_BE_EMPTY = ("choices", "unit", "precision", "level", "subject", "query_wo")
RULE_SCORED = "rule-scored"


@dataclass
class Judgement:
    """What a response answers, and whether it is right."""

    answer: str | None
    """as it was read; None when there is nothing to read"""
    right: bool
    measures: dict[str, float] = field(default_factory=dict)
    """further numbers, by name"""


@dataclass(frozen=True)
class Benchmark:
    """How one benchmark is read and scored."""

    hub: str
    """its name on the hub, with the split that is scored"""
    columns: tuple[str, ...]
    """what scoring and prompt need"""
    picture: str | None
    """the column of its pictures"""
    prompt: Callable[[Row], str]
    gold: Callable[[Row], str]
    judge: Callable[[str, Row, Verifier | None], Judgement]
    """of a response's answer part"""
    parts: tuple[str, ...] = ()
    """columns whose values get scores of their own, where they are there"""
    server: str | None = None
    """what a server would do for it"""


def same_mathematics(text: str, row: Row, _: Verifier | None) -> Judgement:
    """By math-verify, as the math reward compares."""
    answers, gold = math_answers(text), str(row["answer"]).replace("°", "^\\circ")
    if short_answer(text)[0] == str(row["answer"]).strip():
        return Judgement(short_answer(text)[0], True)
    for said in answers:
        if balanced(said) and same_answer(said.replace("°", "^\\circ"), gold):
            return Judgement(said, True)
    return Judgement(answers[0] if answers else None, False)


def same_integer(text: str, row: Row, _: Verifier | None) -> Judgement:
    """AIME: «025» is 25."""
    said = whole_number(text)
    return Judgement(None if said is None else str(said), said is not None and said == whole_number(str(row["answer"])))


def same_letter(text: str, row: Row, _: Verifier | None) -> Judgement:
    """Multiple choice by letter."""
    said = chosen_letter(text)
    return Judgement(said, said is not None and said == gold_letter(row))


def gold_letter(row: Row) -> str:
    """«A» of «A», «(A)» or «a.»."""
    return extract_choice(str(row["answer"])) or str(row["answer"]).strip()


# --- one benchmark after another --------------------------------------------------------------------------------------


def gpqa_choices(row: Row) -> list[str]:
    """The four choices in an order that belongs to the problem, wherever it stands in its file."""
    choices = [str(row["Correct Answer"]), *(str(row[f"Incorrect Answer {i}"]) for i in (1, 2, 3))]
    seed = hashlib.sha256(str(row["Question"]).encode()).hexdigest()
    random.Random(seed).shuffle(order := list(range(4)))
    return [choices[i].strip() for i in order]


def gpqa_prompt(row: Row) -> str:
    """The question with its lettered choices."""
    return f"{str(row['Question']).strip()}\n\n{lettered(gpqa_choices(row))}\n\n{CHOOSE}"


def gpqa_gold(row: Row) -> str:
    """The letter of the right choice."""
    return LETTERS[gpqa_choices(row).index(str(row["Correct Answer"]).strip())]


def gpqa_judge(text: str, row: Row, _: Verifier | None) -> Judgement:
    """By letter."""
    said = chosen_letter(text)
    return Judgement(said, said == gpqa_gold(row))


def lettered(choices: list[str]) -> str:
    """«(A) first», «(B) second», … one a line."""
    return "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices))


def is_closed(row: Row) -> bool:
    """A question of VQA-RAD that is answered by choosing: as its row says, else with a gold of «yes» or «no»."""
    kind = str(row.get("answer_type") or "").strip().upper()
    return kind == "CLOSED" if kind in ("OPEN", "CLOSED") else words(str(row["answer"])) in (["yes"], ["no"])


def vqa_rad_judge(text: str, row: Row, _: Verifier | None) -> Judgement:
    """Exact match, and of open questions the share of the gold's words that are said, and the words' F1."""
    said, gold = words(text), words(str(row["answer"]))
    shaped = f"<think>-</think><answer>{text}</answer>"  # the same comparison as the reward's
    right = bool(said) and exact_match("vqa", shaped, str(row["answer"]))
    if is_closed(row):
        return Judgement(text or None, right)
    common = (Counter(said) & Counter(gold)).total()
    f1 = 2 * common / max(len(said) + len(gold), 1)
    return Judgement(text or None, right, {"open_recall": common / max(len(gold), 1), "open_f1": f1})


def mme_judge(text: str, row: Row, _: Verifier | None) -> Judgement:
    """«yes» or «no» among the first four letters; anything else is «other», and wrong."""
    start = text.strip().lower()[:4]
    said = "yes" if "yes" in start else "no" if "no" in start else None
    return Judgement(said, said == str(row["answer"]).strip().lower())


def mathvista_prompt(row: Row) -> str:
    """The question with its unit, and what form its answer has."""
    text = str(row["question"]).strip()
    if unit := str(row.get("unit") or "").strip():
        text += f" (Unit: {unit})"
    if choices := choices_of(row):
        return f"{text}\n\n{lettered(choices)}\n\n{CHOOSE}"
    if row["answer_type"] == "float":
        return f"{text}\n\nAnswer with a number of {precision(row)} decimals."
    return f"{text}\n\nAnswer with a {'whole number' if row['answer_type'] == 'integer' else row['answer_type']}."


def choices_of(row: Row) -> list[str]:
    """The choices of a row; none for free answers."""
    choices = row.get("choices")
    if isinstance(choices, str):  # some tables hold them as text
        try:
            choices = json.loads(choices.replace("'", '"'))
        except ValueError:
            choices = None
    return [str(choice) for choice in choices] if isinstance(choices, list) else []


def precision(row: Row) -> int:
    """Decimals of a float answer; 1 where the row does not say."""
    try:
        return int(float(row.get("precision")))
    except (TypeError, ValueError, OverflowError):  # none, or NaN
        return 1


def mathvista_normal(said: str, row: Row) -> str | None:
    """`said` in the form that golds have: a choice's text, a whole number, a number rounded as its row says."""
    if choices := choices_of(row):
        return _choice(said, choices)
    if row["answer_type"] == "list":
        return said.strip()
    number = re.sub(r"[$%°,]|\\[a-z]+\{[^{}]*\}|\\[()]", "", said).strip()
    found = re.match(r"[-−]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!.*\d)", number)
    if not found:
        return said.strip() if row["answer_type"] == "text" else None
    value = float(found[0].replace("−", "-"))
    if value in (float("inf"), float("-inf")):
        return None
    return str(int(value)) if row["answer_type"] == "integer" else str(round(value, precision(row)))


def _choice(said: str, choices: list[str]) -> str | None:
    """The choice that is said: by «(B)», by its text, by another way of giving a letter, or as the only one whose text
    stands in what is said. The official evaluation takes the nearest text by edit distance instead."""

    def bare(text: str) -> str:
        return re.sub(r"\^?\\circ|[$°{}\\]|\.$", "", text).strip().lower()

    letter = re.fullmatch(r"\s*\(([A-Z])\)\s*", said)
    if letter and LETTERS.index(letter[1]) < len(choices):
        return choices[LETTERS.index(letter[1])]
    if exact := [choice for choice in choices if bare(choice) == bare(said)]:
        return exact[0]
    if (chosen := chosen_letter(said)) and LETTERS.index(chosen) < len(choices):
        return choices[LETTERS.index(chosen)]
    inside = [choice for choice in choices if re.search(rf"(?<!\w){re.escape(bare(choice))}(?!\w)", bare(said))]
    return inside[0] if len(inside) == 1 else None


def mathvista_judge(text: str, row: Row, extractor: Verifier | None) -> Judgement:
    """Exact equality of what an extractor, or the rule, finds in the text with the gold, both in the same form."""
    said = short_answer(text)[0]
    if extractor and text and (said := extractor.extract(str(row["question"]), text)) is None:
        return Judgement(None, False, {"no_verdict": 1.0})
    answer, gold = mathvista_normal(said, row) if text else None, str(row["answer"])
    golds = {gold} if choices_of(row) else {gold, mathvista_normal(gold, row)}
    return Judgement(answer, answer is not None and answer in golds)


def mathverse_judge(text: str, row: Row, judge: Verifier | None) -> Judgement:
    """A judge's verdict; without one a letter, or math-verify."""
    if row["question_type"] == "multi-choice":
        ruled = same_letter(text, row, None)
    else:
        ruled = same_mathematics(text, row, None)
    if ruled.right or judge is None or not text:
        return ruled
    said = short_answer(text)[0][-20 * SHORT :]
    question = row.get("question_for_eval") or row["question"] or row["query_wo"]  # some have theirs in the picture
    verdict = judge(str(question), str(row["answer"]), said)
    return Judgement(said, bool(verdict), {"no_verdict": float(verdict is None)})


def _column(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


def _math(*parts: str) -> dict[str, Any]:
    """The usual reading of mathematics."""
    return dict(prompt=_column("problem"), gold=_column("answer"), judge=same_mathematics, parts=parts)


_QUESTION = dict(picture="image", prompt=_column("question"), gold=_column("answer"))
_GPQA = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
_VISTA = ("question", "choices", "unit", "precision", "answer", "question_type", "answer_type")
BENCHMARKS = {
    "aime24": Benchmark(
        "HuggingFaceH4/aime_2024@train", ("problem", "answer"), None, **(_math() | {"judge": same_integer})
    ),
    "math500": Benchmark(
        "HuggingFaceH4/MATH-500@test", ("problem", "answer", "level", "subject"), None, **_math("level", "subject")
    ),
    "gpqa_diamond": Benchmark(
        "Idavidrein/gpqa:gpqa_diamond@train",
        *(_GPQA, None, gpqa_prompt, gpqa_gold, gpqa_judge),
        parts=("High-level domain", "Subdomain"),
    ),
    "geometry3k": Benchmark("hiyouga/geometry3k@test", ("problem", "answer"), "images", **_math()),
    "vqa_rad": Benchmark(
        "flaviagiammarino/vqa-rad@test",
        ("question", "answer"),
        **_QUESTION,
        judge=vqa_rad_judge,
        parts=("answer_type",),
    ),
    "mme": Benchmark(
        "lmms-lab/MME@test",
        ("question_id", "question", "answer", "category"),
        **_QUESTION,
        judge=mme_judge,
        parts=("category",),
    ),
    "mmstar": Benchmark(
        "Lin-Chen/MMStar@val",
        ("question", "answer", "category", "l2_category"),
        **_QUESTION,
        judge=same_letter,
        parts=("category", "l2_category"),
    ),
    "mathvista": Benchmark(
        "AI4Math/MathVista@testmini",
        *(_VISTA, "decoded_image", mathvista_prompt, _column("answer"), mathvista_judge),
        parts=("question_type", "answer_type"),
        server="extractor",
    ),
    "mathverse": Benchmark(
        "AI4Math/MathVerse:testmini@testmini",
        ("answer", "question", "question_type", "query_wo"),
        **(_QUESTION | {"prompt": lambda row: str(row["query_wo"] or row["question"])}),
        judge=mathverse_judge,
        parts=("question_type", "problem_version", "subject"),
        server="judge",
    ),
}


# --- rows -------------------------------------------------------------------------------------------------------------


def load_benchmark(name: str, flags: DataFlags, processor: Processor, limit: int = 0) -> list[Sample]:
    """The rows of a benchmark as samples, checked as training's are, the first `limit` of them; `fields` holds their
    columns. Raises UserError naming the first column that the file lacks, or its bad rows.
    """
    benchmark = BENCHMARKS[name]
    data, usual = flags.data or benchmark.hub, benchmark.hub.rpartition("@")[2]
    rows = [_sample(benchmark, *row) for row in _checked(name, raw_rows(data, flags.image_dir, usual))]
    how = (processor, flags.max_prompt_length, flags.skip_bad_rows, True)
    samples = validate_rows(rows, data, None, *how)[: limit or None]
    if name == "mme":
        check_pairs(samples)
    return samples


def _checked(name: str, rows: Iterator) -> Iterator[tuple]:
    """`rows`, once the first of them has every column that the benchmark needs. Raises UserError naming what lacks."""
    benchmark = BENCHMARKS[name]
    needed = [*benchmark.columns, *([benchmark.picture] if benchmark.picture else [])]
    looked = False
    for source, row, *more in rows:
        if isinstance(row, dict) and not looked:
            looked = True
            if missing := [column for column in needed if column not in row]:
                raise UserError(
                    f"{source}: no column «{missing[0]}», which --benchmark {name} needs; it has {', '.join(row)}"
                )
        yield (source, row, *more)


def _sample(benchmark: Benchmark, source: str, row: Row | RowError, folder: Any) -> Sample | Problem:
    if isinstance(row, RowError):
        return source, str(row)
    try:
        check_columns(benchmark, row)
        pictures = row.get(benchmark.picture) if benchmark.picture else None
        pictures = pictures if isinstance(pictures, list) else [] if pictures in (None, "") else [pictures]
        if benchmark.picture and not pictures:
            raise RowError(f"no picture in column «{benchmark.picture}»")
        images = [resolve_image(picture, lambda path: folder / path) for picture in pictures]
        return add_image_tags(Sample(benchmark.prompt(row), benchmark.gold(row), images, source, drop_images(row)))
    except RowError as problem:
        return source, str(problem)


def check_columns(benchmark: Benchmark, row: Row) -> None:
    """Raise BadRow when a column that scoring needs is missing or empty in this row."""
    for column in benchmark.columns:
        if column not in row:
            raise RowError(f"no column «{column}»")
        value = row[column]
        may = (*MAY_BE_EMPTY, "question") if "query_wo" in benchmark.columns else MAY_BE_EMPTY
        if column not in may and (value is None or value == "" or value != value):
            raise RowError(f"nothing in column «{column}»")
        if isinstance(value, dict) or (isinstance(value, list) and column != "choices"):
            raise RowError(f"column «{column}» is neither text nor a number")
    if benchmark is BENCHMARKS["aime24"] and whole_number(str(row["answer"])) is None:
        raise RowError(f"the answer {str(row['answer'])[:40]!r} is no whole number: no response can equal it")
    if not benchmark.prompt(row).strip():
        raise RowError("it asks nothing")


def check_pairs(samples: list[Sample]) -> None:
    """Raise UserError unless each picture of MME has its two questions and a category that there is."""
    counts = Counter((str(s.fields["category"]), str(s.fields["question_id"])) for s in samples)
    for (category, name), count in counts.items():
        if count != 2:
            raise UserError(f"mme has two questions for each picture; {category} {name} has {count}: check --limit")
        if category not in PERCEPTION + COGNITION:
            raise UserError(f"mme has no category {category!r}")


def drop_images(row: Row) -> Row:
    """The columns of a row that JSON can hold: no pictures."""

    def has_picture(value: Any) -> bool:
        return isinstance(value, Cell | bytes) or (isinstance(value, list) and any(map(has_picture, value)))

    return {name: value for name, value in row.items() if not has_picture(value)}


def subset_value(row: Row, column: str) -> str | None:
    """The value of a column that scores are taken apart by; some stand in «metadata»."""
    if column == "answer_type" and "question" in row and "answer_type" not in row and "choices" not in row:
        return "closed" if is_closed(row) else "open"
    value = row.get(column)
    if value is None and isinstance(row.get("metadata"), dict):
        value = row["metadata"].get(column)
    return None if value is None else str(value).strip()


def judge_benchmark(
    name: str, samples: list[Sample], answered: list[dict], server: Verifier | None = None
) -> list[dict]:
    """Predictions with what each response answers and whether it is right, on every process."""
    judge = BENCHMARKS[name].judge
    mine = distributed.shard([(sample, own["responses"]) for sample, own in zip(samples, answered)])
    work = [(answer_part(text), sample.fields) for sample, responses in mine for text in responses]
    if server:
        server.reset_failures()
    with ThreadPoolExecutor(server.flags.verifier_concurrency if server else 8) as pool:
        found = pool.map(lambda job: judge(*job, server), work)
        judged = iter(list(console.progress(found, "scoring", total=len(work), unit="response", leave=False)))
    verdicts = [[next(judged) for _ in responses] for _, responses in mine]
    verdicts = distributed.gather_shards(verdicts)
    return [
        sample.fields
        | {"source": sample.source, "prompt": sample.prompt, "gold": sample.answer}
        | own
        | {"answers": [v.answer for v in own_verdicts], "exact": [v.right for v in own_verdicts]}
        | {"measures": [v.measures for v in own_verdicts]}
        for sample, own, own_verdicts in zip(samples, answered, verdicts)
    ]
