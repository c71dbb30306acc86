"""Exports and prompts of this project in other programs: an older transformers with PEFT, and the newest one.

    ./run.sh test --elsewhere

`conftest.py` runs these scripts, each in the environment that it is for:

    bases.py      makes a tiny base of every family in hub layout       .venv-elsewhere, .venv-newest for Qwen3.5
    untying.py    makes adapters that untie the head of a tied base     .venv-elsewhere
    train.py      trains a base, and exports and merges the result      .venv
    read.py       loads folders; writes their logits and settings       .venv-elsewhere and .venv-newest
    prompts.py    writes the token ids of chats                         .venv-elsewhere and .venv-newest

The tests only compare what the scripts wrote. It stays in `runs/elsewhere` until the next run. `cases.py` lists what is
trained and read, and `hub_configs.py` has the configurations of the bases.
"""
