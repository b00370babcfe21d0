"""On or off topic, judged by an operator's example questions.

The score is the mean of the three highest cosines between the text and the examples, less what the
text has in common with ordinary requests of all kinds (the background): a question on bank cards
is near the examples of a bank, "tell me a joke" is nearer to the background. Both enter one
logistic scale that was fitted over many made-up topics in training.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.text_model import Topic

BACKGROUND_SHARE = 0.35
_NUM_NEAREST = 3
Vectors = NDArray[np.float32]


def off_topic_logit(vector: Vectors, examples: Vectors, background: Vectors) -> float:
    """Return how far a text is from a topic; higher is further. All vectors have length one."""
    return BACKGROUND_SHARE * _near(vector, background) - _near(vector, examples)


def _near(vector: Vectors, others: Vectors) -> float:
    if not len(others):
        return 0.0
    cosines = others @ vector
    return float(np.sort(cosines)[-_NUM_NEAREST:].mean())


class TopicVectors:
    """Embeddings of topics' examples, made once per topic. Belongs to the embedding thread.

    Args:
        embed: makes the embeddings.
        max_topics: how many are kept; the one unused for longest goes first.
    """

    def __init__(self, embed: Callable[[Sequence[str]], Vectors], max_topics: int) -> None:
        self._embed, self._max_topics = embed, max_topics
        self._kept: OrderedDict[Topic, Vectors] = OrderedDict()

    def get(self, topic: Topic) -> Vectors:
        """Return the embeddings of a topic's examples."""
        found = self._kept.get(topic)
        if found is None:
            found = self._kept[topic] = self._embed(topic.examples)
            if len(self._kept) > self._max_topics:
                self._kept.popitem(last=False)
        self._kept.move_to_end(topic)
        return found
