"""A supervisor with one stand-in child, to be killed.

Usage: supervise_forever.py STATE_DIR PORT PIDFILE
"""

import asyncio
import sys
from pathlib import Path

from headrace_launcher.fleet_view import Role
from headrace_launcher.plan import ChildSpec, ProbeKind
from headrace_launcher.process import Spawner
from headrace_launcher.settings import child_environment
from headrace_launcher.state_dir import StateDir
from headrace_launcher.supervisor import Supervisor


async def main() -> None:
    state_dir, port, pid_file = StateDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
    state_dir.create()
    state_dir.lock()
    stand_in = str(Path(__file__).parent / "stand_in.py")
    address = f"127.0.0.1:{port}"
    argv = (sys.executable, "-I", "-S", stand_in, port, "--ignore-term", "--grandchild", pid_file)
    spec = ChildSpec("one", Role.SERVICE, argv, address, ProbeKind.HTTP, (), 0, address)
    async with Spawner([state_dir.lock_descriptor()]) as spawner:
        supervisor = Supervisor([spec], state_dir, child_environment(), spawner, lambda: None)
        supervisor.start()
        await supervisor.wait_ready()
        sys.stdout.write(f"{supervisor.views()[0].pid}\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


asyncio.run(main())
