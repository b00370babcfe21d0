"""What a service says over HTTP: its health, readiness and metrics."""

from __future__ import annotations

import urllib.error
import urllib.request


def fetch(url: str, *, timeout_s: float = 5.0) -> tuple[int, str]:
    """Return status and body, also of a refusal; 0 and nothing if nobody answers.

    Blocks: call it on a thread where the service shares the event loop.
    """
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        # Left open, it is a ResourceWarning since Python 3.14.
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""
