"""Rows flattened to tensors."""

from __future__ import annotations

from headrace_worker.model.batch import Row, build_batch


def test_flattens_rows_in_order() -> None:
    """Ids, positions and slots follow one another row by row; wanted logits are the last ones."""
    batch = build_batch(
        [Row([7, 8, 9], 2, [5, 1], 2), Row([4], 6, [0, 3], 1), Row([1, 2], 0, [2], 0)], 4
    )
    assert batch.token_ids.tolist() == [7, 8, 9, 4, 1, 2]
    assert batch.positions.tolist() == [2, 3, 4, 6, 0, 1]
    assert batch.plan.slots.tolist() == [22, 23, 4, 14, 8, 9]
    assert batch.logit_idx.tolist() == [1, 2, 3]


def test_prefill_rows_know_their_context_and_blocks() -> None:
    """A run of several tokens reads the blocks up to its last token, spare ones left out."""
    (row,) = build_batch([Row([7, 8, 9], 2, [5, 1, 6, 6], 0)], 4).plan.prefill
    assert (row.start, row.end, row.context_tokens) == (0, 3, 5)
    assert row.block_ids.tolist() == [5, 1]


def test_decodes_are_padded_within_their_group_only() -> None:
    """Rows of similar length share a group: padding at most doubles the blocks of any row."""
    rows = [Row([1], context - 1, list(range(40)), 1) for context in (1, 5, 13, 16, 100)]
    groups = build_batch(rows, 4).plan.decode
    found = [(g.token_idx.tolist(), len(g.block_ids) // len(g.token_idx)) for g in groups]
    assert found == [([0], 1), ([1], 2), ([2, 3], 4), ([4], 25)]


def test_padding_is_hidden() -> None:
    """A row sees exactly its context's slots."""
    rows = [Row([1], 8, [3, 4, 5], 1), Row([1], 5, [6, 7], 1)]
    (group,) = build_batch(rows, 4).plan.decode
    assert group.block_ids.tolist() == [3, 4, 5, 6, 7, 0]
    visible = (group.bias == 0).squeeze().sum(-1).tolist()
    assert visible == [9, 6]
    assert group.bias[1, 0, 0, :6].tolist() == [0.0] * 6
