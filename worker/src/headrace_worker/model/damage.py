"""A damaged model is said in one line, whichever reader stumbles over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from headrace_common.errors import InvalidRequest

# What readers of headers, JSON and text raise where something is cut off, of another kind or not
# there at all.
_STUMBLES = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    EOFError,
    SafetensorError,
)


@contextmanager
def refusing_damage(path: Path, kind: str) -> Iterator[None]:
    """Say that what is at *path* is not a readable *kind* where reading it fails.

    Raises:
        InvalidRequest: it is not.
    """
    try:
        yield
    except _STUMBLES as error:
        why = " ".join(str(error).split()) or type(error).__name__
        why = f"it lacks {why}" if isinstance(error, KeyError) else why
        raise InvalidRequest(f"{path} is not a readable {kind}: {why}") from error
