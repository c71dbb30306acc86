"""Metrics of one's own: --reward examples/own_metric.py:hesitates=0 --reward examples/own_metric.py:characters=0.

A reward of weight 0 changes nothing that is learned; its mean is logged as `rewards/NAME` in every step.
"""


def hesitates(completion, answer, **fields):
    """Return 1 if the completion doubts itself, so that the metric is the fraction that do."""
    return float(any(word in completion.lower() for word in ("wait", "hmm", "actually")))


def characters(completion, answer, **fields):
    """Return the length in characters."""
    return len(completion)
