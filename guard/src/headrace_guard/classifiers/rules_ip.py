"""Internet addresses that can point at somebody: not loopback, unspecified or multicast ones."""

import ipaddress

from headrace_guard.classifiers.pattern import Chars, Either, Repeat, Seq, Text
from headrace_guard.classifiers.rule import Rule


def check_ip(candidate: str) -> tuple[int, int] | None:
    """Accept what is an address in full; a sentence's full stop after it does not count."""
    end = len(candidate.rstrip(".")) if "." in candidate else len(candidate)
    try:
        address = ipaddress.ip_address(candidate[:end])
    except ValueError:
        return None
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        return None
    return 0, end


IP_ADDRESS = Rule(
    "pii.ip_address",
    Either(
        # Longer dotted numbers are taken whole so that the check can refuse them.
        Seq(Chars("0-9", 1, 3), Repeat(Seq(Text("."), Chars("0-9", 0, 3)), 3, 8)),
        Seq(Chars("0-9A-Fa-f", 0, 4), Repeat(Seq(Text(":"), Chars("0-9A-Fa-f", 0, 4)), 2, 8)),
    ),
    check=check_ip,
    not_after="A-Za-z0-9_.:",
    score=0.8,
)
