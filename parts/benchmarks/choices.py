"""The letter or the whole number that a response gives, in the many forms in which models state it."""

import functools
import re
import unicodedata

from grading.answers import MARKUP, answer_part, last_boxed, short_answer
from parts.benchmarks.languages import (
    ANSWER,
    ARTICLE,
    CHOOSE,
    EAST_ASIAN,
    EAST_ASIAN_RIGHT,
    IS,
    IT_IS,
    NOT,
    NOT_BEFORE,
    OPTION,
    OR,
    SO,
    STATEMENTS,
    SUBJECT,
    TAKEN_BACK,
    THING,
    TRUE,
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# "A" and "I" before a word are no choices, unless the word cannot follow an article ("A because it is red"). Nor are
# letters that begin a longer word ("C-shaped", "U.S."), except with a Turkish ending ("B'dir").
_NO_NOUN = (
    r"(?i:is|was|are|does|has|because|since|as|due|based|given|for|and|or|but|not|with|which|where|while|when|in|on|by|"
    r"to|from|than|according|if|so|here|rather|instead|the|this|it|we|there|fits|suits|seems|looks|weil|denn|car|parce|"
    r"porque|pois|perché|want|omdat|ponieważ|çünkü|потому|vì|karena)\b"
)
_NO_SUFFIX = r"(?!['’](?!d[iıuü]r))"
_LETTER = (
    rf"(?<![A-Za-z\d])(?:[B-HJ-Z]|[AI](?![ \t]+(?!{_NO_NOUN})[A-Za-z]))"
    rf"(?![A-Za-z\d+#]|-[A-Za-z]|\.[A-Z]\b){_NO_SUFFIX}"
)
# what may precede and follow a letter
_OPEN = r"(?:\\boxed\s*+\{|(?i:\b(?:option|choice|letter)\b)|[\s$_(\[{\"':\\「『【]){0,30}+"
_CLOSE = r"[$_)\]}\"'.」』】]*+"
_END = r"[$_)\]}\"']*\s*(?:[.,;:!\n。、]|\Z)"  # of a phrase, after the letter
_ANY_CASE = rf"(?:{_LETTER}|(?<![A-Za-z\d])[a-z](?={_END}))"
_JOIN = rf"(?:[,;/&|、或和か]|または|あるいは|또는|혹은|(?i:\b(?:{OR})\b))"
_RIGHT = (
    rf"(?i:(?:(?:{ARTICLE}|[ao]) )?(?:(?:{TRUE})\b(?: (?:{ANSWER}|{SUBJECT})\b)?|(?:{ANSWER})\b(?: (?:{TRUE})\b)?))"
)
_HEDGE = re.compile(  # "A or B", "(A), (B)", "A. cat or B. dog", but not "B, C" in "The answer is B, C is too dark"
    rf"(?:{_ANY_CASE})(?:{_CLOSE}(?:{_OPEN}{_CLOSE}{_JOIN}{_CLOSE}{_OPEN})+(?:{_LETTER}|\b[b-z]\b(?!['’]))"
    rf"(?!{_CLOSE}\s+(?:is|was|does|has|shows|fits|matches|works|suits|seems|looks)\b(?!\s+{_RIGHT})))+"
    rf"|{_LETTER}[.):][^\n.]{{1,60}}?(?:\bor\b|或)\s*\(?{_LETTER}(?=[.):])"
)
_MORE = functools.reduce(lambda rest, letter: rf"(?:\n\W*{letter}[.):].*{rest})?", "JIHGFEDC", "")
_OPTIONS = re.compile(rf"^[^\w\n]*A[.):].*\n\W*B[.):].*{_MORE}", re.MULTILINE)  # the lines "A. cat", "B. dog", …

# "the answer, in short, is": a noun, a few words that deny nothing, and "is" in the same language, or a sign
_WORDS = rf"(?:,? (?!(?i:{NOT})\b)(?![A-HJ-Z]\b)\w++){{0,5}},?"
_STATED = "|".join(
    rf"(?i:{answer}|{other})\b{_WORDS}(?:\s*[:=]| [-–—] |\s(?i:{be})\b)" for answer, other, be in STATEMENTS
)
_FILLER = (  # what may follow: "therefore", "clearly", "la letra", "point"
    rf"(?:[\s,:=]|(?i:\b(?:be|would|should|must|most|\w{{1,20}}ly|I (?:believe|think|guess)|"
    rf"{SO}|{ARTICLE}|{ANSWER}|{SUBJECT}|{THING})\b|\bl['’])"
    r"|\b[ao](?= [A-Z]\b| \w{3})){0,12}+"
)
_NOT_BEFORE = "".join(rf"(?<!{word})" for word in NOT_BEFORE.split("|"))
_TAKEN_BACK = (
    rf"[$_)\]}}\"']*+ ?(?i:{TAKEN_BACK}|\b(?:{IS}) (?:{NOT})\b|\b(?:no|não|non|nie) (?:{IS})\b)"  # "B is wrong"
)
_LIKELY = "better|best|closer|closest|(?:more|most) (?:likely|probable|plausible|accurate|appropriate|suitable|fitting)"
_FITS = (
    rf"(?:fits|matches|works|suits|wins|makes more sense|(?:is|seems|looks)(?: the)? (?:{_LIKELY}))"
    r"(?: (?:better|best|fit|match|choice|option|answer|one)){0,3}"
)
_CHOICES = (  # strongest evidence first
    rf"\\boxed\s*+\{{{_OPEN}({_LETTER})(?=[\s$_)\]\"'.]*\}}|[.):,]\s)",  # a letter, or "B. cat", in a box
    # "the answer is B", "I choose B", "the right one is B", "答案是B", or "B is correct"
    rf"{_NOT_BEFORE}(?:\b(?:{_STATED}|(?i:{ANSWER}|{CHOOSE})\b)|{EAST_ASIAN}){_FILLER}{_OPEN}({_ANY_CASE})"
    rf"(?!{_TAKEN_BACK})"
    rf"|({_LETTER}){_CLOSE}\s*(?:{EAST_ASIAN_RIGHT}|(?i:{IS}) {_RIGHT}(?={_END}|\s+{_NO_NOUN}))",
    # "it is B", "so B", or "B fits better"
    rf"(?:(?<!if )(?<!whether )\b(?i:{IT_IS}|{SO})\b|所以|因此|よって|따라서){_FILLER}{_OPEN}({_LETTER})(?={_END})"
    rf"|(?<!or )(?<!and )({_LETTER}){_CLOSE} {_FITS}(?={_END}|\s+{_NO_NOUN})",
    rf"\\boxed\s*+\{{{_OPEN}([a-z])[\s$_)\]\"'.]*\}}",
    r"\A[\W_]*([A-Za-z])번?[\W_]*\Z",  # a single letter
    r"\n(?:[^\w\n]|_)*([A-Z])[\W_]*\Z",  # the last line is a single letter
    r"\A[\s_]*(?=\([A-Z]\)|[A-Z]_*[.):])\(?([A-Z])(?!\.[A-Z]\b)",  # it starts with "X.", "X)", "X:" or "(X)"
    r"\(([A-Z])\)",
    rf"(?i:\b(?:{OPTION})\b)[\s:(\[]*([A-Z])\b{_NO_SUFFIX}(?!{_TAKEN_BACK})",
    rf"\b(?i:(?:it|that) (?:must|should|would|has to) be)\b{_FILLER}{_OPEN}({_LETTER})(?={_END})",
    r"\A\W*([A-Z])(?=\s*(?:[\n,;:–—]|-(?!\w)|\Z))",
    rf"\A\W*([B-H])\b(?!['’]|-\w|\s+[A-Z]\b|\s+vitamin)(?!{_TAKEN_BACK})",  # "B a red bus", but not "A red bus"
)


def extract_choice(completion: str) -> str | None:
    """Return the letter, "A" to "Z", that a completion chooses in its `answer_part`, or None."""
    return chosen_letter(answer_part(completion))


def chosen_letter(text: str) -> str | None:
    """Return the letter that an answer chooses, or None.

    The strongest evidence decides; if it is in several places, the last. Letters side by side ("A or B") choose none. A
    repeated list of the options does not count.
    """
    text = MARKUP.sub("", unicodedata.normalize("NFKC", text).replace("*", ""))
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r"\b([A-Z])(\)?), (?=\(?\1\b)", r"\1\2. ", text)  # "of A and C, C is better"
    text = _HEDGE.sub("…", _OPTIONS.sub("", text)).strip()
    found = (list(re.finditer(pattern, text)) for pattern in _CHOICES)
    return next((matches[-1][matches[-1].lastindex].upper() for matches in found if matches), None)


def whole_number(text: str) -> int | None:
    """Return the whole number that an answer gives, or None if there is no number or the number is not whole.

    A box holds the number alone, with a unit at most, or an equation whose right-hand side is the number. In any other
    text, it is the first number after "the answer is", or else the last. A part of a fraction, a power or a product
    with a symbol does not count (25/2, 2^{10}, 25\\pi).
    """
    answer, explicit = short_answer(text)
    answer = answer.replace("\\,", "").replace("{,}", ",").replace("−", "-")
    answer = re.sub(r"\\(?:text|mathrm|mathbf|boldsymbol)\b|\\[%$;:! ]|\^\\circ|\^\{\\circ\}", "", answer)
    if last_boxed(text) is not None:
        alone = re.fullmatch(r"[${(\s]*(-?\d[\d,]*+(?:\.\d+)?)[^\d\\/^!*+×·]*", answer.rpartition("=")[2])
        number = alone and alone[1]
    else:
        found = re.finditer(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?!\w)", answer)
        numbers = [match[0] for match in found if not is_part(answer, *match.span())]
        number = numbers[0 if explicit else -1] if numbers else None
    whole, _, decimals = (number or "").replace(",", "").partition(".")
    return None if not number or decimals.strip("0") else int(whole[:30])


def is_part(text: str, start: int, end: int) -> bool:
    """Return whether the number at text[start:end] is a part of a fraction, a power or a product with a symbol."""
    before = re.search(r"(?:[/^×·]\s*\{?|\\[A-Za-z]+\s*\{|\}\s*\{)\s*$", text[max(start - 20, 0) : start])
    after = re.match(r"\s*(?:[/^×·]|\\[A-Za-z])", text[end : end + 20])
    return bool(before or after)
