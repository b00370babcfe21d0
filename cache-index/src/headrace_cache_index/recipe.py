"""Pure: whether a publisher's block hashes would match a router's."""

from __future__ import annotations

from headrace_common.blocks import ALGORITHM, self_test
from headrace_common.errors import InvalidRequest
from headrace_contracts.types.v1.types_pb2 import HashRecipe

_MAX_BLOCK_SIZE = 4096


def check_recipe(recipe: HashRecipe) -> None:
    """Refuse a publisher whose hashes would never match a router's.

    Raises:
        InvalidRequest: its recipe or its self-test differs.
    """
    block_size = recipe.block_size_tokens
    if recipe.algorithm != ALGORITHM:
        raise InvalidRequest(
            f"Block hashes are {ALGORITHM}, not {recipe.algorithm!r}.", param="recipe.algorithm"
        )
    if not 1 <= block_size <= _MAX_BLOCK_SIZE:
        raise InvalidRequest(
            f"A block of {block_size} tokens is out of range.", param="recipe.block_size_tokens"
        )
    if recipe.self_test != self_test(recipe.model_fingerprint, block_size):
        raise InvalidRequest(
            "The self-test of the block hashes differs: this worker's hashes would match nobody's.",
            param="recipe.self_test",
        )
