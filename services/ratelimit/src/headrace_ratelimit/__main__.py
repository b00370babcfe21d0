"""Runs the rate limiter: ``headrace-ratelimit``."""

from __future__ import annotations

from headrace_common.service_process import run_service, take_arguments
from headrace_ratelimit.server import serve_limits
from headrace_ratelimit.settings import RateLimitSettings


def main() -> None:
    """Load the settings and serve until SIGTERM."""
    take_arguments("ratelimit", RateLimitSettings)
    run_service("ratelimit", RateLimitSettings.load_or_exit(), serve_limits)


if __name__ == "__main__":
    main()
