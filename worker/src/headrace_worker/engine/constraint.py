"""What the engine knows of a constraint: which tokens may come next. Engine's thread only."""

from __future__ import annotations

from typing import Protocol

import torch


class Matcher(Protocol):
    """The state of one choice: a function of the tokens it has accepted, and of nothing else."""

    def mask(self) -> torch.Tensor:
        """Return which tokens may come next: (V,) bool, not to be changed.

        Raises:
            InvalidRequest: that has become too costly to say.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take the next token.

        Raises:
            InvalidRequest: it may not come here.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing but an end token may follow."""
        ...


class Constraint(Protocol):
    """A constraint made ready; shared by the choices of a request and by requests."""

    def begin(self) -> Matcher:
        """Return the state before the first token."""
        ...
