"""Mathematics: the reward of `--task math`, answers compared by math-verify, and the verifier model.

Imports `common`, `config` and `grading`. Start reading at `reward.py`. `answers.py` finds the formulas in an answer;
`compare.py` has them compared in processes that can be killed, where `equal.py` runs, with `notation.py` and
`units.py`. `verifier.py` asks a model over HTTP.
"""
