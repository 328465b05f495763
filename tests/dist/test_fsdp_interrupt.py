"""Ctrl-C reaches the user out of every wait, and the other ranks hear of it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from pool import on_ranks
from twin import SmallModel, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, PeerError


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2, timeout=30)
def test_ctrl_c_in_a_wait(where: str, communicator: str) -> None:
    """Rank 1 is held up in the first step, so rank 0 waits for it: a real SIGINT ends that wait within a second."""
    model: Any = FSDP(SmallModel(), communicator=communicator)

    def hold(*_: Any) -> None:
        if dist.get_rank() == 1:
            dist.barrier()  # until rank 0 has been interrupted

    if where == "forward":
        model.layers[0].register_forward_pre_hook(hold)
    else:
        model.layers[2].register_forward_hook(lambda m, a, o: o.register_hook(hold) and None)

    if dist.get_rank() == 1:
        with pytest.raises(PeerError, match="rank 0"):
            next_token_loss(model, tokens_for(0, 1)).backward()
        return
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        next_token_loss(model, tokens_for(0, 0)).backward()
        pytest.fail("rank 1 did not come, and yet rank 0 went on")
    except KeyboardInterrupt:
        assert time.monotonic() - started < 3
    finally:
        timer.join()
        signal.signal(signal.SIGINT, ignored)
    model.zero_grad()  # gives the backward pass up
    del model
    gc.collect()
    dist.barrier()
