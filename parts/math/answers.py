"""The formulas and numbers in an answer that may equal the gold answer.

Completions are untrusted: no text may make these functions raise an error or run for seconds.
"""

import re

from grading.answers import SHORT, boxes_of, half_width, short_answer, unit_symbol
from parts.math.units import COUNTED


def count_words(text: str) -> int:
    """Return the number of words of two letters or more outside LaTeX commands."""
    text = re.sub(r"\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    return len(re.findall(r"\b[A-Za-z]{2,}\b", text))


def math_answers(text: str) -> list[str]:
    """Return the expressions that may be the answer, most likely first.

    A boxed answer or a short answer is returned unchanged. If the answer is a sentence, one formula or number in it is
    returned: the first if the answer was marked explicitly, else the last. None is returned for a sentence with a
    negation or for several formulas ("$3$ or $4$"). Prose itself is never returned, because math-verify would find an
    answer in any text, and it would take seconds for a page.
    """
    answer, explicit = short_answer(text)
    if boxes := boxes_of(text):
        return [answer[: 20 * SHORT] + _unit_after_box(answer, text[boxes[-1][1] + 1 :])] if answer else []
    is_prose = len(answer) > SHORT or count_words(answer) >= (1 if explicit and re.search(r"\d", answer) else 2)
    candidates = [answer] if answer and not is_prose else []
    formulas = list(re.finditer(r"\$\$?([^$]+)\$\$?|\\\((.{1,500}?)\\\)|\\\[(.{1,500}?)\\\]", answer, re.DOTALL))
    if re.search(r"(?i:\bnot\b|n['’]t\b|\bnever\b|\bneither\b)", answer) or (len(formulas) > 1 and not is_prose):
        return candidates
    if not formulas and not is_prose:
        return candidates
    found = formulas or list(re.finditer(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?!\w)", answer))
    for stated in found[:1] if explicit else found[-1:]:
        unit = _unit_after(answer[stated.end() :])
        if _STATED.search(answer[: stated.start()]) and _END.match(answer[stated.end() + len(unit) :]):
            text = next(filter(None, stated.groups())).strip()[: 20 * SHORT] if formulas else stated[0] + unit
            candidates.append(text)
    return candidates


# What stands before and behind what a sentence states. "3 or more" and "half of 6" state another number.
_STATED = re.compile(
    r"""(?:\A | [=:] | \b(?:is|are|was|were|be|equals?|equal\ to|gives?|gets?|got|have|has|had|so|thus|hence|then|at
    | answer | (?:total|speed|rate|length|width|height|distance|area|volume|cost|price)\ of
    | makes?|made|costs?|earn(?:s|ed)|spends?|spent|needs?|needed|pays?|paid|sold|sells?|bought|ate|lasts?|weighs?|saved
    | (?:takes?|took)(?:\ her|\ him|\ them|\ it)?))
    [\s$*\\]*(?:(?:exactly|only|just|about|approximately)\ )?\Z""",
    re.IGNORECASE | re.VERBOSE,
)
_END = re.compile(
    rf"\s*(?:(?:(?:square|cubic|such|possible|different|distinct|real|positive) )?{COUNTED.pattern})?"
    r"(?:\W*\Z|\s*[.,;:!?)]|\s+(?:in total|in all|altogether|together|(?:is )?left|follows|(?:of|in|at|on) the"
    r"|every|each|because|since|as)\b)",
    re.IGNORECASE,
)


def _unit_after(text: str) -> str:
    """Return the unit with which `text` begins, such as " square feet" or " km per hour", else ""."""
    unit = re.match(
        r" (?:(?:square|cubic|sq|cu)\.? )?([A-Za-z]{2,})\b(?: ?(?:/|per\b) ?[A-Za-z]+)?(?: squared| cubed)?", text
    )
    is_unit = unit and unit_symbol(unit[1]) and unit[1].lower() not in ("in", "unit", "units")  # "5 in total"
    return unit[0] if is_unit else ""


def _unit_after_box(answer: str, rest: str) -> str:
    """Return the unit or percent sign that follows a box with a number, as in `\\boxed{5}\\text{ km}`, else ""."""
    if not re.search(r"[\d})]\Z", answer):
        return ""
    rest = re.sub(r"\\[,;:! ]|\\?\$|\\[()\]]|~", " ", rest[:SHORT]).lstrip()
    if sign := re.match(r"\\?%|\^\s*\{?\\circ\}?|°", rest):
        return sign[0]
    text = re.match(r"\\(?:text|mathrm|textrm)\s*\{\s*([^{}]+)\}((?:\^\{?\d\}?)?)", rest)
    return f" {text[1]}{text[2]}" if text else _unit_after(" " + rest)


def count_values(gold: str) -> int:
    """Return the number of values in a list or set such as "3, 5" or "3 and 5".

    A tuple, an interval or a sentence is one value.
    """
    if re.search(r"(?<![\\A-Za-z])(?!and\b|or\b)[a-z]{2,} [a-z]", gold):
        return 1
    depth, values = 0, 1
    for token in re.findall(r"\\.|[()\[\]{}]|(?:[,;]\s*)?\b(?:and|or)\b|[,;]", gold, re.DOTALL):
        depth += (token in "([{") - (token in ")]}")
        values += depth == 0 and token[0] in ",;ao"
    return values


def math_candidates(text: str, max_chars: int, values: int = 1) -> list[str]:
    """Return the texts that may equal a gold answer with that many values, without repeats; all are compared.

    They are the whole text, the text after "answer:", and the results of `math_answers`. If the text has a box or is
    longer than `max_chars`, only the latter are returned. The bodies of several boxes, as a list, are one more
    candidate if there are as many boxes as values; otherwise, listing guesses would pay.
    """
    text = half_width(text)
    candidates, boxes = math_answers(text), boxes_of(text)
    if len(boxes) == values > 1:
        candidates.append(", ".join(text[start:end] for start, end in boxes)[: 20 * SHORT])
    if not boxes and len(text) <= max_chars:
        stated, explicit = short_answer(text)
        candidates = [text.strip(), *([stated] if explicit else []), *candidates]
    return list(dict.fromkeys(candidates))
