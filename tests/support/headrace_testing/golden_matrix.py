"""The same greedy texts made in every way in which the engine may come to make them.

A way differs from the next in what shares a step, what was cached, how prompts are cut, who is
preempted and where a text was taken up again. None of it may change a token, nor the logits beyond
rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from headrace_common.blocks import BLOCK_SIZE_TOKENS, chain_key
from headrace_worker.engine.direct import DirectEngine, limits_for
from headrace_worker.engine.engine import StepRunner
from headrace_worker.engine.request import Priority, Request, SamplingParams, StopParams
from headrace_worker.model.batch import Row
from headrace_worker.model_host import ReadyModel
from headrace_worker.sampling import Sampled, SampleSpec

Row32 = np.ndarray[Any, np.dtype[np.float32]]
CHUNK_SIZES = (16, 32, 64, 128, 256, 512)
_BATCH = 16


@dataclass(frozen=True)
class Way:
    """How texts are made.

    Attributes:
        name: for the table.
        token_budget: most tokens in a step.
        max_running: texts at once.
        pool_share: blocks of the pool, as a multiple of what the longest text needs; 0 = plenty.
            The second half of the texts comes once the first runs, in a higher class.
        has_cache: blocks of the text's first making may be reused.
        is_resumed: each text starts with a random part of its output given.
    """

    name: str
    token_budget: int = 256
    max_running: int = _BATCH
    pool_share: float = 0.0
    has_cache: bool = False
    is_resumed: bool = False


ALONE = Way("alone", max_running=1)
WAYS: tuple[Way, ...] = (
    Way("random batches"),
    Way("cache hits", has_cache=True),
    *(Way(f"chunks of {size}", token_budget=size) for size in CHUNK_SIZES),
    Way("preempted", pool_share=1.5),
    Way("resumed at random", is_resumed=True),
)


@dataclass
class Texts:
    """What one way made: per prompt its tokens and the logits of each, (tokens, V) float32."""

    tokens: list[list[int]]
    logits: list[list[Row32]]
    num_preempted: int = 0
    cached_tokens: int = 0


class RecordingRunner:
    """A runner that passes each drawn row on; a request's seed is its number.

    Args:
        runner: does all the work.
        note: gets seed, position and row.
    """

    def __init__(self, runner: StepRunner, note: Callable[[int, int, torch.Tensor], None]) -> None:
        self._runner, self._note = runner, note

    def forward(self, rows: list[Row]) -> torch.Tensor:
        """Compute a step."""
        logits: torch.Tensor = self._runner.forward(rows)
        return logits

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        """Compute a step up to the last norm."""
        states: torch.Tensor = self._runner.hidden(rows)
        return states

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
        """Draw, and note what was drawn from."""
        for row, spec in zip(logits, specs, strict=True):
            self._note(spec.seed, spec.position, row)
        return self._runner.sample(logits, specs)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy one block's KV."""
        self._runner.copy_block(src, dst)


@dataclass
class Difference:
    """How one way's texts differ from those made alone.

    Attributes:
        way: which.
        num_texts: compared.
        num_equal: of them with the same tokens.
        max_kl: largest Kullback-Leibler divergence of a token's distribution, in nats.
        gaps: distances of the two best logits where texts first differ.
        num_preempted: times that a text was put back.
        cached_tokens: prompt tokens that were not computed again.
    """

    way: str
    num_texts: int = 0
    num_equal: int = 0
    max_kl: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_preempted: int = 0
    cached_tokens: int = 0


def make(
    model: ReadyModel, prompts: Sequence[list[int]], num_tokens: int, way: Way, seed: int = 0
) -> Texts:
    """Make *num_tokens* greedily after each prompt, in *way*; end tokens do not end a text."""
    maker = _Maker(model, prompts, num_tokens, way)
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    return maker.run(order)


def resumed(
    model: ReadyModel, prompts: Sequence[list[int]], alone: Texts, way: Way, seed: int = 0
) -> Texts:
    """Take each text up at a random token of what was made alone, and go on."""
    rng = random.Random(seed)
    num_tokens = len(alone.tokens[0])
    maker = _Maker(model, prompts, num_tokens, way)
    maker.given = [text[: rng.randrange(1, num_tokens)] for text in alone.tokens]
    texts = maker.run(rng.sample(range(len(prompts)), len(prompts)))
    texts.tokens = [[*given, *made] for given, made in zip(maker.given, texts.tokens, strict=True)]
    return texts


def compare(way: str, alone: Texts, other: Texts) -> Difference:
    """Compare the tokens of *other*, and the logits up to the first token that differs."""
    result = Difference(way, len(alone.tokens))
    result.num_preempted, result.cached_tokens = other.num_preempted, other.cached_tokens
    for idx, (one, two) in enumerate(zip(alone.tokens, other.tokens, strict=True)):
        same = next(
            (at for at, pair in enumerate(zip(one, two, strict=True)) if len({*pair}) > 1), None
        )
        result.num_equal += same is None
        if same is not None:
            best = np.sort(alone.logits[idx][same])[-2:]
            result.gaps.append(float(best[1] - best[0]))
        start = len(one) - len(other.logits[idx])
        end = len(one) if same is None else same + 1
        for at in range(start, end):
            kl = divergence(alone.logits[idx][at], other.logits[idx][at - start])
            result.max_kl = max(result.max_kl, kl)
    return result


def gap(row: Row32) -> float:
    """Return the distance of a row's two best logits."""
    best = np.partition(row, -2)[-2:]
    return float(best[1] - best[0])


def divergence(reference: Row32, other: Row32) -> float:
    """KL(reference || other) of two rows of logits, in nats."""
    one, two = (torch.from_numpy(row).double().log_softmax(-1) for row in (reference, other))
    return float((one.exp() * (one - two)).sum())


def kl_of_top(top: Sequence[Sequence[float]], logits: torch.Tensor) -> float:
    """KL of a reference's likeliest tokens to a row of ours, all other tokens taken as one.

    Args:
        top: pairs of token id and log probability.
        logits: (V,).
    """
    ours = logits.double().log_softmax(-1)
    pairs = [(value, float(ours[int(token_id)])) for token_id, value in top]
    rest = [1.0 - sum(math.exp(pair[i]) for pair in pairs) for i in (0, 1)]
    kl = sum(math.exp(p) * (p - q) for p, q in pairs)
    return kl + (rest[0] * math.log(rest[0] / rest[1]) if min(rest) > 1e-7 else 0.0)


class _Maker:
    """One engine's run over all prompts."""

    def __init__(
        self, model: ReadyModel, prompts: Sequence[list[int]], num_tokens: int, way: Way
    ) -> None:
        self._prompts, self._num_tokens, self._way = prompts, num_tokens, way
        self._rows: list[list[Row32]] = [[] for _ in prompts]
        self.given: list[list[int]] = [[] for _ in prompts]
        runner = RecordingRunner(model.runner, self._note)
        self._model = replace(model, runner=runner)

    def run(self, order: Sequence[int]) -> Texts:
        texts = Texts([[] for _ in self._prompts], self._rows)
        limits = limits_for(self._model, self._way.token_budget, self._way.max_running)
        with DirectEngine(self._model, limits, self._num_blocks()) as engine:
            if self._way.has_cache:
                self._drain(engine, order, texts)
                texts.tokens = [[] for _ in self._prompts]
                texts.cached_tokens = 0
                for rows in self._rows:
                    rows.clear()
            self._drain(engine, order, texts)
            texts.num_preempted = engine.engine.load.num_preemptions_total
        return texts

    def _drain(self, engine: DirectEngine, order: Sequence[int], texts: Texts) -> None:
        later = order[len(order) // 2 :] if self._way.pool_share else []
        for idx in order[: len(order) - len(later)]:
            engine.submit(self._request(idx, Priority.BATCH))
        open_keys = set(order)
        while open_keys:
            _, output = engine.next()
            idx = output.key
            if output.choices:
                for other in later:
                    engine.submit(self._request(other, Priority.HIGH))
                later = []
            for part in output.choices:
                texts.tokens[idx] += [token.token_id for token in part.tokens]
            if output.is_last:
                open_keys.discard(idx)
                texts.cached_tokens += output.usage.cached_tokens if output.usage else 0

    def _request(self, idx: int, priority: Priority) -> Request:
        return Request(
            key=idx,
            request_id=f"text-{idx}",
            prompt_token_ids=self._prompts[idx],
            sampling=SamplingParams(temperature=0.0),
            stopping=StopParams(max_tokens=self._num_tokens),
            seed=idx,
            priority=priority,
            chain_key=chain_key("golden"),
            resume={0: self.given[idx]} if self.given[idx] else {},
            skip_prefix_cache=not self._way.has_cache,
        )

    def _num_blocks(self) -> int | None:
        if not self._way.pool_share:
            return None
        longest = max(map(len, self._prompts)) + self._num_tokens
        return int(self._way.pool_share * (longest // BLOCK_SIZE_TOKENS + 1))

    def _note(self, seed: int, position: int, row: torch.Tensor) -> None:
        rows, at = self._rows[seed], position - len(self.given[seed])
        # A preempted text's next token is drawn once all the same; a retry would overwrite.
        del rows[at:]
        rows.append(row.detach().cpu().float().numpy().copy())


def all_ways(
    model: ReadyModel, prompts: Sequence[list[int]], alone: Texts, ways: Sequence[Way] = WAYS
) -> Iterator[Difference]:
    """Make the texts in each way and compare them with those made alone."""
    for way in ways:
        if way.is_resumed:
            texts = resumed(model, prompts, alone, way)
        else:
            texts = make(model, prompts, len(alone.tokens[0]), way)
        yield compare(way.name, alone, texts)
