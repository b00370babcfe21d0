"""Entry point of the cache index."""

from __future__ import annotations

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.clock import SystemClock
from headrace_common.lifecycle import run, serve
from headrace_common.telemetry import Telemetry, TelemetrySettings


async def _serve(settings: CacheIndexSettings) -> None:
    app = CacheIndexApp(settings, SystemClock())
    await serve(app, app.lifecycle)


def main() -> None:
    """Run the cache index until SIGTERM."""
    settings = CacheIndexSettings.load_or_exit()
    telemetry = Telemetry("cache-index", TelemetrySettings.load_or_exit())
    settings.log_values()
    try:
        run(_serve(settings))
    except OSError as error:
        raise SystemExit(f"cache-index: {error}") from error
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
