"""The checks that a GPU has to pass, in the interpreter over small sizes; that they can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace_worker.gpu import kernel_check, model_check
from headrace_worker.gpu.kernel_check import Check, KernelSizes, kernel_checks
from headrace_worker.gpu.model_check import ModelSizes, model_checks
from headrace_worker.gpu.operands import Heads
from headrace_worker.gpu.run import all_checks, check
from headrace_worker.kernels.dispatch import kernels_for

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

CPU = torch.device("cpu")
# The interpreter multiplies bit patterns of bfloat16 in tl.dot.
SMALL = KernelSizes(
    rows=(1, 40),
    heads=(Heads(4, 2, 16), Heads(3, 1, 40)),
    shapes=(((0, 1), (0, 5), (40, 1), (13, 20)),),
    block_size=4,
    dtypes=(torch.float32, torch.float16),
)
SMALL_MODELS = ModelSizes(
    families=("gemma2",),
    vocabularies=(300,),
    num_draws=11,
    num_candidates=64,
    batches=(),
    num_prompts=2,
    num_tokens=2,
)


def test_all_kernels_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Each operation is checked for each type, and all hold."""
    assert check(kernel_checks(CPU, SMALL, kernels_for("triton"))) == 0
    said = capsys.readouterr().out
    for what in ("norms and gates of 40", "rotation and write, 3/1 heads", "window 37", "copies"):
        assert what in said
    assert said.endswith(" 0 failed\n")


@pytest.mark.parametrize(
    ("operation", "named"),
    [
        ("rms_norm", "norms and gates of 40, float32"),
        ("silu_mul", "norms and gates of 40, float32"),
        ("paged_attention", "attention, 3/1 heads of 40, float32, cap 0, window 0"),
        ("copy_blocks", "copies of blocks, float32"),
    ],
)
def test_a_wrong_kernel_is_named(operation: str, named: str) -> None:
    """A kernel that does nothing fails its checks, and only these."""
    right = kernels_for("triton")

    def wrong(*args: object) -> object:
        result = getattr(right, operation)(*args)
        return result if result is None else result * 1.01

    broken = right if operation == "copy_blocks" else replace(right, **{operation: wrong})
    if operation == "copy_blocks":
        broken = replace(right, copy_blocks=lambda *_: None)
    sizes = replace(SMALL, rows=(40,), heads=(Heads(3, 1, 40),), dtypes=(torch.float32,))
    failed = []
    for each in kernel_checks(CPU, sizes, broken):
        try:
            each.run()
        except AssertionError:
            failed.append(each.name)
    assert named in failed
    assert {name.split(",")[0] for name in failed} == {named.split(",")[0]}


def test_models_and_sampling_pass() -> None:
    """Sampling, logits and texts by the whole engine on the Triton kernels."""
    names = [each.name for each in model_checks(CPU, SMALL_MODELS)]
    assert names == [
        "sampling from 300 tokens as plain torch does",
        "logits of gemma2, float32",
        "texts of gemma2 by the whole engine",
    ]
    assert check(model_checks(CPU, SMALL_MODELS)) == 0


def test_one_failure_does_not_hide_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    """All run; what failed is counted and told again at the end."""

    def fail() -> None:
        raise AssertionError("wrong by a mile")

    ran: list[int] = []
    checks = [Check("first", fail), Check("second", lambda: ran.append(1)), Check("third", fail)]
    assert check(checks) == 2
    said = capsys.readouterr().out
    assert ran == [1]
    assert "first: FAILED: AssertionError: wrong by a mile" in said
    assert said.endswith("3 checks, 2 failed\n  first\n  third\n")


def test_a_gpu_has_to_pass_every_type_family_and_size() -> None:
    """What runs there is the whole list, recorded steps of each family among it."""
    names = [each.name for each in all_checks(CPU)]
    assert len(names) == len({*names})
    for kind in ("float32", "bfloat16", "float16"):
        assert f"copies of blocks, {kind}" in names
    for family in model_check.FAMILIES:
        assert f"recorded decode steps of {family}" in names
    assert len([name for name in names if name.startswith("attention")]) == 3 * 4 * len(
        kernel_check.ON_GPU.heads
    )
