"""A model runner whose "KV" is the tokens themselves, so that every block mistake shows.

The logits at a position are a function of all tokens up to it as read *through the block table*. If
a block is lost, shared wrongly, overwritten or not copied, the output differs from `continuation`,
which computes the same function from the plain token list.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from headrace_testing import byte_tokenizer
from headrace_worker.model.batch import Row
from headrace_worker.sampling import Sampled, SampleSpec, sample

V = byte_tokenizer.VOCAB_SIZE
END_ID = byte_tokenizer.IM_END_ID
_UNWRITTEN = -1


def logits_after(token_ids: Sequence[int], *, may_end: bool = True) -> torch.Tensor:
    """Return the logits (V,) that follow *token_ids*: letters and spaces, sometimes the end."""
    generator = torch.Generator().manual_seed(hash(tuple(token_ids)) & 0x7FFFFFFF)
    row = torch.full((V,), -30.0)
    row[97:123] = torch.rand(26, generator=generator) * 4
    row[32] = 2.0
    if may_end and int(torch.randint(0, 24, (1,), generator=generator)) == 0:
        row[END_ID] = 9.0
    return row


def continuation(prompt: Sequence[int], num: int, spec: SampleSpec, *, may_end: bool) -> list[int]:
    """Return what a correct engine makes of *prompt*: at most *num* tokens, the end included."""
    tokens = list(prompt)
    for position in range(num):
        at = SampleSpec(
            temperature=spec.temperature,
            seed=spec.seed,
            choice_idx=spec.choice_idx,
            position=position,
        )
        (drawn,) = sample(logits_after(tokens, may_end=may_end)[None], [at])
        tokens.append(drawn.token_id)
        if drawn.token_id == END_ID:
            break
    return tokens[len(prompt) :]


class ToyRunner:
    """A `StepRunner` over blocks of tokens.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        may_end: whether the model ever says the end token.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, may_end: bool = True) -> None:
        self._kv = [[_UNWRITTEN] * block_size for _ in range(num_blocks)]
        self._block_size, self._may_end = block_size, may_end
        # Number of tokens in each step, for tests to look at.
        self.step_tokens: list[int] = []
        # A prompt with this token makes the step raise.
        self.poison_id: int | None = None
        # While cleared, steps wait: a frozen device.
        self.go = threading.Event()
        self.go.set()

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Write the rows' tokens, then read each position's past through its block table."""
        self.go.wait()
        if any(self.poison_id in row.token_ids for row in rows):
            raise RuntimeError("poisoned")
        if not all(row.token_ids for row in rows):
            raise ValueError("a row without a token")
        self.step_tokens.append(sum(len(row.token_ids) for row in rows))
        for row in rows:
            for pos, token_id in enumerate(row.token_ids, row.start_pos):
                block_idx, slot = divmod(pos, self._block_size)
                self._kv[row.block_table[block_idx]][slot] = token_id
        logits = [self._logits(row, end) for row in rows for end in _ends(row)]
        return torch.stack(logits) if logits else torch.empty(0, V)

    def hidden(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return a vector for each wanted token that depends on its whole past."""
        return self.forward(rows)

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
        """Draw as the real runner does on a CPU."""
        return sample(logits, specs)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy a block's tokens."""
        self._kv[dst] = list(self._kv[src])

    def _logits(self, row: Row, end: int) -> torch.Tensor:
        past = [slot for block_id in row.block_table for slot in self._kv[block_id]][:end]
        return logits_after(past, may_end=self._may_end)


def _ends(row: Row) -> range:
    end = row.start_pos + len(row.token_ids)
    return range(end - row.num_logits + 1, end + 1)
