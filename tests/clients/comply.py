"""llm-comply in its three formats. Tests of images are left out: no model here takes them."""

from __future__ import annotations

import os
import re
import subprocess

BASE, KEY, MODEL = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
FORMATS = {"openai-chat": "/v1", "open-responses": "/v1", "anthropic": "/v1"}
counts = []
for form, path in FORMATS.items():
    listed = subprocess.run(
        ["llm-comply", "run", "--list", "--format", form],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    tests = re.findall(r"^  (\S+)", listed, re.MULTILINE)
    wanted = [name for name in tests if "image" not in name and "vision" not in name]
    command = ["llm-comply", "run", "-u", BASE + path, "-k", KEY, "-m", MODEL]
    command += ["--format", form, "--timeout", "300", "-v", "-f", ",".join(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], done.stderr[-500:])
    counts.append(f"{form}: {len(wanted)} {'ok' if done.returncode == 0 else 'FAILED'}")
print(", ".join(counts))
assert not any("FAILED" in one for one in counts)
