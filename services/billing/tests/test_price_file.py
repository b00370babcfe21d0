"""The price file: the packaged one is right, every broken sample is refused with its reason."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace_billing.price_file import PACKAGED, PriceFileError, load_prices

BROKEN = Path(__file__).parent / "broken_prices"
REASONS = {
    "backwards": "later than",
    "float_price": "whole int",
    "given_twice": "given twice",
    "missing_output": "lacks output_nano_usd",
    "negative_price": "price 1",
    "no_default": "'default' is missing",
    "not_toml": "not_toml.toml",
    "too_dear": "must not exceed",
    "unknown_field": "unknown: discount",
    "unknown_table": "nothing else",
    "unknown_tier": "tier must be one of",
}


def test_the_packaged_prices_are_right() -> None:
    """Cached input costs a tenth, and unknown models have a price."""
    prices = {(it.model, it.tier): it for it in load_prices(PACKAGED)}
    assert ("default", 1) in prices
    model = prices["smollm2-135m-instruct", 1]
    assert model.cached_input_nano_usd * 10 == model.input_nano_usd


@pytest.mark.parametrize("path", sorted(BROKEN.glob("*.toml")), ids=lambda it: it.stem)
def test_a_broken_file_is_refused_with_its_reason(path: Path) -> None:
    """One sample per mistake."""
    with pytest.raises(PriceFileError, match=REASONS[path.stem]):
        load_prices(path)


def test_a_missing_file_is_refused() -> None:
    """The path stands in the message."""
    with pytest.raises(PriceFileError, match=r"nowhere\.toml"):
        load_prices(Path("nowhere.toml"))


@pytest.mark.parametrize(
    ("path", "code"), [(PACKAGED, 0), (BROKEN / "too_dear.toml", 2)], ids=["right", "wrong"]
)
def test_check_config_says_by_its_exit_code(path: Path, code: int) -> None:
    """`--check-config` needs no other setting."""
    command = [sys.executable, "-m", "headrace_billing", "--check-config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert str(path) in done.stdout + done.stderr
