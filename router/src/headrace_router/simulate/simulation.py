"""Runs a trace through a simulated fleet, once per policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from headrace_router.simulate.events import EventQueue
from headrace_router.simulate.fleet import Served, SimulatedFleet
from headrace_router.simulate.results import Result, score
from headrace_router.simulate.scenario import Scenario
from headrace_router.simulate.trace import TraceError, TraceRequest

# By then every router has heard of every worker.
_START_S = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's run."""

    result: Result
    served: list[Served]
    num_resyncs: int

    def ttfts(self) -> list[float]:
        """Return the times to first token of all requests that had one."""
        return [one.ttft_s for one in self.served if one.ttft_s is not None]


def simulate(requests: Sequence[TraceRequest], scenario: Scenario, policy: str) -> Run:
    """Let one policy serve a whole trace, to the end of the last request.

    Raises:
        TraceError: a request does not fit into a worker.
    """
    for request in requests:
        if request.prompt_tokens + request.output_tokens > scenario.kv_tokens:
            raise TraceError(
                f"request {request.request_id} needs more KV than the {scenario.kv_tokens} tokens"
                " of a worker"
            )
    began_s = time.perf_counter()
    events = EventQueue()
    fleet = SimulatedFleet(scenario, policy, events)
    served: list[Served] = []

    def arrive(idx: int) -> None:
        served.append(fleet.arrive(requests[idx]))
        if idx + 1 < len(requests):
            events.at(_START_S + requests[idx + 1].at_s, partial(arrive, idx + 1))

    events.at(_START_S + requests[0].at_s, partial(arrive, 0))
    while len(served) < len(requests) or fleet.num_open:
        events.step()
    busy_s = [worker.prefill_busy_s for worker in fleet.workers.values()]
    result = score(policy, served, busy_s, scenario, time.perf_counter() - began_s)
    return Run(result, served, sum(router.num_resyncs for router in fleet.routers))
