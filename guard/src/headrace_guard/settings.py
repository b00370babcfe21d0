"""Settings of the guard."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr

from headrace_common.settings import HandOverSettings, TopicReplicas, config


class GuardSettings(HandOverSettings):
    """Where the guard listens, which policies it has and how much it takes on."""

    prefix: ClassVar[str] = "HEADRACE_GUARD_"
    model_config = config(prefix)

    policy_file: Path | None = Field(
        None, description="TOML file of policies; unset = the packaged default.toml."
    )
    check_budget_s: float = Field(
        3.0,
        gt=0,
        le=60,
        description="Most time for one request or one piece of output, in queues and judged. "
        "Seconds.",
    )
    max_input_chars: int = Field(
        2_000_000, ge=1, le=20_000_000, description="Longest request that is judged. Characters."
    )
    max_held_chars: int = Field(
        8192, ge=512, le=65_536, description="Most undecided output of one choice. Characters."
    )
    max_blocklist_terms: int = Field(
        2000, ge=1, le=20_000, description="Terms in one key's blocklist."
    )
    max_blocklist_chars: int = Field(
        40_000, ge=1, le=1_000_000, description="Characters in one key's blocklist."
    )
    cached_blocklists: int = Field(
        256, ge=1, le=10_000, description="Keys' blocklists that are kept ready."
    )
    num_threads: int = Field(
        2, ge=1, le=64, description="Threads that judge long texts beside the event loop."
    )
    max_waiting_texts: int = Field(
        32,
        ge=1,
        le=10_000,
        description="Long texts that may wait for a thread; of more, the tenant with "
        "most of them loses its newest.",
    )
    policy_dir: Path | None = Field(
        None,
        description="Folder of policies put by the admin API, the same for all guards; "
        "unset = none can be put.",
    )
    policy_poll_s: float = Field(
        2.0, gt=0, le=3600, description="How often policies on disk are looked at. Seconds."
    )
    embedding_dir: Path | None = Field(
        None,
        description="Folder with the embedding model (model.onnx, tokenizer.json); unset = linear "
        "heads decide alone and topics are not evaluated.",
    )
    max_waiting_embeddings: int = Field(
        32,
        ge=1,
        le=10_000,
        description="Texts that may wait to be embedded; of more, the tenant with most of them "
        "loses its newest.",
    )
    judge_url: str = Field(
        "",
        description="OpenAI-compatible endpoint of the judge, up to /v1; empty = there is none.",
    )
    judge_model: str = Field("", description="Name of the judge's model at its endpoint.")
    judge_api_key: SecretStr = Field(SecretStr(""), description="Key for the judge; empty = none.")
    judge_timeout_s: float = Field(
        0.8, gt=0, le=60, description="Most time for one answer of the judge. Seconds."
    )
    judge_max_in_flight: int = Field(
        8, ge=1, le=1000, description="Questions to the judge at a time; as many may wait."
    )
    cached_verdicts: int = Field(
        20_000, ge=0, le=10_000_000, description="Texts whose results are kept; 0 = none."
    )
    audit_dir: Path | None = Field(
        None,
        description="Folder of the audit; unset = it is kept in memory and ends with the process.",
    )
    audit_max_records: int = Field(
        1_000_000,
        ge=1,
        le=1_000_000_000,
        description="Audit records kept; older ones are forgotten once Kafka, if any, has them.",
    )
    audit_max_waiting: int = Field(
        20_000,
        ge=1,
        le=10_000_000,
        description="Audit records that may wait to be written; more are dropped and counted.",
    )
    kafka_bootstrap: str = Field(
        "", description="Kafka brokers for topic guard.audit.v1; empty = it is not published."
    )
    kafka_topic_replicas: TopicReplicas = 0
    sent_grace_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="How long after a gateway's report of what it sent the output's own record may "
        "come. Seconds.",
    )
