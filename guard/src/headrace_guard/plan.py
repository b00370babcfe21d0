"""A policy made ready to run: which classifiers look, and what each finding means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from headrace_guard.classifiers.base import Classifier, Match
from headrace_guard.classifiers.blocklist import CATEGORY as BLOCKLIST
from headrace_guard.classifiers.blocklist import Blocklist, BlocklistCache
from headrace_guard.classifiers.catalogue import RULES
from headrace_guard.classifiers.encoded import Encoded
from headrace_guard.classifiers.rule import Rule, RuleSet
from headrace_guard.classifiers.text_model import CATEGORIES as MODEL_CATEGORIES
from headrace_guard.classifiers.text_model import Asked
from headrace_guard.classifiers.unescaped import Unescaped
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
        asked: what trained classifiers are asked; None = nothing.
        terms_id: tells the key's own blocklist from any other; "" = it has none.
    """

    policy: Policy
    direction: Direction
    holding: tuple[Classifier, ...]
    watching: tuple[Classifier, ...]
    asked: Asked | None = None
    # Of a key's own blocklist; part of what a verdict depends on.
    terms_id: str = ""

    @property
    def looks(self) -> bool:
        """Whether anything is looked for at all."""
        return bool(self.all_classifiers or self.asked)

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
            self.policy.shadow_action(self.direction, match.category),
        )


# By policy and direction, without any key's blocklist.
Plans = Mapping[tuple[str, Direction], Plan]


class Planner:
    """Makes plans. A policy's own classifiers are built once, a key's blocklist once per key.

    Belongs to one thread. Plans that were given out stay as they are when others take their place.
    """

    def __init__(self, policies: Mapping[str, Policy], blocklists: BlocklistCache) -> None:
        self._blocklists = blocklists
        self._plans = plans_of(policies)

    def use(self, plans: Plans) -> None:
        """Make plans from these policies from now on."""
        self._plans = plans

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
        looking = _in_every_reading(plan.direction, (blocklist,))
        if _holds(action):
            return replace(plan, holding=(*looking, *plan.holding), terms_id=blocklist.terms_id)
        return replace(plan, watching=(*looking, *plan.watching), terms_id=blocklist.terms_id)


def plans_of(policies: Mapping[str, Policy]) -> Plans:
    """Make the plans of policies ready; takes a while, and may run on any thread."""
    return {
        (name, direction): _own_plan(policy, direction)
        for name, policy in policies.items()
        for direction in Direction
    }


def _own_plan(policy: Policy, direction: Direction) -> Plan:
    holding: list[Classifier] = []
    watching: list[Classifier] = []
    wanted = policy.rules[direction]
    if policy.blocklist and BLOCKLIST in wanted:
        side = holding if _holds(policy.action(direction, BLOCKLIST)) else watching
        side.append(Blocklist(policy.blocklist))
    rules = [rule for rule in RULES if rule.category in wanted]
    held = tuple(rule for rule in rules if _holds(policy.action(direction, rule.category)))
    watched = tuple(rule for rule in rules if not _holds(policy.action(direction, rule.category)))
    holding += [_rule_set(held)] if held else []
    watching += [_rule_set(watched)] if watched else []
    return Plan(
        policy,
        direction,
        _in_every_reading(direction, tuple(holding)),
        _in_every_reading(direction, tuple(watching)),
        _asked(policy, direction),
    )


def _in_every_reading(
    direction: Direction, classifiers: tuple[Classifier, ...]
) -> tuple[Classifier, ...]:
    if not classifiers:
        return ()
    if direction is Direction.OUTPUT:
        # Input is decoded before it is judged, see `headrace_guard.input_check`.
        classifiers = (*classifiers, Encoded(classifiers))
    return (Unescaped(classifiers),)


@lru_cache(maxsize=64)
def _rule_set(rules: tuple[Rule, ...]) -> RuleSet:
    # Compiling takes tens of milliseconds, and most policies share their sets.
    return RuleSet(rules)


def _asked(policy: Policy, direction: Direction) -> Asked | None:
    points = {
        category: rule.point
        for category, rule in policy.rules[direction].items()
        if category in MODEL_CATEGORIES
    }
    return Asked(points, policy.topic, policy.uses_judge) if points else None


def _holds(action: Action) -> bool:
    return action in (Action.REDACT, Action.BLOCK)
