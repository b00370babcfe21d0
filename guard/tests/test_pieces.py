"""Word pieces that are kept are those that the tokenizer itself gives."""

import string

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing

from headrace_guard.classifiers.pieces import WordPieces

_PIECES = ["[UNK]", "[CLS]", "[SEP]", *string.printable[:62], *string.punctuation, "the", "pass"]
_PIECES += [f"##{char}" for char in string.ascii_lowercase + string.digits]
_TEXT = st.text(st.sampled_from("thepasword 19_-'.\t\n\x00\x7f\u00e9\u4e2d"), max_size=60)


def _tokenizer() -> Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(_PIECES))}
    made = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = BertNormalizer(lowercase=True)
    made.pre_tokenizer = BertPreTokenizer()
    made.post_processor = BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return made


_TOKENIZER = _tokenizer()
_KEPT = WordPieces(_TOKENIZER)


@given(_TEXT)
def test_words_kept_give_what_the_tokenizer_gives(text: str) -> None:
    """Whatever the text: signs, odd characters, other scripts."""
    expected = _TOKENIZER.encode(text).ids[1:-1]
    assert _KEPT.of(text) == expected
    assert _KEPT.of(text) == expected


def test_what_is_kept_is_bounded() -> None:
    """Words longer than any real one are not kept."""
    pieces = WordPieces(_tokenizer())
    assert pieces.of("pass" * 20) == _TOKENIZER.encode("pass" * 20).ids[1:-1]
    assert not pieces._known
