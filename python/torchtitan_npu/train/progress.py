"""A line at the bottom of the terminal that says how far a run is. Log lines appear above it, as they are."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from torchtitan_npu.launch import terminal_handlers

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 0.2


class Display(Protocol):
    """Shows the state of a run while it is entered."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def update(self, step: int, *, loss: float, tokens_per_second: float, checkpoint: str) -> None:
        """After each step; ``tokens_per_second`` is global, ``checkpoint`` says how saving stands."""
        ...


def make_display(*, done_steps: int, max_steps: int, rank: int) -> Display:
    """For rank 0 on a terminal that can move its cursor; elsewhere one that shows nothing."""
    if rank != 0 or not _is_terminal():
        return _NoDisplay()
    from rich.console import Console

    class PatientConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # the error itself: rich's own method ends the program

    console = PatientConsole(file=sys.stdout)
    if console.is_dumb_terminal or not console.is_terminal:
        return _NoDisplay()
    return _Bar(console, done_steps, max_steps)


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


class _NoDisplay:
    def __enter__(self) -> _NoDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def update(self, step: int, *, loss: float, tokens_per_second: float, checkpoint: str) -> None:
        pass


class _AboveBar:
    """A text stream that prints whole lines above the bar, neither wrapped nor coloured."""

    def __init__(self, console: Console, failed: Callable[[Exception], None]) -> None:
        self._console, self._failed = console, failed

    def write(self, text: str) -> int:
        from rich.text import Text

        try:
            self._console.print(Text(text.removesuffix("\n")), soft_wrap=True)
        except (OSError, ValueError) as error:
            self._failed(error)
            raise
        return len(text)

    def flush(self) -> None:
        """Nothing to do: what is printed is written at once."""


class _Bar:
    """rich's progress bar, drawn by the training loop and no thread. A terminal that goes away ends it, not the run."""

    def __init__(self, console: Console, done_steps: int, max_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}", markup=False),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,  # the handlers of the log are redirected, one by one
            redirect_stderr=False,
            speed_estimate_period=600.0,
            expand=True,
        )
        self._task = self._progress.add_task("", total=max_steps, completed=done_steps, state="starting")
        self._redirected: list[tuple[logging.StreamHandler, object]] = []
        self._next_refresh = 0.0
        self._shown = False

    def __enter__(self) -> _Bar:
        for handler in terminal_handlers():
            self._redirected.append((handler, handler.setStream(_AboveBar(self._console, self._failed))))
        self._shown = True
        self._attempt(self._progress.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def update(self, step: int, *, loss: float, tokens_per_second: float, checkpoint: str) -> None:
        state = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {checkpoint}"
        self._progress.update(self._task, completed=step, state=state)
        now = time.monotonic()
        if self._shown and now >= self._next_refresh:
            self._next_refresh = now + _REFRESH_SECONDS
            self._attempt(self._progress.refresh)

    def _attempt(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """The terminal was closed, has hung up, or cannot show the text."""
        if self._shown:
            self._end()
            logger.warning("the progress display is off: %s", error)

    def _end(self) -> None:
        if not self._shown:
            return
        self._shown = False
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()
        try:
            self._progress.refresh()
            self._progress.stop()
        except (OSError, ValueError) as error:
            logger.debug("while taking down the progress display: %s", error)
