"""How a rank ends when something goes wrong: one clear report, and no hanging in the clean-up."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import torch.distributed as dist

from torchtitan_npu.launch.distributed import PeerFailureError, announce_failure, announced_failure, first_line
from torchtitan_npu.launch.environment import Environment
from torchtitan_npu.launch.log import flush_output
from torchtitan_npu.launch.npu_errors import explain_codes, is_collective_failure, own_card_failure

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def is_user_error(error: BaseException) -> bool:
    """Whether the message alone says what to do: our own error types, and what the operating system refuses."""
    return type(error).__module__.partition(".")[0] == "torchtitan_npu" or isinstance(error, OSError)


def run_rank(main: Callable[[], int], env: Environment) -> int:
    """Run ``main`` and return its exit status; on an exception report it and return a status ≠ 0.

    The report is one message for errors of ours, with the traceback for all others. The other ranks notice the closed
    connection, look up the first failure, and name it.

    In a job with several ranks the process ends here, whatever the status, without destroying the process group. After
    a failure that would wait for ranks which, in turn, wait for this one; and even after a success it can deadlock
    (see ``disconnect``).
    """
    try:
        status = main()
    except KeyboardInterrupt:
        logger.error("interrupted")
        status = EXIT_INTERRUPTED
    except Exception as error:
        status = EXIT_FAILURE
        card = own_card_failure() if _from_collective(error) else ""
        if card:
            announce_failure(env.rank, f"its card failed: {card}")
            logger.error("this rank's card failed, which a collective noticed first: %s\n%s", error, card)
        elif not _is_consequence(error, env):
            announce_failure(env.rank, _summary(error))
            if is_user_error(error):
                logger.error("%s", error)
            else:
                logger.error("unexpected %s: %s", type(error).__name__, error, exc_info=error)
            explained = explain_codes(str(error))
            if explained:
                # After the traceback: the last lines are those that are read.
                logger.error("%s", explained)
    if env.world_size > 1:
        _exit_at_once(status)
    return status


def _summary(error: Exception) -> str:
    """What the other ranks are told: one line."""
    explained = "" if is_user_error(error) else explain_codes(str(error)).partition("\n")[0]
    return f"{first_line(error)}: {explained}" if explained else first_line(error)


def _is_consequence(error: Exception, env: Environment) -> bool:
    """Report ``error`` as the consequence of another rank's failure, if it is one."""
    if env.world_size == 1:
        return False
    if isinstance(error, PeerFailureError):
        logger.error("stopped, because another rank failed: %s", error)
        return True
    broken_collective = _from_collective(error)
    cause = announced_failure(wait_seconds=2.0 if broken_collective else 0.0)
    if cause is not None and (broken_collective or cause.endswith(_summary(error))):
        logger.error("stopped, because another rank failed: %s", cause)
        return True
    if is_collective_failure(str(error)):
        logger.error("stopped, because another rank is gone or did not come: %s\n%s", error, explain_codes(str(error)))
    elif broken_collective:
        logger.error("stopped, because another rank is gone: %s", error)
    return broken_collective


def _from_collective(error: Exception) -> bool:
    native = sys.modules.get("torchtitan_npu._C")
    if native is not None and isinstance(error, native.PeerError):
        return True
    # Gloo raises plain RuntimeErrors; its messages start with the place in its sources. torch_npu's have a number.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error) or is_collective_failure(str(error)))
    )


def _exit_at_once(status: int) -> None:
    logging.shutdown()
    flush_output()
    os._exit(status)
