"""Whole simulations, small ones."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from headrace_router.policy_file import PolicyName
from headrace_router.simulate.__main__ import main
from headrace_router.simulate.cost_model import CostModel
from headrace_router.simulate.results import plot, quantile, table
from headrace_router.simulate.scenario import Scenario
from headrace_router.simulate.simulation import simulate
from headrace_router.simulate.trace import TraceError, TraceRequest

KEYS = {"policy", "hit_ratio", "ttft_mean_s", "ttft_p99_s", "slo_ratio", "imbalance_ratio"}


def conversations(count: int = 150, seed: int = 1) -> list[TraceRequest]:
    """Some talks over one system prompt, their turns mixed, in bursts."""
    random = Random(seed)
    talks: dict[int, list[int]] = {}
    made = []
    for number in range(count):
        talk = random.randrange(20)
        chain = talks.setdefault(talk, [0])
        chain.extend(1000 * (talk + 1) + len(chain) + i for i in range(random.randrange(1, 6)))
        if len(chain) > 40:
            del chain[1:]
        tokens = 512 * len(chain) + random.randrange(500)
        at_s = (number // 4) * 1.6
        made.append(TraceRequest(f"r{number}", at_s, tokens, 1 + number % 90, tuple(chain)))
    return made


SMALL = Scenario(num_workers=3, kv_tokens=100_000)


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_every_policy_serves_every_request(policy: str) -> None:
    """Nothing is lost, and figures are in their ranges."""
    run = simulate(conversations(60), SMALL, policy)
    assert all(one.ttft_s is not None and one.ttft_s > 0 for one in run.served)
    assert 0 < run.result.hit_ratio < 1
    assert run.result.imbalance_ratio >= 1
    assert run.result.num_refused == 0


def test_a_seed_repeats_itself() -> None:
    """Also with events lost and several routers."""
    scenario = Scenario(num_workers=3, kv_tokens=50_000, num_routers=2, event_loss_ratio=0.1)
    runs = [simulate(conversations(60), scenario, "hold").ttfts() for _ in range(2)]
    assert runs[0] == runs[1]


def test_hold_beats_taking_turns() -> None:
    """Otherwise the simulator, or the policy, is broken."""
    results = {
        policy: simulate(conversations(), SMALL, policy).result
        for policy in ("hold", "round-robin")
    }
    assert results["hold"].hit_ratio > results["round-robin"].hit_ratio
    assert results["hold"].ttft_mean_s < results["round-robin"].ttft_mean_s


def test_lost_events_are_read_again() -> None:
    """Each gap leads to one reading of the replica's blocks; hits hardly suffer."""
    scenario = Scenario(num_workers=3, kv_tokens=100_000, event_loss_ratio=0.02)
    lossy, whole = (
        simulate(conversations(), scenario, "hold"),
        simulate(conversations(), SMALL, "hold"),
    )
    assert lossy.num_resyncs > 0
    assert whole.num_resyncs == 0
    assert lossy.result.hit_ratio > whole.result.hit_ratio - 0.05
    assert lossy.result.phantom_ratio < 0.05


def test_four_routers_do_about_as_well_as_one() -> None:
    """They bid for each opening; those that tell one another nothing herd."""
    traces = [
        [replace(one, at_s=one.at_s * 0.4) for one in conversations(seed=seed)] for seed in (1, 2)
    ]
    one, several, apart = (
        sum(
            simulate(
                dense, replace(SMALL, num_routers=number, share_bookings=shared), "hold"
            ).result.ttft_mean_s
            for dense in traces
        )
        for number, shared in ((1, True), (4, True), (4, False))
    )
    assert several < one * 1.25
    assert apart > one * 1.25


@pytest.mark.parametrize("spread_s", [0.02, 1.0])
@pytest.mark.parametrize("stream_s", [0.002, 0.007])
def test_forty_at_once_with_a_hot_prefix_use_both_workers(spread_s: float, stream_s: float) -> None:
    """As on a CPU: prompts cost 2 ms a token, each stream some ms a step; one worker is warm."""
    random, head, tokens = Random(1), tuple(range(28)), 460
    costs = CostModel(0.012, stream_s / tokens, prefill_token_s=2e-3, attention_tokens=5000)
    scenario = Scenario(
        num_workers=2,
        kv_tokens=30_000,
        block_tokens=16,
        chunk_tokens=256,
        costs=costs,
        warm_up_ratio=0,
    )
    times = sorted(10 + random.random() * spread_s for _ in range(40))
    burst = [TraceRequest(f"r{idx}", at_s, tokens, 48, head) for idx, at_s in enumerate(times)]
    run = simulate([TraceRequest("first", 0.0, tokens, 2, head), *burst], scenario, "hold")
    workers = [one.worker for one in run.served[1:]]
    assert max(map(workers.count, workers)) <= 0.75 * 40


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    """It would wait for ever."""
    with pytest.raises(TraceError, match="r0"):
        simulate([TraceRequest("r0", 0.0, 900, 200, ())], Scenario(kv_tokens=1000), "hold")


def test_quantiles_are_values_that_were_seen() -> None:
    """The smallest one that enough do not exceed."""
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert quantile([], 0.5) != quantile([], 0.5)


def test_the_command_line_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the shape that scripts rely on."""
    path = tmp_path / "t.jsonl"
    rows = [
        {
            "timestamp": one.at_s * 1000,
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
            "hash_ids": one.chain,
        }
        for one in conversations(30)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    options = ["--trace", str(path), "--workers", "2", "--policies", "hold,random", "--json"]
    assert main(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in told["policies"]] == ["hold", "random"]
    assert all(one.keys() >= KEYS for one in told["policies"])
    assert main(["--trace", str(tmp_path / "absent.jsonl")]) == 2


def test_people_get_a_table_and_a_plot() -> None:
    """One row and one mark per policy."""
    run = simulate(conversations(30), SMALL, "hold")
    assert "hold" in table([run.result])
    drawn = plot({"hold": run.ttfts(), "none": []})
    assert "* hold" in drawn
    assert drawn.count("*") > 20
