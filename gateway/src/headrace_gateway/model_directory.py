"""Which models there are and which replicas serve them: the router's list, mirrored.

The gateway has no model files. Cards come with the list, a tokenizer is fetched from any worker
that has it, once per content. When the router is down the last list stays in use: `least_loaded`
then chooses from it.

A gateway that has just started knows nothing yet: what it does not find in its first seconds is
worth `until_news`, and it is not ready meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from headrace_common.blocks import BLOCK_SIZE_TOKENS
from headrace_common.errors import HeadraceError, ModelNotFound, NoReplica, Unavailable
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.router.v1.router_pb2 import Replica, ReplicaList
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.worker.v1 import worker_pb2
from headrace_contracts.worker.v1.worker_pb2 import ModelCard
from headrace_gateway.absences import Absences
from headrace_gateway.prompt import PromptEncoder
from headrace_gateway.sampling_defaults import SamplingDefaults
from headrace_gateway.text_prompt import TextEncoder

_log = logging.getLogger(__name__)

_FETCH_RETRY_S = 0.5
# After a start, and after a worker has told of a new model: what is not known may come so long.
_LEARNING_S = 5.0

RefKey = tuple[str, int]
OnLost = Callable[[], None]


class ReplicaSource(Protocol):
    """What the router offers here."""

    def watch_replicas(self) -> AsyncIterator[ReplicaList]:
        """Yield the list at once and at each change."""
        ...


class TokenizerSource(Protocol):
    """What workers offer here."""

    async def fetch_tokenizer(self, address: str, model: str) -> bytes:
        """Return a tokenizer.json."""
        ...

    async def forget_all_but(self, addresses: set[str]) -> None:
        """Drop connections to workers that are gone."""
        ...


@dataclass(frozen=True, slots=True)
class ServedCard:
    """What requests read of a `worker.v1.ModelCard`, in values that cost nothing to read."""

    model: str
    fingerprint: str
    takes_text: bool
    vocab_size: int
    context_tokens: int
    # Of the recipe for block hashes.
    hash_fingerprint: str
    block_size_tokens: int
    sampling_defaults: SamplingDefaults

    @classmethod
    def of(cls, told: ModelCard) -> ServedCard:
        """Take what a worker told."""
        return cls(
            model=told.model,
            fingerprint=told.fingerprint,
            takes_text=told.takes_text,
            vocab_size=told.vocab_size,
            context_tokens=told.context_tokens,
            hash_fingerprint=told.recipe.model_fingerprint,
            block_size_tokens=told.recipe.block_size_tokens or BLOCK_SIZE_TOKENS,
            sampling_defaults=SamplingDefaults(told),
        )


@dataclass(frozen=True)
class ServedModel:
    """A model with what is needed to make prompts for it."""

    card: ServedCard
    encoder: PromptEncoder | TextEncoder


def ref_key(ref: ReplicaRef) -> RefKey:
    """Return a replica's identity as a dictionary key."""
    return ref.worker_id, ref.incarnation


class ModelDirectory:
    """Models and replicas as last seen. Belongs to one event loop.

    Args:
        router: source of the list.
        workers: source of tokenizers.
    """

    def __init__(self, router: ReplicaSource, workers: TokenizerSource) -> None:
        self._router, self._workers = router, workers
        self._replicas: dict[RefKey, Replica] = {}
        # Models ever seen stay known: without a replica they are unavailable, not unknown.
        self._cards: dict[str, ModelCard] = {}
        self._encoders: dict[tuple[str, str], PromptEncoder] = {}
        # As asked for since the last list.
        self._served: dict[str, ServedModel] = {}
        self._text_encoder = TextEncoder()
        self._fetches: dict[tuple[str, str], asyncio.Task[None]] = {}
        # Where something runs: the address, and whom to tell if it is lost.
        self._running: dict[RefKey, tuple[str, set[OnLost]]] = {}
        # Of models that have lost their last replica.
        self.absences = Absences()
        # Monotonic times: up to when what is not known is waited for, and up to when a start may
        # hold back readiness. Nobody watches yet.
        self._learns_until_s = self._starts_until_s = 0.0
        # Set, and replaced, when something was learned.
        self._news = asyncio.Event()
        # Whether the router is there: while it is not, nobody waits for its decisions.
        self.is_following = False
        # Whether an unknown model may be one that a worker has yet to say it serves.
        self.is_starting = False

    async def watch(self) -> None:
        """Follow the router's list until it ends; run under `supervise`."""
        if not self._starts_until_s:
            self._learn()
            self._starts_until_s = self._learns_until_s
        try:
            async for replicas in self._router.watch_replicas():
                self.is_following = True
                await self._apply(replicas)
        finally:
            self.is_following = False

    async def close(self) -> None:
        """Stop fetching."""
        await cancel_and_wait(*self._fetches.values())

    @property
    def is_ready(self) -> bool:
        """Whether some model can be served now, and whatever a start must learn is learned."""
        if time.monotonic() < self._starts_until_s and not self._is_complete:
            return False
        return any(
            _is_usable(replica) and any(self._encoder(card) for card in replica.models)
            for replica in self._replicas.values()
        )

    @property
    def num_waiting(self) -> int:
        """Requests that queue at replicas, as they last said."""
        return sum(replica.load.num_waiting for replica in self._replicas.values())

    def cards(self) -> list[ModelCard]:
        """Return the cards of all known models, by name."""
        return [self._cards[name] for name in sorted(self._cards)]

    def get(self, model: str) -> ServedModel:
        """Return a model by its served name.

        Raises:
            ModelNotFound: no worker ever served it.
            Unavailable: it is not known yet: the first worker or the tokenizer is on its way.
        """
        served = self._served.get(model)
        if served is not None:
            return served
        card = self._cards.get(model)
        if card is None:
            if not self._cards:
                # A router that has just started lists nothing, whatever its workers will serve.
                raise NoReplica("The fleet is starting.", retry_after_s=1.0)
            raise ModelNotFound(f"The model {model[:100]!r} does not exist.", param="model")
        encoder = self._encoder(card)
        if encoder is None:
            raise Unavailable("The model is being loaded.", retry_after_s=1.0)
        served = self._served[model] = ServedModel(ServedCard.of(card), encoder)
        return served

    async def until_news(self) -> bool:
        """Wait for what a start has yet to learn; False = nothing more is waited for."""
        left_s, news = self._learns_until_s - time.monotonic(), self._news
        if left_s <= 0 or self._is_complete:
            return False
        try:
            async with asyncio.timeout(left_s):
                await news.wait()
        except TimeoutError:
            return False
        return True

    @property
    def _is_complete(self) -> bool:
        """Whether nothing is on its way that the router or a worker will tell."""
        is_told = self.is_following and not self.is_starting and bool(self._replicas)
        return is_told and not self._fetches

    def _learn(self) -> None:
        self._learns_until_s = time.monotonic() + _LEARNING_S

    def _tell_news(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def least_loaded(self, model: str, excluded: Iterable[ReplicaRef]) -> Replica:
        """Choose a replica without the router, by what was last seen and runs from here.

        Raises:
            NoReplica: none is left.
        """
        left_out = {ref_key(ref) for ref in excluded}
        candidates = [
            replica
            for key, replica in self._replicas.items()
            if key not in left_out
            and _is_usable(replica)
            and any(card.model == model for card in replica.models)
        ]
        if not candidates:
            raise NoReplica("No replica serves this model now.", retry_after_s=1.0)
        return min(candidates, key=self._load)

    def running_on(
        self, ref: ReplicaRef, address: str, on_lost: OnLost
    ) -> AbstractContextManager[None]:
        """Count a request on a replica; call *on_lost* if the fleet learns that it is stuck."""
        return _Running(self._running, ref_key(ref), address, on_lost)

    def _load(self, replica: Replica) -> tuple[int, int]:
        load, running = replica.load, self._running.get(ref_key(replica.replica))
        num_running = 0 if running is None else len(running[1])
        return num_running, load.queued_prefill_tokens + load.running_tokens

    async def _apply(self, replicas: ReplicaList) -> None:
        self._served.clear()
        self.is_starting = replicas.has_undescribed_models
        self._replicas = {ref_key(replica.replica): replica for replica in replicas.replicas}
        for replica in replicas.replicas:
            for card in replica.models:
                self._cards[card.model] = card
                self._ensure_encoder(card)
        self._tell_lost()
        usable = [replica for replica in replicas.replicas if _is_usable(replica)]
        self.absences.note({card.model for replica in usable for card in replica.models})
        self._tell_news()
        listed = {replica.address for replica in self._replicas.values()}
        # A router that has just started lists nothing yet: then nothing is dropped. Streams under
        # way on a replica that left the list go on.
        if listed:
            await self._workers.forget_all_but(
                listed | {address for address, _ in self._running.values()}
            )

    def _tell_lost(self) -> None:
        newest: dict[str, int] = {}
        for worker_id, incarnation in self._replicas:
            newest[worker_id] = max(newest.get(worker_id, 0), incarnation)
        for key, (_, callbacks) in list(self._running.items()):
            replica = self._replicas.get(key)
            is_stuck = replica is not None and replica.state == worker_pb2.WORKER_STATE_STUCK
            if is_stuck or newest.get(key[0], 0) > key[1]:
                for callback in list(callbacks):
                    callback()

    def _encoder(self, card: ModelCard) -> PromptEncoder | TextEncoder | None:
        if card.takes_text:
            return self._text_encoder
        return self._encoders.get((card.tokenizer_sha256, card.chat_template))

    def _ensure_encoder(self, card: ModelCard) -> None:
        key = (card.tokenizer_sha256, card.chat_template)
        if card.takes_text or key in self._encoders or key in self._fetches:
            return
        task = asyncio.create_task(self._fetch(card))
        self._fetches[key] = task
        self._learn()

        def end(_: object) -> None:
            self._fetches.pop(key, None)
            self._tell_news()

        task.add_done_callback(end)

    async def _fetch(self, card: ModelCard) -> None:
        """Try the workers that have the tokenizer until one gives it or none is left."""
        while addresses := self._addresses_with(card):
            for address in addresses:
                try:
                    encoder = await self._try_fetch(address, card)
                except HeadraceError as error:
                    _log.warning("tokenizer of %s from %s: %s", card.model, address, error)
                except Exception:  # noqa: BLE001 - a bad tokenizer must not end the service
                    _log.exception("the tokenizer of %s cannot be used", card.model)
                    return
                else:
                    self._encoders[card.tokenizer_sha256, card.chat_template] = encoder
                    return
            await asyncio.sleep(_FETCH_RETRY_S)

    async def _try_fetch(self, address: str, card: ModelCard) -> PromptEncoder:
        data = await self._workers.fetch_tokenizer(address, card.model)
        if hashlib.sha256(data).hexdigest() != card.tokenizer_sha256:
            raise Unavailable("the content is not what the model card says")
        return await asyncio.to_thread(PromptEncoder, card, data)

    def _addresses_with(self, card: ModelCard) -> list[str]:
        return [
            replica.address
            for replica in self._replicas.values()
            if any(other.tokenizer_sha256 == card.tokenizer_sha256 for other in replica.models)
        ]


class _Running(AbstractContextManager[None]):
    """One request on a replica."""

    __slots__ = ("_address", "_all", "_key", "_on_lost")

    def __init__(
        self,
        running: dict[RefKey, tuple[str, set[OnLost]]],
        key: RefKey,
        address: str,
        on_lost: OnLost,
    ) -> None:
        self._all, self._key, self._address, self._on_lost = running, key, address, on_lost

    def __enter__(self) -> None:
        self._all.setdefault(self._key, (self._address, set()))[1].add(self._on_lost)

    def __exit__(self, *exc_info: object) -> None:
        _, callbacks = self._all[self._key]
        callbacks.discard(self._on_lost)
        if not callbacks:
            del self._all[self._key]


def _is_usable(replica: Replica) -> bool:
    return replica.reachable and replica.state == worker_pb2.WORKER_STATE_READY
