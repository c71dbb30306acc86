"""The rewards of `./run.sh clevr`: those of NeMo-RL's CLEVR test, 0.2 for the format and 0.8 for the answer.

They read the completion as `format_reward` and `exact_answer_alphanumeric_reward` of `nemo_rl/environments/rewards.py`
do. Both are more lenient than `format` and `vqa` in rewards.py.
"""

import re


def tagged(name: str, text: str) -> str | None:
    """Return what stands between the first `<name>` and the last `</name>`, or None."""
    found = re.search(f"<{name}>(.*)</{name}>", text, re.DOTALL)
    return found and found[1]


def tags(completion: str, answer: str = "", **_: object) -> float:
    """Return 0.25 for a `<think>…</think>` and another 0.75 for an `<answer>…</answer>`, wherever they are."""
    return 0.25 * (tagged("think", completion) is not None) + 0.75 * (tagged("answer", completion) is not None)


def exact(completion: str, answer: str, **_: object) -> float:
    """Return 1 if the answer block has the letters and digits of the answer, in either case, and no others; else 0.

    Signs do not count, as in the original: -3 is 3, and 1.5 is 15. CLEVR's answers are words and whole numbers.
    """

    def plain(text: str) -> str:
        return "".join(filter(str.isalnum, text)).lower()

    found = tagged("answer", completion)
    return float(found is not None and plain(found) == plain(answer))
