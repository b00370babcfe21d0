"""The table beside one dict, and the bounds of what one step does."""

from random import Random

from headrace_common.kv_index import TIERS
from headrace_router.mask_table import MaskTable

GPU, CPU, _ = TIERS


def hashes(count: int, seed: int = 1) -> list[int]:
    draw = Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


def test_one_block_more_lets_only_few_go() -> None:
    """However full the table is: the loop waits for each change."""
    gone: list[int] = []
    table = MaskTable(100_000, gone.append)
    table.add(GPU, hashes(150_000), 1)
    num_gone, most = len(gone), 0
    assert num_gone > 0
    for block in hashes(20_000, seed=2):
        table.add(GPU, [block], 1)
        most, num_gone = max(most, len(gone) - num_gone), len(gone)
    assert 0 < most <= 100_000 // 500
    assert 90_000 < table.num_entries <= 100_000


def test_no_dict_of_a_large_table_is_large() -> None:
    """Python copies a dict whole when it grows: 15 million entries would take a second."""
    table = MaskTable(400_000, lambda _mask: None)
    table.add(GPU, hashes(500_000), 1)
    sizes = [len(table.hashes_of(*part)) for part in table.parts()]
    assert sum(sizes) == table.num_entries
    assert max(sizes) <= 10_000


def test_the_bound_is_on_all_tiers_together() -> None:
    """The tier that has most gives way."""
    table = MaskTable(2000, lambda _mask: None)
    table.add(CPU, hashes(300), 1)
    table.add(GPU, hashes(5000, seed=2), 1)
    assert table.num_entries <= 2000
    assert table.num_by_tier == {GPU: table.num_entries - 300, CPU: 300, TIERS[2]: 0}
    assert all(table.on_tier(CPU, block) for block in hashes(300))


def test_what_was_met_lately_stays_once() -> None:
    """A second chance, not a place for ever."""
    table = MaskTable(2000, lambda _mask: None)
    met = hashes(50)
    table.add(GPU, met, 1)
    table.add(GPU, hashes(1900, seed=2), 1)
    table.remember(met)
    table.add(GPU, hashes(1900, seed=3), 1)
    assert all(table.reader()(block) for block in met)
    table.add(GPU, hashes(4000, seed=4), 1)
    assert not any(table.reader()(block) for block in met)


def test_a_sweep_clears_a_bit_everywhere_in_steps() -> None:
    """Also of what changes meanwhile; what nobody else holds leaves."""
    table, blocks = MaskTable(50_000, lambda _mask: None), hashes(20_000)
    table.add(GPU, blocks, 0b01)
    table.add(GPU, blocks[:5000], 0b10)
    table.add(CPU, blocks[:100], 0b01)
    sweep, steps = table.sweep(0b01), 1
    while sweep.step(1000):
        steps += 1
        table.remove(GPU, [blocks[steps]], 0b11)
    assert 20 <= steps <= 22
    assert {table.reader()(block) for block in blocks[5000:]} == {0}
    assert {table.reader()(block) for block in blocks[100:5000]} == {0b10}
    assert table.num_by_tier[CPU] == 0
