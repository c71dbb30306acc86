"""Reading the answer in a text, and calling functions of the user by their name.

Imports `common` and `config`. Start reading at `answers.py`, which finds the answer in a completion; `places.py` reads
boxes and points; `together.py` makes many calls that wait. Rewards are in `rewards.py`; parts/math compares answers,
and parts/workers.py kills calls that hang.
"""
