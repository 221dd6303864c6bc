"""`--audit` prints what the train step runs in, and trains nothing."""

import pytest
from tiny import TINY_GPT, TINY_RESNET


@pytest.mark.parametrize("options", [TINY_GPT, TINY_RESNET], ids=["gpt", "resnet"])
def test_it_prints_the_audit_of_the_runs_own_step_and_ends(command, options):
    ended = command(*options, "--audit", "--policy", "p=f32,c=bf16,o=f32")
    assert ended.status == 0
    assert ended.output.startswith("audit of train_step: ")
    assert "forward: " in ended.output
    assert "bf16" in ended.output
    assert not ended.directory.exists()
