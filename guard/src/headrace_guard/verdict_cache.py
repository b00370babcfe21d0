"""What was found in a text before: a growing conversation is judged message by message, once.

Keys are keyed hashes (BLAKE2b) over tenant, text, who wrote it, policy, key's words and models, so
that no text is kept, no tenant meets another's entry or can time one, and any change of what judges
misses. Only complete results are kept.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

from headrace_guard.input_check import Part, PartResult
from headrace_guard.plan import Plan

# More text than this costs more to hash than is likely to be saved: it is rare and always new.
MAX_CHARS = 65_536


class VerdictCache:
    """Least recently used results go first. Belongs to one event loop.

    Args:
        max_entries: most results; 0 = none are kept.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        # Of this process: entries cannot be made up from outside.
        self._secret = secrets.token_bytes(32)
        self._entries: OrderedDict[bytes, PartResult] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def scope(self, tenant_id: str, plan: Plan, model_version: str) -> bytes:
        """Return what all texts of one request share in their keys."""
        digest = hashlib.blake2b(key=self._secret, digest_size=32)
        for field in (
            tenant_id,
            plan.policy.version,
            plan.direction.value,
            model_version,
            plan.terms_id,
        ):
            data = field.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(4, "little") + data)
        return digest.digest()

    def key(self, scope: bytes, part: Part) -> bytes:
        """Return the key of one text."""
        digest = hashlib.blake2b(scope, key=self._secret, digest_size=32)
        digest.update(part.trust.value.encode() + b"\0")
        digest.update(part.text.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def get(self, key: bytes) -> PartResult | None:
        """Return a kept result."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, part: Part, result: PartResult) -> None:
        """Keep a result if it is complete and its text not too long."""
        if result.missed is not None or len(part.text) > MAX_CHARS or not self._max_entries:
            return
        self._entries[key] = PartResult(result.matches)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
