"""A reward for each step of a calculation: --plugin examples/step_rewards.py --task steps."""

import operator
import re

import rewards

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def steps(completion, answer, **fields):
    """Score each equation such as "12+3=15": 1 if it holds, else -1; and the last number, 1 if it is the answer."""
    spans = []
    for step in re.finditer(r"(\d{1,9})([-+*])(\d{1,9})=(-?\d{1,18})", completion):
        left, sign, right, result = step.groups()
        holds = OPERATIONS[sign](int(left), int(right)) == int(result)
        spans.append((*step.span(), 1.0 if holds else -1.0))
    last = re.search(r"(?<![\d=])\d+\s*\Z", completion)
    return [*spans, (*last.span(), float(last[0].strip() == answer))] if last else spans


rewards.TASKS["steps"] = rewards.Task(steps, template="{{ content }} Write equations, then the number.")
