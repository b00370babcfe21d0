"""The C kernels against their twins, over odd sizes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace_common.errors import Unavailable
from headrace_worker.kernels import compiler, dispatch, native, reference
from headrace_worker.kernels.blocks import (
    KIND_F32,
    KIND_Q4,
    KIND_Q8,
    KIND_Q8_HALVES,
    BlockMatrix,
    from_float,
    from_gguf,
)
from headrace_worker.kernels.draws import Draw
from headrace_worker.kernels.native import NativeKernels
from headrace_worker.kernels.native_types import TokenPlan, key_panels
from headrace_worker.kernels.plan import Scoring
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model.batch import Row, build_batch
from headrace_worker.sampling import drawn

KINDS = ("F32", "Q4_0", "Q4_1", "Q5_0", "Q8_0")


def randn(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def matrix(kind: str, num_out: int, num_in: int) -> tuple[BlockMatrix, torch.Tensor]:
    """Return a matrix and what GGUF's own library makes of it."""
    weight = randn(num_out + num_in, num_out, num_in)
    if kind == "F32":
        return from_float(weight), weight
    quantisation = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(weight.numpy(), quantisation)
    blocks = from_gguf(raw, kind)
    assert blocks is not None
    expected = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(raw, quantisation)))
    return BlockMatrix(torch.from_numpy(blocks), num_in), expected


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    found = dispatch.native_for("cpu")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("F32", KIND_F32),
        ("Q4_0", KIND_Q4),
        ("Q4_1", KIND_Q4),
        ("Q5_0", KIND_Q8),
        ("Q8_0", KIND_Q8),
    ],
)
def test_blocks_hold_the_files_weights_exactly(kind: str, expected: int) -> None:
    """Dequantised from our layout they equal GGUF's own dequantisation bit for bit."""
    blocks, weight = matrix(kind, 7, 96)
    assert (blocks.kind, blocks.num_out) == (expected, 7)
    assert torch.equal(reference.dequantised(blocks), weight)


@pytest.mark.parametrize(
    ("kind", "scale_bytes", "expected"),
    [("Q4_K", (0, 2), KIND_Q4), ("Q6_K", (208,), KIND_Q8_HALVES)],
)
def test_super_blocks_become_groups(
    kernels: NativeKernels, kind: str, scale_bytes: tuple[int, ...], expected: int
) -> None:
    """Any bytes of GGUF's K kinds dequantise to the same bits, and multiply as they should."""
    quantisation = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    raw = np.random.default_rng(1).integers(0, 256, (7, 2 * block_bytes), dtype=np.uint8)
    for start in (*scale_bytes, *(block_bytes + place for place in scale_bytes)):
        raw[:, start : start + 2] = np.full((7, 1), 0.01, np.float16).view(np.uint8)
    rows = from_gguf(raw, kind)
    assert rows is not None
    blocks = BlockMatrix(torch.from_numpy(rows), 512)
    weight = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(raw, quantisation)))
    assert blocks.kind == expected
    assert torch.equal(reference.dequantised(blocks), weight)
    assert torch.equal(kernels.linear(torch.eye(512), blocks), weight.T)


def test_other_quantisations_have_no_layout() -> None:
    """What has none is left to float32."""
    raw = gguf.quantize(randn(1, 2, 32).numpy(), gguf.GGMLQuantizationType.Q5_1)
    assert from_gguf(raw, "Q5_1") is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 32), (5, 64), (9, 96), (66, 576), (3, 1536)])
def test_linear_equals_its_twin(
    kernels: NativeKernels, kind: str, num_out: int, num_in: int
) -> None:
    """Any number of rows and outputs, also such that no tile fits, agrees to 1e-5."""
    blocks, weight = matrix(kind, num_out, num_in)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 19):
        x = randn(num_rows, num_rows, num_in)
        expected = x.double() @ weight.double().T
        error = (kernels.linear(x, blocks) - expected).abs().max() / expected.abs().max()
        assert error < 1e-5
        twin_error = (reference.linear(x, blocks) - expected).abs().max() / expected.abs().max()
        assert twin_error < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", [Rounding.INT16, Rounding.INT8])
def test_rounded_rows_equal_their_twin(
    kernels: NativeKernels, kind: str, rounding: Rounding
) -> None:
    """Rows of all sizes, zeros among them, round and multiply as the twin does."""
    blocks, _ = matrix(kind, 37, 1056)
    for num_rows in (1, 2, 3, 4, 5, 8, 11, 130):
        x = randn(num_rows, num_rows, 1056) * torch.logspace(-3, 3, num_rows).unsqueeze(1)
        x[:, :64] = 0
        expected = reference.rounded_linear(x, blocks, rounding)
        error = (kernels.linear(x, blocks, rounding) - expected).abs().amax(dim=1)
        assert (error < 1e-5 * expected.abs().amax(dim=1)).all()


def test_rounding_errors_are_those_of_the_type() -> None:
    """Of a product of 576: about a hundredth with int8, some 1e-5 with int16."""
    blocks, weight = matrix("Q4_1", 64, 576)
    x = randn(1, 50, 576)
    expected = x.double() @ weight.double().T
    for rounding, error in ((Rounding.INT16, 5e-5), (Rounding.INT8, 1.5e-2)):
        result = reference.rounded_linear(x, blocks, rounding)
        assert error / 10 < (result - expected).std() / expected.std() < error


@pytest.mark.parametrize("rounding", list(Rounding))
def test_broken_rows_spoil_themselves_only(kernels: NativeKernels, rounding: Rounding) -> None:
    """A NaN or an infinity makes its own row NaN or infinite and no other."""
    blocks, _ = matrix("Q4_1", 20, 64)
    x = randn(1, 9, 64)
    expected = kernels.linear(x, blocks, rounding)
    x[2, 5], x[7, 40] = float("nan"), float("inf")
    result = kernels.linear(x, blocks, rounding)
    is_good = torch.ones(9, dtype=torch.bool)
    is_good[[2, 7]] = False
    assert torch.equal(result[is_good], expected[is_good])
    assert not result[~is_good].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_linear_reads_each_weight_exactly(kernels: NativeKernels, kind: str) -> None:
    """A row of the identity gives a column, bit for bit."""
    blocks, weight = matrix(kind, 11, 64)
    assert torch.equal(kernels.linear(torch.eye(64), blocks), weight.T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", list(Rounding))
def test_rows_do_not_depend_on_their_mates(
    kernels: NativeKernels, kind: str, rounding: Rounding
) -> None:
    """A row alone and the same among 2 to 129 others, on one thread or three, has the same bits."""
    blocks, _ = matrix(kind, 85, 320)
    threads = native.NativeKernels(compiler.ensure_compiled(compiler.default_cache_dir()), 3)
    x = randn(3, 130, 320)
    alone = torch.cat([kernels.linear(row.unsqueeze(0), blocks, rounding) for row in x])
    for num_rows in (2, 3, 4, 5, 6, 7, 8, 9, 130):
        for each in (kernels, threads):
            assert torch.equal(each.linear(x[:num_rows], blocks, rounding), alone[:num_rows])


@pytest.mark.parametrize("size", [8, 64, 576])
def test_rms_norm_equals_its_twin(kernels: NativeKernels, size: int) -> None:
    """Small and large rows alike, and a row of zeros."""
    x, weight = (
        randn(1, 5, size) * torch.tensor([[1e-4], [1.0], [100.0], [0.0], [1.0]]),
        randn(2, size),
    )
    result = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(result, reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


def test_gates_equal_their_twins(kernels: NativeKernels) -> None:
    """SiLU and GELU from far below to far above zero."""
    gate = torch.cat((torch.linspace(-120, 120, 500), torch.linspace(-2, 2, 524))).view(2, 512)
    gate_up = torch.cat((gate, randn(1, 2, 512)), dim=-1)
    result, expected = kernels.silu_mul(gate_up), reference.silu_mul(gate_up)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-30)
    result, expected = kernels.gelu_mul(gate_up), reference.gelu_mul(gate_up)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
def test_rope_equals_its_twin(kernels: NativeKernels, head_dim: int) -> None:
    """All usual head sizes."""
    x, angles = randn(1, 3, 5, head_dim), randn(2, 3, head_dim // 2)
    result = kernels.rope(x, angles.cos(), angles.sin())
    torch.testing.assert_close(result, reference.apply_rope(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3), (2, 2), (20, 1)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 16), (64, 16), (80, 48)])
def test_attention_equals_its_twin(
    kernels: NativeKernels, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    """Contexts of 1 to 300 tokens over shuffled blocks, written and read by the kernels."""
    contexts = (1, 3, 15, 16, 17, 65, 129, 300)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    kv = randn(1, 2, 60, block_size, num_kv_heads, head_dim)
    tables = [[order.pop() for _ in range(-(-context // block_size))] for context in contexts]
    rows = [Row([0], c - 1, table, 0) for c, table in zip(contexts, tables, strict=True)]
    batch = build_batch(rows, block_size)
    starts = np.cumsum([0, *map(len, tables[:-1])])
    plan = TokenPlan(
        batch.plan.slots,
        torch.tensor([block_id for table in tables for block_id in table]),
        torch.from_numpy(starts),
        torch.tensor(contexts),
    )
    k, v = randn(2, 8, num_kv_heads, head_dim), randn(3, 8, num_kv_heads, head_dim)
    expected_kv = kv.clone()
    reference.write_kv(k, v, expected_kv, batch.plan.slots)
    own = torch.stack((key_panels(kv[0]), kv[1]))
    kernels.write_kv(k, v, own, plan)
    assert torch.equal(own, torch.stack((key_panels(expected_kv[0]), expected_kv[1])))
    q = 3 * randn(4, 8, num_heads, head_dim)
    for scoring in (Scoring(0.25), Scoring(0.3, 4.0), Scoring(0.2, 0.0, 6), Scoring(0.2, 9.0, 33)):
        result = kernels.attention(q, own, plan, scoring)
        expected = reference.paged_attention(q, expected_kv, batch.plan, scoring)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["peaked", "flat", "ties", "masked"])
@pytest.mark.parametrize("vocab_size", [1, 7, 1003, 8192])
def test_draws_are_the_twins(kernels: NativeKernels, shape: str, vocab_size: int) -> None:
    """Every mixture of truncations takes the tokens that plain torch takes."""
    logits = randn(vocab_size, 3, vocab_size) * (0.5 if shape == "flat" else 5.0)
    if shape == "ties":
        logits = logits.round()
    if shape == "masked":
        logits[:, 1::3] = float("-inf")
    draws = [
        Draw(row, temperature, top_p, min_p, top_k, uniform)
        for row, temperature in enumerate((0.2, 0.8, 2.5))
        for top_p in (0.0, 0.05, 0.9, 1.0)
        for min_p in (0.0, 0.1, 1.0)
        for top_k in (0, 1, 5, 700)
        for uniform in (0.0, 0.37, 0.9999)
    ]
    assert kernels.draw(logits, draws) == drawn(logits, draws)


def test_draws_from_broken_logits_stay_in_range(kernels: NativeKernels) -> None:
    """Rows without a number give some token; a NaN among numbers never comes."""
    logits = torch.full((3, 40), float("nan"))
    logits[1] = float("-inf")
    logits[2, 5:9] = 1.0
    draws = [Draw(row, 1.0, 0.9, 0.0, 0, u) for row in range(3) for u in (0.0, 0.5, 0.99)]
    tokens = kernels.draw(logits, draws)
    assert all(0 <= token < 40 for token in tokens)
    assert tokens[6:] == [5, 7, 8]


def test_a_logit_of_plus_infinity_is_the_likeliest(kernels: NativeKernels) -> None:
    """And of several, and of what is too high, each comes as often: in C as in torch."""
    logits = randn(1, 4, 101)
    logits[0, 60] = float("inf")
    logits[1, [3, 60, 100]] = float("inf")
    logits[2, [7, 60]] = torch.tensor([float("inf"), 2e30])
    logits[3, [0, 60]] = torch.tensor([float("nan"), float("inf")])
    draws = [
        Draw(row, temperature, top_p, 0.0, top_k, uniform)
        for row in range(4)
        for temperature in (0.2, 1.0)
        for top_p, top_k in ((0.0, 0), (0.9, 0), (0.0, 2))
        for uniform in (0.0, 0.45, 0.9999)
    ]
    tokens = kernels.draw(logits, draws)
    assert tokens == drawn(logits, draws)
    came = [
        {t for t, draw in zip(tokens, draws, strict=True) if draw.row == row} for row in range(4)
    ]
    assert came == [{60}, {3, 60, 100}, {7, 60}, {60}]


COMPUTES_AT_THE_END = """
import ctypes, sys, threading
from pathlib import Path
import torch
from headrace_worker.kernels.blocks import from_float
from headrace_worker.kernels.dispatch import native_for
from headrace_worker.kernels.native_types import I64, matrix_of, pointer

kernels = native_for("cpu", Path(sys.argv[1]), 2)
weight, x = kernels.pack(from_float(torch.randn(2048, 2048))), torch.randn(64, 2048)
y, matrix, turns = torch.empty(64, 2048), matrix_of(weight), threading.Semaphore(0)
places = kernels.context, pointer(x), ctypes.byref(matrix), pointer(y), I64(64), I64(0)

def compute():
    while True:
        kernels.library.hr_linear(*places)
        turns.release()

threading.Thread(target=compute, daemon=True).start()
for _ in range(3):
    turns.acquire()
"""


def test_a_process_may_end_while_a_thread_computes(tmp_path: Path) -> None:
    """As it does when the engine's thread could not be waited for: no crash, exit code 0."""
    command = [sys.executable, "-c", COMPUTES_AT_THE_END, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_backend_has_none() -> None:
    """The backend "torch" does without compiled kernels."""
    assert dispatch.native_for("torch") is None


def test_no_compiler_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a compiler there is one line in the log and no kernels."""
    monkeypatch.setattr(compiler.shutil, "which", lambda _name: None)
    assert dispatch.native_for("cpu", tmp_path) is None
    assert [record.getMessage() for record in caplog.records] == [
        "computing without compiled kernels: there is no C compiler 'cc'"
    ]


def broken(name: str, find: str, put: str, folder: Path) -> Path:
    """Copy the sources with a mistake in one of them."""
    shutil.copytree(compiler.SOURCES, folder)
    source = (folder / name).read_text()
    assert find in source
    (folder / name).write_text(source.replace(find, put))
    return folder


@pytest.mark.parametrize(
    ("name", "find", "put", "said"),
    [
        ("linear.c", "scale[v], offset[v])", "scale[v], scale[v])", "(kind 1, float32)"),
        ("unpack.h", "& 0x0f0f0f0fu", "& 0x07070707u", "(kind 1, int8)"),
        ("attention.c", "end < num ? end : num", "num", "check (attention)"),
        ("linear.c", "void run_product", "vid run_product", "could not be compiled"),
    ],
)
def test_broken_kernels_are_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    find: str,
    put: str,
    said: str,
) -> None:
    """Kernels that compute something else, or do not compile, are refused and leave no debris."""
    monkeypatch.setattr(compiler, "SOURCES", broken(name, find, put, tmp_path / "src"))
    monkeypatch.setattr(compiler, "FLAGS", ("-O0", *compiler.FLAGS[1:]))
    assert dispatch.native_for("cpu", tmp_path / "cache") is None
    assert said in caplog.text
    assert not list((tmp_path / "cache").glob("tmp-*"))


def test_compiled_once(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is there is not compiled again."""

    def fail(*_args: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_compile", fail)
    library = compiler.ensure_compiled(compiler.default_cache_dir())
    assert library.exists()


@pytest.mark.parametrize("call", [lambda path: path.write_bytes(b"no library"), lambda _path: None])
def test_unloadable_library_is_said(tmp_path: Path, call: Callable[[Path], object]) -> None:
    """A file that is no library, or absent, raises what the fallback understands."""
    call(tmp_path / "k.so")
    with pytest.raises(Unavailable, match="cannot be loaded"):
        native.NativeKernels(tmp_path / "k.so")
