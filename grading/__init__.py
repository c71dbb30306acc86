"""What an answer is, and how it is judged: reading answers out of text, math-verify, a verifier model.

Imports `common` and `config`. Start reading at `answers.py`: it finds the answer in a completion. `sandbox.py` runs
reward functions in processes that can be killed, `math_equal.py` runs in them, and `verifier.py` asks a model behind an
OpenAI-compatible server. The reward functions themselves are in `rewards.py`.
"""
