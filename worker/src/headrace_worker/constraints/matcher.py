"""llguidance behind the engine's `Constraint` and `Matcher`.

llguidance (guidance-ai/llguidance) walks a trie of all tokens' bytes with a derivative-based lexer
and an Earley parser. It never raises for a grammar or a token; it goes into an error state, which
is turned into an error here.

Masks are computed between two steps of all streams. An ambiguous grammar can make each cost
more than the last, within llguidance's limits up to half a second; so a choice has an allowance of
computing time, and one that exceeds it ends with its request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from headrace_common.errors import InvalidRequest
from headrace_worker.constraints.refusals import told
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.model.info import ModelInfo

# Schemas with hundreds of members take a millisecond a token.
_ALLOWED_S, _ALLOWED_PER_TOKEN_S = 0.25, 0.01


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    def __init__(
        self,
        table: TokenTable,
        vocab_size: int,
        eos_token_id: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.tokens = [table.spelling(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(table.special_ids)
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._encode(text)


def tokenizer_of(info: ModelInfo, table: TokenTable) -> LLTokenizer:
    """Build the trie of all tokens of a model; takes some tenths of a second."""
    plain = Tokenizer.from_str(info.tokenizer_json.decode())
    plain.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        ids: list[int] = plain.encode(text, add_special_tokens=False).ids
        return ids

    vocabulary = _Vocabulary(table, info.vocab_size, info.eos_token_ids[0], encode)
    # llguidance takes anything with the wrapper's attributes.
    return LLTokenizer(
        vocabulary,  # type: ignore[arg-type]
        n_vocab=info.vocab_size,
        eos_token=list(info.eos_token_ids),
    )


class GuidedMatcher:
    """One choice's state.

    Args:
        matcher: before the first token.
        cpu_s: computing time of the calling thread.
        on_error: called when llguidance can go on no more.
    """

    def __init__(
        self, matcher: LLMatcher, cpu_s: Callable[[], float], on_error: Callable[[], None]
    ) -> None:
        self._matcher, self._cpu_s, self._on_error = matcher, cpu_s, on_error
        # What may still be computed.
        self._left_s = _ALLOWED_S

    def mask(self) -> torch.Tensor:
        """Return which tokens may come next: (V,) bool.

        Raises:
            InvalidRequest: it cannot be said, or has become too costly.
        """
        started_s = self._cpu_s()
        allowed = self._matcher.compute_logit_bias()
        self._check(started_s)
        return torch.from_numpy(np.frombuffer(allowed, dtype=np.uint8) != 0)

    def accept(self, token_id: int) -> None:
        """Take the next token; raises as `mask` does."""
        self._left_s += _ALLOWED_PER_TOKEN_S
        started_s = self._cpu_s()
        self._matcher.consume_token(token_id)
        self._check(started_s)

    @property
    def is_complete(self) -> bool:
        """Whether only an end token may follow."""
        return self._matcher.is_stopped()

    def _check(self, started_s: float) -> None:
        if self._matcher.is_error():
            self._on_error()
            raise told("The answer cannot be held to its constraint", self._matcher.get_error())
        self._left_s -= self._cpu_s() - started_s
        if self._left_s < 0:
            raise InvalidRequest(
                "The answer cannot be held to its constraint: it has become too complex to be "
                "followed token by token.",
                param="constraint",
            )


class GuidedConstraint:
    """A grammar made ready. `begin` may be called from any thread."""

    def __init__(self, matcher: LLMatcher, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._pristine, self._cpu_s = matcher, cpu_s
        # Copies share the lexer's states, which only grow: once there are too many, all that is
        # made of this constraint fails.
        self.is_spent = False

    def begin(self) -> GuidedMatcher:
        """Return the state before the first token."""
        return GuidedMatcher(self._pristine.deep_copy(), self._cpu_s, self._note_error)

    def _note_error(self) -> None:
        self.is_spent = True
