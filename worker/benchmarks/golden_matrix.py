"""Greedy texts of the real model, made in every way, against transformers.

    python worker/benchmarks/golden_matrix.py [MODEL.gguf] [--prompts 200] [--tokens 16]
        [--threads 2] [--backend cpu] [--activations float32] [--ways alone "cache hits" ...]

The whole engine makes each text alone, in random batches, with cached prefixes, with prompts cut
into chunks of 16 to 512, preempted in a tiny pool, and resumed at a random token. The texts made
alone are compared with transformers (in a process of its own, float32, weights dequantised by its
own code), the others with those. Printed: texts with identical tokens, the largest divergence of a
token's distribution, and where texts part the distance of the two best logits there. Exit code 1 =
a text differs although the best logit was clear, or a divergence is above 1e-4 (to transformers) or
1e-6 (among ourselves). With rounded activations the bounds are those of bf16: 5e-3 to transformers,
and a best logit is clear by 0.5.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headrace_testing.golden_matrix import (
    ALONE,
    WAYS,
    Difference,
    Texts,
    all_ways,
    compare,
    make,
)
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model.loader import load_model
from headrace_worker.model.runner import ModelRunner
from headrace_worker.model_host import ReadyModel
from headrace_worker.prepare import ensure_prepared
from headrace_worker.settings import default_cache_dir

_GOLDEN = Path(__file__).parents[1] / "golden"
_NUM_BLOCKS = 1024
_MAX_PROMPT_TOKENS = 400
MAX_KL_TO_REFERENCE, MAX_KL_AMONG_US = 1e-4, 1e-6
# Two logits closer than this are decided by rounding, of float32 and of activations.
CLEAR_GAP = 2e-3
MAX_KL_ROUNDED, CLEAR_GAP_ROUNDED = 5e-3, 0.5


def main() -> int:
    """Run all; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    home = default_cache_dir().parent / "models"
    parser.add_argument(
        "model", type=Path, nargs="?", default=home / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", default="cpu", help="cpu or torch")
    parser.add_argument(
        "--activations", choices=[each.name.lower() for each in Rounding], default="float32"
    )
    parser.add_argument("--ways", nargs="*", help="some of the ways only", default=None)
    args = parser.parse_args()
    folder = ensure_prepared(args.model, default_cache_dir())
    loaded = load_model(folder)
    rounding = Rounding[args.activations.upper()]
    runner = ModelRunner(
        loaded, _NUM_BLOCKS, num_threads=args.threads, backend=args.backend, rounding=rounding
    )
    table = TokenTable.from_json(loaded.info.tokenizer_json)
    model = ReadyModel(loaded.info, runner, table, _NUM_BLOCKS)
    prompts = _prompts(Tokenizer.from_str(loaded.info.tokenizer_json.decode()), args.prompts)
    _say(f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, {args.tokens} tokens each")
    _say("way                  identical  largest KL  least clear parting  put back  cached")
    alone = make(model, prompts, args.tokens, ALONE)
    ways = [way for way in WAYS if args.ways is None or way.name in args.ways]
    started_s = time.perf_counter()
    reference = _reference(args.model, prompts, alone, args.threads)
    to_reference = compare("transformers", reference, alone)
    if rounding is Rounding.FLOAT32:
        wrong = _report(to_reference, MAX_KL_TO_REFERENCE)
    else:
        wrong = _report(to_reference, MAX_KL_ROUNDED, CLEAR_GAP_ROUNDED)
    for difference in all_ways(model, prompts, alone, ways):
        wrong |= _report(difference, MAX_KL_AMONG_US)
    _say(f"{time.perf_counter() - started_s:.0f} s; {'NOT as it must be' if wrong else 'all hold'}")
    return int(wrong)


def _prompts(tokenizer: Tokenizer, number: int) -> list[list[int]]:
    """Cut the golden run's texts in many places: short and long, many with shared beginnings."""
    golden = json.loads(
        (_GOLDEN.parents[1] / "tests" / "golden" / "greedy_smollm2.json").read_text("utf-8")
    )
    texts = [case["text"] for case in golden["cases"]]
    texts += [entry["text"] for entry in golden["tokenizer"]]
    sources = [ids for text in texts if (ids := tokenizer.encode(text).ids)]
    rng = random.Random(7)
    prompts: list[list[int]] = []
    seen: set[tuple[int, ...]] = set()
    while len(prompts) < number:
        ids = rng.choice(sources) + rng.choice(sources) * rng.randrange(2)
        prompt = ids[: round(min(len(ids), _MAX_PROMPT_TOKENS) ** rng.uniform(0.4, 1))]
        if tuple(prompt) not in seen:
            seen.add(tuple(prompt))
            prompts.append(prompt)
    return prompts


def _reference(gguf: Path, prompts: list[list[int]], alone: Texts, threads: int) -> Texts:
    with tempfile.TemporaryDirectory() as name:
        texts, logits = Path(name) / "texts.json", Path(name) / "logits.npy"
        pairs = list(zip(prompts, alone.tokens, strict=True))
        texts.write_text(json.dumps(pairs), encoding="utf-8")
        script = _GOLDEN / "reference_logits.py"
        paths = map(str, (sys.executable, script, gguf, texts, logits))
        command = [*paths, "--threads", str(threads)]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"the reference failed: {done.stderr.decode()[-2000:]}")
        rows = np.load(logits)
    tokens = [[int(row.argmax()) for row in text] for text in rows]
    return Texts(tokens, [list(text) for text in rows])


def _report(it: Difference, max_kl: float, clear_gap: float = CLEAR_GAP) -> bool:
    """Print one line; True if it is not as it must be."""
    parting = f"{min(it.gaps):.1e}" if it.gaps else "-"
    _say(
        f"{it.way:20} {it.num_equal:4}/{it.num_texts:<4}  {it.max_kl:10.1e}  {parting:>19}"
        f"  {it.num_preempted:8}  {it.cached_tokens:6}"
    )
    return it.max_kl > max_kl or any(gap > clear_gap for gap in it.gaps)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
