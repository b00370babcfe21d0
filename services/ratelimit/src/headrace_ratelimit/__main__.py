"""Runs the rate limiter: ``headrace-ratelimit``."""

from __future__ import annotations

from headrace_common.lifecycle import run
from headrace_common.telemetry import Telemetry, TelemetrySettings
from headrace_ratelimit.server import serve_limits
from headrace_ratelimit.settings import RateLimitSettings


def main() -> None:
    """Load the settings and serve until SIGTERM."""
    settings = RateLimitSettings.load_or_exit()
    telemetry = Telemetry("ratelimit", TelemetrySettings.load_or_exit())
    try:
        run(serve_limits(settings))
    except OSError as error:
        raise SystemExit(f"ratelimit: {error}") from error
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
