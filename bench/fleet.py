"""What a user of a running fleet feels, as ratios inside one run.

Usage: ``python bench/fleet.py --base-url http://127.0.0.1:8080 --api-key KEY [--rounds 5]``.

Prints one JSON object: medians in seconds and tokens per second, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

_SENTENCE = "The ledger lists ink, paper, wax, thread, needles and lamp oil for the winter. "
_STORY = "Write a long story about a lighthouse and the people who live near it."


@dataclass(frozen=True)
class Stream:
    """One streamed answer. Seconds from the request's start; tokens as the usage event says."""

    ttft_s: float
    total_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token."""
        return (self.output_tokens - 1) / (self.total_s - self.ttft_s)


class Client:
    """Streams greedy chat answers."""

    def __init__(self, base_url: str, api_key: str, model: str) -> None:
        self._url, self._model = f"{base_url}/v1/chat/completions", model
        self._http = httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=300)

    def stream(self, prompt: str, max_tokens: int) -> Stream:
        """Stream one answer to its end."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s, ttft_s = time.monotonic(), 0.0
        usage: dict[str, Any] = {}  # Any: JSON
        with self._http.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"{response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if not ttft_s and any(c["delta"].get("content") for c in event["choices"]):
                    ttft_s = time.monotonic() - started_s
        return Stream(
            ttft_s=ttft_s,
            total_s=time.monotonic() - started_s,
            output_tokens=usage["completion_tokens"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )


def measure(client: Client, rounds: int) -> dict[str, float]:
    """Run all measurements and return their medians."""
    client.stream("Warm up.", 4)
    cold, warm = [], []
    for _ in range(rounds):
        prompt = f"Note {time.time_ns()}. " + _SENTENCE * 26
        cold.append(client.stream(prompt + "What comes first?", 2))
        time.sleep(0.3)
        warm.append(client.stream(prompt + "What comes last?", 2))
    alone = [client.stream(_STORY, 64) for _ in range(rounds)]
    with ThreadPoolExecutor(8) as pool:
        started_s = time.monotonic()
        together = list(pool.map(lambda i: client.stream(f"{i}: {_STORY}", 64), range(8)))
        together_s = time.monotonic() - started_s
    ttft_cold_s = statistics.median(s.ttft_s for s in cold)
    ttft_warm_s = statistics.median(s.ttft_s for s in warm)
    one_per_s = statistics.median(s.tokens_per_s for s in alone)
    eight_per_s = sum(s.output_tokens for s in together) / together_s
    return {
        "prompt_tokens": statistics.median(s.prompt_tokens for s in cold),
        "cached_tokens": statistics.median(s.cached_tokens for s in warm),
        "ttft_cold_s": round(ttft_cold_s, 3),
        "ttft_cached_s": round(ttft_warm_s, 3),
        "ttft_cold_over_cached": round(ttft_cold_s / ttft_warm_s, 1),
        "ttft_short_prompt_s": round(statistics.median(s.ttft_s for s in alone), 3),
        "one_stream_tokens_per_s": round(one_per_s, 1),
        "eight_streams_tokens_per_s": round(eight_per_s, 1),
        "eight_over_one": round(eight_per_s / one_per_s, 2),
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080")
    parser.add_argument("--api-key", required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    client = Client(options.base_url, options.api_key, options.model)
    print(json.dumps(measure(client, options.rounds), indent=1))


if __name__ == "__main__":
    main()
