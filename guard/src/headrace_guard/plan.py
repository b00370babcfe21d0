"""A policy made ready to run: which classifiers look, and what each finding means."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace_guard.classifiers.base import Classifier, Match
from headrace_guard.classifiers.blocklist import CATEGORY as BLOCKLIST
from headrace_guard.classifiers.blocklist import Blocklist, BlocklistCache
from headrace_guard.classifiers.catalogue import RULES
from headrace_guard.classifiers.rule import RuleSet
from headrace_guard.policy import DEFAULT_POLICY, Direction, Policy
from headrace_guard.verdict import Action, Finding


@dataclass(frozen=True)
class Plan:
    """What runs for one policy, one direction and one key's blocklist.

    Args:
        policy: the policy.
        direction: into the model or out of it.
        holding: classifiers whose findings must not get out (block, redact).
        watching: classifiers whose findings only are reported.
    """

    policy: Policy
    direction: Direction
    holding: tuple[Classifier, ...]
    watching: tuple[Classifier, ...]

    @property
    def all_classifiers(self) -> tuple[Classifier, ...]:
        """Everything that looks."""
        return self.holding + self.watching

    def finding(self, match: Match, part_idx: int) -> Finding:
        """Say what a match means."""
        return Finding(
            match.category,
            match.detector,
            match.score,
            part_idx,
            match.start,
            match.end,
            self.policy.action(self.direction, match.category),
        )


class Planner:
    """Makes plans. A policy's own classifiers are built once, a key's blocklist once per key.

    Belongs to one thread.
    """

    def __init__(self, policies: dict[str, Policy], blocklists: BlocklistCache) -> None:
        self._policies, self._blocklists = policies, blocklists
        self._plans = {
            (name, direction): _own_plan(policy, direction)
            for name, policy in policies.items()
            for direction in Direction
        }

    def plan(self, name: str, direction: Direction) -> Plan | None:
        """Return the plan of a policy without any key's blocklist; None = no such policy."""
        return self._plans.get((name or DEFAULT_POLICY, direction))

    def with_terms(self, plan: Plan, key_terms: tuple[str, ...]) -> Plan:
        """Return *plan* with a key's own blocklist added.

        Raises:
            BlocklistTooLargeError: the key's blocklist is.
        """
        action = plan.policy.action(plan.direction, BLOCKLIST)
        if not key_terms or action is Action.OFF:
            return plan
        blocklist = self._blocklists.get(key_terms)
        if _holds(action):
            return replace(plan, holding=(blocklist, *plan.holding))
        return replace(plan, watching=(blocklist, *plan.watching))


def _own_plan(policy: Policy, direction: Direction) -> Plan:
    holding: list[Classifier] = []
    watching: list[Classifier] = []
    actions = policy.actions[direction]
    if policy.blocklist and BLOCKLIST in actions:
        (holding if _holds(actions[BLOCKLIST]) else watching).append(Blocklist(policy.blocklist))
    rules = [rule for rule in RULES if rule.category in actions]
    held = [rule for rule in rules if _holds(actions[rule.category])]
    watched = [rule for rule in rules if not _holds(actions[rule.category])]
    holding += [RuleSet(held)] if held else []
    watching += [RuleSet(watched)] if watched else []
    return Plan(policy, direction, tuple(holding), tuple(watching))


def _holds(action: Action) -> bool:
    return action in (Action.REDACT, Action.BLOCK)
