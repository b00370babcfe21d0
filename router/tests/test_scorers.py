"""The scorers: from 0 to 1, 1 is best."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import Candidate
from headrace_router.policies.weighted import SCORERS
from headrace_router.replicas import Replica
from headrace_router.scorers import load, prefix, session


def candidates(*fields: tuple[int, int]) -> list[Candidate]:
    return [
        Candidate(Replica(f"w{i}", ReplicaKey(f"w{i}", 1)), hit_blocks=hits, load_tokens=tokens)
        for i, (hits, tokens) in enumerate(fields)
    ]


@given(
    fields=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 10**9)), max_size=8),
    prompt_tokens=st.integers(1, 10_000),
    session_id=st.text(max_size=5),
)
def test_every_score_lies_between_0_and_1(ask, fields, prompt_tokens, session_id) -> None:
    """Whatever the numbers, weights keep their meaning."""
    query = ask(prompt_tokens, session_id=session_id)
    for scorer in SCORERS.values():
        scores = scorer(query, candidates(*fields))
        assert len(scores) == len(fields)
        assert all(0 <= one <= 1 for one in scores)


def test_prefix_is_the_cached_share(ask) -> None:
    """Half the prompt held is 0.5."""
    assert prefix.score(ask(64), candidates((0, 0), (2, 0))) == [0.0, 0.5]


def test_load_is_relative_to_the_busiest(ask) -> None:
    """Idle is 1, the busiest is 0; all idle is all 1."""
    assert load.score(ask(), candidates((0, 0), (0, 50), (0, 100))) == [1.0, 0.5, 0.0]
    assert load.score(ask(), candidates((0, 0), (0, 0))) == [1.0, 1.0]


def test_session_moves_only_when_its_worker_leaves(ask) -> None:
    """Rendezvous hashing: other sessions stay where they are."""
    everyone = candidates(*[(0, 0)] * 6)

    def homes(of: list[Candidate]) -> dict[int, str]:
        found = {}
        for number in range(60):
            scores = session.score(ask(session_id=f"s{number}"), of)
            found[number] = of[scores.index(max(scores))].key.worker_id
        return found

    before, after = homes(everyone), homes(everyone[:-1])
    assert {before[n] for n in before if before[n] != after[n]} == {"w5"}
    assert session.score(ask(), everyone) == [0.0] * 6
