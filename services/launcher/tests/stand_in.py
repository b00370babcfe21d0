"""A child process for the supervisor's tests: answers /ready, and misbehaves on request.

Usage: stand_in.py PORT [--grandchild PIDFILE] [--exit-code N] [--ignore-term] [--not-ready-file F]
With STAND_IN_LISTEN_FD it listens on the socket that it inherits, and PORT only names it. With
STAND_IN_SUCCESSION_FD it hands over when it is told to stop, and then drains while --drain-file is
there. Once it finds --hoard-file, it removes it and holds 64 MiB more. It answers with its process
id.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--grandchild", type=Path)
parser.add_argument("--exit-code", type=int)
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--not-ready-file", type=Path)
parser.add_argument("--drain-file", type=Path)
parser.add_argument("--hoard-file", type=Path)
args = parser.parse_args()

sys.stdout.write("stand-in says hello\n")
if args.exit_code is not None:
    sys.stdout.write("stand-in is about to fail\n")
    sys.exit(args.exit_code)
if args.grandchild:
    code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
    args.grandchild.write_text(str(process.pid))


leaving = threading.Event()
hoard = bytearray()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if args.hoard_file and args.hoard_file.exists():
            args.hoard_file.unlink()
            hoard.extend(b"x" * 2**26)
        ready = not (args.not_ready_file and args.not_ready_file.exists())
        ready = ready and not leaving.is_set()
        self.send_response(200 if ready else 503)
        self.send_header("X-Process", str(os.getpid()))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def stop(*_):
    if "STAND_IN_SUCCESSION_FD" in os.environ:
        threading.Thread(target=hand_over).start()
    else:
        sys.exit(0)


def hand_over():
    leaving.set()
    with socket.socket(fileno=int(os.environ["STAND_IN_SUCCESSION_FD"])) as line:
        with contextlib.suppress(BrokenPipeError):
            line.sendall(b"1")
        line.recv(1)
    server.shutdown()
    server.server_close()
    while args.drain_file and args.drain_file.exists():
        time.sleep(0.05)
    os._exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if args.ignore_term else stop)
HTTPServer.allow_reuse_address = True
inherited = os.environ.get("STAND_IN_LISTEN_FD")
server = HTTPServer(("127.0.0.1", args.port), Handler, bind_and_activate=not inherited)
if inherited:
    server.socket.close()
    server.socket = socket.socket(fileno=int(inherited))
    server.server_activate()
server.serve_forever()
