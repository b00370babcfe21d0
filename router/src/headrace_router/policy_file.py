"""The versioned policy file: how the router picks. Read once, checked, frozen."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from random import Random
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_common.settings import SettingsError
from headrace_router.policies import (
    HoldParameters,
    HoldPolicy,
    Policy,
    RandomPolicy,
    RoundRobinPolicy,
    ScoredPolicy,
)

PolicyName = Literal["hold", "least-load", "weighted", "round-robin", "random"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PickSection(_Section):
    """Which policy, and what it assumes."""

    policy: PolicyName = "hold"
    default_prefill_tokens_per_s: float = Field(default=1000.0, gt=0, le=1e7)


class HoldSection(_Section):
    """Knobs of `hold`."""

    own_weight: float = Field(default=2.0, ge=0, le=100)
    ageing_ratio: float = Field(default=0.2, ge=0, le=100)
    slack_s: float = Field(default=0.1, ge=0, le=600)


class WeightedSection(_Section):
    """Weights of the scorers."""

    prefix: float = Field(default=2.0, ge=0, le=100)
    load: float = Field(default=1.0, ge=0, le=100)
    session: float = Field(default=0.5, ge=0, le=100)


class QueueSection(_Section):
    """Bounds of the queues."""

    max_waiting_per_model: int = Field(default=1024, ge=0, le=1_000_000)
    max_wait_s: float = Field(default=60.0, gt=0, le=3600)


class FairnessSection(_Section):
    """Knobs of the virtual counters."""

    output_weight: float = Field(default=2.0, ge=0, le=100)
    slack_tokens: float = Field(default=8192, ge=0, le=1e9)


class ModelSection(_Section):
    """What differs for one model."""

    policy: PolicyName


class PolicyFile(_Section):
    """The whole file."""

    version: Literal[1]
    pick: PickSection = PickSection()
    hold: HoldSection = HoldSection()
    weighted: WeightedSection = WeightedSection()
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
        match self.policy_name(model):
            case "hold":
                return HoldPolicy(HoldParameters(**self.hold.model_dump()), random)
            case "least-load":
                return ScoredPolicy("least-load", {"load": 1.0}, random)
            case "weighted":
                return ScoredPolicy("weighted", self.weighted.model_dump(), random)
            case "round-robin":
                return RoundRobinPolicy()
            case "random":
                return RandomPolicy(random)


def load_policy_file(path: Path | None) -> PolicyFile:
    """Read a policy file; None reads the packaged one.

    Raises:
        SettingsError: it cannot be read or says something wrong; the message lists every mistake.
    """
    try:
        if path is None:
            text = (resources.files("headrace_router") / "policy.toml").read_text()
        else:
            text = path.read_text()
        return PolicyFile.model_validate(tomllib.loads(text))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"policy file {path}: {error}") from error
    except ValidationError as error:
        mistakes = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        )
        raise SettingsError(f"policy file {path}: {mistakes}") from error
