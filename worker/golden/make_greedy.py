"""Make tests/golden/greedy_smollm2.json with transformers, the reference implementation.

    pip install -c constraints.txt -e '.[worker,golden]'
    python worker/golden/make_greedy.py SmolLM2-135M-Instruct.Q4_1.gguf

transformers reads the same GGUF file (weights dequantised by its own code, float32) and its own
tokenizer; nothing of the worker is used. Kept of each prompt: its ids, the greedy continuation, the
smallest gap between the best and the second logit on the way (a prompt with a gap below `MIN_GAP`
is refused: rounding could decide it, choose another text), and the likeliest tokens of the first
step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from prompts import CHATS, RAW, TEXTS
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUT = Path(__file__).parents[2] / "tests" / "golden" / "greedy_smollm2.json"
MAX_NEW_TOKENS = 32
MIN_GAP = 0.01
NUM_TOP = 32


def main() -> int:
    """Run all prompts and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    gguf: Path = parser.parse_args().gguf.resolve()
    torch.set_num_threads(1)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers 5.24 does not read tokenizer.ggml.pre from a GGUF file. The model's own
    # tokenizer.json, and llama.cpp under the name "smollm", cut every number character off first;
    # without that, digits outside ASCII come out differently.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()

    cases = [
        case_of(model, tokenizer, {"kind": "raw", "text": text}, ids_of(tokenizer, text))
        for text in RAW
    ]
    for messages in CHATS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        case = {"kind": "chat", "messages": messages, "text": text}
        cases.append(case_of(model, tokenizer, case, ids_of(tokenizer, text)))
    texts = [{"text": text, "token_ids": ids_of(tokenizer, text)} for text in TEXTS]
    close = [case["text"][:60] for case in cases if case["min_gap"] < MIN_GAP]
    for text in close:
        sys.stderr.write(f"too close to call, choose another text: {text!r}\n")
    if close:
        return 1
    golden = {
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "max_new_tokens": MAX_NEW_TOKENS,
        "eos_token_ids": [tokenizer.eos_token_id],
        "cases": cases,
        "tokenizer": texts,
    }
    OUTPUT.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return a text's tokens, none added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.inference_mode()
def case_of(model: Any, tokenizer: Any, case: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """Continue a prompt greedily; return *case* with what is to be compared."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    output = result.sequences[0, len(prompt) :].tolist()
    logits = torch.cat(result.logits)
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    first = logits[0].double().log_softmax(-1).topk(NUM_TOP)
    pairs = zip(first.indices.tolist(), first.values.tolist(), strict=True)
    top = [[token_id, round(value, 6)] for token_id, value in pairs]
    sys.stderr.write(f"{len(prompt):5d} {min(gaps):.4f} {tokenizer.decode(output)[:70]!r}\n")
    return {
        **case,
        "prompt_token_ids": prompt,
        "output_token_ids": output,
        "min_gap": round(min(gaps), 5),
        "first_top_logprobs": top,
    }


if __name__ == "__main__":
    sys.exit(main())
