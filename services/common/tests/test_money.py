from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.money import nano_usd_from_text, usd_text


@given(st.integers(0, 10**18))
def test_text_and_nano_usd_are_inverse(nano: int) -> None:
    """No amount is changed by being printed."""
    assert nano_usd_from_text(usd_text(nano)) == nano


@pytest.mark.parametrize(
    "text", ["", "ten", "-1", "NaN", "sNaN", "Infinity", "0.0000000001", "1,5"]
)
def test_what_is_no_exact_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="amount in USD"):
        nano_usd_from_text(text)


def test_negative_amounts_print_with_their_sign() -> None:
    assert usd_text(-1_500_000_000) == "-1.50"
    assert usd_text(3) == "0.000000003"
