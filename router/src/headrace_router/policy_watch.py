"""Takes up changes of the policy file while the router runs.

The file's time and size are looked at now and then; that also works where files are replaced by
links (a Kubernetes ConfigMap). A broken file changes nothing, is told once in the log and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from headrace_common.settings import SettingsError
from headrace_router.metrics import RouterMetrics
from headrace_router.policy_file import PolicyFile, load_policy_file

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0


class PolicyWatch:
    """Follows one file.

    Args:
        path: the file.
        use: takes each new content that is right.
        metrics: where changes are counted.
    """

    def __init__(
        self, path: Path, use: Callable[[PolicyFile], None], metrics: RouterMetrics
    ) -> None:
        self._path, self._use, self._metrics = path, use, metrics
        self._seen = _stamp(path)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.look()

    def look(self) -> bool:
        """Take the file up if it has changed; tell whether it was."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            fresh = load_policy_file(self._path)
        except SettingsError as error:
            _log.warning("the former policy stays: %s", error)
            self._metrics.policy_reloads.labels("refused").inc()
            return False
        self._use(fresh)
        _log.info("the policy file was taken up")
        self._metrics.policy_reloads.labels("taken").inc()
        return True


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
