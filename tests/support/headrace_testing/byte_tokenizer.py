"""A whole tokenizer in 259 entries: one token per byte and three control tokens.

Byte-level BPE without merges, so that token id == byte value and a test can read ids as text. Ids
256 to 258 are `<|endoftext|>`, `<|im_start|>` and `<|im_end|>`.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 256, 257, 258
VOCAB_SIZE = 259
SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_json() -> bytes:
    """Return the tokenizer as `tokenizer.json`."""
    vocab = {char: byte for byte, char in byte_chars().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        ]
    )
    text: str = tokenizer.to_str()
    return text.encode()


def encode(text: str) -> list[int]:
    """Return the ids of plain text (control tokens' spellings stay text)."""
    return list(text.encode())


def decode(token_ids: list[int]) -> str:
    """Return the text of ids; control tokens have none."""
    return bytes(i for i in token_ids if i < END_OF_TEXT_ID).decode("utf-8", errors="replace")


def byte_chars() -> dict[int, str]:
    """GPT-2's map from byte to a printable character (openai/gpt-2, src/encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in chars]
    return chars | {byte: chr(256 + idx) for idx, byte in enumerate(rest)}
