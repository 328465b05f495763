"""The progress display where its output fails."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest

from torchtitan_npu.launch import reset_logging, setup_logging
from torchtitan_npu.train.progress import make_display


class _Failing(io.StringIO):
    """A terminal that fails every write from a certain one on."""

    def __init__(self, error: Exception, working_writes: int) -> None:
        super().__init__()
        self.error, self.left = error, working_writes

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.left == 0:
            raise self.error
        self.left -= 1
        return super().write(text)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(logging, "raiseExceptions", False)  # what logging says of its own failed lines
    yield monkeypatch
    monkeypatch.undo()
    reset_logging()


@pytest.mark.parametrize("working_writes", [0, 3, 8])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "gone"), OSError(5, "I/O error"), ValueError("closed"), UnicodeError("no blocks")]
)
def test_output_that_fails_ends_the_display_only(environment: Any, error: Exception, working_writes: int) -> None:
    output = _Failing(error, working_writes)
    environment.setattr(sys, "stdout", output)
    setup_logging(0, 1)
    logger = logging.getLogger("torchtitan_npu.test")
    handler = next(h for h in logging.getLogger("torchtitan_npu").handlers if getattr(h, "stream", None) is output)
    with make_display(done_steps=0, max_steps=5, rank=0) as display:
        for step in range(1, 6):
            logger.info("[Step %d]", step)
            display.update(step, loss=1.0, tokens_per_second=10.0, checkpoint="saved step-3")
    assert output.left == 0
    assert handler.stream is output


@pytest.mark.parametrize("rank", [0, 1])
def test_no_display_without_a_terminal_or_on_other_ranks(environment: Any, rank: int) -> None:
    output = io.StringIO() if rank == 0 else _Failing(OSError("not to be used"), 0)
    environment.setattr(sys, "stdout", output)
    with make_display(done_steps=0, max_steps=5, rank=rank) as display:
        display.update(1, loss=1.0, tokens_per_second=10.0, checkpoint="")
    assert output.getvalue() == ""
