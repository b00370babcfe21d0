"""Make tests/golden/greedy_gemma3.json with transformers, as `make_greedy.py` does for SmolLM2.

    pip install -c constraints.txt -e '.[worker,golden]'
    headrace model fetch gemma3-270m
    python worker/golden/make_gemma.py gemma-3-270m-q4_k_m.gguf

A base model, so only plain texts; one is longer than the windows of 512 positions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
from make_greedy import MAX_NEW_TOKENS, MIN_GAP, case_of, ids_of
from prompts import RAW, TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUT = Path(__file__).parents[2] / "tests" / "golden" / "greedy_gemma3.json"
# transformers 5.24 joins runs of spaces from a GGUF by merges; SentencePiece and llama.cpp take the
# longest user-defined piece, which has 31. Only runs beyond that come out differently.
_LONGEST_RUN = 31
_MIN_LONG_TOKENS, _MAX_LONG_TOKENS = 600, 760


def main() -> int:
    """Run all prompts whose choices are clear and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    gguf: Path = parser.parse_args().gguf.resolve()
    torch.set_num_threads(1)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    bos = [tokenizer.bos_token_id]
    long_ids = bos + [token for text in RAW for token in ids_of(tokenizer, text)]
    prompts = [(text, bos + ids_of(tokenizer, text)) for text in RAW]
    prompts.append(("(all of them)", long_ids[:_MAX_LONG_TOKENS]))
    cases = [case_of(model, tokenizer, {"kind": "raw", "text": t}, ids) for t, ids in prompts]
    # Rounding could decide these.
    clear = [case for case in cases if case["min_gap"] >= MIN_GAP]
    longest = max(len(case["prompt_token_ids"]) for case in clear)
    sys.stderr.write(f"{len(clear)} of {len(cases)} are clear, the longest has {longest} tokens\n")
    if longest < _MIN_LONG_TOKENS:
        return 1
    golden = {
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "max_new_tokens": MAX_NEW_TOKENS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": [tokenizer.eos_token_id],
        "cases": clear,
        "tokenizer": [
            {"text": text, "token_ids": ids_of(tokenizer, text)}
            for text in TEXTS
            if " " * (_LONGEST_RUN + 1) not in text
        ],
    }
    OUTPUT.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
