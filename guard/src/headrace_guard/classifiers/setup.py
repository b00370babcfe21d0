"""Builds the trained classifiers from what is installed and configured."""

from __future__ import annotations

import logging
from pathlib import Path

from headrace_guard.classifiers.artefact import load_packaged
from headrace_guard.classifiers.cascade import CascadeModels
from headrace_guard.classifiers.embedding import Embedder, EmbeddingMissingError
from headrace_guard.classifiers.judge import HttpJudge, JudgeEndpoint
from headrace_guard.cpu_pool import CpuPool
from headrace_guard.settings import GuardSettings

_log = logging.getLogger(__name__)


def judge_of(settings: GuardSettings) -> HttpJudge | None:
    """Return the configured judge; None = there is none."""
    if not settings.judge_url:
        return None
    return HttpJudge(
        JudgeEndpoint(
            settings.judge_url,
            settings.judge_model,
            settings.judge_api_key.get_secret_value(),
            settings.judge_timeout_s,
            settings.judge_max_in_flight,
        )
    )


def load_models(
    embedding_dir: Path | None, threads: CpuPool, embed_thread: CpuPool, judge: HttpJudge | None
) -> CascadeModels:
    """Load the packaged models, and the embedding model if it is there.

    Args:
        embedding_dir: where the embedding model's files are; None = there is none.
        threads: where long texts are scored.
        embed_thread: one thread, where embeddings are made.
        judge: whom to ask; None = nobody.

    Raises:
        ArtefactError: the packaged models cannot be used.
    """
    return CascadeModels(load_packaged(), _embedder(embedding_dir), threads, embed_thread, judge)


def _embedder(folder: Path | None) -> Embedder | None:
    if folder is None:
        _log.warning("no embedding model: linear heads decide alone, topics are not evaluated")
        return None
    try:
        return Embedder(folder)
    except EmbeddingMissingError as error:
        _log.warning("embedding model not available, linear heads decide alone: %s", error)
        return None
