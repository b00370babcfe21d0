"""The SDKs of Node (openai, @anthropic-ai/sdk, ai): installs them here and runs the checks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PACKAGES = (
    "openai",
    "@anthropic-ai/sdk",
    "zod",
    "ai",
    "@ai-sdk/openai",
    "@ai-sdk/openai-compatible",
    "@ai-sdk/anthropic",
)
script = Path(__file__).with_suffix(".mjs")
if not Path("node_modules/ai").exists():
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES], check=True)
# Beside its packages, where Node looks for them.
shutil.copy(script, script.name)
subprocess.run(["node", script.name], check=True)
