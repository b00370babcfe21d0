"""Why a constraint is refused: the library's own texts, provoked, and what becomes of them."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace_worker.constraints.refusals import in_our_words, told

NO_VALUE = {"minimum": 5, "maximum": 3, "type": "integer"}
NO_PROPERTY = {"type": "object", "properties": {"a": False}, "required": ["a"]}
LOOP = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
IN_GRAMMAR = 'start: %json {"type": "zap"}'


def error_of(grammar):
    """Return what the library says, at the latest for the first token."""
    text = json.dumps({"grammars": [grammar]})
    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
    if not matcher.is_error():
        matcher.compute_logit_bias()
    assert matcher.is_error()
    return matcher.get_error()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, 'these keywords cannot be enforced: "not"'),
        ({"type": "string", "format": "zap"}, "the format 'zap' is not known"),
        ({"type": "zap"}, "'zap' is no type of JSON"),
        ({"$ref": "#/$defs/x"}, "$ref leads to '/$defs/x', which is not there"),
        ({"$ref": "http://a.example/x"}, "$ref leads out of the schema, to 'http://a.example/x'"),
        (
            {"oneOf": [{"type": "string"}, {"type": "string"}]},
            "oneOf cannot be enforced where two may fit; use anyOf",
        ),
        ({"required": "a"}, "required has a value of the wrong kind"),
        ({"properties": 5}, "properties has a value of the wrong kind"),
        (
            {"type": "object", "properties": {"a": {}}, "minProperties": 1},
            "minProperties and maxProperties cannot be enforced beside properties that may be left",
        ),
        ({"type": "integer", "multipleOf": 0}, "multipleOf must be above 0"),
        (NO_VALUE, "nothing can fit: minimum (5) is greater than maximum (3)"),
        (NO_PROPERTY, "nothing can fit the property 'a'"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "nothing can fit it"),
        (LOOP, "nothing can fit it"),
        ({"type": "string", "pattern": "(a"}, "a pattern is wrong"),
        ({"type": "string", "pattern": "a(?=b)"}, "a pattern is wrong"),
        ({"type": "string", "pattern": r"\bfoo"}, "a pattern is wrong"),
        ({"x-guidance": {"zap": 1}}, "it is not well formed"),
    ],
)
def test_a_schema_is_refused_in_our_words(schema, words):
    """What is wrong with it, and nothing about options or parts of the library."""
    said = error_of({"json_schema": schema})
    ours = in_our_words(said)
    assert ours.startswith(words)
    assert "\n" not in ours


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "a" b', 'the grammar has no rule "b" (line 1, column 8)'),
        ("start: [a", "the grammar cannot be read (line 1, column 10)"),
        ("start: /(a/", "a pattern is wrong"),
        ('foo: "a"', "the grammar has no rule 'start'"),
        ("start: <|zap|>", "the grammar cannot be read (line 1, column 8)"),
        ("start: @zap", "it is not well formed"),
        (IN_GRAMMAR, "'zap' is no type of JSON (line 1, column 8)"),
        ("start: a\na: a", "nothing can fit it"),
    ],
)
def test_a_grammar_is_refused_in_our_words(grammar, words):
    """With the place where it is wrong; which control tokens there are is nobody's business."""
    ours = in_our_words(error_of({"lark_grammar": grammar}))
    assert ours.startswith(words)
    assert "special" not in ours


def test_what_is_quoted_is_short_and_the_rest_is_in_the_log(caplog):
    """The client's own text may be of any length, and the library's says more than is told."""
    caplog.set_level("DEBUG")
    said = error_of({"json_schema": {"type": "z" * 5000}})
    error = told("The constraint cannot be used", said)
    assert len(error.public_message) < 200
    assert error.param == "constraint"
    assert "Invalid type: zzz" in caplog.text
