"""Fixtures of all test folders; loaded by `-p headrace_testing.plugin`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from headrace_testing.clock import FakeClock
from headrace_testing.postgres import LocalPostgres, PostgresMissingError
from headrace_testing.processes import fleet
from headrace_testing.servers import LocalServer, kafka, valkey

# A busy machine is no reason for a test to fail.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")

__all__ = ["fleet"]  # fixtures that live in modules of their own

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_NAME = "gemma-3-270m-q4_k_m.gguf"


@pytest.fixture
def clock() -> FakeClock:
    """A clock that moves only when told."""
    return FakeClock()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """One valkey-server for the session; do not freeze or kill it, take `own_redis` for that."""
    server = valkey(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def redis_url(redis_server: LocalServer) -> str:
    """URL of the session's server; keep to a key prefix of your own."""
    return f"redis://127.0.0.1:{redis_server.port}/0"


@pytest.fixture
def redis_db_url(redis_server: LocalServer) -> Iterator[str]:
    """URL of an empty database, emptied again after the test."""
    import redis

    url = f"redis://127.0.0.1:{redis_server.port}/9"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[LocalServer]:
    """A server of this test's own, started, to be frozen and killed."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = valkey(folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """One broker for the session; do not freeze or kill it, take `own_kafka` for that."""
    server = kafka(tmp_path_factory.mktemp("kafka"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def kafka_bootstrap(kafka_server: LocalServer) -> str:
    """Address of the session's broker; use topics of your own."""
    return f"127.0.0.1:{kafka_server.port}"


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[LocalServer]:
    """A broker of this test's own, started; its log is lost when it is killed."""
    folder = tmp_path / "kafka"
    folder.mkdir()
    server = kafka(folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model's file; fetched by `headrace model fetch` or the first `make up`."""
    return _model_file(GGUF_NAME, "headrace model fetch")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """The second real model's file."""
    return _model_file(GEMMA_NAME, "headrace model fetch gemma3-270m")


def _model_file(name: str, command: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "headrace" / "models" / name
    if not path.exists():
        reason = f"{path} is absent: run `{command}`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[LocalPostgres]:
    """One PostgreSQL for the session; do not stop it, take `own_postgres` for that."""
    yield from _postgres()


@pytest.fixture
def postgres_url(postgres_server: LocalPostgres) -> Iterator[str]:
    """SQLAlchemy URL of an empty database of this test's own."""
    url = postgres_server.create_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def own_postgres() -> Iterator[LocalPostgres]:
    """A server of this test's own, started, to be stopped and started again."""
    yield from _postgres()


def _postgres() -> Iterator[LocalPostgres]:
    try:
        server = LocalPostgres()
    except PostgresMissingError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    try:
        server.start()
        yield server
    finally:
        server.remove()
