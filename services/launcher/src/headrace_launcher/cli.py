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

from headrace_launcher.admin_options import add_admin_commands, moment, words
from headrace_launcher.exit_codes import EXIT_OK
from headrace_launcher.guard_options import add_guard_commands
from headrace_launcher.model_catalog import MODELS
from headrace_launcher.service_programs import PROGRAMS, program_of, run_program
from headrace_launcher.settings import LauncherSettings

if TYPE_CHECKING:
    _Commands: TypeAlias = "argparse._SubParsersAction[ArgumentParser]"

Handler = Callable[[LauncherSettings, Namespace], int]
_DOWN_TIMEOUT_S = 180.0
# Options that stand for a setting of the same name.
_SETTINGS = (
    "state_dir",
    "host",
    "port",
    "workers",
    "gateways",
    "prefill_workers",
    "model",
    "model_name",
    "model_routes_file",
    "upstreams_file",
)


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code (2: the command line or a setting is wrong)."""
    program = program_of(arguments)
    if program is not None:
        return run_program(*program)
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
    add_admin_commands(commands, _command)
    add_guard_commands(commands, _command)
    _add_usage(commands)
    model = commands.add_parser("model", help="models on this machine").add_subparsers(
        required=True, metavar="COMMAND"
    )
    fetch = _command(
        model, "fetch", "bring the default model into the cache", "model_command:fetch"
    )
    fetch.add_argument(
        "model", type=Path, nargs="?", metavar="NAME", help=f"one of {', '.join(MODELS)}"
    )
    _list_programs(commands)
    return parser


def _list_programs(commands: _Commands) -> None:
    """Show them in the help; `run` takes them before anything is parsed."""
    groups: dict[str, _Commands] = {}
    for command, (_, text) in PROGRAMS.items():
        place = commands
        for group in command[:-1]:
            if group not in groups:
                parser = commands.add_parser(group, help=f"the {group}'s own programs")
                groups[group] = parser.add_subparsers(required=True, metavar="COMMAND")
            place = groups[group]
        place.add_parser(command[-1], help=text, add_help=False)


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
        "--gateways", type=int, metavar="N",
        help="gateways, on the port and the ports after it (default 1)",
    )  # fmt: skip
    start.add_argument(
        "--prefill-workers", type=int, metavar="N",
        help="how many workers only compute prompts for the others (default 0)",
    )  # fmt: skip
    start.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="GGUF file or Hugging Face folder to serve, or the name of a model to fetch",
    )
    start.add_argument("--model-name", metavar="NAME", help="name to serve it under")
    start.add_argument(
        "--models", type=Path, dest="model_routes_file", metavar="FILE",
        help="model routes: aliases, splits, fallbacks (default: model-routes.toml in the state "
        "directory, once it is there)",
    )  # fmt: skip
    start.add_argument(
        "--upstreams", type=Path, dest="upstreams_file", metavar="FILE",
        help="OpenAI-compatible servers that work in this fleet (docs/upstreams.md)",
    )  # fmt: skip
    stop = _command(commands, "down", "drain and stop the fleet", "running:down")
    stop.add_argument(
        "--timeout-s", type=float, default=_DOWN_TIMEOUT_S, help="how long to wait. Seconds"
    )
    show = _command(commands, "status", "show every service and worker", "running:status")
    kind = show.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="for scripts")
    kind.add_argument(
        "--prometheus", action="store_true", help="targets, as a file for its file_sd_configs"
    )


def _add_usage(commands: _Commands) -> None:
    usage = _command(commands, "usage", "what a key or a tenant has used", "admin:usage")
    whose = usage.add_mutually_exclusive_group(required=True)
    whose.add_argument("--key", metavar="KEY_ID", help="request by request")
    whose.add_argument("--tenant", metavar="TENANT", help="summed")
    usage.add_argument(
        "--by", type=words, metavar="G,...",
        help="with --tenant: sum by day, project, key, model, tier (default day,model)",
    )  # fmt: skip
    usage.add_argument("--from", dest="from_unix_s", type=moment, default=0, metavar="DATE")
    usage.add_argument(
        "--to", dest="to_unix_s", type=moment, default=0, metavar="DATE", help="until before this"
    )
    usage.add_argument("--csv", action="store_true", help="with --tenant: for spreadsheets")
    usage.add_argument("--json", action="store_true", help="for scripts")
