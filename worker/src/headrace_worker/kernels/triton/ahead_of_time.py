"""Compiles every kernel for sm_80 and sm_90 without a device and compares with the committed table.

``python -m headrace_worker.kernels.triton.ahead_of_time`` checks, with ``--update`` it writes
``resources.json`` anew: registers a thread, shared memory in bytes, spilled bytes. A kernel fails
the check if it does not compile, spills, asks for more shared memory than the device has, or needs
more registers or shared memory than the table says.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace_worker.kernels.triton import (
    copy_blocks,
    gated,
    paged_decode,
    paged_prefill,
    rms_norm,
    rope,
    sampling,
)
from headrace_worker.kernels.triton.launch import precision
from headrace_worker.kernels.triton.tuning import UNTUNED, Cut

TABLE = Path(__file__).with_name("resources.json")
# Shared memory that one program may have. Bytes.
TARGETS = {80: 163 << 10, 90: 227 << 10}
_PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_OPTIONS = ("num_warps", "num_stages")
_FIGURES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spill_bytes": re.compile(r"(\d+) bytes spill stores"),
}


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel is launched.

    Attributes:
        name: in the table.
        kernel: the jitted function.
        pointers: element type of each pointer argument, e.g. "bf16".
        scalars: type of each number argument.
        constants: compile-time arguments.
        cut: further ones, and warps and stages.
    """

    name: str
    kernel: Any  # Any: a jitted function
    pointers: dict[str, str]
    scalars: dict[str, str]
    constants: dict[str, Any]
    cut: Cut = field(default_factory=dict)


def variants() -> list[Variant]:
    """Every kernel as it is launched: head sizes, caps, windows, and float32 for the checks."""
    half, full = torch.bfloat16, torch.float32
    return [
        *(_decode(dim, half) for dim in (64, 128, 256)),
        _decode(128, half, has_cap=True),
        *(_decode(dim, full) for dim in (64, 256)),
        _join(),
        *(_prefill(dim, half) for dim in (64, 128, 256)),
        _prefill(128, half, has_window=True),
        _prefill(256, half, has_cap=True, has_window=True),
        *(_prefill(dim, full, has_window=True) for dim in (64, 128, 256)),
        *(_norm(has_delta=has_delta) for has_delta in (False, True)),
        _rope(),
        *(_gated(has_gelu=has_gelu) for has_gelu in (False, True)),
        _copy(),
        *_sampling(),
    ]


def compiled(variant: Variant, capability: int) -> dict[str, int]:
    """Compile for one kind of device and return what `TABLE` holds."""
    names = variant.kernel.arg_names
    types = {name: f"*{kind}" for name, kind in variant.pointers.items()} | variant.scalars
    signature = {name: types.get(name, "constexpr") for name in names}
    # Torch's allocations are aligned; without the promise loads are not vectorised.
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*") or name.startswith("stride")
    }
    options = {name: value for name, value in variant.cut.items() if name in _OPTIONS}
    constants = variant.constants | {k: v for k, v in variant.cut.items() if k not in _OPTIONS}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(variant.kernel, signature, constexprs=places, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    program = triton.compile(source, target=target, options=options or None)
    figures = _assembled(program.asm["ptx"], capability)
    return figures | {"shared_bytes": int(program.metadata.shared)}


def _assembled(ptx: str, capability: int) -> dict[str, int]:
    architecture = f"sm_{capability}a" if "sm_90a" in ptx else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(  # noqa: S603 - fixed arguments, no shell
            [str(_PTXAS), "-v", f"-arch={architecture}", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    found = {name: pattern.search(done.stderr) for name, pattern in _FIGURES.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}


def problems(figures: dict[str, int], known: dict[str, int] | None, limit_bytes: int) -> list[str]:
    """Say what is wrong with a kernel's figures; empty = nothing."""
    found = []
    if figures["spill_bytes"]:
        found.append(f"spills {figures['spill_bytes']} bytes")
    if figures["shared_bytes"] > limit_bytes:
        found.append(f"needs {figures['shared_bytes']} bytes of shared memory of {limit_bytes}")
    if known is None:
        return [*found, "is not in the table"]
    return found + [
        f"{name} grew from {known[name]} to {figures[name]}"
        for name in ("registers", "shared_bytes")
        if figures[name] > known[name]
    ]


def _decode(dim: int, dtype: torch.dtype, *, has_cap: bool = False) -> Variant:
    return Variant(
        f"paged_decode D={dim}{' cap' * has_cap}{_suffix(dtype)}",
        paged_decode.paged_decode_kernel,
        dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr"), _TYPES[dtype])
        | dict.fromkeys(("token_idx_ptr", "contexts_ptr", "tables_ptr"), "i32")
        | dict.fromkeys(("parts_ptr", "log_sums_ptr"), "fp32"),
        {"scale": "fp32", "soft_cap": "fp32"}
        | dict.fromkeys(("window", "num_splits", "stride_q", "stride_table"), "i32"),
        {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "GROUP": 16,
            "DIM": dim,
            "DIM_PADDED": dim,
            "BLOCK_SIZE": 16,
            "HAS_CAP": has_cap,
            "PRECISION": precision(dtype),
        },
        UNTUNED.cut("paged_decode", dim, dtype),
    )


def _join() -> Variant:
    return Variant(
        "join_splits",
        paged_decode.join_splits_kernel,
        {"parts_ptr": "fp32", "log_sums_ptr": "fp32", "token_idx_ptr": "i32", "out_ptr": "bf16"},
        {"num_splits": "i32"},
        {"NUM_HEADS": 32, "DIM": 128, "DIM_PADDED": 128, "SPLITS": 16},
    )


def _prefill(
    dim: int, dtype: torch.dtype, *, has_cap: bool = False, has_window: bool = False
) -> Variant:
    tables = ("tile_row", "tile_start", "starts", "num_new", "contexts", "tables")
    return Variant(
        f"paged_prefill D={dim}{' cap' * has_cap}{' window' * has_window}{_suffix(dtype)}",
        paged_prefill.paged_prefill_kernel,
        dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), _TYPES[dtype])
        | {f"{name}_ptr": "i32" for name in tables},
        {"scale": "fp32", "soft_cap": "fp32"}
        | dict.fromkeys(("window", "stride_q", "stride_out", "stride_table"), "i32"),
        {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "DIM": dim,
            "DIM_PADDED": dim,
            "BLOCK_SIZE": 16,
            "HAS_CAP": has_cap,
            "HAS_WINDOW": has_window,
            "PRECISION": precision(dtype),
        },
        UNTUNED.cut("paged_prefill", dim, dtype),
    )


def _suffix(dtype: torch.dtype) -> str:
    return " fp32" if dtype == torch.float32 else ""


def _norm(*, has_delta: bool) -> Variant:
    return Variant(
        "add_rms_norm" if has_delta else "rms_norm",
        rms_norm.rms_norm_kernel,
        dict.fromkeys(("x_ptr", "delta_ptr", "weight_ptr", "out_ptr", "sum_ptr"), "bf16"),
        {"eps": "fp32"} | dict.fromkeys(("size", "heads", "stride_token", "stride_head"), "i32"),
        {"HAS_DELTA": has_delta, "BLOCK": 4096},
        UNTUNED.cut("rms_norm", 4096, torch.bfloat16),
    )


def _rope() -> Variant:
    return Variant(
        "rope_write_kv",
        rope.rope_write_kv_kernel,
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "keys_ptr", "values_ptr"), "bf16")
        | {"cos_ptr": "fp32", "sin_ptr": "fp32", "slots_ptr": "i64"},
        dict.fromkeys(("stride_q", "stride_k", "stride_v", "num_heads", "num_kv_heads"), "i32"),
        {"HALF": 64, "BLOCK": 64},
        UNTUNED.cut("rope_write_kv", 128, torch.bfloat16),
    )


def _gated(*, has_gelu: bool) -> Variant:
    return Variant(
        "gelu_mul" if has_gelu else "silu_mul",
        gated.gated_kernel,
        {"gate_up_ptr": "bf16", "out_ptr": "bf16"},
        {"size": "i32"},
        {"HAS_GELU": has_gelu},
        UNTUNED.cut("gated", 14_336, torch.bfloat16),
    )


def _copy() -> Variant:
    return Variant(
        "copy_blocks",
        copy_blocks.copy_blocks_kernel,
        {"source_ptr": "bf16", "target_ptr": "bf16", "pairs_ptr": "i32"},
        dict.fromkeys(("size", "stride_source", "stride_target"), "i32"),
        {},
        UNTUNED.cut("copy_blocks", 16_384, torch.bfloat16),
    )


def _sampling() -> list[Variant]:
    tile, candidates = sampling.TILE, sampling.CANDIDATES
    floats = ("maxima_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "values_ptr")
    return [
        Variant(
            "penalise",
            sampling.penalise_kernel,
            {"logits_ptr": "fp32", "rows_ptr": "i32", "ids_ptr": "i32"}
            | dict.fromkeys(("repetition_ptr", "subtracted_ptr", "added_ptr", "kept_ptr"), "fp32"),
            {"num_entries": "i32", "vocab": "i32"},
            {"BLOCK": 256},
        ),
        Variant(
            "restore",
            sampling.restore_kernel,
            {"logits_ptr": "fp32", "rows_ptr": "i32", "ids_ptr": "i32", "kept_ptr": "fp32"},
            {"num_entries": "i32", "vocab": "i32"},
            {"BLOCK": 256},
        ),
        Variant(
            "tile_stats",
            sampling.tile_stats_kernel,
            dict.fromkeys(("logits_ptr", "temperature_ptr", "maxima_ptr", "sums_ptr"), "fp32"),
            {"vocab": "i32", "num_tiles": "i32"},
            {"TILE": tile, "TILES": 8},
        ),
        Variant(
            "collect",
            sampling.collect_kernel,
            dict.fromkeys(("logits_ptr", "bounds_ptr", "values_ptr"), "fp32")
            | {"counts_ptr": "i32", "ids_ptr": "i32", "rows_ptr": "i32"},
            {"vocab": "i32"},
            {"BLOCK": 8 * tile, "CANDIDATES": candidates},
        ),
        Variant(
            "choose",
            sampling.choose_kernel,
            dict.fromkeys(floats, "fp32")
            | dict.fromkeys(("ids_ptr", "counts_ptr", "top_k_ptr", "chosen_ptr"), "i32")
            | dict.fromkeys(("sums_ptr", "uniform_ptr"), "fp64"),
            {},
            {"CANDIDATES": candidates},
        ),
        Variant(
            "invert",
            sampling.invert_kernel,
            dict.fromkeys(("logits_ptr", "tile_maxima_ptr", "tile_sums_ptr"), "fp32")
            | dict.fromkeys(("maxima_ptr", "temperature_ptr"), "fp32")
            | {"uniform_ptr": "fp64", "chosen_ptr": "i32"},
            {"vocab": "i32", "num_tiles": "i32"},
            {"TILE": tile, "TILES": 512},
        ),
    ]


def main() -> int:
    """Compile all; 0 = the table holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the table anew")
    is_update = parser.parse_args().update
    table = {} if is_update else json.loads(TABLE.read_text(encoding="utf-8"))
    measured: dict[str, dict[str, int]] = {}
    failed = False
    for variant in variants():
        for capability, limit_bytes in TARGETS.items():
            name = f"{variant.name} sm_{capability}"
            figures = measured[name] = compiled(variant, capability)
            known = figures if is_update else table.get(name)
            wrong = problems(figures, known, limit_bytes)
            failed = failed or bool(wrong)
            sys.stdout.write(f"{name}: {figures} {'; '.join(wrong) or 'ok'}\n")
    if is_update:
        TABLE.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
