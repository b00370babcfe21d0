"""Entry point of the cache index."""

from __future__ import annotations

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.clock import SystemClock
from headrace_common.lifecycle import serve
from headrace_common.service_process import run_service, take_no_arguments


async def _serve(settings: CacheIndexSettings) -> None:
    app = CacheIndexApp(settings, SystemClock())
    await serve(app, app.lifecycle)


def main() -> None:
    """Run the cache index until SIGTERM."""
    take_no_arguments("cache-index", CacheIndexSettings)
    run_service("cache-index", CacheIndexSettings.load_or_exit(), _serve)


if __name__ == "__main__":
    main()
