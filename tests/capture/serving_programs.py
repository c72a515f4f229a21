"""Servers that stand for an engine, and a client of theirs."""

SERVER = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
import torch
from kcap.capture.session import SESSION_VARIABLE, read_session
from kcap.capture.window.window import StepShape, Window

window = Window(read_session(os.environ[SESSION_VARIABLE]))
window.register()
window.start()
a = torch.eye(4)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path, _, steps = self.path.partition("?")
        if path == "/die":
            print("ValueError: out of memory", flush=True)
            os._exit(7)
        for step in range(int(steps or 0)):
            window.begin(StepShape("decode", [1], [step]))
            torch.mm(a, a)
            window.end()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass

server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
try:
    server.serve_forever()
except KeyboardInterrupt:
    print("the server ended in order", flush=True)
"""
NEVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503, "still loading")

print("loading the weights", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DIES = "import sys; print('RuntimeError: no such model', file=sys.stderr); sys.exit(5)"
CLIENT = """
import os, subprocess, sys
from urllib.request import urlopen

assert "KCAP_SESSION" not in os.environ, "a client is no part of what is recorded"

port, output, *words = sys.argv[1:]
for word in words:
    if word in ("start", "stop"):
        subprocess.run([sys.executable, "-m", "kcap", "window", word, output], check=True)
    elif word == "fail":
        sys.exit("AssertionError: a request failed")
    else:
        urlopen(f"http://127.0.0.1:{port}/{word}").read()
"""
