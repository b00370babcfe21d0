r"""Trains and measures the heads of cascades (`docs/cascade/README.md`).

    python bench/cascade.py answer --model SMALL.gguf --out small.jsonl    (and for the large one)
    python bench/cascade.py train --small small.jsonl --large large.jsonl \
        --small-name smollm2-135m-instruct --large-name gemma3-270m --price-ratio 2 \
        --head HEAD.json --plot CURVE.svg

Tasks are generated and graded by `cascade_tasks.py`. `answer` may be stopped and started again: it
goes on where it was. `train` takes one half of the tasks to learn and prints what it finds on the
other: the curve of cost and quality against a draw at random and an oracle.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from dataclasses import asdict
from itertools import count
from pathlib import Path

from cascade_curve import Answered, Measurement, learn, threshold_of
from cascade_tasks import Task, is_right, make_tasks
from tokenizers import Tokenizer

from headrace_common.blocks import BLOCK_SIZE_TOKENS, chain_key
from headrace_common.clock import SystemClock
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.request import Request, SamplingParams, StopParams
from headrace_worker.engine.scheduler import SchedulerLimits
from headrace_worker.model_host import ModelHost, ReadyModel
from headrace_worker.settings import default_cache_dir

_SEED = 20261129
_MAX_TOKENS = 24
_AT_ONCE = 16
_WAIT_S = 120.0


class Answerer:
    """A model in this process, greedy, many prompts at once.

    Args:
        model: what answers.
    """

    def __init__(self, model: ReadyModel) -> None:
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._keys, info = count(1), model.info
        self._tokenizer = Tokenizer.from_str(info.tokenizer_json.decode())
        self._bos = [info.bos_token_id] if info.add_bos and info.bos_token_id is not None else []
        self._ends = frozenset(info.eos_token_ids)
        self._engine = Engine(
            runner=model.runner,
            num_blocks=model.num_blocks,
            limits=SchedulerLimits(
                token_budget=512,
                max_running=_AT_ONCE,
                max_waiting=256,
                context_tokens=info.context_tokens,
                block_size=BLOCK_SIZE_TOKENS,
            ),
            table=model.table,
            events=BlockEventLog(),
            sink=self._take,
            clock=SystemClock(),
            on_step=lambda _facts: None,
        )

    def __enter__(self) -> Answerer:
        self._engine.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._engine.stop()

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._outputs.put(output)

    def answer(self, tasks: list[Task]) -> list[Answered]:
        """Answer tasks together; in their order."""
        asked = [self._submit(task) for task in tasks]
        texts: dict[int, str] = dict.fromkeys((key for key, _ in asked), "")
        made: dict[int, int] = dict.fromkeys(texts, 0)
        left = set(texts)
        while left:
            output = self._outputs.get(timeout=_WAIT_S)
            if output.error is not None:
                raise output.error
            for choice in output.choices:
                texts[output.key] += choice.text
                made[output.key] += len(choice.tokens)
            if output.is_last:
                left.discard(output.key)
        return [
            Answered(task.kind, task.prompt, text, is_right(task, text), num, made[key])
            for task, (key, num) in zip(tasks, asked, strict=True)
            for text in (texts[key],)
        ]

    def _submit(self, task: Task) -> tuple[int, int]:
        key = next(self._keys)
        ids = self._bos + self._tokenizer.encode(task.prompt, add_special_tokens=False).ids
        self._engine.submit(
            Request(
                key=key,
                request_id=f"cascade-{key}",
                prompt_token_ids=ids,
                sampling=SamplingParams(temperature=0.0),
                stopping=StopParams(max_tokens=_MAX_TOKENS, stop=("\n",), end_token_ids=self._ends),
                seed=0,
                chain_key=chain_key("cascade"),
            )
        )
        return key, len(ids)


def answer(args: argparse.Namespace) -> None:
    """Let one model answer every task; add to the file what is missing in it."""
    tasks = make_tasks(args.per_kind, _SEED)
    done = len(args.out.read_text().splitlines()) if args.out.exists() else 0
    model = ModelHost(args.model, default_cache_dir(), 16_384, args.threads).load()
    with Answerer(model) as answerer, args.out.open("a") as out:
        started_s = time.monotonic()
        for start in range(done, len(tasks), _AT_ONCE):
            for answered in answerer.answer(tasks[start : start + _AT_ONCE]):
                out.write(json.dumps(asdict(answered)) + "\n")
            out.flush()
            print(f"{start + _AT_ONCE}/{len(tasks)} {time.monotonic() - started_s:.0f} s")


def read(path: Path) -> list[Answered]:
    """Read a file of answers."""
    return [Answered(**json.loads(line)) for line in path.read_text().splitlines()]


def train(args: argparse.Namespace) -> None:
    """Learn on one half, measure on the other, write the head and the plot, print the table."""
    pairs = list(zip(read(args.small), read(args.large), strict=True))
    if any(a.prompt != b.prompt for a, b in pairs):
        raise SystemExit("the two files answer different tasks")
    # Small generators repeat themselves: what is measured was never seen, and counts once.
    seen = {small.prompt for small, _ in pairs[0::2]}
    held_out = list({a.prompt: (a, b) for a, b in pairs[1::2] if a.prompt not in seen}.values())
    curves = [learn(pairs[0::2]), learn(pairs[0::2][0::2]), learn(pairs[0::2][1::2])]
    found = Measurement(held_out, curves[0], args.price_ratio, threshold_of(pairs[0::2], curves))
    print(found.table())
    if args.plot:
        args.plot.write_text(found.svg())
    if args.head:
        measured = found.measured(args.small_name, args.large_name)
        args.head.write_text(json.dumps(curves[0].file(measured), indent=1) + "\n")


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("answer", help="let one model answer every task")
    asking.add_argument("--model", type=Path, required=True)
    asking.add_argument("--out", type=Path, required=True)
    asking.add_argument("--per-kind", type=int, default=120)
    asking.add_argument("--threads", type=int, default=1)
    asking.set_defaults(run=answer)
    training = commands.add_parser("train", help="learn a head and measure it")
    for side in ("small", "large"):
        training.add_argument(f"--{side}", type=Path, required=True)
        training.add_argument(f"--{side}-name", required=True)
    training.add_argument(
        "--price-ratio", type=float, default=2.0, help="of a token, large : small"
    )
    training.add_argument("--head", type=Path)
    training.add_argument("--plot", type=Path)
    training.set_defaults(run=train)
    args = parser.parse_args()
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
