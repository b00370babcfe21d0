"""Constraints over a tokenizer of bytes: what may come next, what is refused, what is kept."""

import asyncio
import json
import threading

import pytest
from llguidance import LLParserLimits

from headrace_common.clock import SystemClock
from headrace_common.errors import InvalidRequest, QueueFull
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing import byte_tokenizer
from headrace_testing.waiting import eventually
from headrace_worker.constraints import compiler as compiler_module
from headrace_worker.constraints.compiler import ConstraintCompiler
from headrace_worker.constraints.matcher import GuidedConstraint, tokenizer_of
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.model.info import ModelInfo

END = byte_tokenizer.IM_END_ID
TABLE = TokenTable.from_json(byte_tokenizer.tokenizer_json())
INFO = ModelInfo(
    fingerprint="x",
    context_tokens=100,
    vocab_size=byte_tokenizer.VOCAB_SIZE + 5,
    chat_template="",
    eos_token_ids=(END, byte_tokenizer.END_OF_TEXT_ID),
    bos_token_id=None,
    add_bos=False,
    tokenizer_json=byte_tokenizer.tokenizer_json(),
    special_tokens={},
    kv_bytes_per_token=1,
    created_unix_s=0,
)


class Counted:
    """Outcomes in order."""

    def __init__(self):
        self.outcomes = []

    def observe_compile(self, outcome, duration_s):
        assert duration_s >= 0
        self.outcomes.append(outcome)


@pytest.fixture
async def counted():
    return Counted()


@pytest.fixture
async def compiler(counted):
    made = ConstraintCompiler(lambda: tokenizer_of(INFO, TABLE), SystemClock(), counted)
    yield made
    made.close()


def fits(constraint, text):
    """Whether the whole text passes, byte by byte, and an end may follow."""
    matcher = constraint.begin()
    for byte in text.encode():
        if matcher.is_complete or not matcher.mask()[byte]:
            return False
        matcher.accept(byte)
    return matcher.is_complete or bool(matcher.mask()[END])


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


async def test_a_schema_lets_pass_what_obeys_it(compiler):
    """Keys, types, required members; blanks as far as they are bounded; no lone surrogates."""
    made = await compiler.compile(b"t", pb.OutputConstraint(json_schema=json.dumps(PERSON)))
    assert fits(made, '{"name": "é"}')
    assert fits(made, '{\n  "name": "a",\n  "age": 12\n}')
    for bad in (
        "{}",
        '{"name": 1}',
        '{"name": "a", "age": -1}',
        '{"name": "a", "x": 1}',
        '{"name": "a"} ',
        '{"name": "\\ud800"}',
        "{" + "\n" * 3 + '"name": "a"}',
    ):
        assert not fits(made, bad), bad


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (
            pb.OutputConstraint(json_object=True),
            ["{}", '{"a": [1, {"b": null}]}'],
            ["[]", "{", "1"],
        ),
        (pb.OutputConstraint(regex=r"[a-c]{2}/\d+"), ["ab/1", "cc/007"], ["ab", "ab/x", "abc/1"]),
        (pb.OutputConstraint(regex=r"a\/b\\"), ["a/b\\"], ["a\\/b"]),
        (pb.OutputConstraint(grammar='start: "a" b\nb: /[0-9]+/'), ["a1", "a23"], ["a", "b1"]),
        (pb.OutputConstraint(grammar='root ::= "x" [0-9]+'), ["x5"], ["5"]),
        (pb.OutputConstraint(choice=pb.TextChoice(texts=["yes", 'n"o'])), ["yes", 'n"o'], ["ye"]),
    ],
)
async def test_every_kind(compiler, constraint, good, bad):
    """Each lets pass what it says and nothing else."""
    made = await compiler.compile(b"t", constraint)
    assert [fits(made, text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


def tools(**fields):
    return pb.ToolCallRules(
        functions=[
            pb.CallableFunction(name="f", arguments_schema=json.dumps(PERSON)),
            pb.CallableFunction(name="g"),
        ],
        begin="<call>",
        end="</call>",
        **fields,
    )


F = '<call>\n{"name": "f", "arguments": {"name": "x"}}\n</call>'
G = '<call>\n{"name": "g", "arguments": {"any": 1}}\n</call>'


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (
            pb.OutputConstraint(tool_calls=tools()),
            ["", "just text <cal", "I look.\n" + F, F + "\n" + G, G + "\n" + G + "\n" + F],
            ["<call>", "<call>no", F + "text", F.replace('"x"', "1"), F.replace('"f"', '"h"')],
        ),
        (pb.OutputConstraint(tool_calls=tools(max_calls=1)), ["text", F], [F + "\n" + G]),
        (
            pb.OutputConstraint(tool_calls=tools(required=True)),
            [F, F + "\n" + F],
            ["", "text " + F],
        ),
        (
            pb.OutputConstraint(tool_calls=tools(), json_object=True),
            ["{}", F],
            ["text", "", "{}" + F],
        ),
        (pb.OutputConstraint(tool_calls=tools(required=True), regex="a"), [F], ["a"]),
    ],
)
async def test_calls_of_functions(compiler, constraint, good, bad):
    """Free text until a call begins, then its schema; required, bounded, or beside JSON."""
    made = await compiler.compile(b"t", constraint)
    assert [fits(made, text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


PATCH = r"""
start: "*** Begin" LF line+ "*** End" LF?
line: ("+" | "-") /(.*)/ LF -> line
%import common.LF
"""
P = '<call>\n{"name": "p", "arguments": *** Begin\n+a "b" \\\n-}\n*** End'
Q = '<call>\n{"name": "q", "arguments": ab/1'


def text_tools(*names, **fields):
    texts = {"p": {"grammar": PATCH}, "q": {"regex": r"[a-z]+/\d"}, "all": {"regex": r"(.|\n)*"}}
    functions = [pb.CallableFunction(name=name, **texts.get(name, {})) for name in names]
    return pb.OutputConstraint(
        tool_calls=pb.ToolCallRules(functions=functions, begin="<call>", end="</call>", **fields)
    )


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (
            text_tools("g", "p", "q"),
            ["text", "I look.\n" + P, P + "\n", Q, G + "\n" + G + "\n" + P, G + "\n" + Q],
            [P + "}\n</call>", P + "\n" + G, P[:-3], Q + "\n" + Q, Q[:-1], P.replace("+", " ")],
        ),
        (text_tools("g", "q", max_calls=1), [G, Q], [G + "\n" + Q]),
        (
            text_tools("g", "q", max_calls=2),
            [G + "\n" + Q, G + "\n" + G],
            [G + "\n" + G + "\n" + Q],
        ),
        (text_tools("p", required=True, max_calls=1), [P], ["", "text", P + "\n" + P]),
        (
            text_tools("all", required=True),
            ['<call>\n{"name": "all", "arguments": }\n</call> and more'],
            ["x"],
        ),
    ],
)
async def test_arguments_that_are_a_text_end_the_answer(compiler, constraint, good, bad):
    """As they are, without quotes; whatever they say, only the answer's end ends them."""
    made = await compiler.compile(b"t", constraint)
    assert [fits(made, text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, False),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, True),
        ({"type": "object"}, True),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "anyOf": [{"properties": {"b": {"type": "integer"}}}],
            },
            True,
        ),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "integer"}}},
                    {"properties": {"b": {"type": "integer"}}},
                ]
            },
            True,
        ),
    ],
)
async def test_properties_that_nobody_named_are_not_invented(compiler, schema, is_open):
    """An object holds what it names, unless its schema asks for more or is composed."""
    nested = {"type": "array", "items": schema}
    for wanted, form in ((schema, "%s"), (nested, "[%s]")):
        made = await compiler.compile(b"t", pb.OutputConstraint(json_schema=json.dumps(wanted)))
        assert fits(made, form % '{"a": 1}')
        assert fits(made, form % '{"a": 1, "b": 2}') is is_open


async def test_control_tokens_are_never_text(compiler):
    """Free text of any length may hold no control token, though a model could draw one."""
    made = await compiler.compile(b"t", pb.OutputConstraint(tool_calls=tools()))
    mask = made.begin().mask()
    assert not mask[byte_tokenizer.IM_START_ID]
    assert mask[END]
    assert len(mask) == INFO.vocab_size


async def test_choices_do_not_share_their_state(compiler):
    """Each begins afresh."""
    made = await compiler.compile(
        b"t", pb.OutputConstraint(choice=pb.TextChoice(texts=["ab", "cd"]))
    )
    first, second = made.begin(), made.begin()
    first.accept(ord("a"))
    assert not first.mask()[ord("c")]
    assert second.mask()[ord("c")]
    with pytest.raises(InvalidRequest):
        first.accept(ord("d"))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "zap"},
        {"$ref": "#/definitions/none"},
        {"$ref": "http://169.254.169.254/"},
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "(?=x)"},
        {"allOf": [{"anyOf": [{"required": [f"{a}{b}"]} for b in range(9)]} for a in range(9)]},
    ],
)
async def test_what_cannot_be_enforced_is_refused_with_a_reason(compiler, counted, value):
    """One line, and the same again from what is kept."""
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            await compiler.compile(b"t", pb.OutputConstraint(json_schema=json.dumps(value)))
        assert "\n" not in caught.value.public_message
        assert len(caught.value.public_message) < 300
    assert counted.outcomes == ["refused", "cached"]


async def test_lenient_passes_over_what_cannot_be_enforced(compiler):
    """The rest of the schema still holds."""
    value = json.dumps({"type": "integer", "not": {"const": 5}})
    made = await compiler.compile(b"t", pb.OutputConstraint(json_schema=value, lenient=True))
    assert fits(made, "5")
    assert not fits(made, '"5"')


@pytest.mark.parametrize(
    "constraint",
    [
        pb.OutputConstraint(regex="((a{0,100}){0,100}){0,100}b"),
        pb.OutputConstraint(regex="(.*a){30}.{40}b"),
        pb.OutputConstraint(grammar='start: start start | "a"'),
        pb.OutputConstraint(grammar='start: a{1000}\na: b{1000}\nb: "x"'),
        pb.OutputConstraint(json_schema=json.dumps({"type": "array", "minItems": 10**6})),
        pb.OutputConstraint(json_schema=json.dumps({"type": "string", "minLength": 10**6})),
    ],
)
async def test_hostile_constraints_cost_a_bounded_time(compiler, constraint):
    """Refused or ready within the bound; a mask then comes or the request fails, nothing hangs."""
    try:
        made = await compiler.compile(b"t", constraint)
        matcher = made.begin()
        for _ in range(20):
            matcher.mask()
            matcher.accept(ord("a") if matcher.mask()[ord("a")] else ord("x"))
    except InvalidRequest:
        return


def costly(constraint, each_s):
    """A choice for which each mask takes so long, and each token that is taken."""
    now_s = 0.0

    def cpu_s():
        nonlocal now_s
        now_s += each_s
        return now_s

    return GuidedConstraint(constraint._pristine, cpu_s).begin()


def go_on(matcher, taken):
    """Take a hundred tokens, or as many as may be."""
    for _ in range(100):
        matcher.mask()
        matcher.accept(ord("a"))
        taken.append("a")


@pytest.mark.parametrize(("each_s", "num_tokens"), [(0.3, 0), (0.055, 2), (0.0113, 19)])
async def test_what_costs_too_much_a_token_ends(compiler, each_s, num_tokens):
    """A choice may compute a quarter of a second, and a hundredth for each token more."""
    made = await compiler.compile(b"t", pb.OutputConstraint(regex="a*"))
    taken = []
    with pytest.raises(InvalidRequest, match="too complex") as refused:
        go_on(costly(made, each_s), taken)
    assert refused.value.param == "constraint"
    assert len(taken) == num_tokens


async def test_what_costs_little_a_token_goes_on(compiler):
    """Half a hundredth a token never ends it."""
    made = await compiler.compile(b"t", pb.OutputConstraint(regex="a*"))
    matcher = costly(made, 0.004)
    for _ in range(300):
        assert matcher.mask()[ord("a")]
        matcher.accept(ord("a"))


async def test_equal_constraints_are_compiled_once(compiler, counted):
    """Those under way are waited for, those that are ready are kept."""
    wanted = pb.OutputConstraint(regex="a+")
    first, second = await asyncio.gather(
        compiler.compile(b"t", wanted), compiler.compile(b"t", wanted)
    )
    assert first is second is await compiler.compile(b"t", wanted)
    assert counted.outcomes == ["ok", "ok", "cached"]


async def test_a_constraint_whose_lexer_is_full_is_compiled_anew(compiler, counted):
    """Its states are shared by all that use it; a kept one that is full would refuse for ever."""
    compiler._limits = LLParserLimits(max_lexer_states=60)
    wanted = pb.OutputConstraint(regex="(.*a.{12})|(.*b.{12})")
    spent = await compiler.compile(b"t", wanted)

    def write(constraint, text):
        matcher = constraint.begin()
        for byte in text.encode():
            matcher.mask()
            matcher.accept(byte)

    with pytest.raises(InvalidRequest, match="states"):
        write(spent, "abcaabbacbbbabab" * 20)
    with pytest.raises(InvalidRequest, match="states"):
        write(spent, "b")
    fresh = await compiler.compile(b"t", wanted)
    write(fresh, "b")
    assert await compiler.compile(b"t", wanted) is fresh
    assert counted.outcomes == ["ok", "ok", "cached"]


async def test_what_takes_too_long_is_refused_and_the_loop_goes_on(counted, monkeypatch):
    """The wait is bounded; who asks again waits for the same compilation and gets it."""
    go = threading.Event()
    really = compiler_module._compile

    def slow(*arguments):
        go.wait(10)
        return really(*arguments)

    monkeypatch.setattr(compiler_module, "_compile", slow)
    made = ConstraintCompiler(
        lambda: tokenizer_of(INFO, TABLE), SystemClock(), counted, timeout_s=0.05
    )
    wanted = pb.OutputConstraint(regex="a")
    with pytest.raises(InvalidRequest, match="in time"):
        await made.compile(b"t", wanted)
    assert counted.outcomes == ["timeout"]
    go.set()
    made._timeout_s = 10
    assert await made.compile(b"t", wanted)
    assert counted.outcomes[-1] in ("ok", "cached")
    made.close()


async def test_building_the_tokenizer_is_not_the_clients_time(counted):
    """It is begun at the start; who comes before it is ready waits for it and is not refused."""
    go = threading.Event()

    def slow():
        go.wait(10)
        return tokenizer_of(INFO, TABLE)

    made = ConstraintCompiler(slow, SystemClock(), counted, timeout_s=5)
    made.prepare()
    asking = asyncio.ensure_future(made.compile(b"t", pb.OutputConstraint(regex="a")))
    await asyncio.sleep(0.05)
    assert not asking.done()
    go.set()
    assert await asking
    assert counted.outcomes == ["ok"]
    made.close()


async def test_too_many_at_once_are_refused(counted, monkeypatch):
    """Before any work is done for them."""
    monkeypatch.setattr(compiler_module, "_MAX_WAITING", 1)
    made = ConstraintCompiler(lambda: tokenizer_of(INFO, TABLE), SystemClock(), counted)
    go = threading.Event()
    really = compiler_module._compile
    monkeypatch.setattr(compiler_module, "_compile", lambda *given: go.wait(10) and really(*given))
    await made._ready_tokenizer()
    flood = [
        asyncio.ensure_future(made.compile(b"flood", pb.OutputConstraint(regex=one)))
        for one in "abc"
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await made.compile(b"flood", pb.OutputConstraint(regex="d"))
    go.set()
    assert all(await asyncio.gather(*flood))
    assert counted.outcomes == ["busy", "ok", "ok", "ok"]
    made.close()


async def test_one_tenants_slow_constraints_hold_up_no_other(counted, monkeypatch):
    """However many of them wait: another's is compiled beside them."""
    made = ConstraintCompiler(lambda: tokenizer_of(INFO, TABLE), SystemClock(), counted)
    go = threading.Event()
    really = compiler_module._compile

    def slow_for_some(tokenizer, constraint, limits):
        if constraint.regex.startswith("slow"):
            go.wait(10)
        return really(tokenizer, constraint, limits)

    monkeypatch.setattr(compiler_module, "_compile", slow_for_some)
    flood = [
        asyncio.ensure_future(made.compile(b"flood", pb.OutputConstraint(regex=f"slow{idx}")))
        for idx in range(60)
    ]
    await eventually(lambda: sum(one.done() for one in flood) > 20)
    async with asyncio.timeout(30):
        assert await made.compile(b"other", pb.OutputConstraint(regex="a"))
    assert not go.is_set()
    go.set()
    outcomes = await asyncio.gather(*flood, return_exceptions=True)
    assert sum(isinstance(it, QueueFull) for it in outcomes) > 20
    made.close()


async def test_what_another_waits_for_too_is_waited_for_at_ones_own_place(counted, monkeypatch):
    """Nor refused with the other's place; and whoever is first compiles it for both."""
    made = ConstraintCompiler(lambda: tokenizer_of(INFO, TABLE), SystemClock(), counted)
    go = threading.Event()
    really, compiled = compiler_module._compile, []

    def slow_for_some(tokenizer, constraint, limits):
        compiled.append(constraint.regex)
        if constraint.regex.startswith("slow"):
            go.wait(10)
        return really(tokenizer, constraint, limits)

    monkeypatch.setattr(compiler_module, "_compile", slow_for_some)
    await made._ready_tokenizer()
    wanted = [*(f"slow{idx}" for idx in range(33)), "a"]
    flood = [
        asyncio.ensure_future(made.compile(b"flood", pb.OutputConstraint(regex=one)))
        for one in wanted
    ]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        others = await made.compile(b"other", pb.OutputConstraint(regex="a"))
    assert not go.is_set()
    go.set()
    assert (await asyncio.gather(*flood))[-1] is others
    assert compiled.count("a") == 1
    made.close()
