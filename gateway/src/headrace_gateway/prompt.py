"""Messages to token ids, so that only the template can write control tokens.

Text that spells a control token (`<|im_end|>` in a user's message) stays text: before rendering, a
private-use character that occurs nowhere in the messages is put inside every such spelling and
behind anything at a string's end, blanks aside, that could begin one. After rendering, every intact
spelling comes from the template. The text is cut there, the mark removed, and each plain piece
encoded with control tokens off. A control token ends what a tokenizer looks at, so the pieces' ids
are those of the whole text; and pieces that were encoded before are remembered (`token_ids`).

Which tokens are control tokens a tokenizer says only in part: Qwen's `<think>` and `<tool_call>`
are added as ordinary ones. Here every added token is one that is special, spelled `<|...|>`, or
spelled in the model's own template.

Templates run in Jinja's immutable sandbox with the options and helpers of `transformers`
(huggingface/transformers, utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace_common.errors import InvalidRequest
from headrace_contracts.worker.v1.worker_pb2 import ModelCard
from headrace_gateway.control_tokens import (
    encode_ids,
    make_tokenizer,
    spare_first_prefix,
    with_control_tokens,
)
from headrace_gateway.token_ids import PieceMemory, TokenIds
from headrace_gateway.tool_prompt import spells_hermes, tell_tools

# A message as templates see it. Any: strings, and JSON values inside tool calls.
Message = dict[str, Any]
# Below this a text is encoded on the caller's thread in well under a millisecond.
LONG_CHARS = 2048
# Behind each text where many are searched at once.
_END = "\0"
_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
# Of messages that may tell of calls.
_TOOL_ROLES = {"assistant", "tool"}
_TEMPLATE_KEYS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments")
)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text; empty = the model has none.
        special_tokens: spellings by name, given to the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source) if source else None
        self._source, self._special_tokens = source, dict(special_tokens)
        # What every rendering knows.
        self._names: dict[str, Any] = {
            **({} if self._template is None else self._template.globals),
            **special_tokens,
            "documents": None,
            "add_generation_prompt": True,
        }
        self.knows_developer = "developer" in source
        self.knows_tools = spells_hermes(source)

    def check_args(self, args: Mapping[str, Any]) -> None:
        """Refuse what the template would pass over in silence.

        An effort it may: a model that does not reason does so alike with any, and agents send one
        to every model.

        Raises:
            InvalidRequest: it knows no such word, or the word is ours.
        """
        for name in args:
            is_known = name == "reasoning_effort" or re.search(
                rf"\b{re.escape(name)}\b", self._source
            )
            if name in _RESERVED or name in self._special_tokens or not is_known:
                param = f"chat_template_kwargs.{name[:64]}"
                raise InvalidRequest(f"This model's chat template takes no {param}.", param=param)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        args: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the messages and the opening of the assistant's turn.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions.", param="model"
            )
        try:
            template, names = self._template, {**self._names, **(args or {})}
            names["messages"], names["tools"] = messages, list(tools) or None
            # Not by its `new_context`, which looks through globals that are in the names already.
            context = Context(template.environment, names, template.name, template.blocks)
            return "".join(template.root_render_func(context))
        except jinja2.TemplateError as error:
            text = str(error)[:200]
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {text}", param="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                "The model's chat template cannot render these messages.", param="messages"
            ) from error


@dataclass(frozen=True, slots=True)
class _Control:
    """A control token, and whether it swallows the space beside it."""

    ids: TokenIds
    lstrip: bool
    rstrip: bool


class PromptEncoder:
    """Turns prompts of one model into ids. Thread-safe after construction.

    Args:
        card: the model.
        tokenizer_json: its tokenizer.
    """

    def __init__(self, card: ModelCard, tokenizer_json: bytes) -> None:
        spec = with_control_tokens(tokenizer_json, card.chat_template)
        # For what is not the beginning of a text, and for what is.
        self._plain = self._first = make_tokenizer(spec)
        if spare_first_prefix(spec):
            self._plain = make_tokenizer(spec)
        self.template = ChatTemplate(card.chat_template, card.special_tokens)
        self._bos = [card.bos_token_id] if card.add_bos else []
        added = self._plain.get_added_tokens_decoder()
        self._special = {
            token.content: _Control(TokenIds.of([i]), token.lstrip, token.rstrip)
            for i, token in added.items()
            if token.special
        }
        self._spelling = _alternatives(self._special)
        alone = {token.content for token in added.values() if token.single_word}
        matching = _alternatives(self._special, alone)
        self._control = matching and re.compile(f"({matching.pattern})")
        self._beginnings = tuple(
            {text[:end] for text in self._special for end in range(1, len(text))}
        )
        self._suspect = _suspect(self._special, self._beginnings)
        self._memory = PieceMemory()

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        args: Mapping[str, Any] | None = None,
        owner: bytes | None = None,
    ) -> TokenIds:
        """Render and encode a conversation.

        Args:
            messages: the conversation.
            tools: functions to show to the model, as templates see them.
            args: the client's own words to the template.
            owner: for whom its pieces are remembered; None = for nobody.

        Raises:
            InvalidRequest: the template refuses it.
        """
        messages = self._fitted(messages, tools)
        shown = list(tools) if tools and self.template.knows_tools else []
        args = dict(args) if args else {}
        if args:
            self.template.check_args(args)
        given = [*messages, *shown, args]
        spelling = self._spelling
        if spelling is None or not self._needs_marks(given):
            return self._encode_pieces(self.template.render(messages, shown, args), "", owner)
        mark = _free_mark(given)

        def marked(values: Sequence[Message]) -> list[Message]:
            return [
                _map_strings(value, lambda text: self._marked(spelling, text, mark))
                for value in values
            ]

        (marked_args,) = marked([args])
        rendered = self.template.render(marked(messages), marked(shown), marked_args)
        return self._encode_pieces(rendered, mark, owner)

    def encode_text(self, text: str, *, add_bos: bool = True) -> TokenIds:
        """Encode a plain prompt; control tokens' spellings stay text."""
        return TokenIds.of((self._bos if add_bos else []) + encode_ids(self._first, text))

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""
        return [self._plain.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens spelled out: for the guard."""
        text: str = self._plain.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _fitted(self, messages: Sequence[Message], tools: Sequence[Message]) -> Sequence[Message]:
        """Fit the messages to what the model's template knows."""
        roles = {message["role"] for message in messages}
        if not self.template.knows_tools and (tools or roles & _TOOL_ROLES):
            messages = tell_tools(messages, tools)
        if not self.template.knows_developer and "developer" in roles:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        return messages

    def _needs_marks(self, values: Sequence[Message]) -> bool:
        # All at once; a spelling found across two texts only costs the marks that nobody needed.
        texts = _strings(values)
        texts.append("")
        return self._suspect is not None and self._suspect.search(_END.join(texts)) is not None

    def _marked(self, spelling: re.Pattern[str], text: str, mark: str) -> str:
        # A spelling may start inside another and end behind it, so every character of it, the last
        # one too, is followed by the mark.
        text = spelling.sub(lambda found: mark.join(found.group()) + mark, text)
        if text.endswith(self._beginnings):
            return text + mark
        # Templates trim texts.
        bare = text.rstrip()
        if bare.endswith(self._beginnings):
            return bare + mark + text[len(bare) :]
        return text

    def _encode_pieces(self, text: str, mark: str, owner: bytes | None) -> TokenIds:
        # Plain pieces and control tokens in turn.
        parts = [text] if self._control is None else self._control.split(text)
        pieces: list[TokenIds] = []
        remembered, strips = self._memory.recent, False
        for idx in range(0, len(parts), 2):
            piece = parts[idx]
            control = self._special[parts[idx + 1]] if idx + 1 < len(parts) else None
            if mark or strips or (control is not None and control.lstrip):
                right = control is not None and control.lstrip
                piece = _stripped(piece, mark, left=strips, right=right)
            if piece:
                is_first = idx == 0 and self._first is not self._plain
                ids = None if owner is None or is_first else remembered.get((owner, piece))
                if ids is None:
                    ids = self._piece_ids(piece, owner, is_first=is_first)
                pieces.append(ids)
            if control is not None:
                pieces.append(control.ids)
                strips = control.rstrip
        return TokenIds.joined(pieces)

    def _piece_ids(self, piece: str, owner: bytes | None, *, is_first: bool) -> TokenIds:
        if is_first:
            return TokenIds.of(encode_ids(self._first, piece))
        if owner is None:
            return TokenIds.of(encode_ids(self._plain, piece))
        ids = self._memory.get((owner, piece))
        if ids is None:
            ids = TokenIds.of(encode_ids(self._plain, piece))
            self._memory.put((owner, piece), ids)
        return ids


def _stripped(piece: str, mark: str, *, left: bool, right: bool) -> str:
    """Take the mark out of a piece, and the space that the control tokens beside it swallow."""
    if mark:
        piece = piece.replace(mark, "")
    if left:
        piece = piece.lstrip()
    return piece.rstrip() if right else piece


def _alternatives(
    spellings: Mapping[str, object], alone: Collection[str] = ()
) -> re.Pattern[str] | None:
    """Return what finds any spelling; those that stand *alone* only where no word is beside."""
    longest_first = sorted((text for text in spellings if text), key=len, reverse=True)
    found = [
        rf"(?<!\w){re.escape(text)}(?!\w)" if text in alone else re.escape(text)
        for text in longest_first
    ]
    return re.compile("|".join(found)) if found else None


def _suspect(spellings: Mapping[str, object], beginnings: Sequence[str]) -> re.Pattern[str] | None:
    """Return what finds a spelling in texts that each end with `_END`, or what may begin one."""
    if not spellings:
        return None
    whole = "|".join(map(re.escape, spellings))
    cut = "|".join(map(re.escape, beginnings))
    return re.compile(rf"{whole}|(?:{cut})\s*{_END}" if cut else whole)


def _strings(values: Sequence[Message]) -> list[str]:
    """Return every text in JSON values, keys included."""
    texts: list[str] = []
    todo: list[object] = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            texts.extend(value)
            value = value.values()
        elif not isinstance(value, list):
            value = (value,)
        for inner in value:
            if isinstance(inner, str):
                texts.append(inner)
            elif isinstance(inner, dict | list):
                todo.append(inner)
    return texts


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:  # Any: JSON values
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        # Keys of a tool's arguments are the client's text too; those that templates look up stay.
        return {
            key if key in _TEMPLATE_KEYS else change(key): _map_strings(inner, change)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_map_strings(inner, change) for inner in value]
    return value


def _free_mark(messages: Sequence[Message]) -> str:
    used = set[str]().union(*_strings(messages))
    for code in range(_FIRST_MARK, _LAST_MARK + 1):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequest("The messages use every private-use character.", param="messages")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        autoescape=False,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its content simply stays."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Any) -> Any:  # Any: jinja's parser and node types
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
