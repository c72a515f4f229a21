"""Servers that stand for an engine, and a client of theirs."""

SERVER = """
import os, signal, sys, threading, time
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
        if path == "/break":
            print("RuntimeError: the engine is dead", flush=True)
            self.server.broken = True
        if path == "/hang":
            window.begin(StepShape("decode", [1], [1]))
            open("hangs", "w").close()
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        if self.server.broken:
            return self.send_error(503, "no engine")
        for step in range(int(steps or 0)):
            window.begin(StepShape("decode", [1], [step]))
            torch.mm(a, a)
            window.end()
        if self.server.stalls:
            time.sleep(60)
        self.server.stalls = path == "/stall"
        self.send_response(200)
        self.end_headers()
        if path == "/kill":
            os.kill(engine, signal.SIGKILL)
            os.waitpid(engine, 0)
            self.server.stalls = True
        if path == "/quit":
            threading.Thread(target=self.server.shutdown).start()

    def log_message(self, *args):
        pass

server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.broken = server.stalls = False
try:
    server.serve_forever()
    server.server_close()
    time.sleep(1)
except KeyboardInterrupt:
    print("the server ended in order", flush=True)
"""
OF_TWO_PROCESSES = SERVER.replace("window = Window", "engine = os.fork()\nwindow = Window").replace(
    "class Handler", "if not engine:\n    time.sleep(600)\n\nclass Handler"
)
NEVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503, "still loading")

print("loading the weights", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SILENT = """
import os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        open("hangs", "w").close()
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = """
import signal, sys, threading, time

def beat():
    while True:
        open(f"{sys.argv[0]}.lives", "w").close()
        time.sleep(0.05)

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=beat, daemon=True).start()
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
