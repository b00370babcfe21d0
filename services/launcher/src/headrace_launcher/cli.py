"""The command line of `headrace`: what can be asked for, and who does it.

Commands are named as ``module:function`` and imported when asked for, so that `headrace status`
does not wait for gRPC.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from headrace_common.money import nano_usd_from_text
from headrace_launcher.exit_codes import EXIT_OK
from headrace_launcher.settings import LauncherSettings

if TYPE_CHECKING:
    _Commands: TypeAlias = "argparse._SubParsersAction[ArgumentParser]"

Handler = Callable[[LauncherSettings, Namespace], int]
_DOWN_TIMEOUT_S = 180.0
# What fits in the contract's fields.
_MAX_INT64 = 2**63 - 1
# Options that stand for a setting of the same name.
_SETTINGS = ("state_dir", "host", "port", "workers", "model", "model_name")


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code (2: the command line or a setting is wrong)."""
    args = build_parser().parse_args(arguments)
    args.own_arguments = [word for word in arguments if word != "--detach"]
    given = {name: value for name in _SETTINGS if (value := getattr(args, name, None)) is not None}
    settings = LauncherSettings.load_or_exit(**given)
    module, _, function = args.handler.partition(":")
    handler: Handler = getattr(import_module(f"headrace_launcher.{module}"), function)
    try:
        return handler(settings, args)
    except BrokenPipeError:  # e.g. `headrace usage | head`
        sys.stderr.close()
        return EXIT_OK


def build_parser() -> ArgumentParser:
    """Describe every command and option."""
    parser = ArgumentParser(
        prog="headrace", description="Runs and serves an LLM fleet.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_fleet_commands(commands)
    _add_admin_commands(commands)
    model = commands.add_parser("model", help="models on this machine").add_subparsers(
        required=True, metavar="COMMAND"
    )
    fetch = _command(
        model, "fetch", "bring the default model into the cache", "model_command:fetch"
    )
    fetch.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser


def _command(commands: _Commands, name: str, text: str, handler: str) -> ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(handler=handler)
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="where the fleet keeps everything (default: $HEADRACE_LAUNCHER_STATE_DIR, "
        "else ${XDG_STATE_HOME:-~/.local/state}/headrace)",
    )
    return parser


def _add_fleet_commands(commands: _Commands) -> None:
    start = _command(commands, "up", "start the whole fleet", "up:up")
    start.add_argument("--detach", action="store_true", help="return once the fleet is ready")
    start.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    start.add_argument("--host", help="address of the public API (default 127.0.0.1)")
    start.add_argument("--port", type=int, help="port of the public API (default 8080)")
    start.add_argument("--workers", type=int, metavar="N", help="engine workers (default 2)")
    start.add_argument(
        "--model", type=Path, metavar="PATH", help="GGUF file or Hugging Face folder to serve"
    )
    start.add_argument("--model-name", metavar="NAME", help="name to serve it under")
    stop = _command(commands, "down", "drain and stop the fleet", "running:down")
    stop.add_argument(
        "--timeout-s", type=float, default=_DOWN_TIMEOUT_S, help="how long to wait. Seconds"
    )
    show = _command(commands, "status", "show every service and worker", "running:status")
    show.add_argument("--json", action="store_true", help="for scripts")


def _add_admin_commands(commands: _Commands) -> None:
    keys = commands.add_parser("keys", help="API keys").add_subparsers(
        required=True, metavar="COMMAND"
    )
    _add_key_create(keys)
    show = _command(keys, "list", "list API keys", "admin:list_keys")
    show.add_argument("--tenant", help="of this tenant only")
    show.add_argument("--json", action="store_true", help="for scripts")
    revoke = _command(keys, "revoke", "revoke an API key", "admin:revoke_key")
    revoke.add_argument("key_id", metavar="KEY_ID")
    revoke.add_argument("--json", action="store_true", help="for scripts")
    usage = _command(commands, "usage", "what a key has used", "admin:usage")
    usage.add_argument("--key", required=True, metavar="KEY_ID")
    usage.add_argument("--json", action="store_true", help="for scripts")
    ledger = commands.add_parser("ledger", help="the books").add_subparsers(
        required=True, metavar="COMMAND"
    )
    verify = _command(ledger, "verify", "recount the books", "admin:verify_ledger")
    verify.add_argument("--json", action="store_true", help="for scripts")


def _add_key_create(keys: _Commands) -> None:
    create = _command(keys, "create", "create an API key", "admin:create_key")
    create.add_argument("--tenant", required=True, help="made if it does not exist")
    create.add_argument("--name", required=True)
    create.add_argument("--requests-per-minute", type=_limit, metavar="R")
    create.add_argument("--tokens-per-minute", type=_limit, metavar="T", help="input and output")
    create.add_argument("--max-concurrent", type=_limit, metavar="C", help="requests at once")
    create.add_argument(
        "--budget-usd", type=_budget, metavar="B", help="per calendar month, e.g. 12.50"
    )
    create.add_argument("--models", type=_words, default=[], metavar="M,...", help="default: all")
    create.add_argument(
        "--guard-block", type=_words, default=[], metavar="WORD,...", help="words to block"
    )
    create.add_argument("--guard-policy", default="", metavar="P", help="name of a guard policy")
    create.add_argument("--json", action="store_true", help="for scripts")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _limit(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1; leave the option out for no limit")
    return _bounded(value)


def _budget(text: str) -> int:
    return _bounded(nano_usd_from_text(text))


def _bounded(value: int) -> int:
    if value > _MAX_INT64:
        raise argparse.ArgumentTypeError("is too large; leave the option out for no limit")
    return value
