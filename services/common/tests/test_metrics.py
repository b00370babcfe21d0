from __future__ import annotations

import contextlib
import math
import shutil
import socket
import struct
import threading

import pytest

from headrace_common import metrics
from headrace_common.metrics import ObservabilityServer, RpcMetrics, new_registry, watch_disk
from headrace_testing.waiting import eventually_sync
from headrace_testing.web import fetch


def get(port: int, path: str) -> tuple[int, str]:
    return fetch(f"http://127.0.0.1:{port}{path}")


@pytest.fixture
def readiness():
    return {"ready": False}


@pytest.fixture
def port(readiness):
    registry = new_registry()
    RpcMetrics(registry).calls.labels("headrace.x/Y", "OK").inc()
    server = ObservabilityServer("127.0.0.1", 0, registry, lambda: readiness["ready"])
    yield server.port
    server.close()


def test_health_says_alive_while_ready_says_whether_work_is_welcome(port, readiness) -> None:
    assert get(port, "/health")[0] == 200
    assert get(port, "/ready")[0] == 503
    readiness["ready"] = True
    assert get(port, "/ready")[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nhost:"])
def test_a_client_that_says_nothing_holds_no_thread(monkeypatch, sent) -> None:
    """Anybody who reaches the port could otherwise use up the process's threads."""
    monkeypatch.setattr(metrics, "_SILENT_CLIENT_S", 0.2)
    server = ObservabilityServer("127.0.0.1", 0, new_registry(), lambda: True)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(sent)
        assert client.recv(1) == b""
    server.close()


def test_a_byte_now_and_then_holds_no_thread_either(monkeypatch, capfd) -> None:
    """Others are served meanwhile, and the log says nothing of it."""
    server = ObservabilityServer("127.0.0.1", 0, new_registry(), lambda: True)
    before = threading.active_count()
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nx: ")

        def is_cut() -> bool:
            with contextlib.suppress(TimeoutError):
                try:
                    client.sendall(b"y")
                    return client.recv(1) == b""
                except ConnectionError:
                    return True
            return False

        assert not is_cut()
        eventually_sync(lambda: threading.active_count() == before + 1)
        assert get(server.port, "/health")[0] == 200
        # Bytes come far more often than this, and it is over all the same.
        monkeypatch.setattr(metrics, "_CONNECTION_S", 0.3)
        assert any(is_cut() for _ in range(600))
    eventually_sync(lambda: threading.active_count() == before)
    server.close()
    assert capfd.readouterr().err == ""


def test_readiness_is_a_metric_too(port, readiness) -> None:
    """An alert can tell a service that may get no work from one that is gone."""
    assert "\nheadrace_ready 0.0\n" in get(port, "/metrics")[1]
    readiness["ready"] = True
    assert "\nheadrace_ready 1.0\n" in get(port, "/metrics")[1]


def test_free_space_is_read_at_each_scrape_and_unknown_without_a_folder(tmp_path) -> None:
    registry = new_registry()
    later = tmp_path / "later"
    watch_disk(registry, {"outbox": tmp_path, "audit": later})

    def free_bytes(use: str) -> float | None:
        return registry.get_sample_value("headrace_disk_free_bytes", {"use": use})

    whole = shutil.disk_usage(tmp_path).total
    assert 0 < free_bytes("outbox") <= whole
    assert math.isnan(free_bytes("audit"))
    later.mkdir()
    assert 0 < free_bytes("audit") <= whole


def test_metrics_are_served_in_prometheus_text(port) -> None:
    status, text = get(port, "/metrics")
    assert status == 200
    assert 'headrace_rpc_calls_total{code="OK",method="headrace.x/Y"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_other_paths_say_what_there_is(port) -> None:
    status, text = get(port, "/nothing")
    assert status == 404
    assert "/metrics" in text


def test_a_client_that_left_before_its_answer_is_not_worth_a_line(port, capfd) -> None:
    """A probe that reads only the status line must not fill the log with tracebacks."""
    linger_not = struct.pack("ii", 1, 0)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_not)
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert get(port, "/health")[0] == 200
    assert capfd.readouterr().err == ""
