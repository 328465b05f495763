"""The checks find nothing in what the unmodified torch_npu does, at whatever speed the streams progress."""

from __future__ import annotations

import textwrap

import pytest
from simulated import Run

PROGRAM = """
import torch, torch_npu
from torch import nn

def train(device, steps=6):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    side = torch.npu.Stream() if device == "npu" else None
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (2, 17), generator=generator)
        if side is not None:  # the next batch comes over a stream of its own, from pinned memory that is reused
            with torch.npu.stream(side):
                tokens = tokens.pin_memory().to(device, non_blocking=True)
            torch.npu.current_stream().wait_stream(side)
            tokens.record_stream(torch.npu.current_stream())
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if step % 3 == 0 else loss.detach())
        if step == 4 and side is not None:
            torch.npu.empty_cache()
    return [float(loss) for loss in losses]

on_card, on_host = train("npu"), train("cpu")
assert max(abs(a - b) for a, b in zip(on_card, on_host)) < 1e-4, (on_card, on_host)
"""


@pytest.mark.parametrize("queue", "012")
@pytest.mark.parametrize("seed", ["", "1", "2"])
def test_a_training_loop_with_two_streams(run_well: Run, queue: str, seed: str) -> None:
    run_well(PROGRAM, TASK_QUEUE_ENABLE=queue, TT_SIM_DELAY=seed)


def test_a_missing_wait_in_torch_is_found(run: Run) -> None:
    """The same as above is not found because nothing is looked at: without wait_stream there is a race."""
    done = run(PROGRAM.replace("torch.npu.current_stream().wait_stream(side)", "pass"))
    assert done.returncode != 0 and "simulated Ascend: rank 0: race: aclnn" in done.stderr, done.stderr


def test_a_failed_operator_is_an_error_that_names_it(run: Run) -> None:
    # torch_npu's own clean-up at the end of a process whose card has failed can wait for ever: it is left out.
    leave = (
        "import os, sys\n"
        "show = sys.excepthook\n"
        "sys.excepthook = lambda *error: (show(*error), sys.stderr.flush(), os._exit(1))\n"
    )
    done = run(leave + textwrap.dedent(PROGRAM), TT_SIM_FAULT="operator:aclnnSilu:2")
    assert done.returncode == 1, done.stderr
    assert "aclnnSilu failed on stream" in done.stderr and "507015" in done.stderr, done.stderr
