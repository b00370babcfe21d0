"""A child process for the supervisor's tests: answers /ready, and misbehaves on request.

Usage: stand_in.py PORT [--grandchild PIDFILE] [--exit-code N] [--ignore-term] [--not-ready-file F]
With STAND_IN_LISTEN_FD it listens on the socket that it inherits, and PORT only names it.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--grandchild", type=Path)
parser.add_argument("--exit-code", type=int)
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--not-ready-file", type=Path)
args = parser.parse_args()

sys.stdout.write("stand-in says hello\n")
if args.exit_code is not None:
    sys.stdout.write("stand-in is about to fail\n")
    sys.exit(args.exit_code)
if args.grandchild:
    code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
    args.grandchild.write_text(str(process.pid))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = not (args.not_ready_file and args.not_ready_file.exists())
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


signal.signal(signal.SIGTERM, signal.SIG_IGN if args.ignore_term else lambda *_: sys.exit(0))
HTTPServer.allow_reuse_address = True
inherited = os.environ.get("STAND_IN_LISTEN_FD")
server = HTTPServer(("127.0.0.1", args.port), Handler, bind_and_activate=not inherited)
if inherited:
    server.socket.close()
    server.socket = socket.socket(fileno=int(inherited))
    server.server_activate()
server.serve_forever()
