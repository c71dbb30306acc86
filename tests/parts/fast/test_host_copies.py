"""Training continues while a checkpoint is written, and does not change what is written."""

import threading
import time

import pytest
import torch

import grpo
from policy.optimizer import ShardAdamW
from tests.helpers.runs import config, difference
from training import checkpoint

pytest.importorskip("parts.fast", reason="needs parts/fast, which is not here")

from parts import fast
from parts.fast import host_copies


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU: on a GPU, vLLM would start in this process")
def test_training_goes_on_while_a_checkpoint_is_read_but_does_not_change_it(tiny_model, shapes, tmp_path, monkeypatch):
    """Reading the tensors takes longer than what precedes the next update. Some are copied ahead, some are not.

    The next update waits until they are read, but not until they are on the disk.
    """
    grpo.main(config(tiny_model, shapes, tmp_path / "plain", max_steps=2, save_every=1))
    copy_to_host, phases = host_copies.copy_to_host, []
    step, save, went_on, in_time = ShardAdamW.step, checkpoint.dcp.save, threading.Event(), []

    def slow(tensor):
        phases.append("read")
        time.sleep(0.1 * (phases.count("step") == 1))
        return copy_to_host(tensor)

    def recorded(*args, **kwargs):
        phases.append("step")
        if phases.count("step") == 2:
            went_on.set()
        return step(*args, **kwargs)

    def write(*args, **kwargs):
        save(*args, **kwargs)
        in_time.append(went_on.wait(30))  # as if the disk were so slow

    monkeypatch.setattr(checkpoint.dcp, "save", write)
    monkeypatch.setattr(host_copies, "copy_to_host", slow)
    monkeypatch.setattr(host_copies, "EARLY_COPIES", 1e6)
    monkeypatch.setattr(checkpoint, "host_copies", lambda: fast)
    monkeypatch.setattr(ShardAdamW, "step", recorded)
    grpo.main(config(tiny_model, shapes, tmp_path / "slow", max_steps=2, save_every=1))
    assert in_time == [True, True], "the update in step 2 has waited for the disk"
    for name in ("checkpoint-1", "checkpoint-2"):
        assert difference(tmp_path / "plain" / name, tmp_path / "slow" / name, tmp_path) == 0.0
    first, second = (i for i, phase in enumerate(phases) if phase == "step")
    reads = phases[first:second].count("read")
    assert reads == phases[second:].count("read") > 50
