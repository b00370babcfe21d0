"""The texts of the golden run: own, fixed, of many kinds and lengths."""

from __future__ import annotations

from typing import Any

_MILL = (
    "The old mill stands where the river bends twice before it meets the sea. For three "
    "hundred years its wheel turned day and night, and the people of the valley brought their"
    " grain to it by cart, by boat and on their backs. The miller kept a book in which he "
    "wrote the name of every farmer, the weight of every sack, and the weather of the day. "
    "When the wheel stopped, the book was found in a dry box beneath the floor, its last page"
    " still open at a harvest that nobody had come to collect. "
)
_FLEET = (
    "A fleet of machines answers questions. Each machine keeps what it has lately read, so "
    "that a question which begins like an earlier one costs less. A clerk at the door looks "
    "at every new question, guesses how long each machine would need before its first word, "
    "and sends the question to the one that would speak first. When a machine falls silent "
    "the clerk hands its unfinished answers to another, and the people who asked notice "
    "nothing but a short pause. "
)
_CODE = '''def merge(left, right):
    """Merge two sorted lists."""
    out = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i])
            i += 1
        else:
            out.append(right[j])
            j += 1
    out.extend(left[i:])
    out.extend(right[j:])
    return out


def merge_sort(items):
    """Sort a list."""
    if len(items) < 2:
        return items
    middle = len(items) // 2
'''
_LEDGER = "".join(
    f"| 2026-03-{day:02d} | tenant-{day % 7} | {day * 137} tokens | {day * 411} nano-dollars |\n"
    for day in range(1, 13)
)

RAW: tuple[str, ...] = (
    "Once upon a time",
    "The capital of France is",
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "SELECT name, count(*) FROM orders WHERE",
    '{"name": "Ada", "born": 1815, "languages": [',
    "# Recipe: pancakes\n\nIngredients:\n-",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are:\n1.",
    "E = mc^2 means that",
    "Bonjour tout le monde, je m'appelle",
    "Guten Morgen! Wie geht es",
    "今天天气很好,我们",
    "東京は日本の",
    "안녕하세요. 오늘은",
    "I love 🍕 and 🎉 because",
    "for (int i = 0; i < 10; i++) {\n",
    "<html>\n<head>\n<title>",
    _CODE,
    _CODE + "    left = merge_sort(items[:middle])\n",
    _MILL + "The farmers",
    _MILL * 2 + "The name of the miller was",
    _FLEET * 3,
    _FLEET + _MILL + _CODE,
    "Ledger of March:\n" + _LEDGER,
    (_MILL + _FLEET) * 3 + "In short,",
)

_DEFAULT_QUESTIONS: tuple[str, ...] = (
    "What is gravity?",
    "Write a haiku about the sea.",
    "Name three uses of copper.",
    "What is 17 + 25?",
    "Translate 'good morning' into French.",
    "Explain photosynthesis to a child.",
    "Write a Python function that reverses a string.",
    "Who wrote the play Hamlet?",
    "Give me a JSON object with keys a and b.",
    "What does 你好 mean?",
    "Name the planets of the solar system in order.",
    "Is 😀 an emoji or a letter?",
    "Summarise this text in one sentence:\n\n" + _MILL,
    "Summarise this text in one sentence:\n\n" + _FLEET * 2,
    "What does this code do?\n\n```python\n" + _CODE + "```",
    "How many tokens did tenant-5 use?\n\n" + _LEDGER,
    "Repeat the last sentence of this text:\n\n" + (_MILL + _FLEET) * 2,
)

CHATS: tuple[list[dict[str, Any]], ...] = (
    *([{"role": "user", "content": question}] for question in _DEFAULT_QUESTIONS),
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What colour is the sky?"},
    ],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Tell me about your ship."},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada, how can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You are a careful accountant."},
        {"role": "user", "content": "Here is the ledger.\n" + _LEDGER},
        {"role": "assistant", "content": "Thank you. What would you like to know?"},
        {"role": "user", "content": "Which day had the largest amount?"},
    ],
    [
        {"role": "user", "content": "Count to five."},
        {"role": "assistant", "content": "1, 2, 3, 4, 5"},
        {"role": "user", "content": "And now backwards."},
    ],
)

# For the tokenizer alone.
TEXTS: tuple[str, ...] = (
    "",
    " ",
    "a",
    "  two leading spaces",
    "trailing spaces   ",
    "tabs\tand\t\ttabs",
    "line\nbreaks\n\n\nand\r\nwindows",
    "1234567890 3.14159 1,000,000 0x7f 12th 2026-11-29T16:30:00Z",
    "٣٤٥ ١٢ ½ ² Ⅷ ௧௨",
    "don't you've they're I'm we'll he'd DON'T",
    "naïve café Ångström ß ẞ İstanbul",
    "e\u0301 versus \u00e9, \u200bzero width\u200d, \ufeffmark, no\u00a0break",
    "今天天气很好。我们去公园玩吧!",
    "東京タワーは1958年に完成しました。",
    "한국어 문장입니다. 감사합니다!",
    "Привет, мир! Сколько стоит 25 рублей?",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 😀😀😀 ❤️",
    "\U0001d518\U0001d52b\U0001d526\U0001d520\U0001d52c\U0001d521\U0001d522",
    "def f(x):\n    return x**2  # square\n\n\nclass A(B):\n\tpass\n",
    "SELECT * FROM t WHERE a <> 'b' AND c >= 10;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    '<div class="x">a &amp; b</div><!-- c -->',
    "https://example.org/path?q=1&r=%20#frag user@example.org",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>a<|endoftext|> <|im_start|><|im_end|>",
    "<|im_start not a token|> <repo_name>x<filename>y <|im_end|",
    "$100 €20 £3 ¥500 #hash @at ^caret ~tilde `tick`",
    "...!!!???--- === *** ___ ((())) [[[]]] {{{}}}",
    "CamelCaseWords and snake_case_words and kebab-case-words",
    "a" * 200,
    "0" * 50,
    " " * 40 + "x" + "\n" * 20,
    "\x00\x01\x1f control \x7f",
    _MILL,
    _CODE,
    _LEDGER,
)
