"""Pure: what a request is sampled with where it names nothing, prepared once per model card.

A value that the client named stands. What it left open is what the card of the model that is really
asked recommends, else OpenAI's own; an engine of another make keeps its own defaults there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace_contracts.worker.v1.worker_pb2 import ModelCard, Sampling, SamplingValues

Json = dict[str, Any]  # Any: JSON values
# What the public API calls the narrowest nucleus; the contract reads a top_p of 0 as "off".
LEAST_TOP_P = 1e-6
# Of OpenAI's API.
_TEMPERATURE, _TOP_P = 1.0, 1.0


class NamedSampling(NamedTuple):
    """Those of a request's values that a model may have defaults for; None = not named."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def to_values(self) -> SamplingValues:
        """Return them as contracts have them."""
        values: dict[str, Any] = {
            name: value for name, value in self._asdict().items() if value is not None
        }
        if self.top_k is not None:
            values["top_k"] = max(0, self.top_k)
        if self.top_p == 0:
            values["top_p"] = LEAST_TOP_P
        return SamplingValues(**values)


NOTHING_NAMED = NamedSampling()


class SamplingDefaults:
    """What one model card recommends.

    Args:
        told: the card.
    """

    def __init__(self, told: ModelCard) -> None:
        # Contracts carry 32-bit floats: 0.95 is meant where 0.949999988 came.
        said: Json = {
            field.name: _short(value) for field, value in told.sampling_defaults.ListFields()
        }
        self._said = tuple(
            (idx, name, said[name])
            for idx, name in enumerate(NamedSampling._fields)
            if name in said
        )
        own: Json = {} if told.takes_text else {"temperature": _TEMPERATURE, "top_p": _TOP_P}
        # As clients are shown them; None = the engine's own, which nobody here knows.
        self.shown: Json | None = {**own, **said} or None

    def fill(self, sampling: Sampling | SamplingValues, named: NamedSampling) -> None:
        """Set what the request left open."""
        for idx, name, value in self._said:
            if named[idx] is None:
                setattr(sampling, name, value)

    def echo(self, named: NamedSampling) -> Json:
        """Return temperature and top_p as they are used; None = the engine's own."""
        shown, told = self.shown or {}, named._asdict()
        return {
            name: shown.get(name) if told[name] is None else told[name]
            for name in ("temperature", "top_p")
        }


def _short(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value
