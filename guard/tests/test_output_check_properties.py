"""What holds for every text and every way of cutting it."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_guard.classifiers.catalogue import RULES
from headrace_guard.classifiers.rule import RuleSet
from headrace_guard.normalise import Window
from headrace_guard.output_check import OutputCheck
from headrace_guard.plan import Plan
from headrace_guard.stream_scan import GRID_CHARS
from headrace_guard.verdict import Action, Finding
from headrace_testing.guard_plans import MAX_HELD_CHARS, Run, fullwidth, no_deadline, plan, run

TERMS = ("canary", "canary bird", "bird cage door", "art", "schön", "水車", "c++", "ab ab ac")
BLOCKING = plan(output='blocklist = "block"\n"*" = "block"', terms=TERMS)
ONLY_BLOCKLIST = plan(output='blocklist = "block"\n"pii.*" = "flag"', terms=TERMS)
REDACTING = plan(output='"*" = "redact"\n"secret.*" = "block"\n"pii.phone" = "flag"', terms=TERMS)
FLAGGING = plan(output='"*" = "flag"', terms=TERMS)
OPEN = plan(output='"*" = "redact"', terms=TERMS, fails_open=True)
PLANS = st.sampled_from([BLOCKING, ONLY_BLOCKLIST, REDACTING, FLAGGING, OPEN])

_PIECES = st.sampled_from(
    [
        *(
            "canary",
            "CANARY",
            "can",
            "ary",
            "ca\u200bnary",
            "c\u0301anary",
            fullwidth("canary"),
            "bird",
        ),
        *(
            "cage",
            "door",
            "art",
            "party",
            "schön",
            "schon",
            "水",
            "車",
            "c++",
            "ab",
            "ac",
            "İ",
            "ﬁ",
        ),
        *(" ", "  ", "\n", "\t ", "\u00a0", ".", ",", "-", "_", "@", "\u200b", "\u0301", "\u202e"),
        *("a", "b@c.de", "jo.doe@mail.example.org", "@mail", ".org", "x", "7", "é", "한글"),
        *("4111 1111 1111 1111", "4111-1111", "1111-1111", "4111111111111111", "12/27", "5105"),
        *("DE89 3704 0044 0532 0130 00", "DE89", "+49 30 123456", "(212) 555-2368", "123-45-6789"),
        *("10.1.2.3", "192.0.2.77", "2001:db8::1", "::", "AKIAIOSFODNN7EXAMPLE", "AKIA", "ghp_"),
        *("eyJhbGciOiJIUzI1NiJ9", ".eyJzdWIiOiIxMjM0NTY3ODkwIn0", ".c2lnbmF0dXJl", "x" * 40),
        *(
            "-----BEGIN RSA PRIVATE KEY-----\n",
            "MIIEpAIBAAKCAQEA\n",
            "-----END RSA PRIVATE KEY-----",
        ),
        *(
            'password = "q8!fLs92xQw"',
            "api_key: ",
            "token=",
            "A1b2C3d4E5f6",
            "\U000e0063\U000e0061",
        ),
        *(
            "c4n4ry",
            "c4",
            "n@",
            "kiI",
            "c a",
            " n-a",
            ".r y",
            "c ",
            "pnanel",
            "pna",
            "\u0441\u0430n",
        ),
        # Parts of "see the canary", "canary bird" and a mail address in base64, hex, percent signs.
        *("c2VlIHRoZSBjYW5hcnk=", "c2VlIHRoZSBj", "YW5hcnk", "YW5h", "\nYW5hcnkgYmlyZCA=", "=="),
        *("63616e617279", "63 61 6e", " 61 72 79", "0x63", ",0x61", "\\x6e", "%63%61", "%6eary"),
        # Escapes, whole and in parts.
        *("\\u0063anary", "\\n", "\\t", "\\", "\\\\", "\\u00", "6", "1", "\\u0061", "\\x61", '\\"'),
        *(
            "\\u0020",
            "\\ud835",
            "\\udc1a",
            "\\u0040",
            "\\u0430",
            "\\n4111111111111111",
            "\\ta@b.co",
        ),
        *("am8uZG9lQG1haWwuZXhhbXBsZS5vcmc=", "\u202eyranac", "\u202c"),
    ]
)
_ANY = st.text(max_size=8)
TEXTS = st.lists(st.one_of(_PIECES, _PIECES, _PIECES, _ANY), max_size=30).map("".join)
# Undecided for longer than the bound: keys without end, words full of invisible characters.
_LONG = st.sampled_from(
    [
        *(
            "-----BEGIN PRIVATE KEY-----",
            "A" * 700,
            "\n" * 90,
            " canary",
            "can",
            "\u200b" * 300,
            "ary ",
        ),
        *("eyJhbGciOiJIUzI1NiJ9", "y" * 900, ".eyJ", "\u0301" * 200, " ", "word " * 30, "b@c.de "),
    ]
)
LONG_TEXTS = st.lists(_LONG, max_size=12).map("".join)
LONG_CUTS = st.lists(st.integers(0, 6000), max_size=60)
CUTS = st.lists(st.integers(0, 400), max_size=40)


def chunked(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut for cut in cuts if cut < len(text)})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def outcome(result: Run) -> tuple[object, ...]:
    return result.released, result.findings, result.reasons, result.is_over


@settings(max_examples=150, deadline=None)
@given(PLANS, TEXTS, CUTS)
def test_chunking_changes_nothing(made: Plan, text: str, cuts: list[int]) -> None:
    """Released text, findings and end are those of the text in one piece."""
    assert outcome(run(made, chunked(text, cuts))) == outcome(run(made, [text]))


@settings(max_examples=100, deadline=None)
@given(PLANS, LONG_TEXTS, LONG_CUTS)
@example(BLOCKING, "hello -----BEGIN PRIVATE KEY-----" + "A" * 5000, [2100, 2200])
@example(OPEN, "hello -----BEGIN PRIVATE KEY-----" + "A" * 5000, [2100, 2200])
@example(ONLY_BLOCKLIST, "can" + "\u200b" * 1500 + "ary", [700])
@example(OPEN, "can" + "\u200b" * 1500 + "ary", [700])
@example(FLAGGING, "a canary" + "\u200b" * 1500 + " bird", [700])
def test_chunking_changes_nothing_at_the_bound(made: Plan, text: str, cuts: list[int]) -> None:
    """Also when text stays undecided for too long, the outcome is that of one piece."""
    result = run(made, chunked(text, cuts))
    assert outcome(result) == outcome(run(made, [text]))
    assert result.max_held_chars <= MAX_HELD_CHARS + GRID_CHARS


@settings(max_examples=30, deadline=None)
@given(PLANS, TEXTS)
def test_single_characters_change_nothing(made: Plan, text: str) -> None:
    """The finest cut there is gives the same."""
    assert outcome(run(made, [*text, ""])) == outcome(run(made, [text]))


@settings(max_examples=100, deadline=None)
@given(PLANS, TEXTS, CUTS)
def test_released_never_passes_scanned_and_held_is_bounded(
    made: Plan, text: str, cuts: list[int]
) -> None:
    """What came out was read before; what waits stays below the bound plus one grid step."""
    result = run(made, chunked(text, cuts))
    assert all(released <= scanned for released, scanned in result.progress)
    assert result.progress[-1][1] == len(text)
    assert result.max_held_chars <= MAX_HELD_CHARS + GRID_CHARS


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([BLOCKING, ONLY_BLOCKLIST]), TEXTS, CUTS)
def test_nothing_of_a_blocked_span_is_released(made: Plan, text: str, cuts: list[int]) -> None:
    """Without redaction the released text is the text up to the first blocked span, exactly."""
    result = run(made, chunked(text, cuts))
    starts = [found.start for found in result.findings if found.action is Action.BLOCK]
    assert result.released == (text[: min(starts)] if starts else text)


@settings(max_examples=100, deadline=None)
@given(TEXTS, CUTS)
def test_flag_only_policies_change_no_byte_and_hold_nothing(text: str, cuts: list[int]) -> None:
    """What is only reported passes at once and as it is."""
    result = run(FLAGGING, chunked(text, cuts))
    assert result.released == text
    assert result.max_held_chars == 0


@settings(max_examples=100, deadline=None)
@given(TEXTS, CUTS)
def test_a_stream_finds_what_the_whole_text_has(text: str, cuts: list[int]) -> None:
    """Nothing is lost or invented against one look at the whole text."""
    found = {
        (finding.category, finding.start, finding.end)
        for finding in run(FLAGGING, chunked(text, cuts)).findings
    }
    window = Window(text)
    whole = [match for one in FLAGGING.all_classifiers for match in one.find(window)]
    assert found == {(match.category, match.start, match.end) for match in whole}


@settings(max_examples=80, deadline=None)
@given(TEXTS, CUTS)
def test_redaction_changes_only_the_spans(text: str, cuts: list[int]) -> None:
    """Between the placeholders stands the original text."""
    result = run(OPEN, chunked(text, cuts))
    rest, done = result.released, 0
    for begin, end, label in _merged(result.findings):
        clean = text[done:begin]
        assert rest.startswith(clean + label)
        rest, done = rest[len(clean) + len(label) :], end
    assert rest == text[done:]


def _merged(findings: list[Finding]) -> list[tuple[int, int, str]]:
    spans: list[tuple[int, int, str]] = []
    for found in sorted(findings, key=lambda one: (one.start, one.end, one.category)):
        label = f"[redacted {found.category}]"
        if spans and found.start < spans[-1][1]:
            begin, end, label = spans.pop()
            spans.append((begin, max(end, found.end), label))
        else:
            spans.append((found.start, found.end, label))
    return spans


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(0, 400))
def test_rules_keep_their_promises(text: str, cut: int) -> None:
    """`live_from` and `find` of a beginning agree with the whole text (see classifiers.base)."""
    rules = RuleSet(RULES)
    begun = Window(text[:cut], is_final=False)
    live = rules.live_from(begun)
    whole = rules.find(Window(text))
    begin = len(begun.text)
    assert all(not match.context_start < live or match.end <= begin for match in whole)
    settled = [match for match in rules.find(begun) if match.end <= live]
    assert set(settled) <= set(whole)


@settings(max_examples=150, deadline=None)
@given(PLANS, TEXTS, CUTS, st.integers(0, 40), CUTS)
def test_a_guard_that_takes_over_goes_on_where_the_first_was_lost(
    made: Plan, text: str, cuts: list[int], lost_after: int, cuts_again: list[int]
) -> None:
    """Wherever it was lost: each character comes out once, and the audit is that of one guard."""
    first, out, num_out = OutputCheck(made, 0, MAX_HELD_CHARS), "", 0
    for piece in chunked(text, cuts)[:lost_after]:
        out += first.feed(piece, False, no_deadline()).text
        num_out = first.num_released_chars
    second, whole = OutputCheck(made, 0, MAX_HELD_CHARS, None, num_out), Run()
    pieces = chunked(text, cuts_again)
    for idx, piece in enumerate(pieces):
        released = second.feed(piece, idx == len(pieces) - 1, no_deadline())
        whole.released += released.text
        whole.findings += released.findings
        assert second.num_released_chars <= second.num_scanned_chars
    alone = run(made, [text])
    assert out + whole.released == alone.released
    assert whole.findings == alone.findings
    assert second.num_text_chars == len(alone.released)
    assert (second.num_released_chars, second.num_scanned_chars) == alone.progress[-1]


def test_a_guard_that_takes_over_under_another_policy_goes_by_it() -> None:
    """What the first let out is out; behind it the second's policy holds, also inside a word."""
    for output, after in (
        ('blocklist = "block"', ""),
        ('blocklist = "redact"', "[redacted blocklist] sings"),
    ):
        second = OutputCheck(plan(output=output, terms=("canary",)), 0, 1024, None, len("the can"))
        assert second.feed("the canary sings", True, no_deadline()).text == after
