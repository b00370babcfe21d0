"""Key administration for external black-box suites, by the commands of `headrace`.

Set CASES_ADAPTER to this file and HEADRACE_LAUNCHER_STATE_DIR to the fleet's state directory. Cases
that need two gateways: ``headrace up --gateways 2``, and the port after the first is the second's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_OPTIONS = {
    "rpm": "--requests-per-minute",
    "tpm": "--tokens-per-minute",
    "max_parallel": "--max-concurrent",
}


def _headrace(*words: str) -> Any:
    command = [sys.executable, "-m", "headrace_launcher", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


class Admin:
    """Creates and revokes keys, reads usage and prices."""

    def create_key(self, **limits: Any) -> dict[str, str]:
        """Create a key; limits: tenant, models, rpm, tpm, max_parallel, budget_usd."""
        words = ["keys", "create", "--tenant", limits.pop("tenant"), "--name", "case"]
        if models := limits.pop("models", None):
            words += ["--models", ",".join(models)]
        if (budget := limits.pop("budget_usd", None)) is not None:
            words += ["--budget-usd", f"{budget:.9f}"]
        for name, value in limits.items():
            words += [_OPTIONS[name], str(value)]
        made = _headrace(*words)
        return {"id": made["key_id"], "key": made["api_key"]}

    def revoke_key(self, key_id: str) -> None:
        """Revoke a key."""
        _headrace("keys", "revoke", key_id)

    def usage(self, key_id: str) -> list[dict[str, Any]]:
        """Return the closed usage records of a key, newest last."""
        records = _headrace("usage", "--key", key_id)["records"]
        return [record for record in records if record["status"] != "open"]

    def spend(self, key_id: str) -> float:
        """Return what a key has spent, USD."""
        return int(_headrace("usage", "--key", key_id)["total_nano_usd"]) / 1e9

    def prices(self) -> dict[str, float]:
        """Return USD per token by class, as the packaged price table has them."""
        import tomllib
        from importlib import resources

        text = resources.files("headrace_billing").joinpath("data", "prices.toml").read_text()
        (price, *_) = tomllib.loads(text)["price"]
        return {
            "input": price["input_nano_usd"] / 1e9,
            "cached": price["cached_input_nano_usd"] / 1e9,
            "output": price["output_nano_usd"] / 1e9,
        }
