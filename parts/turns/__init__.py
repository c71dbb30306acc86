"""Episodes of several turns (`--env`, docs/turns.md): the model samples a turn, an environment answers it, and so on.

Imports everything up to `training`. `data.processor_for` imports it. Start reading at `environment.py`, whose
`RunEnvironment` a run then calls; `episodes.py` has the episodes, `replies.py` makes tokens of answers, `worker.py`
runs in the workers, `metrics.py` computes metrics, `parked.py` stores episodes that wait for a later step, and
`trial.py` tries an environment without a model.
"""

from parts.turns.environment import use_environment

__all__ = ["use_environment"]
