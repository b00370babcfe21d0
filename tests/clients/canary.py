"""compatcanary (npm): its profiles of an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import subprocess

BASE, KEY, MODEL = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
environ = {**os.environ, "OPENAI_API_KEY": KEY}
scores = []
for profile in ("chat", "modern"):
    command = ["npx", "--yes", "compatcanary", "scan", "--base-url", f"{BASE}/v1", "--model", MODEL]
    command += ["--profile", profile, "--format", "json", "--timeout", "300"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], done.stderr[-500:])
    report = json.loads(done.stdout)
    scores.append((profile, report.get("score")))
print(", ".join(f"{profile} {score}" for profile, score in scores))
assert all(score == 100 for _, score in scores)
