"""Start an adapter: `python -m headrace_worker.upstream`, or `headrace worker upstream`."""

from __future__ import annotations

import argparse

from headrace_common.clock import SystemClock
from headrace_common.metrics import new_registry
from headrace_common.service_process import run_service
from headrace_worker.settings import UpstreamSettings
from headrace_worker.upstream.app import serve_upstream

# Options that stand for a setting; the key is none of them, as others may see a command line.
_OPTIONS = {
    "upstream_url": ("url", "base URL of the server, such as http://127.0.0.1:8000/v1"),
    "upstream_model": ("model", "the model's name over there"),
    "model_name": ("model_name", "name under which it is served here"),
    "worker_id": ("worker_id", "name of this worker"),
    "listen": ("listen", "host:port for the fleet's router and gateways"),
}


def main() -> None:
    """Run until told to stop; exit code 0 = drained, 1 = could not start, 2 = bad settings."""
    parser = argparse.ArgumentParser(
        prog="headrace worker upstream",
        description="Serve somebody else's OpenAI-compatible server as a worker. Settings also "
        "come from HEADRACE_UPSTREAM_*; the server's key only from there.",
    )
    for option, (_, text) in _OPTIONS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", help=text)
    args = vars(parser.parse_args())
    given = {_OPTIONS[name][0]: value for name, value in args.items() if value is not None}
    run_service("worker", UpstreamSettings.load_or_exit(**given), _serve)


async def _serve(settings: UpstreamSettings) -> None:
    await serve_upstream(settings, SystemClock(), new_registry())


if __name__ == "__main__":
    main()
