"""What math-verify reads whole. It ignores what it does not know, so any other answer is compared as a text."""

import re

_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega|pi|Delta|Omega"
_FUNCTIONS = "a?(?:rc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|sqrt|[dtc]?frac|binom|gcd|f?box(?:ed)?"
_OTHERS = "times|cdot|div|pm|mp|infty|emptyset|cup|cap|in|le|ge|left|right|[lr](?:floor|ceil)|degree"
_MATRIX = r"\\(?:begin|end)\{[pbv]?matrix\}"
_LIMITS = r"\\lim_\{[a-z]\s*\\to\b[^{}]*\}|\\(?:int|sum|prod)(?:_(?:\{[^{}]*\}|\w)|\^(?:\{[^{}]*\}|\w))*"
_NAME = r"[A-Za-z]_(?:\{\w+\}|\w)"  # x_1
_TOKEN = re.compile(
    rf"\s+|\d+(?:\.\d+)?|\.\d+|\\(?:{_GREEK}|{_FUNCTIONS}|{_OTHERS})(?![A-Za-z])|\\mathbb\{{[A-Z]\}}|{_MATRIX}|\\[\\{{}}%]"
    rf"|{_NAME}|{_LIMITS}|(?<![A-Za-z])(?:and|or|[A-Za-z]{{1,2}})(?![A-Za-z\d_])|(?<=[{{(+*/^=\d])[A-Za-z]{{3,4}}(?=[)}}+*/^=])|(?<=\\log)_(?=\{{)|[-+*/^=<>(){{}}\[\],;:!|&]"
)
# Of these tokens, what would be read as something else: "1 2", "2 h 30 min", dy/dx, A^T, f^{-1}(x), Roman numerals.
_MISREAD = re.compile(
    r"\d\s+[\d.]|(?<![\\A-Za-z])(?!or\b)[A-Za-z]{1,2}\s+\d|\\frac\{d[a-z]?\}\{d|(?<![A-Za-z])d[a-z]?\s*/\s*d[a-z]"
    r"|\^\s*\{?T|\\\{[^}]*\\\{|(?<![\\A-Za-z])[A-Za-z](?:_\w)?\s*\^\s*\{-1\}\s*\("
    r"|\A\(?(?:[IVX]{2,}|[IVXLCDM]*[IVX][IVXLCDM]+|[ivx]{2,})\)?\Z"
)


def is_readable(text: str) -> bool:
    """Return whether `text`, as `normalise` writes it, consists only of what math-verify reads as it is meant."""
    place = 0
    while token := _TOKEN.match(text, place):
        place = token.end()
    return place == len(text) and not _MISREAD.search(text)
