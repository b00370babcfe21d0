"""On or off topic, judged by an operator's example questions.

The score is the mean of the three highest cosines between the text and the examples, both seen from
the middle of what people ask assistants about. From the origin all questions lie close together,
because they are questions; from there, those of one topic do. (ADR 42 has the figures and what was
tried beside.) The score enters one logistic scale that was fitted over made-up topics in training.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.text_model import Topic

_NUM_NEAREST = 3
Vectors = NDArray[np.float32]


def centred(vectors: Vectors, centre: Vectors) -> Vectors:
    """Return vectors (..., size) as seen from *centre* (size), each of length one."""
    moved = vectors - centre
    lengths = np.linalg.norm(moved, axis=-1, keepdims=True)
    return np.asarray(moved / np.maximum(lengths, 1e-9), np.float32)


def off_topic_logit(vector: Vectors, examples: Vectors) -> float:
    """Return how far a text is from a topic; higher is further. All vectors are `centred`."""
    return -float(np.sort(examples @ vector)[-_NUM_NEAREST:].mean())


class TopicVectors:
    """Embeddings of topics' examples, made once per topic. Belongs to the embedding thread.

    Args:
        embed: makes the embeddings.
        centre: from where they are seen.
        max_topics: how many are kept; the one unused for longest goes first.
    """

    def __init__(
        self, embed: Callable[[Sequence[str]], Vectors], centre: Vectors, max_topics: int
    ) -> None:
        self._embed, self._centre, self._max_topics = embed, centre, max_topics
        self._kept: OrderedDict[Topic, Vectors] = OrderedDict()

    def off_topic_logit(self, vector: Vectors, topic: Topic) -> float:
        """Return how far the text with this embedding is from a topic; higher is further."""
        return off_topic_logit(centred(vector, self._centre), self._examples(topic))

    def _examples(self, topic: Topic) -> Vectors:
        found = self._kept.get(topic)
        if found is None:
            found = self._kept[topic] = centred(self._embed(topic.examples), self._centre)
            if len(self._kept) > self._max_topics:
                self._kept.popitem(last=False)
        self._kept.move_to_end(topic)
        return found
