"""GenerateRequest -> Request: defaults are read as the contract says, mistakes name their field."""

import pytest

from headrace_common.blocks import chain_key
from headrace_common.errors import InvalidRequest
from headrace_contracts.types.v1.types_pb2 import PRIORITY_BATCH, PRIORITY_UNSPECIFIED
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.engine.request import Priority
from headrace_worker.generate_request import RequestRules, parse

RULES = RequestRules("m", "f" * 64, 100, frozenset([2]))


def message(**fields) -> pb.GenerateRequest:
    base = {
        "request_id": "r",
        "model": "m",
        "prompt_token_ids": [1, 2],
        "stopping": pb.Stopping(max_tokens=5),
    }
    return pb.GenerateRequest(**(base | fields))


def test_zero_means_off():
    """0 is off for top_p, penalties and n."""
    request = parse(message(), RULES, 7, 3.0)
    assert (request.key, request.accepted_s) == (7, 3.0)
    assert request.num_choices == 1
    assert (request.sampling.top_p, request.sampling.repetition_penalty) == (1.0, 1.0)
    assert request.stopping.end_token_ids == {2}
    assert request.num_top_logprobs is None
    assert request.ttft_slo_s is None


def test_priority_unspecified_is_standard():
    """Unspecified is read as STANDARD."""
    for given, expected in (
        (PRIORITY_UNSPECIFIED, Priority.STANDARD),
        (PRIORITY_BATCH, Priority.BATCH),
    ):
        assert parse(message(priority=given), RULES, 1, 0.0).priority is expected


def test_the_chain_key_depends_on_the_salt():
    """Tenants' caches are apart."""
    request = parse(message(cache_salt=b"tenant"), RULES, 1, 0.0)
    assert request.chain_key == chain_key("f" * 64, "", b"tenant")
    assert request.chain_key != parse(message(), RULES, 1, 0.0).chain_key


def test_ignore_eos_keeps_the_callers_own_end_tokens():
    """Only the model's end tokens are ignored."""
    stopping = pb.Stopping(max_tokens=5, ignore_eos=True, stop_token_ids=[9])
    assert parse(message(stopping=stopping), RULES, 1, 0.0).stopping.end_token_ids == {9}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"request_id": ""}, "request_id"),
        ({"n": 65}, "n"),
        ({"prompt_token_ids": [100]}, "prompt_token_ids"),
        ({"logprobs": pb.LogprobOptions(top=21)}, "logprobs.top"),
        ({"priority": 77}, "priority"),
        ({"sampling": pb.Sampling(temperature=-1)}, "sampling.temperature"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": pb.Sampling(top_p=1.5)}, "sampling.top_p"),
        ({"sampling": pb.Sampling(min_p=2)}, "sampling.min_p"),
        ({"sampling": pb.Sampling(presence_penalty=float("inf"))}, "sampling.presence_penalty"),
        ({"sampling": pb.Sampling(logit_bias={100: 1.0})}, "sampling.logit_bias"),
        ({"sampling": pb.Sampling(logit_bias={1: float("nan")})}, "sampling.logit_bias"),
        ({"sampling": pb.Sampling(allowed_token_ids=[100])}, "sampling.allowed_token_ids"),
        ({"stopping": pb.Stopping(max_tokens=0)}, "stopping.max_tokens"),
        ({"stopping": pb.Stopping(max_tokens=1, min_tokens=2)}, "stopping.min_tokens"),
        ({"stopping": pb.Stopping(max_tokens=1, stop=[""])}, "stopping.stop"),
        ({"stopping": pb.Stopping(max_tokens=1, stop=["x"] * 65)}, "stopping.stop"),
        ({"stopping": pb.Stopping(max_tokens=1, stop_token_ids=[100])}, "stopping.stop_token_ids"),
        ({"resume": [pb.ResumeChoice(choice_idx=1)]}, "resume"),
        ({"resume": [pb.ResumeChoice(), pb.ResumeChoice()]}, "resume"),
        ({"resume": [pb.ResumeChoice(output_token_ids=[100])]}, "resume"),
    ],
)
def test_a_mistake_is_refused_by_name(fields, param):
    """The error's `param` is the field at fault."""
    with pytest.raises(InvalidRequest) as refusal:
        parse(message(**fields), RULES, 1, 0.0)
    assert refusal.value.param == param
