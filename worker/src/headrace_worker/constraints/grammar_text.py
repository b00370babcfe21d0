"""From the contract's OutputConstraint to llguidance's grammar text. Pure.

A constraint of several parts becomes a list of named grammars: `top` says how they go together,
`whole` is the wanted kind of text, `args0`, `args1`... are the arguments of the functions. Those
that are a text and no JSON end an answer. Schemas are written with bounded blanks between their
tokens: a model that likes blanks would else never come to an end.

What is refused here is refused before any grammar is built, by size alone; the rest is bounded by
llguidance's own limits.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from headrace_common.errors import InvalidRequest
from headrace_contracts.worker.v1 import worker_pb2 as pb

# At most one line break and an indent between two tokens of JSON.
_BLANKS = r"\n? {0,16}"
MAX_TEXT_CHARS = 256 * 1024
_MAX_GRAMMAR_CHARS = 64 * 1024
_MAX_DEPTH = 64
# The time to compile one object grows with the square of its properties.
_MAX_PROPERTIES = 1000
_MAX_VALUES = 20_000
_MAX_TEXTS = 1024
_MAX_FUNCTIONS = 128
_DEFAULT_MAX_CALLS = 64
_ENDS_PATTERN = {"/": "\\/", "\n": "\\n"}

# Keywords that say themselves which further properties an object may have.
_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
# Keywords beside `properties` that may name more of them.
_JOINING = {"anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
# Keywords whose values hold schemas.
_MAPS_OF_SCHEMAS = {"properties", "$defs", "definitions"}
_LISTS_OF_SCHEMAS = {"anyOf", "oneOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}

# A grammar as llguidance's JSON has it. Any: a JSON schema.
Json = dict[str, Any]


def grammar_text(constraint: pb.OutputConstraint) -> str:
    """Return the grammar as llguidance's JSON.

    Raises:
        InvalidRequest: it is not well formed, or too large.
    """
    whole = _whole(constraint)
    if not constraint.HasField("tool_calls"):
        if whole is None:
            raise _refused("it says nothing")
        return json.dumps({"grammars": [whole]})
    return json.dumps({"grammars": _with_calls(constraint.tool_calls, whole)})


def _whole(constraint: pb.OutputConstraint) -> Json | None:
    """Return the grammar of the wanted kind; None = any text."""
    kind = constraint.WhichOneof("kind")
    if kind == "json_schema":
        return _json_grammar(constraint.json_schema, "whole", lenient=constraint.lenient)
    if kind == "json_object":
        return _json_grammar('{"type": "object"}', "whole", lenient=False)
    if kind == "regex":
        return _regex_grammar(constraint.regex, "whole")
    if kind == "grammar":
        return _lark_grammar(_lark(constraint.grammar), "whole")
    if kind == "choice":
        return _lark_grammar("start: " + " | ".join(_choices(constraint.choice)), "whole")
    return None


def _with_calls(rules: pb.ToolCallRules, whole: Json | None) -> list[Json]:
    if not 0 < len(rules.functions) <= _MAX_FUNCTIONS or not (rules.begin and rules.end):
        raise _refused(f"tool_calls needs 1 to {_MAX_FUNCTIONS} functions and their spelling")
    begin = _quoted(rules.begin)
    lines = ["%llguidance {}"]
    if rules.required:
        lines.append(f"start: {begin} calls")
    elif whole is not None:
        lines.append(f"start: {begin} calls | @whole")
    else:
        # The text ends where a call begins, and a call cannot be spelled as text.
        lines += ["start: lead calls | TEXT", f"lead[lazy]: TEXT {begin}", r"TEXT: /(.|\n)*/"]
    lines.append("calls: " + _order(rules))
    grammars: list[Json] = []
    for idx, function in enumerate(rules.functions):
        head = _quoted(f'\n{{"name": {_quoted(function.name)}, "arguments": ')
        end = "" if function.WhichOneof("text") else _quoted("}" + chr(10) + rules.end)
        lines.append(f"call{idx}: {head} @args{idx} {end}")
        grammars.append(_arguments_grammar(function, f"args{idx}"))
    if whole is not None and not rules.required:
        grammars.append(whole)
    return [_lark_grammar("\n".join(lines), "top"), *grammars]


def _order(rules: pb.ToolCallRules) -> str:
    """Return how calls may follow each other, the first one's beginning left out."""
    more = min(rules.max_calls or _DEFAULT_MAX_CALLS, _DEFAULT_MAX_CALLS) - 1
    again = _quoted("\n" + rules.begin)
    calls: list[str] = []
    last: list[str] = []
    for idx, function in enumerate(rules.functions):
        (last if function.WhichOneof("text") else calls).append(f"call{idx}")
    any_call, any_last = f"({' | '.join(calls)})", f"({' | '.join(last)})"
    if not calls:
        return any_last
    # The last place may hold either kind.
    ends = f" ({again} ({any_call} | {any_last}))?" if last and more else ""
    bound = more - 1 if ends else more
    repeated = f"{any_call} ({again} {any_call}){{0,{bound}}}" if bound else any_call
    return f"{repeated}{ends}" + (f" | {any_last}" if last else "")


def _arguments_grammar(function: pb.CallableFunction, name: str) -> Json:
    """Arguments are a text, or an object, said or not."""
    kind = function.WhichOneof("text")
    if kind == "regex":
        return _regex_grammar(function.regex, name)
    if kind == "grammar":
        _check_size(function.grammar, _MAX_GRAMMAR_CHARS)
        return _lark_grammar(function.grammar, name)
    grammar = _json_grammar(function.arguments_schema or "{}", name, lenient=function.lenient)
    if grammar["json_schema"].setdefault("type", "object") != "object":
        raise _refused(f"the arguments of {function.name!r} must be of type object")
    return grammar


def _json_grammar(text: str, name: str, *, lenient: bool) -> Json:
    _check_size(text, MAX_TEXT_CHARS)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise _refused("a schema is not valid JSON") from None
    if not isinstance(schema, dict):
        raise _refused("a schema must be a JSON object")
    _check_schema(schema)
    whole = schema if _is_composed(schema) else _closed(schema)
    # Last, so that it wins over an option of the same name in the client's schema.
    options = {"whitespace_pattern": _BLANKS, "lenient": lenient}
    return {"name": name, "json_schema": {**whole, "x-guidance": options}}


def _closed(schema: Json) -> Json:
    """Return a schema whose objects hold only the properties that they name.

    JSON Schema allows others unless it says no; small models then invent properties until their
    tokens are spent. Where keywords may bring more properties, all is left as it is.
    """
    closed = {key: _closed_inside(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not _OPENING.intersection(schema):
        closed.setdefault("additionalProperties", False)
    return closed


def _closed_inside(key: str, value: Any) -> Any:  # Any: JSON values
    if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
        return {name: _closed_inside("items", inner) for name, inner in value.items()}
    if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [_closed_inside("items", inner) for inner in value]
    return _closed(value) if key in _SCHEMAS and isinstance(value, dict) else value


def _is_composed(value: object) -> bool:
    """Whether some object's properties come from several schemas at once."""
    if isinstance(value, list):
        return any(map(_is_composed, value))
    if not isinstance(value, dict):
        return False
    is_joined = "properties" in value and not _JOINING.isdisjoint(value)
    return is_joined or "allOf" in value or any(map(_is_composed, value.values()))


def _check_schema(schema: Json) -> None:
    level: list[object] = [schema]
    num_values = 0
    for _ in range(2 * _MAX_DEPTH):
        num_values += len(level)
        if num_values > _MAX_VALUES:
            raise _refused(f"a schema has more than {_MAX_VALUES} values")
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                if len(value) > _MAX_PROPERTIES:
                    raise _refused(f"an object in a schema has more than {_MAX_PROPERTIES} members")
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = inner
        if not level:
            return
    raise _refused("a schema is nested too deeply")


def _lark_grammar(text: str, name: str) -> Json:
    return {"name": name, "lark_grammar": text}


def _regex_grammar(regex: str, name: str) -> Json:
    _check_size(regex, _MAX_GRAMMAR_CHARS)
    return _lark_grammar(f"start: /{_slashes_escaped(regex)}/", name)


def _lark(text: str) -> str:
    _check_size(text, _MAX_GRAMMAR_CHARS)
    try:
        lark: str = any_to_lark(text)
    except Exception as error:
        raise _refused("the grammar is neither Lark nor GBNF") from error
    return lark


def _choices(choice: pb.TextChoice) -> list[str]:
    if not 0 < len(choice.texts) <= _MAX_TEXTS or not all(choice.texts):
        raise _refused(f"choice needs 1 to {_MAX_TEXTS} texts, none empty")
    _check_size("".join(choice.texts), _MAX_GRAMMAR_CHARS)
    return [_quoted(text) for text in dict.fromkeys(choice.texts)]


def _quoted(text: str) -> str:
    """Spell a text as Lark and JSON both do."""
    return json.dumps(text, ensure_ascii=False)


def _slashes_escaped(regex: str) -> str:
    """Escape what would end a Lark pattern early; what is escaped already stays."""
    escaped, is_after_backslash = "", False
    for char in regex:
        escaped += char if is_after_backslash else _ENDS_PATTERN.get(char, char)
        is_after_backslash = char == "\\" and not is_after_backslash
    return escaped


def _check_size(text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise _refused(f"a text has more than {max_chars} characters")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"The constraint cannot be used: {why}.", param="constraint")
