"""Entry point of the cache index."""

from __future__ import annotations

from pathlib import Path

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.engines_file import load_engines_file
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.clock import SystemClock
from headrace_common.lifecycle import serve
from headrace_common.service_process import CheckedFile, run_service, take_arguments


async def _serve(settings: CacheIndexSettings) -> None:
    app = CacheIndexApp(settings, SystemClock())
    await serve(app, app.lifecycle)


def _check(path: Path | None) -> str:
    return f"{path or 'no file'}: {len(load_engines_file(path))} engines"


def main() -> None:
    """Run the cache index until SIGTERM, or check a file of engines."""
    take_arguments("cache-index", CacheIndexSettings, CheckedFile("engines_file", _check))
    run_service("cache-index", CacheIndexSettings.load_or_exit(), _serve)


if __name__ == "__main__":
    main()
