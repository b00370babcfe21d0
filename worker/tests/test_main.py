"""The process: how it starts, how it leaves, what it says when it cannot start."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest

from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing.tiny_model import write_hf_folder
from headrace_testing.waiting import eventually, free_port

SERVICE = pb.DESCRIPTOR.services_by_name["Worker"]
GENERATE = method_ref(SERVICE, "Generate", pb.GenerateRequest, pb.GenerateEvent)
DESCRIBE = method_ref(SERVICE, "Describe", pb.DescribeRequest, pb.DescribeResponse)


@contextlib.asynccontextmanager
async def process(**settings):
    """A worker process with these settings; killed at the end if it still runs."""
    own = {f"HEADRACE_WORKER_{name.upper()}": str(value) for name, value in settings.items()}
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace_worker",
        env={**os.environ, **own},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


@contextlib.asynccontextmanager
async def tiny_worker(tmp_path, **settings):
    """A ready worker process over a tiny checkpoint, and a session with it."""
    write_hf_folder(tmp_path)
    port = free_port()
    base = {"model_path": tmp_path, "model_name": "tiny", "listen": f"127.0.0.1:{port}"}
    async with process(**(base | settings)) as running:
        session = SessionClient(f"127.0.0.1:{port}")

        async def is_ready():
            assert running.returncode is None
            with contextlib.suppress(Exception):
                described = await session.unary(DESCRIBE, pb.DescribeRequest(), timeout_s=2)
                return described.state == pb.WORKER_STATE_READY

        try:
            await eventually(is_ready, within_s=60)
            yield running, session
        finally:
            await session.close()


def request(max_tokens):
    return pb.GenerateRequest(
        request_id="r",
        model="tiny",
        prompt_token_ids=[40, 41, 42],
        stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=True),
    )


async def test_sigterm_lets_a_stream_finish_and_exits_with_zero(tmp_path):
    """The running stream ends as ever, then the process leaves by itself."""
    async with tiny_worker(tmp_path, drain_grace_s=20) as (running, session):
        stream = session.stream(GENERATE, request(200))
        events = [await anext(stream)]
        running.send_signal(signal.SIGTERM)
        events += [event async for event in stream]
        assert sum(len(d.token_ids) for e in events for d in e.deltas) == 200
        assert await asyncio.wait_for(running.wait(), 20) == 0


async def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path):
    """Exit code 1 and the path on stderr, no traceback."""
    async with process(model_path=tmp_path / "none.gguf") as running:
        _, stderr = await asyncio.wait_for(running.communicate(), 60)
        assert running.returncode == 1
        assert "none.gguf" in stderr.decode().splitlines()[-1]
        assert "Traceback" not in stderr.decode()


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"model_path": "x", "num_thread": 1}, "NUM_THREAD"), ({}, "MODEL_PATH")],
)
async def test_wrong_settings_end_the_start(settings, word):
    """A typo or a missing path: exit code 2, the variable on stderr."""
    async with process(**settings) as running:
        _, stderr = await asyncio.wait_for(running.communicate(), 60)
        assert running.returncode == 2
        assert word in stderr.decode()


COMPUTES_AT_THE_END = """
import sys, threading
import torch
from headrace_worker.__main__ import leave

def compute():
    while True:
        torch.randn(1000).sort()

if len(sys.argv) > 1:
    threading.Thread(target=compute, name=sys.argv[1], daemon=True).start()
leave()
sys.exit(3)
"""


@pytest.mark.parametrize(("threads", "code"), [([], 3), (["engine"], 0), (["load"], 0)])
def test_a_thread_that_still_computes_is_left_behind(threads, code):
    """The interpreter would abort when it unwinds one at its own end."""
    command = [sys.executable, "-c", COMPUTES_AT_THE_END, *threads]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
