"""Takes up changes of the routes file while requests run; a bad file leaves the former routes.

The file's time and size are looked at each second, which also works where files are replaced by
links (a Kubernetes ConfigMap); SIGHUP and the admin's request look at once. A request keeps the
choice that it began with.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from headrace_common.settings import SettingsError
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.model_routes.choice import ModelRoutes
from headrace_gateway.model_routes.route_file import (
    RouteFile,
    load_cascades,
    load_route_file,
)

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
NO_ROUTES = ModelRoutes(RouteFile(version=1), "")


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What came of looking at the file.

    Args:
        outcome: taken, unchanged or refused.
        revision: of the routes that are in force.
        error: why the file was refused.
    """

    outcome: str
    revision: str
    error: str = ""


class RouteWatch:
    """Follows one file.

    Args:
        path: the file; None = there are no routes. A file that is not there yet has none; if it
            vanishes, what it said stays: no names are taken away by a slip or between the two steps
            of an editor that writes anew.
        metrics: reloads are counted.
    """

    def __init__(self, path: Path | None, metrics: GatewayMetrics) -> None:
        self._path, self._metrics = path, metrics
        self._seen: tuple[int, int, int] | None = None
        self._error = ""
        self.routes = NO_ROUTES
        self._look_now = asyncio.Event()
        if path is not None:
            self.reload()

    def wake(self) -> None:
        """Look at once."""
        self._look_now.set()

    async def run(self) -> None:
        """Look until cancelled; run under `supervise`."""
        while True:
            is_asked = self._look_now.is_set()
            self._look_now.clear()
            if is_asked or _stamp(self._path) != self._seen:
                self.reload()
            try:
                async with asyncio.timeout(_INTERVAL_S):
                    await self._look_now.wait()
            except TimeoutError:
                continue

    def reload(self) -> ReloadResult:
        """Read the file now; what is in force changes only if it is right."""
        before = self.routes.revision
        self._seen = _stamp(self._path)
        try:
            if self._path is not None and (self._seen is not None or before):
                file, revision = load_route_file(self._path)
                cascades = load_cascades(file, self._path.parent)
                self.routes = ModelRoutes(file, revision, cascades)
            else:
                self.routes = NO_ROUTES
        except SettingsError as error:
            if str(error) != self._error:
                _log.warning("the former model routes stay: %s", error)
            self._error = str(error)
            return self._told("refused")
        self._error = ""
        if self.routes.revision == before:
            return self._told("unchanged")
        _log.info("model routes %r are in force", self.routes.revision)
        return self._told("taken")

    @property
    def standing(self) -> ReloadResult:
        """What is in force, and what is wrong with the file, if anything."""
        return ReloadResult(
            "refused" if self._error else "taken", self.routes.revision, self._error
        )

    def _told(self, outcome: str) -> ReloadResult:
        self._metrics.route_reloads.labels(outcome).inc()
        return ReloadResult(outcome, self.routes.revision, self._error)


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)
