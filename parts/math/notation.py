"""Write mathematical answers in one notation, as text: LaTeX for symbols, roots, powers, fractions and functions."""

import re
import unicodedata
from collections.abc import Callable

from grading.answers import IN_WORDS, number_in_digits

_GREEK = ("alpha", "beta", "gamma", "delta", "theta", "lambda", "rho", "sigma", "phi", "omega", "pi")
_COMMANDS = (  # a sign and its name in LaTeX
    "×times ·cdot ⋅cdot ±pm ∓mp √sqrt ∞infty ∅emptyset ∪cup ∩cap ∈in ∖setminus ≤le ≥ge ≦le ≧ge ⩽le ⩾ge ≠ne ≪ll ≫gg "
    "≈approx ≅cong ≡equiv ∝propto →to °degree ºdegree ∠angle △triangle ∥parallel ⊥perp ⟨langle ⟩rangle ⌊lfloor ⌋rfloor "
    "⌈lceil ⌉rceil ¬neg ∧wedge ∨vee ∘circ …ldots αalpha βbeta γgamma δdelta εepsilon θtheta λlambda ρrho σsigma τtau "
    "φphi ωomega πpi ΓGamma ΔDelta ΘTheta ΛLambda ΣSigma ΦPhi"
)
_SYMBOLS = str.maketrans(
    {word[0]: f"\\{word[1:]} " for word in _COMMANDS.split()}
    | {c: f"\\mathbb{{{letter}}}" for c, letter in zip("ℝℤℕℚℂ", "RZNQC")}
    | {"℃": "\\degree C", "℉": "\\degree F", "÷": "/", "∶": ":", "∛": "\\sqrt[3] ", "∜": "\\sqrt[4] "}
    | {"′": "'", "’": "'", "、": ", ", "或": " or ", "和": " and "}
    | dict.fromkeys("−‐‑‒–—", "-")
)
_SYNONYMS = {"lnot": "neg", "land": "wedge", "lor": "vee", "dots": "ldots", "cdots": "ldots", "overrightarrow": "vec"}
_SYNONYMS |= {"overline": "bar", "widehat": "hat", "pmod": "mod", "bmod": "mod"}
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|csc|sec|ln|log|exp"
_MAGNITUDES = {"dozen": "12", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}"}
_MAGNITUDES |= {"trillion": "10^{12}", "万": "10^{4}", "亿": "10^{8}"}
_NESTED = r"\(((?:[^()]|\([^()]*\))*)\)"  # the parentheses of an argument
_AMOUNT = rf"(\d(?:[\d,]|\\!)*(?:\.\d+)?(?:\s*(?:{'|'.join(_MAGNITUDES)}))?)"
_REWRITES: list[tuple[str, str | Callable[[re.Match], str]]] = [  # (pattern, replacement), applied in this order
    (r"\\f?box(?:ed)?(?![A-Za-z])\s*(?=[^\s{])", ""),
    (r"```\w*\n?|`|^#+\s|__", " "),
    (r"^\s*(?:答案|故选|选)\s*[是为选]?\s*:?", ""),
    (r"^\s*(?:=|≈|\\approx\b)", ""),
    (r"\b(?:is equal to|equals)\b", "="),
    (r"\\frac\s+(\d)\s+(\d)", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\\(?:text|textrm|textbf|mathrm|mathbf|operatorname|mbox|rm|ce)\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r" \1 "),
    (
        r"(?<![A-Za-z])C\((\d+),\s*(\d+)\)|(?:\{\})?\^\{?(\d+)\}?C_\{?(\d+)\}?",
        lambda match: "\\binom" + "".join(f"{{{number}}}" for number in match.groups() if number),
    ),
    (r"\((\d+)\)(?=_)", r"\1"),
    (r"^\s*(['\"])(.*)\1\s*$", r"\2"),
    (r"\\!|\\(?:displaystyle|textstyle|limits|[bB]igg?[lr]?)(?![A-Za-z])", ""),
    (r"\\left[\[(]\s*\\begin\{array\}\{[lcr]*\}", r"\\begin{pmatrix}"),
    (r"\\end\{array\}\s*\\right[\])]", r"\\end{pmatrix}"),
    (r"(?<!\\)\\[,;: ]|\\q?quad\b|~", " "),
    (r"\^\s*\{?\s*\\(?:circ|degree)\b\s*\}?|\\(?:text)?degree\b", r"\\degree "),
    (r"\\degree\s*(?=[,;])", ""),  # of several angles, the last one names the unit
    (r"(?<!\\)\bdegrees?\s+(C|F)(?:elsius|ahrenheit)?\b", r"\\degree \1"),
    (r"\s*(?:\\?%|\b(?:percent|per cent|pct)\b)", r"\\%"),
    (r"(?<=\d)\s*\\Omega(?![A-Za-z])", " Ω"),
    (r"\\prime\b\s*", "'"),
    (r"\^\s*\{?\s*('+)\s*\}?", r"\1"),
    (r"\\varnothing\b|\\\{\s*\\\}|\b(?:the )?empty set\b|(?i:^\s*no (?:real )?(?:solutions?|roots?)$)", r"\\emptyset "),
    (r"(?i:^\s*(?:the set of )?all real(?: number)?s$)", r"\\mathbb{R}"),
    (r"(?<!\d)(\d++)\.(\d*+)\\overline\s*\{(\d+)\}", lambda match: _repeating(*match.groups())),
    (r"\b([apAP])\.\s?([mM])\b\.?", r"\1\2"),  # "p.m." becomes "pm"
    (r"(?<![\d.,])(\d{1,3})((?:(?: |\{,\})\d{3})+)(?![\d,])", lambda match: re.sub(r"\D", "", match[0])),  # 10 000
    (r"(?<![\w.])(\d++)\s+(\d++)\s*/\s*(\d+)(?![\w.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"(\1\\times 10^{\2})"),
    (rf"(?<=[\d)}}])\s*({'|'.join(_MAGNITUDES)})(?![A-Za-z])", lambda match: f"\\times {_MAGNITUDES[match[1]]}"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({\\-])", "^"),
    (r"\.\.\.", r"\\ldots "),
    (r"\\([A-Za-z]+)", lambda match: f"\\{_SYNONYMS.get(match[1], match[1])}"),
    (r"\\mod\s*\{?(\w+)\}?|\(mod (\w+)\)", lambda match: f" mod {match[1] or match[2]}"),
    (r"\^\s*(-?\d+)|_\s*(\d+)", lambda match: match[0][0] + "{" + (match[1] or match[2]) + "}"),  # `x^10` means x^{10}
    (r"<=|=<|\\leq?(?:slant)?(?![A-Za-z])", r"\\le "),
    (r">=|\\geq?(?:slant)?(?![A-Za-z])", r"\\ge "),
    (r"\+/?-", r"\\pm "),
    (r"(?<![\\A-Za-z])(?:oo|inf(?:inity)?)(?![A-Za-z])", r"\\infty "),
    (rf"(?<![\\A-Za-z])({'|'.join(_GREEK)})(?![A-Za-z]|\s+[A-Za-z]{{2}})", r"\\\1 "),
    (r"(?<![\\A-Za-z])log_?(\d+)\s*(?=\()", r"\\log_{\1}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?=\s*(?:[\d(^_\\|]|[A-Za-z]\b))", r"\\\1 "),
    (r"(?<![A-Za-z])abs\s*\(([^()]*)\)", r"|\1|"),
    (r"(?<![A-Za-z])cbrt\b", r"\\sqrt[3]"),
    (rf"(?<![A-Za-z])\\?sqrt\s*(\[\d+\])?\s*{_NESTED}", r"\\sqrt\1{\2}"),
    (r"(?<![A-Za-z])\\?sqrt\s*(\[\d+\])?\s*(\d+(?:\.\d+)?|[A-Za-z]\b)", r"\\sqrt\1{\2}"),
]


_END = re.compile(r"\s*(?<!\.)[.。]\s*\Z")
_DENOMINATORS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_WORDS = re.compile(
    rf"\s*(negative |minus )?({IN_WORDS.pattern})(?:[ -](halve|{'|'.join(_DENOMINATORS)})s?)?[\s.]*", re.IGNORECASE
)


def normalise(text: str) -> str:
    """Return `text` in LaTeX without delimiters, boxes and markup; full-width characters become ordinary ones."""
    text = "".join(str(unicodedata.decimal(c, c)) for c in text if unicodedata.category(c) != "Cf")  # nothing invisible
    if words := _WORDS.fullmatch(text):  # "three quarters"
        sign, number, part = words.groups()
        divisor = f"/{_DENOMINATORS.get(part.lower(), 2)}" if part else ""
        text = ("-" if sign else "") + number_in_digits(number) + divisor
    if text.count("$") == 1:  # not around a formula
        text = re.sub(r"(?<=\d)\s*\\?\$\s*\Z", " dollar", re.sub(rf"\\?\$\s*{_AMOUNT}", r"\1 dollar", text))
    text = re.sub(rf"([€£¥])\s*{_AMOUNT}", r"\2 \1", text)
    text = re.sub(r" ?[¼-¾⅐-⅞]", lambda match: "\\frac{" + _nfkc(match[0].strip()).replace("⁄", "}{") + "}", text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda match: "^{" + _nfkc(match[0]) + "}", text)
    text = re.sub(r"[₀-₉ₙ]+", lambda match: "_{" + _nfkc(match[0]) + "}", text)
    text = _strip_delimiters(_nfkc(text.translate(_SYMBOLS)))
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    return _END.sub("", text.strip())


def _repeating(whole: str, decimals: str, repeated: str) -> str:
    """Write a repeating decimal as a fraction: ("0", "1", "6") → (16 − 1) / 90."""
    numerator = int(whole + decimals + repeated) - int(whole + decimals)
    return f"\\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(decimals)}}}"


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _strip_delimiters(text: str) -> str:
    text = re.sub(r"\\?\$|(?<!\\)\\[()]", " ", text)
    return re.sub(r"\A\s*\\\[(.*)\\\]", r"\1", text, flags=re.DOTALL).strip().strip("*")


# --- dates, ranges and clock times ------------------------------------------------------------------------------------

_JOINED = re.compile(
    r"(\d+(?:\.\d+)?)(?:\\%)?\s*(-|/|:|to\b)\s*(\d+(?:\.\d+)?)(?:\s*\2\s*(\d+(?:\.\d+)?))?(?:\\%)?\s*([ap]m)?",
    re.IGNORECASE,
)


def joined_numbers(text: str) -> tuple[str, list[float | str]]:
    """Return what kind of text joins numbers by `-`, `/`, `:` or "to", and its parts; for other texts, ("", []).

    A "date" (three numbers), an ascending "range" and a "time" such as 8:20 are not to be computed. A "difference"
    descends; it may be a range. A "ratio" is any other a:b.
    """
    text = re.sub(r"\A(\d+)\.(\d+)\.(\d+)\Z", r"\1-\2-\3", text.strip("()[]"))
    match = _JOINED.fullmatch(re.sub(r"\A\\frac\{(\d+)\}\{(\d+)\}\Z", r"\1/\2", text))
    if match is None:
        return "", []
    first, sign, second, third, half = match.groups()
    parts = [*(float(number) for number in (first, second, third) if number), *([half.lower()] if half else [])]
    if third:
        return "date", parts
    if sign == ":" or half:
        return "time" if half or re.fullmatch(r"\d\d?:[0-5]\d", f"{first}:{second}") else "ratio", parts
    if sign == "/":
        return "fraction", parts
    return "range" if sign != "-" or float(first) < float(second) else "difference", parts


# --- named values and inequalities ------------------------------------------------------------------------------------

_NAME = r"(?:m?\\angle\s*)?\\?[A-Za-z]+(?:\^\{-1\})?\s*(?:_\s*(?:\{\w+\}|\w))?'*(?:\(\w+\))?"
_POINT = re.compile(r"(?<![\w\\])[A-Z]'*(?:_\s*(?:\{\w\}|\w))?\s*(?=\([^()]*,)")  # the name in A(1,2)
_VARIABLE = re.compile(r"(?!\\pi|\\infty)(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w\}?)?")
RELATION = re.compile(r"\s*(<|>|\\le\b|\\ge\b|\\ne\b)\s*")
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}
_BRACKETS = {">": "(", "\\ge": "[", "<": ")", "\\le": "]"}


def without_names(candidate: str, gold: str) -> tuple[str, str] | None:
    """Return both answers without the names of their values, or None if the names differ.

    Values of one letter are a set, with or without indices: "x_1=3, x_2=5" becomes "3, 5". Values of several letters
    become a tuple in the order of the letters. Single values keep their names if both have one.
    """
    if gold.startswith("(") != candidate.startswith("("):
        candidate, gold = (_POINT.sub("", text) for text in (candidate, gold))
    texts, named = (candidate, gold), (_named(candidate), _named(gold))
    if all(len(pairs) == 1 for pairs in named) or any(not pairs and "=" in text for text, pairs in zip(texts, named)):
        return texts
    letters = [{re.sub(r"_.*", "", name) for name, _ in pairs} for pairs in named]
    is_set = all(len(each) <= 1 for each in letters)
    names = letters if is_set else [sorted(name for name, _ in pairs) for pairs in named]
    if all(named) and names[0] != names[1]:
        return None
    values = [", ".join(value for _, value in (pairs if is_set else sorted(pairs))) for pairs in named]
    candidate, gold = (
        text if not pairs else each if is_set else f"({each})" for text, pairs, each in zip(texts, named, values)
    )
    return candidate, gold


def _named(text: str) -> list[tuple[str, str]]:
    """Return the (name, value) pairs of "x_1=3, x_2=5" or "(x, y) = (3, 5)"; [] if not every value has a name."""
    if tuples := re.fullmatch(r"\(([^()=]+)\)\s*=\s*\(([^()=]+)\)", text):
        names, values = (re.split(r"\s*,\s*", part.strip()) for part in tuples.groups())
        return list(zip(names, values)) if len(names) == len(values) else []
    parts = re.split(rf"\s*(?:[,;]|\band\b|\bor\b)[\s,;]*(?={_NAME}\s*=)", text)
    pairs = [re.fullmatch(rf"\s*({_NAME})\s*=([^=]+)", part, re.DOTALL) for part in parts]
    return [] if None in pairs else [(re.sub(r"[\s{}\\]", "", pair[1]), pair[2].strip()) for pair in pairs]


def solution_set(text: str) -> str:
    """Write inequalities of one variable as intervals: "x<1 or x>=3" → (-∞, 1) ∪ [3, ∞). Other text stays."""
    text = re.sub(r"\A\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{R\})?\s*(?:\||\\mid\b|:)(.*)\\\}\Z", r"\1", text)
    intervals = [_interval(part) for part in re.split(r",?\s*(?:\bor\b|\\cup\b|\\lor\b)", text)]
    return text if None in intervals else "\\cup ".join(intervals)


def _interval(text: str) -> str | None:
    """Write `a < x`, `x < b`, `a < x < b` or `a < x and x < b`, with any relations, as an interval; else None."""
    bounds = []
    for inequality in re.split(r",?\s*(?:\band\b|\\cap\b|\\land\b)", text):
        parts = RELATION.split(inequality.strip())
        if len(parts) == 3 and _VARIABLE.fullmatch(parts[0]):
            bounds += [(parts[1], parts[2])]
        elif len(parts) in (3, 5) and _VARIABLE.fullmatch(parts[2]):
            bounds += [(_FLIPPED[parts[1]], parts[0]), *zip(parts[3::2], parts[4::2])]
        else:
            return None
    low = [_BRACKETS[relation] + value for relation, value in bounds if relation in (">", "\\ge")]
    high = [value + _BRACKETS[relation] for relation, value in bounds if relation in ("<", "\\le")]
    other = [value for relation, value in bounds if relation == "\\ne"]
    if other:
        return f"(-\\infty, {other[0]})\\cup ({other[0]}, \\infty)" if len(bounds) == 1 else None
    return None if len(low) > 1 or len(high) > 1 else ", ".join((low or ["(-\\infty"]) + (high or ["\\infty)"]))
