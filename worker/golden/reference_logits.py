"""Logits of given texts by transformers, for `worker/benchmarks/golden_matrix.py`.

    python worker/golden/reference_logits.py MODEL.gguf TEXTS.json LOGITS.npy [--threads 2]

TEXTS.json is a list of [prompt ids, output ids], all outputs of the same length. Written are the
float32 logits (texts, output tokens, V) from which each output token follows, given all tokens
before it. If each output token is the best there, the output is what transformers generates
greedily: token by token its choice is the same, given the same tokens before.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main() -> int:
    """Compute and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("logits", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    gguf: Path = args.gguf.resolve()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    texts = json.loads(args.texts.read_text(encoding="utf-8"))
    num_tokens = len(texts[0][1])
    shape = (len(texts), num_tokens, model.config.get_text_config().vocab_size)
    out = np.lib.format.open_memmap(args.logits, mode="w+", dtype=np.float32, shape=shape)
    with torch.inference_mode():
        for idx, (prompt, output) in enumerate(texts):
            ids = torch.tensor([[*prompt, *output[:-1]]])
            out[idx] = model(ids, logits_to_keep=num_tokens).logits[0].float().numpy()
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
