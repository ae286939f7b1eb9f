"""A chat endpoint on this machine that answers, or fails, as a script says."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-0123-not-for-anyone"


def reply(text, tokens=100):
    """A chat completion."""
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}}], "usage": {"total_tokens": tokens}})


class Server:
    """What was asked, and what to answer: `script` first, one a request, then `answer(candidate)`."""

    def __init__(self, answer):
        self.answer, self.script, self.candidates, self.headers, self.bodies = answer, [], [], [], []

    def respond(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.bodies.append(body)
        self.headers.append(handler.headers)
        candidate = body["messages"][1]["content"].partition("<candidate>\n")[2].partition("\n</candidate>")[0]
        self.candidates.append(candidate)
        step = self.script.pop(0) if self.script else self.answer(candidate)
        if step == "hang":
            time.sleep(0.6)
            return
        if step == "drop":
            handler.connection.close()
            return
        status, headers, text = step
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        for name, value in headers.items():
            handler.send_header(name, value)
        payload = text.encode()
        handler.send_header("Content-Length", str(len(payload) + (50 if headers.get("X-Cut") else 0)))
        handler.end_headers()
        handler.wfile.write(payload)


@contextmanager
def judge_server(answer=lambda candidate: reply("All is said.\nVERDICT: True")):
    """The server and its address."""
    server = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            server.respond(self)

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.handle_error = lambda *_: None
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{httpd.server_port}/v1"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
