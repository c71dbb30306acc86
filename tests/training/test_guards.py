"""The difference between the log-probabilities of sampler and trainer.

Guards against: a metric of rows with images that counts the text rows of the same micro-batch, and tokens of earlier
steps that count as errors.
"""

from dataclasses import replace

import torch

from packing import pack
from tests.helpers.models import groups_of
from training import guards
from training.metrics import logp_difference


def test_differences_of_rows_with_and_without_images_are_apart():
    """By hand: three tokens with an image differ by 0.5; of four without, which differ by 0.25, one is stale."""
    with_image, text = groups_of([[3], [4]])
    with_image = replace(with_image, prompt=replace(with_image.prompt, image_token=int(with_image.prompt.ids[0])))
    text = replace(text, completions=[replace(text.completions[0], num_stale=1)])
    batch = pack([with_image, text])
    batch.values.token_weights[:] = 1.0
    got = logp_difference(batch, batch.values.sampling_logp + torch.tensor([0.5] * 3 + [-0.25] * 4))
    want = {"difference": 2.25, "image_difference": 1.5, "difference_max": 0.5}
    assert got == want | {"fresh_tokens": 6, "image_fresh_tokens": 3, "teacher_kl": 0.0}


def test_only_the_first_update_of_a_step_is_judged(monkeypatch):
    """A limit of 0 allows any difference."""
    stats = {"difference": torch.tensor(1.5), "fresh_tokens": torch.tensor(6)}
    assert "by 0.250 nats per token" in guards.check_logp_difference(stats, is_first_update=True)
    assert guards.check_logp_difference(stats, is_first_update=False) is None
    for limit in (0.3, 0):
        monkeypatch.setattr(guards, "MAX_LOGP_DIFFERENCE", limit)
        assert guards.check_logp_difference(stats, is_first_update=True) is None
