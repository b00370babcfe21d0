"""Letters of other scripts that look like ASCII ones (UTS 39, confusables.txt).

The table is that of the `confusable-homoglyphs` package, made from Unicode's file. Of its entries
those count here that lead from any other character to ASCII; accents do not matter. Letters in
frames, with strokes or hooks, regional indicators and small capitals, which that file leaves out,
go by their names.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from confusable_homoglyphs.confusables import confusables_data

from headrace_guard.characters import is_dropped_mark

_NAMED = re.compile(
    r"(?:(?:CROSSED )?NEGATIVE (?:CIRCLED|SQUARED) LATIN CAPITAL LETTER"
    r"|REGIONAL INDICATOR SYMBOL LETTER|LATIN LETTER SMALL CAPITAL"
    r"|LATIN (?:SMALL|CAPITAL) LETTER) ([A-Z])(?: WITH .+| BAR)?"
)


@lru_cache(maxsize=16_384)
def ascii_lookalike(char: str) -> str:
    """Return the ASCII text that *char* can be taken for; "" if there is none.

    Digits of other scripts become the digit they mean, not the letter they resemble.
    """
    if char.isascii():
        return ""
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    for entry in confusables_data.get(char, ()):
        parts = unicodedata.normalize("NFKD", entry["c"])
        shown = "".join(part for part in parts if not is_dropped_mark(part))
        if shown and shown.isascii() and shown.isprintable():
            return shown
    named = _NAMED.fullmatch(unicodedata.name(char, ""))
    return "" if named is None else named.group(1).lower()
