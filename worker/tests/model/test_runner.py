"""What the engine relies on: any way of cutting and mixing the work gives the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

from headrace_common.errors import InvalidRequest
from headrace_testing.tiny_model import TOKENS, TinyShape, write_hf_folder
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model.runner import ModelRunner, Row

S = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_hf_folder(path, TinyShape())
    return path


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return ModelRunner(folder, num_blocks=64)


def ids_of(seed: int, num: int) -> list[int]:
    return [(seed * 31 + 7 * i * i + i) % len(TOKENS) for i in range(num)]


def whole(runner: ModelRunner, ids: Sequence[int], table: Sequence[int]) -> torch.Tensor:
    return runner.forward([Row(ids, 0, table, 1)])


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    """Compiled kernels compute the same bits."""
    assert torch.equal(left, right)


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("chunk", [1, 3, 16, 40])
def test_chunks_equal_the_whole(folder: Path, rounding: Rounding, chunk: int) -> None:
    """A prompt computed in chunks, borders inside blocks too, has the logits of the whole."""
    runner = ModelRunner(folder, num_blocks=64, rounding=rounding, num_threads=2)
    ids = ids_of(1, 77)
    expected = whole(runner, ids, range(5))
    table = [20, 9, 33, 12, 28]
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        logits = runner.forward([Row(part, start, table, int(start + chunk >= len(ids)))])
    assert_same(logits, expected)


def test_batch_mates_do_not_matter(runner: ModelRunner) -> None:
    """Decodes of many lengths, chunks and a whole prompt in one batch equal each alone."""
    lengths = (1, 15, 16, 17, 40, 100, 5, 64)
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(8)]
    prompts = [ids_of(i, n + 1) for i, n in enumerate(lengths)]
    alone = torch.cat([whole(runner, p, t) for p, t in zip(prompts, tables, strict=True)])
    for prompt, table in zip(prompts[:6], tables[:6], strict=True):
        runner.forward([Row(prompt[:-1], 0, table, 0)])
    rows = [Row(p[-1:], len(p) - 1, t, 1) for p, t in zip(prompts[:6], tables[:6], strict=True)]
    rows.insert(2, Row(prompts[6], 0, tables[6], 1))
    runner.forward([Row(prompts[7][:30], 0, tables[7], 0)])
    rows.insert(0, Row(prompts[7][30:], 30, tables[7], 1))
    mixed = runner.forward(rows)
    assert_same(mixed, alone[[7, 0, 1, 6, 2, 3, 4, 5]])


def test_decode_is_the_same_bit_for_bit_among_others(runner: ModelRunner) -> None:
    """Alone, in a batch of eight, or beside a prompt: a one-token row has exactly equal logits."""
    assert runner.uses_compiled_kernels
    tables = [[4 * i, 4 * i + 1, 4 * i + 2] for i in range(9)]
    prompts = [ids_of(i, 12 + 4 * i) for i in range(8)]
    for prompt, table in zip(prompts, tables, strict=False):
        runner.forward([Row(prompt[:-1], 0, table, 0)])
    rows = [Row(p[-1:], len(p) - 1, t, 1) for p, t in zip(prompts, tables, strict=False)]
    alone = torch.cat([runner.forward([row]) for row in rows])
    assert torch.equal(runner.forward(rows), alone)
    rows.insert(3, Row(ids_of(9, 40), 0, tables[8], 2))
    mixed = runner.forward(rows)
    assert torch.equal(torch.cat((mixed[:3], mixed[5:])), alone)


@pytest.mark.parametrize("num_tokens", [1, 9, 14])
def test_compiled_kernels_equal_torch(folder: Path, runner: ModelRunner, num_tokens: int) -> None:
    """Short rows give what the plain operations give, a context behind them or not."""
    plain = ModelRunner(folder, num_blocks=64, backend="torch")
    assert not plain.uses_compiled_kernels
    prompt, tail = ids_of(1, 50), ids_of(2, num_tokens)
    for start in (0, 50):
        logits = []
        for each in (runner, plain):
            each.forward([Row(prompt, 0, [9, 3, 5, 7], 0)])
            logits.append(each.forward([Row(tail, start, [9, 3, 5, 7], num_tokens)]))
        assert_close(logits[0], logits[1])


def test_long_steps_are_cut_unseen(folder: Path) -> None:
    """More tokens than the kernels take at once, logits in both parts: as any other step."""
    runner = ModelRunner(folder, num_blocks=64)
    ids, others = ids_of(1, 500), ids_of(2, 60)
    table, other_table = list(range(40, 0, -1)), [50, 60, 45, 61]
    alone = torch.cat(
        [
            runner.forward([Row(ids, 0, table, 3)]),
            runner.forward([Row(others, 0, other_table, 60)]),
        ]
    )
    assert_same(runner.forward([Row(ids, 0, table, 3), Row(others, 0, other_table, 60)]), alone)
    plain = ModelRunner(folder, num_blocks=64, backend="torch")
    rows = [Row(ids, 0, table, 3), Row(others, 0, other_table, 60)]
    assert_close(plain.forward(rows), alone)
    assert_close(plain.hidden(rows), runner.hidden(rows))


def test_sizes_that_the_kernels_do_not_take_run_on_torch(tmp_path: Path) -> None:
    """A hidden size that is no multiple of 32 still works."""
    write_hf_folder(tmp_path, TinyShape(hidden_size=48, num_heads=3, num_kv_heads=3))
    odd = ModelRunner(tmp_path, num_blocks=4)
    assert not odd.uses_compiled_kernels
    assert odd.forward([Row([1], 0, [0], 1)]).isfinite().all()


def test_rows_may_share_complete_blocks(runner: ModelRunner) -> None:
    """Two rows that read the same first blocks compute what each computes alone."""
    prefix, tails = ids_of(3, 32), (ids_of(4, 9), ids_of(5, 20))
    alone = [whole(runner, prefix + tail, range(40, 44)) for tail in tails]
    runner.forward([Row(prefix, 0, [1, 2], 0)])
    rows = [Row(tails[0], 32, [1, 2, 3], 1), Row(tails[1], 32, [1, 2, 4, 5], 1)]
    assert_same(runner.forward(rows), torch.cat(alone))


def test_copied_block_continues_on_its_own(runner: ModelRunner) -> None:
    """After copy_block the copy holds the same KV and writes to it leave the source alone."""
    ids = ids_of(6, 24)
    expected = whole(runner, [*ids, 11], [50, 51])
    runner.forward([Row(ids, 0, [1, 2], 0)])
    runner.copy_block(2, 3)
    other = runner.forward([Row([12], 24, [1, 3], 1)])
    assert_same(runner.forward([Row([11], 24, [1, 2], 1)]), expected)
    assert not torch.allclose(other, expected)


def test_logits_only_where_wanted(runner: ModelRunner) -> None:
    """num_logits picks the last positions of each row, in row order; 0 gives none."""
    ids = ids_of(7, 10)
    every = runner.forward([Row(ids, 0, [0], 10)])
    some = runner.forward([Row(ids, 0, [0], 3), Row(ids, 0, [1], 0), Row(ids, 0, [2], 1)])
    assert some.shape == (4, len(TOKENS))
    assert some.is_contiguous()
    assert_same(some, torch.cat((every[-3:], every[-1:])))
    assert runner.forward([Row(ids, 0, [0], 0)]).shape == (0, len(TOKENS))


def test_stale_block_content_is_not_seen(runner: ModelRunner) -> None:
    """A reused block's old KV behind the row's end has no influence."""
    ids = ids_of(8, 20)
    expected = whole(runner, ids, [60, 61])
    runner.forward([Row(ids_of(9, 64), 0, [1, 2, 3, 4], 0)])
    assert_same(whole(runner, ids, [4, 1]), expected)
    runner.forward([Row(ids[:-1], 0, [2, 3], 0)])
    assert_same(runner.forward([Row(ids[-1:], 19, [2, 3, 4], 1)]), expected)


def test_other_block_size_gives_the_same_logits(folder: Path, runner: ModelRunner) -> None:
    """The block size is a matter of memory, not of results."""
    ids = ids_of(2, 50)
    small = ModelRunner(folder, num_blocks=30, block_size=32)
    assert_same(whole(small, ids, list(range(29, 16, -1))), whole(runner, ids, range(4)))


def test_warm_up_leaves_no_trace(runner: ModelRunner) -> None:
    """Warming up changes no result and leaves block 0 empty."""
    ids = ids_of(3, 5)
    expected = whole(runner, ids, [1])
    runner.warm_up()
    assert_same(whole(runner, ids, [0]), expected)


def test_unknown_backend_is_refused(folder: Path) -> None:
    """By its name."""
    with pytest.raises(InvalidRequest, match="abacus"):
        ModelRunner(folder, num_blocks=1, backend="abacus")


def test_unused_blocks_take_no_memory(folder: Path) -> None:
    """A pool of 4 GiB costs next to nothing until its blocks are used."""
    process = psutil.Process()
    before = process.memory_info().rss
    big = ModelRunner(folder, num_blocks=(4 << 30) // (S * 512))
    big.forward([Row(ids_of(1, 20), 0, [0, big.num_blocks - 1], 1)])
    assert process.memory_info().rss - before < 64 << 20
