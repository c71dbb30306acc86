"""Parsing and judging answers: extraction from text, comparison with math-verify, and a verifier model.

Imports `common` and `config`. Start reading at `answers.py`, which finds the answer in a completion. `sandbox.py` runs
functions in processes that can be killed, and `math_equal.py` runs in such a process, with the rules of `notation.py`
and `units.py`. `verifier.py` asks a model on an OpenAI-compatible server. The reward functions are in `rewards.py`.
"""
