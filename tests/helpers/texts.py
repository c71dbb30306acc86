"""Texts that a model might write: random bytes, and long ones that are slow to search."""

import random
import time
from collections.abc import Callable
from typing import Any


def strange_texts() -> list[str]:
    rng = random.Random(0)
    texts = [rng.randbytes(rng.randint(1, 400)).decode("utf-8", "replace") for _ in range(500)]
    texts += [rng.randbytes(rng.randint(1, 400)).decode("latin-1") for _ in range(500)]
    return texts


def long_texts() -> list[str]:
    pieces = [
        "a",
        " ",
        "9",
        "{",
        "}",
        "\\boxed{",
        "<answer>",
        "</answer>",
        "<think>",
        "1,",
        "(",
        "\n",
        "\\frac{",
        "answer ",
    ]
    pieces += [
        "</think><answer>",
        "yes no ",
        "é",
        "肺",
        "9^",
        "\\sqrt{",
        "{{}",
        ".",
        "1.",
        "١",
        "\x00",
        "answer is ",
        "A)",
    ]
    texts = [(piece * 10_000)[:10_000] for piece in pieces]
    texts += ["answer" + " " * 10_000, "\\boxed{" + " " * 10_000, "1" + ",111" * 2500 + ",11", "{" * 5000 + "}" * 5000]
    texts += ["\\boxed{" * 1400 + "}" * 1400, "<answer>" + "9" * 10_000, "x" * 5000 + "<answer>", "!" * 10_000 + "a"]
    return texts


TEXTS = {"random bytes": strange_texts(), "10,000 characters": long_texts()}


def think(answer: str) -> str:
    return f"<think>t</think>\n<answer>{answer}</answer>"


def check_with_any_text(function: Callable[[str, str], Any], is_valid: Callable[[Any], bool], texts: list[str]) -> None:
    """Use each text as a completion, as the answer block of a well-formed completion, and as the gold answer. The
    result must be valid, and computing it must not take long."""
    slow = []
    for text in texts:
        inside = think(text.replace("<", "‹"))
        for completion, gold in ((text, "3"), (inside, "3"), (inside, "yes"), (think("3"), text)):
            value, seconds = _timed(function, completion, gold)
            assert is_valid(value), (completion[:80], gold[:80], value)
            if seconds > 4:  # two seconds on an idle machine, but other tests may be running
                slow.append((completion, gold))
    for completion, gold in slow:  # measure again, in case the machine was busy
        assert _timed(function, completion, gold)[1] < 4, (completion[:80], gold[:80])


def _timed(function: Callable[[str, str], Any], completion: str, gold: str) -> tuple[Any, float]:
    start = time.perf_counter()
    return function(completion, gold), time.perf_counter() - start
