"""Numbers in the messages of torch_npu and CANN: what they mean and what to do."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator

# torch_npu: "… NPU function error: call aclnnAdd failed, error code is 507015",
#            "… HCCL function error: HcclCommInitRootInfo(…), error code is 9", "NPU error,NPU error code is:507046".
# CANN and watchdogs: "error code: [507015]", "errorCode=9".
_CODE = re.compile(r"error ?code(?: is)?\s*[:=]?\s*\[?(\d{1,6})\b", re.IGNORECASE)
# torch_npu's own words where it leaves the number out: of this thread's call, and of one that its queue made. And
# HCCL's, where the card had failed before.
_WITHOUT_CODE = ("ACL stream synchronize failed", "The Inner error is reported as above", "HCCL_E_RUNTIME")
_ASK_MILLISECONDS = 2000
_LEAST_ACL_CODE = 100000
# 507xxx: errors of the runtime on the card; 507046: it is still at work.
_RUNTIME_CODES = 507
_SYNC_TIMEOUT = 507046
_MOST_EXPLANATIONS = 3
# What a rank sees of a peer that is gone or does not come: on its card, and from HCCL itself.
_COLLECTIVE_ACL = {507048, 507057}
_COLLECTIVE_HCCL = {9, 11, 12, 13, 14, 19, 21}


def explain_codes(message: str) -> str:
    """What the numeric codes of AscendCL, aclnn and HCCL in ``message`` mean, a line each; empty if there are none.

    Codes from 100000 are AscendCL's and aclnn's. Smaller ones are HCCL's in a line that speaks of HCCL, and nobody's
    that we know in any other.
    """
    explanations: list[str] = []
    for is_hccl, code in _codes(message):
        from torchtitan_npu import _C  # only now: most messages have no codes

        explained = _C.explain_hccl(code) if is_hccl else _C.explain_acl(code)
        if explained not in explanations and explained not in message:
            explanations.append(explained)
    return "\n".join(explanations[:_MOST_EXPLANATIONS])


def is_collective_failure(message: str) -> bool:
    """Whether the codes in ``message`` say that a collective failed because of another rank."""
    return any(code in (_COLLECTIVE_HCCL if is_hccl else _COLLECTIVE_ACL) for is_hccl, code in _codes(message))


def own_card_failure() -> str:
    """What this rank's own card failed with, explained; empty if it works, waits for another rank, or there is none.

    After a failed operator everything that is sent to the card fails, and a collective may be the first to notice. So
    the card is asked: the message may only say that a collective failed, or hold the codes of another rank.
    """
    code = _card_error()
    if code // 1000 != _RUNTIME_CODES or code in _COLLECTIVE_ACL or code == _SYNC_TIMEOUT:
        return ""
    from torchtitan_npu import _C

    return _C.explain_acl(code)


def _codes(message: str) -> Iterator[tuple[bool, int]]:
    """(whether it is HCCL's, code), in the order of the message."""
    if any(words in message for words in _WITHOUT_CODE) and _CODE.search(message) is None:
        last = _last_error()
        if last >= _LEAST_ACL_CODE:
            yield False, last
    for line in message.splitlines():
        for found in _CODE.finditer(line):
            code = int(found[1])
            if code >= _LEAST_ACL_CODE:
                yield False, code
            elif code > 0 and "hccl" in line[: found.start()].lower():
                yield True, code


def _last_error() -> int:
    """AscendCL's last error in this thread, or what the card failed with; 0 if there is none, or no AscendCL here."""
    library = _ascendcl()
    return int(library.aclrtPeekAtLastError(0) if library else 0) or _card_error()


def _card_error() -> int:
    """What the card failed with, waiting at most two seconds for its work; 0 if it did not, or no AscendCL here."""
    library = _ascendcl()
    return int(library.aclrtSynchronizeDeviceWithTimeout(_ASK_MILLISECONDS)) if library else 0


def _ascendcl() -> ctypes.CDLL | None:
    """The library, if this process has loaded it and it has what is called here."""
    try:
        library = ctypes.CDLL("libascendcl.so", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    names = ("aclrtPeekAtLastError", "aclrtSynchronizeDeviceWithTimeout")
    return library if all(hasattr(library, name) for name in names) else None
