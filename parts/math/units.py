"""Units of measurement at the end of mathematical answers: "5 N·m", "5 kg m^2 s^{-2}", "5 kilovolts", "5厘米"."""

import re
from collections import Counter

from grading.answers import unit_symbol

_PREFIXES = {"": "", "n": "nano", "μ": "micro", "u": "micro", "m": "milli", "k": "kilo", "M": "mega", "G": "giga"}
_PREFIXES |= {"T": "tera", "c": "centi", "d": "deci", "h": "hecto"}
_BASES = {  # symbol -> names; both take a prefix
    "m": "meter metre", "g": "gram", "L": "liter litre", "s": "second", "A": "ampere amp", "K": "kelvin",
    "mol": "mole", "cd": "candela", "Hz": "hertz", "N": "newton", "Pa": "pascal", "J": "joule", "W": "watt",
    "C": "coulomb", "V": "volt", "F": "farad", "Ω": "ohm", "S": "siemen", "Wb": "weber", "T": "tesla", "H": "henry",
    "lm": "lumen", "lx": "lux", "Bq": "becquerel", "Gy": "gray", "Sv": "sievert", "eV": "electronvolt", "B": "byte",
    "bit": "", "bps": "", "cal": "calorie", "Wh": "", "Ah": "", "bar": "",
}  # fmt: skip
_OTHERS = {  # symbol -> other spellings, without prefixes
    "degree": "度", "m": "米", "km": "千米 公里", "cm": "厘米", "mm": "毫米", "dm": "分米", "kg": "千克 公斤",
    "g": "克", "L": "升 l", "mL": "毫升 ml", "s": "秒", "min": "分钟 分", "h": "小时 时", "day": "天", "yr": "年",
    "dollar": "usd", "N·m": "Nm", "ha": "hectare", "qt": "quart", "pt": "pint", "wk": "week", "mo": "month",
    "ton": "", "atm": "", "mmHg": "", "psi": "", "rpm": "", "rev": "revolution", "ppm": "", "acre": "", "gal": "gallon",
    "cup": "", "dB": "decibel", "kB": "KB", "pF": "picofarad", "cc": "", "sr": "", "tonne": "吨",
    "AU": "", "ly": "", "pc": "parsec", "Å": "angstrom", "€": "euro eur", "£": "gbp", "¥": "yen 元",
    "degreeC": "celsius 摄氏度", "degreeF": "fahrenheit",
}  # fmt: skip
_SYMBOLS = {
    word: prefix.replace("u", "μ") + base
    for prefix, long_prefix in _PREFIXES.items()
    for base, names in _BASES.items()
    if prefix not in ("c", "d", "h") or base in "mgL"
    for word in (prefix + base, *(long_prefix + name for name in names.split()))
} | {word: symbol for symbol, others in _OTHERS.items() for word in (symbol, *others.split())}
_LETTERS = "mgshlLNJWVKATCFHΩÅ€£¥"  # single letters that are units after a space; other letters are variables
# What is counted: the plural of a word, but not "thirds", "times" or "plus".
COUNTED = re.compile(
    r"(?:people|children|men|women|(?!(?:plus|minus|times|squares|cubes|halves|tens)\b)[a-z]{2,}(?<!th)(?<!rd)(?<![isu])s)"
)
_NOT_UNITS = {*"倍成折千百十"}
_FACTOR = re.compile(r"(\\degree[CF]?|[A-Za-zμΩÅ€£¥]+|[\u4e00-\u9fff]+)\.?(?:\^\{?(-?\d)\}?|([23]))?")
_VALUE_END = re.compile(r"[\d)}!](?=\s*(?:[^\W\d_]|\\degree|[€£¥]))|\\pi\b")


def split_unit(text: str) -> tuple[str, str | None]:
    """Return the value and the unit, as in ("5", "cm^2"), or `text` and None if it does not end with a unit.

    The unit is a product of powers in one notation, the same for "m/s" and "meters per second". That of a percentage is
    "%". A word after a space is a unit, too ("5 apples").
    """
    if re.fullmatch(r"(?:[^,;%A-Za-z\\]|\\[a-z]+)*[\d)}]\s*\\%", text):
        return text[:-2].strip(), "%"
    for value in _VALUE_END.finditer(text):
        if unit := _parse(text[value.end() :].rstrip()):
            return text[: value.end()], unit
    return text, None


def _parse(text: str) -> str | None:
    """Return a unit in one notation, or None if `text` is not a unit."""
    for words, power in (("(?:square|sq)", "squared", "平方"), 2), (("(?:cubic|cu)", "cubed", "立方"), 3):
        before, after, han = words
        text = re.sub(rf"(?:\b{before}\b\.?\s*|{han})([^\W\d_]+)", rf"\1^{power}", text)
        text = re.sub(rf"([^\W\d_])\s+{after}\b", rf"\1^{power}", text)
    text = re.sub(r"\\degree\s+(?=[CF]\b)", r"\\degree", re.sub(r"\s*\^\s*", "^", text))
    powers: Counter[str] = Counter()
    joint, sign = " " if text[:1].isspace() else "", 1
    for piece in re.split(r"\s*(/|\*|\\cdot\b|\bper\b|\s)\s*", text.strip()):
        if re.fullmatch(r"/|\*|\\cdot|per|\s", piece):
            joint, sign = piece, -1 if piece in ("/", "per") else sign
            continue
        factor = _FACTOR.fullmatch(piece.strip("()"))
        symbol = factor and _symbol(factor[1], joint, alone=not powers or sign < 0)
        if not symbol:
            return None
        for unit in symbol.split("·"):
            powers[unit] += sign * int(factor[2] or factor[3] or 1)
    return " ".join(f"{symbol}^{power}" for symbol, power in sorted(powers.items()))


def _symbol(name: str, joint: str, alone: bool) -> str | None:
    """Return the symbol of one unit; `joint` is what precedes it, "" directly after a number."""
    if name.startswith("\\degree"):
        return name[1:]
    if len(name) == 1 and name.isascii():
        return _SYMBOLS.get(name, name) if joint and name in _LETTERS else None
    lower = name.lower()
    known = unit_symbol(lower)
    symbol = _SYMBOLS.get(name) or _SYMBOLS.get(lower) or _SYMBOLS.get(lower.removesuffix("s")) or known
    if symbol and (joint or known or len(name) > 2 or name != lower or not name.isascii()):
        return symbol  # but "2cd" is a product
    is_counted = joint and COUNTED.fullmatch(lower) if name.isascii() else len(name) <= 2 and lower not in _NOT_UNITS
    return lower.rstrip("s") if is_counted and alone else None
