"""``headrace guard``: asks the guard of a running fleet for policies and its audit."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime

from headrace_common.proto_json import to_json
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_launcher.admin import running_address
from headrace_launcher.exit_codes import EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK
from headrace_launcher.fleet import run_until_done
from headrace_launcher.guard_client import GuardClient, open_guard
from headrace_launcher.peer import PeerError
from headrace_launcher.settings import LauncherSettings
from headrace_launcher.state_dir import StateDir
from headrace_launcher.text import say, table_text

Command = Callable[[GuardClient, Namespace], Awaitable[int]]


def with_guard(command: Command) -> Callable[[LauncherSettings, Namespace], int]:
    """Wrap a command so that it gets the guard's client, and its errors become sentences."""

    def run(settings: LauncherSettings, args: Namespace) -> int:
        state_dir = StateDir(settings.state_dir)
        address = settings.guard_address or running_address(state_dir, "guard")
        if not address:
            say(
                f"no fleet runs with state directory {state_dir.path}. "
                f"Start one with `headrace up`, or name another directory with --state-dir"
            )
            return EXIT_NOT_RUNNING
        return run_until_done(_call(command, address, args))

    return run


async def _call(command: Command, address: str, args: Namespace) -> int:
    async with open_guard(address) as client:
        try:
            return await command(client, args)
        except PeerError as error:
            say(str(error))
            return EXIT_FAILED


@with_guard
async def list_policies(client: GuardClient, args: Namespace) -> int:
    """``headrace guard policies``."""
    policies = await client.policies()
    if args.json:
        print(json.dumps({"policies": [to_json(info) for info in policies]}, indent=2))
    else:
        _print_policies(policies)
    return EXIT_OK


@with_guard
async def show_policy(client: GuardClient, args: Namespace) -> int:
    """``headrace guard policy``: TOML on standard output, to be edited and put again."""
    document = await client.policy(args.name)
    print(f"# {document.info.name}, version {document.info.version}")
    print(document.toml)
    return EXIT_OK


@with_guard
async def put_policy(client: GuardClient, args: Namespace) -> int:
    """``headrace guard put``."""
    try:
        text = args.file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        say(f"{args.file}: {error}")
        return EXIT_FAILED
    document = await client.put(args.name, text, args.if_version)
    print(f"{document.info.name} is in force, version {document.info.version}")
    return EXIT_OK


@with_guard
async def delete_policy(client: GuardClient, args: Namespace) -> int:
    """``headrace guard delete``."""
    _print_policies(await client.delete(args.name))
    return EXIT_OK


@with_guard
async def reload_policies(client: GuardClient, _args: Namespace) -> int:
    """``headrace guard reload``."""
    _print_policies(await client.reload())
    return EXIT_OK


@with_guard
async def show_audit(client: GuardClient, args: Namespace) -> int:
    """``headrace guard audit``: exit code 1 if nothing is known of the request."""
    records = await client.audit(args.request_id)
    if args.json:
        print(json.dumps({"records": [to_json(record) for record in records]}, indent=2))
    elif not records:
        say(f"the guard knows nothing of {args.request_id}")
    else:
        for record in records:
            _print_record(record)
    return EXIT_OK if records else EXIT_FAILED


@with_guard
async def verify_audit(client: GuardClient, args: Namespace) -> int:
    """``headrace guard verify``: exit code 0 only if the chain is whole."""
    answer = await client.verify_audit()
    if args.json:
        print(json.dumps(to_json(answer), indent=2))
    else:
        print(f"{'right' if answer.ok else 'WRONG'}: {answer.num_records} records")
        for problem in answer.problems:
            print(f"  {problem}")
    return EXIT_OK if answer.ok else EXIT_FAILED


def _print_policies(policies: Iterable[pb.PolicyInfo]) -> None:
    rows = (
        (
            info.name,
            "put" if info.is_put else "file",
            "open" if info.fails_open else "closed",
            info.version,
        )
        for info in policies
    )
    print(table_text(("name", "from", "fails", "version"), rows))


def _print_record(record: pb.AuditRecord) -> None:
    at = datetime.fromtimestamp(record.unix_us / 1e6, UTC).isoformat(timespec="milliseconds")
    kind = pb.AuditKind.Name(record.kind).removeprefix("AUDIT_KIND_").lower()
    if record.kind == pb.AUDIT_KIND_SENT:
        fail_open = ", unguarded as the key allows" if record.fail_open else ""
        print(f"{at} {kind}: {record.released_chars} characters{fail_open}")
        return
    state = pb.VerdictState.Name(record.state).removeprefix("VERDICT_STATE_").lower()
    action = pb.Action.Name(record.action).removeprefix("ACTION_").lower()
    print(f"{at} {kind}: {state}, {action}; policy {record.policy_version}")
    released = f", released {record.released_chars}" if record.kind == pb.AUDIT_KIND_OUTPUT else ""
    print(f"  characters: scanned {record.scanned_chars}{released}")
    if record.reason:
        print(f"  not judged: {record.reason}")
    for found in record.findings:
        where = f"{found.path or f'choice {record.choice_idx}'}[{found.start}:{found.end}]"
        done = pb.Action.Name(found.action).removeprefix("ACTION_").lower()
        would = pb.Action.Name(found.shadow_action).removeprefix("ACTION_").lower()
        shadow = f" (shadow: {would})" if found.shadow_action else ""
        print(f"  {found.category} {found.score:.2f} in {where}: {done}{shadow}, {found.detector}")
