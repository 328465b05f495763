"""The environment variables of NPUs: what is accepted, what is refused, and what the log says (R51)."""

from __future__ import annotations

import pytest

from torchtitan_npu.launch import LaunchError, read_npu_variables
from torchtitan_npu.launch.npu_variables import advised_buffer_mb, parse_visible_cards


def test_defaults() -> None:
    variables = read_npu_variables({})
    assert (variables.buffer_mb, variables.whitelist_disabled, variables.visible_cards) == (200, True, None)
    assert variables.warnings == ()
    assert variables.describe() == (
        "HCCL: 2 x 200 MiB of the card for each communicator (HCCL_BUFFSIZE is not set), whitelist off "
        "(HCCL_WHITELIST_DISABLE); cards: all (ASCEND_RT_VISIBLE_DEVICES)"
    )
    variables.check_ranks(64)


def test_values_of_the_article() -> None:
    variables = read_npu_variables(
        {"HCCL_BUFFSIZE": "128", "HCCL_WHITELIST_DISABLE": "1", "ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}
    )
    assert (variables.buffer_mb, variables.whitelist_disabled, variables.visible_cards) == (128, True, (0, 1, 2, 3))
    assert "2 x 128 MiB" in variables.describe() and "cards: 0,1,2,3" in variables.describe()


@pytest.mark.parametrize("text", ["0", "-1", "200M", "1e3", "65537", "٣"])
def test_a_buffer_size_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(
        LaunchError, match="HCCL_BUFFSIZE=.* must be a whole number of MiB in 1..65536; unset it for 200"
    ):
        read_npu_variables({"HCCL_BUFFSIZE": text})


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(LaunchError) as caught:
        read_npu_variables({"HCCL_BUFFSIZE": "x", "HCCL_WHITELIST_DISABLE": "yes", "ASCEND_RT_VISIBLE_DEVICES": "0-3"})
    lines = str(caught.value).splitlines()
    assert [line.split("=")[0] for line in lines] == [
        "HCCL_BUFFSIZE",
        "HCCL_WHITELIST_DISABLE",
        "ASCEND_RT_VISIBLE_DEVICES",
    ]


def test_a_whitelist_without_a_file_is_warned_of() -> None:
    (warning,) = read_npu_variables({"HCCL_WHITELIST_DISABLE": "0"}).warnings
    assert "HCCL_WHITELIST_FILE" in warning
    assert read_npu_variables({"HCCL_WHITELIST_DISABLE": "0", "HCCL_WHITELIST_FILE": "/x"}).warnings == ()


@pytest.mark.parametrize(("text", "cards"), [("", ()), ("0", (0,)), ("0,1,2", (0, 1, 2)), ("3,5,11", (3, 5, 11))])
def test_cards(text: str, cards: tuple[int, ...]) -> None:
    assert parse_visible_cards(text) == cards


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # CANN would see card 0 alone.
        ("0-3", "numbers and commas only.*write 0,1,2,3$"),
        ("0, 1", "numbers and commas only.*write 0,1$"),
        ("0-1,4-5", "write 0,1,4,5$"),
        ("1,0", "each card once, in order; write 0,1$"),
        ("1,1", "each card once, in order; write 1$"),
        ("a", "'a' is no card"),
        ("0,", "'' is no card"),
        ("3-1", "'3-1' is no card"),
        ("-1", "'-1' is no card"),
    ],
)
def test_what_cann_would_read_otherwise_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_visible_cards(text)


def test_more_ranks_than_cards() -> None:
    variables = read_npu_variables({"ASCEND_RT_VISIBLE_DEVICES": "2,3"})
    variables.check_ranks(2)
    with pytest.raises(LaunchError, match=r"=2,3 names 2 card\(s\), and 4 ranks .* --nproc_per_node=2"):
        variables.check_ranks(4)


def test_advice_for_the_buffer() -> None:
    """ceil(4 x 8192 x 4096 x 2 / 2^20) = 256; one more element of a sequence is one MiB more, rounded up."""
    assert advised_buffer_mb(4, 8192, 4096, 2) == 256
    assert advised_buffer_mb(1, 128, 4096, 2) == 1
    assert advised_buffer_mb(1, 129, 4096, 2) == 2
    advice = read_npu_variables({"HCCL_BUFFSIZE": "128"}).buffer_advice(4, 8192, 4096, 2)
    assert "= 256 MiB; in effect: 128 MiB" in advice
