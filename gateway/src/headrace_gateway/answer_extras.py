"""What some clients want beside the text: ids of tokens, log probabilities of the prompt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from headrace_contracts.worker.v1.worker_pb2 import TokenLogprob
from headrace_gateway.api_request import Shown
from headrace_gateway.job import Job

# JSON of an answer. Any: nested values of JSON types.
Json = dict[str, Any]


class AnswerExtras:
    """One answer's.

    Args:
        shown: what is wanted.
        jobs: the prompts, in order.
    """

    def __init__(self, shown: Shown | None = None, jobs: Sequence[Job] = ()) -> None:
        self.shown, self._jobs = shown or Shown(logprobs=True), jobs

    def shown_logprobs(
        self, logprobs: Sequence[TokenLogprob] | None
    ) -> Sequence[TokenLogprob] | None:
        """Return them if they are wanted for themselves."""
        return logprobs if self.shown.logprobs else None

    def whole_logprobs(
        self, logprobs: Sequence[TokenLogprob], form: Callable[[Sequence[TokenLogprob]], Json]
    ) -> Json | None:
        """Return a whole choice's."""
        return form(logprobs) if self.shown.logprobs and logprobs else None

    def of_output(self, logprobs: Sequence[TokenLogprob] | None) -> Json:
        """Return what is wanted of these output tokens."""
        if not self.shown.token_ids:
            return {}
        return {"token_ids": [token.token_id for token in logprobs or ()]}

    def of_prompt(self, choice_idx: int) -> Json:
        """Return what is wanted of the prompt of a choice."""
        if not (self.shown.token_ids or self.shown.prompt_logprobs):
            return {}
        num_choices = self.shown.num_best or self._jobs[0].generate.n or 1
        job = self._jobs[choice_idx // num_choices]
        said: Json = {}
        if self.shown.token_ids:
            said["prompt_token_ids"] = list(job.generate.prompt_token_ids)
        if self.shown.prompt_logprobs:
            said["prompt_logprobs"] = _prompt_logprobs(job.prompt_logprobs)
        return said


def more_fields(fields: Json) -> bytes:
    """Return further fields of an object, to be put behind others."""
    return b"," + orjson.dumps(fields)[1:-1] if fields else b""


def _prompt_logprobs(tokens: Sequence[TokenLogprob]) -> list[Json | None]:
    """Return vLLM's shape: a dictionary by id for each token, none for the first."""
    return [None if idx == 0 else _ranked(token) for idx, token in enumerate(tokens)]


def _ranked(token: TokenLogprob) -> Json:
    ranks = {other.token_id: rank for rank, other in enumerate(token.top, 1)}
    return {
        str(it.token_id): {
            "logprob": it.logprob,
            "rank": ranks.get(it.token_id),
            "decoded_token": token_text(it),
        }
        for it in (*token.top, token)
    }


def token_text(token: TokenLogprob) -> str:
    """Return a token as text; a part of a character as U+FFFD."""
    return token.token.decode("utf-8", "replace")


def best_by_text(tokens: Sequence[TokenLogprob]) -> Json:
    """Return log probabilities by text; of parts of characters, that look alike, the best one."""
    best: Json = {}
    for token in tokens:
        text = token_text(token)
        best[text] = max(token.logprob, best.get(text, token.logprob))
    return best
