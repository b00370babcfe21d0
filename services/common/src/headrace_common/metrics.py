"""Metrics and health over HTTP, on a thread of its own so that a busy loop still answers.

Each service has a `metrics.py` with one class that makes all its collectors in a given registry;
docs/METRICS.md is rendered from those. Label values come from small enums, never from callers.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from headrace_common.loop_metrics import LoopCounter, LoopHistogram
from headrace_common.settings import address_family

# Seconds. TTFT and similar: from a cache hit on a GPU to a long prompt on a CPU.
LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip


def new_registry() -> CollectorRegistry:
    """Return a registry that already holds the process's own metrics (memory, CPU, descriptors)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def show_ready(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> None:
    """Show what /ready says as a metric. *is_ready* is called on the HTTP thread."""
    Gauge(
        "headrace_ready", "1 while the service may get work, as /ready says.", registry=registry
    ).set_function(is_ready)


def watch_disk(registry: CollectorRegistry, folders: dict[str, Path]) -> None:
    """Show the free space of folders that must not fill up, by what they are for."""
    gauge = Gauge(
        "headrace_disk_free_bytes",
        "Free space where a service writes what must not be lost; NaN while there is no folder.",
        ["use"],
        registry=registry,
    )
    for use, folder in folders.items():
        gauge.labels(use).set_function(partial(_free_bytes, folder))


def _free_bytes(folder: Path) -> float:
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return float("nan")


# A scrape asks at once, and reads its answer: so long it may say, or read, nothing, and so long may
# it all take, to whoever sends a byte now and then.
_SILENT_CLIENT_S = 10.0
_CONNECTION_S = 20.0


class RpcMetrics:
    """Calls served, by method and outcome, for every gRPC service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = LoopCounter(
            "headrace_rpc_calls",
            "Calls that ended, by method and gRPC code.",
            ["method", "code"],
            registry=registry,
        )
        self.duration_s = LoopHistogram(
            "headrace_rpc_duration_seconds",
            "Time from a call's start to its end.",
            ["method"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.running = Gauge(
            "headrace_rpc_running", "Calls being served.", ["method"], registry=registry
        )


class ObservabilityServer:
    """Serves /metrics, /health (the process lives) and /ready (it may get work; a metric too).

    Args:
        host: address to bind.
        port: 0 = any free one, see `port`.
        registry: what /metrics shows.
        is_ready: called on the HTTP thread; must be cheap and thread-safe.
        details: what /ready says beside its status, of things that do not decide it; as is_ready.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        is_ready: Callable[[], bool],
        details: Callable[[], dict[str, bool]] = dict,
    ) -> None:
        show_ready(registry, is_ready)

        class Handler(BaseHTTPRequestHandler):
            # Each connection holds a thread.
            timeout = _SILENT_CLIENT_S

            def do_GET(self) -> None:
                status, kind, body = _answer(self.path, registry, is_ready, details)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not worth a line."""

        self._server = _QuietServer((host, port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="observability", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)


class _QuietServer(ThreadingHTTPServer):
    """Ends connections that have lasted too long, and says nothing of clients that left."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        # Monotonic time of each connection's begin.
        self._begun_s: dict[socket.socket, float] = {}
        self.address_family = address_family(address[0])
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # Any: as in the base
        self._begun_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # Any: as in the base
        self._begun_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second, between two connections: what waits for a late client wakes and ends."""
        latest_s = time.monotonic() - _CONNECTION_S
        for request, begun_s in list(self._begun_s.items()):
            if begun_s < latest_s:
                # Its own thread may have closed it at this moment.
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # Any: as in the base
        """Say nothing of clients that left before their answer: a probe may, every second."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _answer(
    path: str,
    registry: CollectorRegistry,
    is_ready: Callable[[], bool],
    details: Callable[[], dict[str, bool]],
) -> tuple[int, str, bytes]:
    match path.partition("?")[0]:
        case "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(registry)
        case "/health":
            return 200, "application/json", b'{"status":"ok"}'
        case "/ready":
            ready = is_ready()
            body = {"status": "ready" if ready else "not ready", **details()}
            text = json.dumps(body, separators=(",", ":"))
            return 200 if ready else 503, "application/json", text.encode()
        case _:
            return 404, "application/json", b'{"error":"try /metrics, /health or /ready"}'
