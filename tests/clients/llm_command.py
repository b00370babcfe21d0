"""The command line `llm`, with the fleet as an extra OpenAI model: whole, and streamed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

BASE, KEY, MODEL = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
with tempfile.TemporaryDirectory() as folder:
    models = f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {BASE}/v1\n"
    models += "  api_key_name: ours\n"
    Path(folder, "extra-openai-models.yaml").write_text(models)
    Path(folder, "keys.json").write_text(json.dumps({"ours": KEY}))
    environ = {**os.environ, "LLM_USER_PATH": folder}
    for extra in ([], ["--no-stream"]):
        command = ["llm", "-m", "ours", "-o", "max_tokens", "8", *extra, "Say hello."]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), "no text"
print("2 checks")
