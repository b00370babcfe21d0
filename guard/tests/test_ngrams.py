"""Features: words and characters in place, the same for a text wherever it stands."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_guard.classifiers.ngrams import NUM_BUCKETS, features


def test_features_of_a_word_do_not_depend_on_where_it_stands() -> None:
    """The word's own features are among those of any text with that word."""
    alone = set(features("canary").buckets.tolist())
    assert alone <= set(features("the canary is here").buckets.tolist())


def test_word_order_matters() -> None:
    """Pairs and triples of words tell two texts of the same words apart."""
    one, other = features("ignore the rules"), features("the rules ignore")
    assert set(one.buckets.tolist()) != set(other.buckets.tolist())


@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_text_has_features_inside_it(text: str) -> None:
    """No text fails; each feature has a bucket and begins inside the text."""
    found = features(text)
    assert len(found.buckets) == len(found.positions)
    assert np.all((found.buckets >= 0) & (found.buckets < NUM_BUCKETS))
    assert np.all((found.positions >= 0) & (found.positions <= max(len(text) - 1, 0)))
