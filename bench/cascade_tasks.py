"""Tasks with checkable answers, made from a seed: nothing is fetched, nothing judged by taste.

Each prompt has a line of instruction, three solved examples and one question, so that a base model
without a chat template can answer it too. The answer is the rest of the line, compared exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_WORDS = (
    "river stone lamp cloud paper wheel bread candle garden mirror bridge copper winter silver "
    "market window anchor basket button kettle ladder needle pocket ribbon saddle thread violin "
    "walnut marble hammer barrel carpet dragon engine feather goblet harvest island jacket kitten"
).split()
_NAMES = (
    "Anna Boris Clara David Elena Frank Greta Henry Irene James Karin Louis Maria Nadia".split()
)
_THINGS = "apples coins books stamps shells pens cups nails beads maps".split()


@dataclass(frozen=True)
class Task:
    """One question.

    Args:
        kind: which generator made it.
        prompt: what the model is given; the answer follows on the same line.
        answer: the only right one.
    """

    kind: str
    prompt: str
    answer: str


# A question and its answer.
Pair = tuple[str, str]


def _add(draw: random.Random) -> Pair:
    top = draw.choice((9, 20, 100, 1000))
    a, b = draw.randint(1, top), draw.randint(1, top)
    return f"{a} + {b}", str(a + b)


def _subtract(draw: random.Random) -> Pair:
    top = draw.choice((9, 20, 100, 1000))
    a, b = sorted((draw.randint(1, top), draw.randint(1, top)), reverse=True)
    return f"{a} - {b}", str(a - b)


def _multiply(draw: random.Random) -> Pair:
    a, b = draw.randint(2, draw.choice((5, 12))), draw.randint(2, draw.choice((9, 12, 30)))
    return f"{a} * {b}", str(a * b)


def _larger(draw: random.Random) -> Pair:
    top = draw.choice((20, 1000))
    a, b = draw.sample(range(1, top + 1), 2)
    return f"{a} or {b}", str(max(a, b))


def _copy(draw: random.Random) -> Pair:
    text = " ".join(draw.sample(_WORDS, draw.randint(2, 5)))
    return text, text


def _upper(draw: random.Random) -> Pair:
    word = draw.choice(_WORDS)
    return word, word.upper()


def _first_letter(draw: random.Random) -> Pair:
    word = draw.choice(_WORDS)
    return word, word[0]


def _last_word(draw: random.Random) -> Pair:
    words = draw.sample(_WORDS, draw.randint(3, 6))
    return " ".join(words), words[-1]


def _reverse(draw: random.Random) -> Pair:
    words = draw.sample(_WORDS, draw.randint(2, 4))
    return " ".join(words), " ".join(reversed(words))


def _json(draw: random.Random) -> Pair:
    name, number = draw.choice(_NAMES), draw.randint(1, 99)
    return f"{name}, {number}", f'{{"name": "{name}", "age": {number}}}'


def _look_up(draw: random.Random) -> Pair:
    people = draw.sample(_NAMES, draw.randint(2, 5))
    thing = draw.choice(_THINGS)
    counts = [draw.randint(2, 99) for _ in people]
    facts = " ".join(f"{p} has {n} {thing}." for p, n in zip(people, counts, strict=True))
    idx = draw.randrange(len(people))
    return f"{facts} How many {thing} has {people[idx]}?", str(counts[idx])


def _who(draw: random.Random) -> Pair:
    people = draw.sample(_NAMES, draw.randint(2, 5))
    things = draw.sample(_THINGS, len(people))
    facts = " ".join(f"{p} sells {t}." for p, t in zip(people, things, strict=True))
    idx = draw.randrange(len(people))
    return f"{facts} Who sells {things[idx]}?", people[idx]


def _next_number(draw: random.Random) -> Pair:
    start, step = draw.randint(1, 30), draw.choice((1, 2, 3, 5, 10, 7))
    row = [start + step * i for i in range(4)]
    return ", ".join(map(str, row)), str(start + step * 4)


_KINDS: dict[str, tuple[str, Callable[[random.Random], Pair]]] = {
    "add": ("Add the numbers.", _add),
    "subtract": ("Subtract the numbers.", _subtract),
    "multiply": ("Multiply the numbers.", _multiply),
    "larger": ("Which number is larger?", _larger),
    "copy": ("Repeat the text.", _copy),
    "upper": ("Write the word in capital letters.", _upper),
    "first_letter": ("Give the first letter of the word.", _first_letter),
    "last_word": ("Give the last word.", _last_word),
    "reverse": ("Give the words in reverse order.", _reverse),
    "json": ("Write the name and age as JSON.", _json),
    "look_up": ("Answer from the text.", _look_up),
    "who": ("Answer from the text.", _who),
    "next_number": ("Give the next number.", _next_number),
}


def make_tasks(num_per_kind: int, seed: int) -> list[Task]:
    """Return tasks of every kind, mixed; the same for the same arguments."""
    tasks = []
    for kind, (instruction, make) in _KINDS.items():
        draw = random.Random(f"{seed} {kind}")
        shots = [make(draw) for _ in range(3)]
        told = "".join(f"Q: {question}\nA: {answer}\n" for question, answer in shots)
        for _ in range(num_per_kind):
            question, answer = make(draw)
            tasks.append(Task(kind, f"{instruction}\n{told}Q: {question}\nA:", answer))
    random.Random(seed).shuffle(tasks)
    return tasks


def is_right(task: Task, text: str) -> bool:
    """Whether a model's text answers the task."""
    return text.split("\n")[0].strip() == task.answer
