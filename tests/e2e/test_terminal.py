"""Training on a terminal: the progress display, and terminals that cannot show it or go away."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Callable, Mapping

import pytest
from processes import Copy, clean_environment

from .conftest import TIMEOUT_SECONDS, TRAIN_MAIN, Workspace
from .test_train import LINE

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Training with a pseudo terminal for its output, and what it has shown."""

    def __init__(self, work: Workspace, *flags: str, columns: int = 100, **environment: str) -> None:
        self.shown = ""
        self.master, slave = pty.openpty()
        self.resize(columns)
        unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        inherited: Mapping[str, str] = {k: v for k, v in clean_environment().items() if k not in unset}
        environment = {**inherited, "TERM": "xterm", **environment}
        self.copy = Copy(TRAIN_MAIN, work.arguments(*flags), environment, slave, slave)
        os.close(slave)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self, until: str = "") -> None:
        """Until ``until`` was shown, or the program has closed the terminal."""
        while not until or until not in self.shown:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # EIO: nobody has it open any more
                return
            self.shown += data.decode("utf-8", errors="replace")

    def wait(self) -> int | None:
        stop = threading.Timer(TIMEOUT_SECONDS, self.copy.stop)
        stop.start()
        self.read()
        stop.cancel()
        os.close(self.master)
        return self.status()

    def status(self) -> int | None:
        """The exit status, when the program has ended."""
        self.copy.process.join(TIMEOUT_SECONDS)
        self.copy.stop()
        return self.copy.returncode

    def lines(self) -> list[str]:
        return ESCAPE.sub("", self.shown).replace("\r", "\n").splitlines()


def test_display_on_a_terminal(make_workspace: Callable[..., Workspace]) -> None:
    """The log's lines are whole, above a bar with loss, throughput, ETA and checkpoint; resizing does no harm."""
    work = make_workspace("bar")
    terminal = Terminal(work)
    terminal.read(until="[Step 1]")
    terminal.resize(9)
    terminal.read(until="[Step 2]")
    terminal.resize(120)
    assert terminal.wait() == 0, terminal.shown
    lines = terminal.lines()
    steps = [match.group(1) for line in lines if (match := LINE.fullmatch(line))]
    assert steps == ["1", "2", "3", "4", "5", "6"]
    bar = next(line for line in reversed(lines) if line.startswith("step 6/6"))
    loss = re.search(r"loss (\d+\.\d{3})  [\d,]+ tokens/s  saved step-00000006 ETA 0:00:00", bar)
    assert loss is not None, bar
    assert float(loss.group(1)) == pytest.approx(work.metrics()[-1]["loss"], abs=1e-3)
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")  # the cursor is back
    assert "\x1b" not in (work.logs / "train.log").read_text()


def test_plain_lines_on_a_dumb_terminal(make_workspace: Callable[..., Workspace]) -> None:
    terminal = Terminal(make_workspace("dumb"), TERM="dumb")
    assert terminal.wait() == 0, terminal.shown
    assert "\x1b" not in terminal.shown
    assert len(LINE.findall(terminal.shown.replace("\r", ""))) == 6


def test_training_goes_on_when_the_terminal_goes_away(make_workspace: Callable[..., Workspace]) -> None:
    work = make_workspace("closed")
    terminal = Terminal(work)
    terminal.read(until="[Step 1]")
    os.close(terminal.master)
    assert terminal.status() == 0
    assert [record["step"] for record in work.metrics()] == [1, 2, 3, 4, 5, 6]
    assert "the progress display is off" in (work.logs / "train.log").read_text()
    assert len(LINE.findall((work.logs / "train.log").read_text())) == 6
