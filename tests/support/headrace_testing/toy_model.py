"""A ready model around the toy runner, for tests of what surrounds an engine."""

from headrace_testing import byte_tokenizer
from headrace_testing.toy_runner import ToyRunner
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.model.info import ModelInfo
from headrace_worker.model_host import ReadyModel


def toy_model(context_tokens: int, num_blocks: int, runner: ToyRunner | None = None) -> ReadyModel:
    """Return a model with so many blocks of KV; without a *runner* of the test's it never ends."""
    data = byte_tokenizer.tokenizer_json()
    info = ModelInfo(
        fingerprint="f" * 64,
        context_tokens=context_tokens,
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        chat_template="",
        eos_token_ids=(byte_tokenizer.IM_END_ID,),
        bos_token_id=None,
        add_bos=False,
        tokenizer_json=data,
        special_tokens={},
        kv_bytes_per_token=4,
        created_unix_s=0,
    )
    runner = runner or ToyRunner(num_blocks, may_end=False)
    return ReadyModel(info, runner, TokenTable.from_json(data), num_blocks)
