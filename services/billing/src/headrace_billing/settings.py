"""Every knob of billing."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr

from headrace_billing.export_format import Dialect
from headrace_common.settings import (
    Address,
    OptionalAddress,
    RpcServiceSettings,
    TopicReplicas,
    config,
)


class BillingSettings(RpcServiceSettings):
    """Settings of the billing service."""

    prefix: ClassVar[str] = "HEADRACE_BILLING_"
    model_config = config(prefix)

    database_url: SecretStr = Field(
        description="sqlite:////path/ledger.db or postgresql+psycopg://user:password@host/name."
    )
    kafka_bootstrap: str = Field(
        min_length=3, description="host:port[,host:port] of the brokers that carry usage events."
    )
    kafka_topic_replicas: TopicReplicas = 0
    admin_listen: Address = Field(
        "127.0.0.1:0",
        description="host:port of the admin API over HTTP; port 0: a free one.",
    )
    prices_file: Path | None = Field(
        None, description="TOML prices for an empty price table; unset = the packaged ones."
    )
    sweep_grace_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="Time after its deadline until an open request is closed for it. Seconds.",
    )
    sweep_interval_s: float = Field(
        10.0, gt=0, le=3600, description="Pause between two looks for such requests. Seconds."
    )
    worker_usage_days: int = Field(
        90,
        ge=7,
        le=36_500,
        description="How long the workers' own counts are kept, for the sweeper and reconcile. "
        "Days.",
    )
    idempotency_days: int = Field(
        90,
        ge=1,
        le=36_500,
        description="How long a write of the admin API that names an Idempotency-Key is known, so "
        "that a repeat is not done again. Days.",
    )
    guard_address: OptionalAddress = Field(
        "",
        description="host:port of the guard, asked which policies keys may name; empty = any name.",
    )
    export_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Where closed requests are sent, such as an OpenMeter; empty = nowhere.",
    )
    export_dialect: Dialect = Field(
        Dialect.CLOUD_EVENTS, description="cloudevents (JSON batches) or stripe (meter events)."
    )
    export_token: SecretStr = Field(
        SecretStr(""), description="Bearer token for export_url; empty = none is sent."
    )
    export_source: str = Field(
        "headrace",
        pattern=r"^[A-Za-z0-9._:/-]{1,128}$",
        description="CloudEvents source, or prefix of Stripe's meters; never change it afterwards.",
    )
