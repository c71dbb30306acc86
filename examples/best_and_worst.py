"""Train on the 4 best and the 4 worst completions: --advantage best_and_worst --num_generations 16, with --plugin."""

import grpo


def best_and_worst(rewards, reward_weights, cfg):
    total = rewards.total
    order = total.where(~total.isnan(), total.nanmean(dim=1, keepdim=True)).argsort(dim=1)  # unscored: in the middle
    return grpo.group_advantages(total).scatter(1, order[:, 4:-4], float("nan"))  # NaN: left out


grpo.ADVANTAGES["best_and_worst"] = best_and_worst
