"""Every knob of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr

from headrace_common.settings import Address, HandOverSettings, TopicReplicas, config

# With grpc:// before it, over gRPC instead of plain TCP.
_PEER = r"^(grpc://)?[^\s:/]+:\d{1,5}$"


class GatewaySettings(HandOverSettings):
    """Where the other services are, and the bounds of one request."""

    prefix: ClassVar[str] = "HEADRACE_GATEWAY_"
    model_config = config(prefix)

    listen: Address = Field("127.0.0.1:8080", description="host:port of the public HTTP API.")
    router_address: str = Field(
        "127.0.0.1:7010", pattern=_PEER, description="host:port of the router."
    )
    guard_address: str = Field(
        "127.0.0.1:7030", pattern=_PEER, description="host:port of the guard."
    )
    ratelimit_address: str = Field(
        "127.0.0.1:7040", pattern=_PEER, description="host:port of the rate limiter."
    )
    billing_address: str = Field(
        "127.0.0.1:7050", pattern=_PEER, description="host:port of billing."
    )
    kafka_bootstrap: str = Field(
        "127.0.0.1:9092", description="host:port,... of Kafka brokers for usage events."
    )
    kafka_topic_replicas: TopicReplicas = 0
    outbox_dir: Path = Field(
        Path("outbox"), description="Folder of this process's usage log; survives restarts."
    )
    outbox_seats: int = Field(
        0,
        ge=0,
        le=1000,
        description="Gateways that may share outbox_dir: each takes the first of the folders 1, 2, "
        "... in it that no other has. 0 = it is this process's own.",
    )
    state_url: SecretStr = Field(
        SecretStr(""),
        description="sqlite:////path/state.sqlite3 or postgresql+psycopg://user:password@host/name "
        "for stored responses, files, batches and idempotency records; shared by the processes of "
        "one gateway. Empty = SQLite in the outbox folder, for a single process.",
    )
    response_ttl_s: int = Field(
        30 * 86_400,
        ge=60,
        le=366 * 86_400,
        description="Stored responses are kept so long. Seconds.",
    )
    idempotency_ttl_s: int = Field(
        86_400,
        ge=1,
        le=30 * 86_400,
        description="An answer is repeated for its Idempotency-Key so long. Seconds.",
    )
    idempotency_wait_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="A repetition waits so long for the first request to end. Seconds.",
    )
    story_ttl_s: int = Field(
        86_400,
        ge=60,
        le=30 * 86_400,
        description="What became of a request can be asked for so long. Seconds.",
    )
    file_ttl_s: int = Field(
        30 * 86_400,
        ge=60,
        le=366 * 86_400,
        description="Files and batches are kept so long. Seconds.",
    )
    file_max_bytes: int = Field(
        100 * 2**20, ge=1024, le=2**30, description="Largest file of requests. Bytes."
    )
    project_file_bytes: int = Field(
        2**30,
        ge=1024,
        le=2**40,
        description="Room for all files of one project; results of batches are kept beyond it too, "
        "uploads are not. Bytes.",
    )
    batch_concurrency: int = Field(
        4,
        ge=0,
        le=256,
        description="Requests of batches under way at once in this process; 0 = it runs none.",
    )
    calls_per_s: float = Field(
        100.0,
        ge=0,
        le=1e6,
        description="Calls that use no model (lists, files, batches, stored responses, usage, "
        "repeated answers) that one tenant may make a second at this process; twice as many may "
        "come at once. 0 = any.",
    )
    max_body_bytes: int = Field(
        10 * 2**20, ge=1024, le=256 * 2**20, description="Largest request body. Bytes."
    )
    request_timeout_s: float = Field(
        600.0, ge=1, le=86_400, description="Longest life of one request. Seconds."
    )
    keep_alive_s: float = Field(
        10.0,
        gt=0,
        le=60,
        description="A stream silent for so long gets a comment, so that proxies keep it. Seconds.",
    )
    silent_start_s: float = Field(
        15.0,
        gt=0,
        le=3600,
        description="A stream that no worker has begun is opened by a comment after so long; until "
        "then a refusal has a real status. Below idle timeouts of proxies and clients. Seconds.",
    )
    slow_reader_s: float = Field(
        30.0,
        gt=0,
        le=600,
        description="A client that reads nothing for so long is cut off. Seconds.",
    )
    default_max_tokens: int = Field(
        4096, ge=1, description="Most output tokens of a request that names no limit. Tokens."
    )
    ttft_slo_priority_ms: int = Field(
        1000,
        ge=0,
        le=600_000,
        description="Time to first token wanted for priority requests; orders queues. "
        "0 = none is told. Milliseconds.",
    )
    ttft_slo_standard_ms: int = Field(
        5000,
        ge=0,
        le=600_000,
        description="The same for ordinary requests. Milliseconds.",
    )
    ttft_slo_flex_ms: int = Field(
        60_000,
        ge=0,
        le=600_000,
        description="The same for flex requests and batches. Milliseconds.",
    )
    tpot_slo_priority_ms: int = Field(
        0,
        ge=0,
        le=60_000,
        description="Time per output token wanted for priority requests: workers cut others' "
        "prompts so small that their steps keep to it. 0 = as the workers' "
        "STREAM_SLOWDOWN_RATIO says. Milliseconds.",
    )
    tpot_slo_standard_ms: int = Field(
        0,
        ge=0,
        le=60_000,
        description="The same for ordinary requests. Milliseconds.",
    )
    shares_port: bool = Field(
        False,
        description="Let further gateway processes listen on the same address (SO_REUSEPORT); the "
        "kernel spreads connections. Each has an outbox_dir and a metrics_listen of its own, and "
        "all the same state_url.",
    )
    max_attempts: int = Field(
        4, ge=1, le=16, description="Most replicas tried for one request, resumes included."
    )
    replica_wait_s: float = Field(
        12.0,
        ge=0,
        le=600,
        description="A request whose model lost its last replica within the last minute waits so "
        "long for one, unless its route has another model for it. Below silent_start_s, so that a "
        "refusal has a real status; 0 = it is refused at once. Seconds.",
    )
    retry_ratio: float = Field(
        0.2, ge=0, le=10, description="Retries before the first token that each request pays for."
    )
    retry_floor_per_s: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="Retries a second that may be made however few requests come.",
    )
    retry_burst: float = Field(
        100.0, ge=1, le=1e6, description="Most retries saved up: one lost worker's whole queue."
    )
    guard_timeout_s: float = Field(
        4.0, gt=0, le=60, description="Longest wait for a verdict on an input. Seconds."
    )
    guard_wait_s: float = Field(
        12.0,
        ge=0,
        le=600,
        description="A request or answer of a fail-closed key waits so long for a guard while "
        "there is none: it may be starting again, or frozen. Below silent_start_s, so that a "
        "refusal has a real status. Seconds.",
    )
    admit_timeout_s: float = Field(
        0.5, gt=0, le=10, description="Longest wait for an admission. Seconds."
    )
    num_replicas: int = Field(
        1,
        ge=1,
        le=1000,
        description="Gateways that share the load: without the rate limiter each grants its share.",
    )
    overdraft_ratio: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Share of a budget that postpaid keys may spend while the rate limiter is "
        "away, through all gateways together.",
    )

    model_routes_file: Path | None = Field(
        None,
        description="TOML file of aliases, splits, fallbacks and cascades of models; read again "
        "when it changes. A file that is not there yet has none.",
    )

    cors_origins: str = Field(
        "",
        pattern=r"^(\*|https?://[^\s,/]+(,\s*https?://[^\s,/]+)*)?$",
        description="Origins whose web pages may call the API from a browser, such as "
        "https://app.example.com,http://localhost:3000; * = any. Empty = none.",
    )

    def allowed_origins(self) -> frozenset[str]:
        """Return the entries of `cors_origins`."""
        return frozenset(entry.strip() for entry in self.cors_origins.split(",") if entry.strip())

    def state_location(self) -> str:
        """Return the URL of the state's database."""
        return self.state_url.get_secret_value() or f"sqlite:///{self.outbox_dir / 'state.sqlite3'}"
