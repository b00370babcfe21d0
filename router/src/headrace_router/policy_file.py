"""The versioned policy file: how the router picks. Read once, checked, frozen."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from random import Random
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace_common.toml_file import load_toml
from headrace_router.pairs import PairRules
from headrace_router.policies.consistent_hash import (
    ConsistentHashParameters,
    ConsistentHashPolicy,
)
from headrace_router.policies.hold import HoldParameters, HoldPolicy
from headrace_router.policies.min_ttft import MinTtftPolicy
from headrace_router.policies.overlap_load import OverlapLoadPolicy
from headrace_router.policies.policy import Policy
from headrace_router.policies.power_of_two import PowerOfTwoPolicy
from headrace_router.policies.prefix_threshold import (
    PrefixThresholdParameters,
    PrefixThresholdPolicy,
)
from headrace_router.policies.random_choice import RandomPolicy
from headrace_router.policies.round_robin import RoundRobinPolicy
from headrace_router.policies.session import SessionPolicy
from headrace_router.policies.weighted import WeightedPolicy

PolicyName = Literal[
    "hold",
    "min-ttft",
    "overlap-load",
    "weighted",
    "prefix-threshold",
    "least-load",
    "round-robin",
    "random",
    "power-of-two",
    "consistent-hash",
    "session",
]

# Where the defaults stand; the sections add the bounds.
_HOLD, _THRESHOLD = HoldParameters(), PrefixThresholdParameters()
_HASH, _PAIRS = ConsistentHashParameters(), PairRules()


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PickSection(_Section):
    """Which policy, and what it assumes."""

    policy: PolicyName = "hold"
    shadow: PolicyName | None = None
    default_prefill_tokens_per_s: float = Field(default=1000.0, gt=0, le=1e7)


class HoldSection(_Section):
    """Knobs of `hold`."""

    own_weight: float = Field(default=_HOLD.own_weight, ge=0, le=100)
    ageing_ratio: float = Field(default=_HOLD.ageing_ratio, ge=0, le=100)
    slack_s: float = Field(default=_HOLD.slack_s, ge=0, le=600)
    decode_weight: float = Field(default=_HOLD.decode_weight, ge=0, le=100)
    queue_weight: float = Field(default=_HOLD.queue_weight, ge=0, le=100)
    max_ratio: float = Field(default=_HOLD.max_ratio, ge=1, le=1000)
    max_difference: int = Field(default=_HOLD.max_difference, ge=1, le=100_000)
    gather_s: float = Field(default=_HOLD.gather_s, ge=0, le=1)


class WeightedSection(_Section):
    """Weights of the scorers."""

    prefix: float = Field(default=2.0, ge=0, le=100)
    kv: float = Field(default=1.0, ge=0, le=100)
    queue: float = Field(default=1.0, ge=0, le=100)
    load: float = Field(default=0.0, ge=0, le=100)
    session: float = Field(default=0.5, ge=0, le=100)


class OverlapLoadSection(_Section):
    """Knobs of `overlap-load`."""

    prefill_weight: float = Field(default=2.0, ge=0, le=100)


class PrefixThresholdSection(_Section):
    """Knobs of `prefix-threshold`."""

    least_match_ratio: float = Field(default=_THRESHOLD.least_match_ratio, ge=0, le=1)
    max_difference: int = Field(default=_THRESHOLD.max_difference, ge=0, le=1_000_000)
    max_ratio: float = Field(default=_THRESHOLD.max_ratio, ge=1, le=1000)


class ConsistentHashSection(_Section):
    """Knobs of `consistent-hash`."""

    head_blocks: int = Field(default=_HASH.head_blocks, ge=1, le=1_000_000)
    max_load_ratio: float = Field(default=_HASH.max_load_ratio, ge=1, le=1000)


class PairsSection(_Section):
    """What handing a prompt's KV over costs; see `pairs`."""

    setup_s: float = Field(default=_PAIRS.setup_s, ge=0, le=600)
    transfer_bytes_per_s: float = Field(default=_PAIRS.transfer_bytes_per_s, gt=0, le=1e15)
    stall_weight: float = Field(default=_PAIRS.stall_weight, ge=0, le=100)

    def rules(self) -> PairRules:
        """Return the knobs as the choice takes them."""
        return PairRules(**self.model_dump())


class QueueSection(_Section):
    """Bounds and order of the queues."""

    max_waiting_per_model: int = Field(default=1024, ge=0, le=1_000_000)
    max_wait_s: float = Field(default=60.0, gt=0, le=3600)
    promote_after_s: float = Field(default=30.0, gt=0, le=3600)
    goal_window_s: float = Field(default=1.0, ge=0, le=3600)
    max_batch_ttft_s: float = Field(default=30.0, ge=0, le=3600)


class FairnessSection(_Section):
    """Knobs of the virtual counters."""

    output_weight: float = Field(default=2.0, ge=0, le=100)
    slack_tokens: float = Field(default=8192, ge=0, le=1e9)


class ModelSection(_Section):
    """What differs for one model."""

    policy: PolicyName
    shadow: PolicyName | None = None


class PolicyFile(_Section):
    """The whole file."""

    version: Literal[1]
    pick: PickSection = PickSection()
    hold: HoldSection = HoldSection()
    weighted: WeightedSection = WeightedSection()
    overlap_load: OverlapLoadSection = OverlapLoadSection()
    prefix_threshold: PrefixThresholdSection = PrefixThresholdSection()
    consistent_hash: ConsistentHashSection = ConsistentHashSection()
    pairs: PairsSection = PairsSection()
    queue: QueueSection = QueueSection()
    fairness: FairnessSection = FairnessSection()
    models: dict[str, ModelSection] = Field(default_factory=dict)

    def policy_name(self, model: str) -> PolicyName:
        """Return the name of a model's policy."""
        section = self.models.get(model)
        return self.pick.policy if section is None else section.policy

    def make_policy(self, model: str, random: Random) -> Policy:
        """Make a model's policy.

        Args:
            model: served name.
            random: what breaks ties.
        """
        return _MAKERS[self.policy_name(model)](self, random)

    def make_shadow(self, model: str, random: Random) -> Policy | None:
        """Make the policy that is scored beside a model's own and never used, if there is one."""
        section = self.models.get(model)
        name = self.pick.shadow if section is None else section.shadow
        return None if name is None else _MAKERS[name](self, random)


# How each policy is made out of its section.
_MAKERS: Final[dict[PolicyName, Callable[[PolicyFile, Random], Policy]]] = {
    "hold": lambda file, random: HoldPolicy(HoldParameters(**file.hold.model_dump()), random),
    "min-ttft": lambda _file, random: MinTtftPolicy(random),
    "overlap-load": lambda file, random: OverlapLoadPolicy(
        file.overlap_load.prefill_weight, random
    ),
    "weighted": lambda file, random: WeightedPolicy("weighted", file.weighted.model_dump(), random),
    "prefix-threshold": lambda file, random: PrefixThresholdPolicy(
        PrefixThresholdParameters(**file.prefix_threshold.model_dump()), random
    ),
    "least-load": lambda _file, random: WeightedPolicy("least-load", {"load": 1.0}, random),
    "round-robin": lambda _file, _random: RoundRobinPolicy(),
    "random": lambda _file, random: RandomPolicy(random),
    "power-of-two": lambda _file, random: PowerOfTwoPolicy(random),
    "consistent-hash": lambda file, _random: ConsistentHashPolicy(
        ConsistentHashParameters(**file.consistent_hash.model_dump())
    ),
    "session": lambda _file, random: SessionPolicy(random),
}


def load_policy_file(path: Path | None) -> PolicyFile:
    """Read a policy file; None reads the packaged one.

    Raises:
        SettingsError: it cannot be read or says something wrong; the message lists every mistake.
    """
    packaged = resources.files("headrace_router") / "policy.toml"
    return load_toml(packaged if path is None else path, PolicyFile, "policy file")
