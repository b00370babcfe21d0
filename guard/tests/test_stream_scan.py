"""The sliding window: what settles, what is held, and its bound."""

from headrace_guard.classifiers.blocklist import Blocklist
from headrace_guard.stream_scan import GRID_CHARS, MAX_HIDDEN_CHARS, StreamScanner


def scanner(max_held_chars: int = 1024) -> StreamScanner:
    return StreamScanner([Blocklist(["canary bird", "bird cage"])], max_held_chars)


def test_text_without_a_live_beginning_settles_at_once() -> None:
    """Nothing waits for nothing."""
    scan = scanner()
    assert scan.feed("hello world").text == "hello world"
    assert scan.num_held_chars == 0


def test_a_live_beginning_is_held_until_it_is_decided() -> None:
    """Then it comes with its match, at its place in the whole text."""
    scan = scanner()
    assert scan.feed("a canary").text == "a "
    assert scan.feed(" bi").text == ""
    settled = scan.feed("rd!")
    assert (settled.text, settled.start) == ("canary bird!", 2)
    assert [(match.start, match.end) for match in settled.matches] == [(2, 13)]


def test_a_match_is_not_cut_by_a_live_beginning_inside_it() -> None:
    """ "canary bird" waits while "bird cage" may still come of its end."""
    scan = scanner()
    assert scan.feed("canary bird ca").text == ""
    settled = scan.feed("ke")
    assert settled.text == "canary bird cake"
    assert [(match.start, match.end) for match in settled.matches] == [(0, 11)]


def test_finish_settles_everything() -> None:
    """The end of the text is the end of a word."""
    scan = scanner()
    scan.feed("canary bird")
    assert len(scan.finish().matches) == 1
    assert scan.num_held_chars == 0


def test_no_classifier_means_no_window() -> None:
    """Everything settles, whatever its length."""
    scan = StreamScanner([], 1024)
    assert scan.room() > 10**9
    assert scan.feed("x" * 10_000).text == "x" * 10_000


def test_hidden_text_is_stuck_at_its_bound() -> None:
    """Only at multiples of the grid, so that chunks make no difference."""
    scan = scanner()
    stuck_at = []
    for _ in range(2 * MAX_HIDDEN_CHARS // 64):
        room = min(64, scan.room())
        text = "canary" + "\u200b" * (room - 6) if not scan.num_scanned_chars else "\u200b" * room
        if scan.feed(text).is_stuck:
            stuck_at.append(scan.num_scanned_chars)
            break
    assert stuck_at == [MAX_HIDDEN_CHARS + GRID_CHARS]


def test_give_up_and_skip_move_on() -> None:
    """What follows is scanned again."""
    scan = scanner()
    scan.feed("canary")
    assert scan.skip(" bird").text == "canary bird"
    scan.feed(" and a canary bi")
    assert scan.give_up().text == "canary bi"
    assert [match.start for match in scan.feed(" canary bird.").matches] == [28]
