"""transformers, float32: static batches or its continuous batching (`MODEL:continuous`)."""

from __future__ import annotations

import time
from typing import Any

import figures
import torch
from transformers import AutoModelForCausalLM, GenerationConfig


class _Clock:
    """Notes when each token of a static batch was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:
        self.times.append(figures.now())

    def end(self) -> None:
        pass


class Static:
    """One batch at a time, all rows of one length."""

    def __init__(self, model: Any) -> None:  # Any: transformers' own type
        self._model = model

    def __call__(self, prompts: list[list[int]], num_tokens: int) -> figures.Times:
        """Generate; see figures.py. The streamer takes one row: rows advance together."""
        ids, clock = torch.tensor(prompts), _Clock()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=True,
                temperature=figures.TEMPERATURE,
                top_p=figures.TOP_P,
                top_k=0,
                streamer=clock,
            )
        # The first entry is the prompt.
        return [clock.times[1:] for _ in prompts]


class Continuous:
    """transformers' own paged engine."""

    def __init__(self, model: Any) -> None:  # Any: transformers' own type
        config = GenerationConfig(
            do_sample=True, temperature=figures.TEMPERATURE, top_p=figures.TOP_P, top_k=0,
            eos_token_id=-1, pad_token_id=0, max_new_tokens=1,
        )  # fmt: skip
        self._manager = model.init_continuous_batching(generation_config=config)
        self._manager.start()
        self._num_requests = 0

    def __call__(self, prompts: list[list[int]], num_tokens: int) -> figures.Times:
        """Generate; see figures.py."""
        times: dict[str, list[float]] = {}
        for ids in prompts:
            self._num_requests += 1
            name = f"request-{self._num_requests}"
            times[name] = []
            self._manager.add_request(
                ids, request_id=name, max_new_tokens=num_tokens, streaming=True
            )
        num_open = len(prompts)
        while num_open:
            output = self._manager.get_result(timeout=600)
            at, known = figures.now(), times[output.request_id]
            known += [at] * (len(output.generated_tokens) - len(known))
            num_open -= output.is_finished()
        return list(times.values())


def main() -> None:
    """Measure one of the two."""
    args = figures.arguments()
    path, _, kind = args.model.rpartition(":")
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    attention = "paged|sdpa" if kind == "continuous" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention
    ).eval()
    engine = Continuous(model) if kind == "continuous" else Static(model)
    figures.measure(engine, args, time.perf_counter() - started)


if __name__ == "__main__":
    main()
