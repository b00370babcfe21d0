"""The command line of everything that asks the guard: policies and its audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace_launcher.admin_options import AddCommand

if TYPE_CHECKING:
    from headrace_launcher.admin_options import Commands


def add_guard_commands(commands: Commands, add: AddCommand) -> None:
    """Add all of them."""
    guard = commands.add_parser("guard", help="policies and audit of the guard").add_subparsers(
        required=True, metavar="COMMAND"
    )
    show = add(guard, "policies", "list the policies in force", "guard_command:list_policies")
    show.add_argument("--json", action="store_true", help="for scripts")
    one = add(guard, "policy", "show a policy as TOML", "guard_command:show_policy")
    one.add_argument("name", metavar="NAME")
    put = add(guard, "put", "put a policy in force", "guard_command:put_policy")
    put.add_argument("name", metavar="NAME")
    put.add_argument("file", type=Path, metavar="FILE", help="TOML as `guard policy` shows it")
    put.add_argument("--if-version", default="", metavar="V", help="replace this version only")
    drop = add(guard, "delete", "drop a policy that was put", "guard_command:delete_policy")
    drop.add_argument("name", metavar="NAME")
    add(guard, "reload", "read the policy files again", "guard_command:reload_policies")
    audit = add(guard, "audit", "how one request was judged", "guard_command:show_audit")
    audit.add_argument("request_id", metavar="REQUEST_ID")
    audit.add_argument("--json", action="store_true", help="for scripts")
    verify = add(guard, "verify", "recount the audit's hash chain", "guard_command:verify_audit")
    verify.add_argument("--json", action="store_true", help="for scripts")
