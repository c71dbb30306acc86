"""What math-verify reads whole. It ignores what it does not know, so any other answer is compared as a text."""

import re

_TOKEN = re.compile(
    r"""\s+ | \d+(?:\.\d+)? | \.\d+ | [-+*/^=<>(){}\[\],;:!|&] | \\[\\{}%]
    | (?:[A-Za-z]_|\\(?:epsilon|mu|rho|sigma|theta|lambda|omega)_)(?:\{\w+\}|\w) | (?<=\\log)_(?=\{)
    | \\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega|pi|Delta|Omega)(?![A-Za-z])
    | \\(?:a?(?:rc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|sqrt|[dtc]?frac|binom|gcd|f?box(?:ed)?)(?![A-Za-z])
    | \\(?:times|cdot|div|pm|mp|infty|emptyset|cup|cap|in|le|ge|left|right|[lr](?:floor|ceil)|degree)(?![A-Za-z])
    | \\(?:begin|end)\{[pbv]?matrix\} | \\mathbb\{[A-Z]\}
    | \\lim_\{[a-z]\s*\\to\b[^{}]*\} | \\(?:int|sum|prod)(?:[_^](?:\{[^{}]*\}|\w))*
    | (?<![A-Za-z])(?:and|or|[A-Za-z]{1,2})(?![A-Za-z\d_])  # "xy" is a product; a digit behind it, as in H2O, is none
    | (?<=[{(+*/^=\d])[A-Za-z]{3,4}(?=[)}+*/^=])  # within a formula, so is "GMm"
    """,
    re.VERBOSE,
)
_MISREAD = re.compile(  # of these tokens, what means something else
    r"""\d\s+[\d.] | (?<![\\A-Za-z])(?!or\b)[A-Za-z]{1,2}\s+\d  # "1 2", "2 h 30 min"
    | \\frac\{d[a-z]?\}\{d | (?<![A-Za-z])d[a-z]?\s*/\s*d[a-z]  # derivatives
    | \^\s*\{?T | (?<![\\A-Za-z])[A-Za-z](?:_\w)?\s*\^\s*\{-1\}\s*\(  # a transpose, the inverse of a function
    | \\\{[^}]*\\\{  # a set in a set
    | \A\(?(?:[IVX]{2,}|[IVXLCDM]*[IVX][IVXLCDM]+|[ivx]{2,})\)?\Z  # Roman numerals; CD is a product
    """,
    re.VERBOSE,
)


def is_readable(text: str) -> bool:
    """Return whether `text`, as `normalise` writes it, consists only of what math-verify reads as it is meant."""
    place = 0
    while token := _TOKEN.match(text, place):
        place = token.end()
    return place == len(text) and not _MISREAD.search(text)
