"""Which classifiers hold and which only watch."""

from headrace_guard.classifiers.base import Classifier
from headrace_guard.normalise import Window
from headrace_guard.policy import Direction
from headrace_guard.verdict import Action
from headrace_testing.guard_plans import plan


def test_only_what_must_not_get_out_is_held() -> None:
    """Flagged categories watch; what is off does not run."""
    made = plan(output='"pii.email" = "redact"\n"pii.card" = "flag"\n"pii.iban" = "off"')
    window = Window("a@example.org 4111111111111111 DE89370400440532013000")

    def found(classifiers: tuple[Classifier, ...]) -> list[str]:
        return [match.category for one in classifiers for match in one.find(window)]

    assert found(made.holding) == ["pii.email"]
    assert found(made.watching) == ["pii.card"]
    assert (len(made.holding), len(made.watching)) == (1, 1)


def test_a_blocklist_goes_where_its_action_says() -> None:
    """The policy's own terms and the key's are separate, so that the policy's is built once."""
    blocked = plan(output='blocklist = "block"', own_terms=("a",), terms=("b",))
    flagged = plan(output='blocklist = "flag"', own_terms=("a",), terms=("b",))
    assert (len(blocked.holding), len(blocked.watching)) == (2, 0)
    assert (len(flagged.holding), len(flagged.watching)) == (0, 2)


def test_without_terms_or_with_the_category_off_no_blocklist_runs() -> None:
    """Nothing to look for costs nothing."""
    assert plan(output='blocklist = "block"').all_classifiers == ()
    assert plan(output="", terms=("b",), own_terms=("a",)).all_classifiers == ()


def test_directions_are_separate() -> None:
    """Input and output have their own actions."""
    made = plan(input_='"pii.email" = "block"', direction=Direction.INPUT)
    assert made.policy.action(Direction.INPUT, "pii.email") is Action.BLOCK
    assert plan(input_='"pii.email" = "block"').all_classifiers == ()
