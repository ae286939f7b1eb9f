"""A chat endpoint on this machine that answers, or fails, as a script says."""

import json
import socketserver
import threading
import time
from contextlib import contextmanager, suppress
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
        if step == "trickle":
            handler.send_response(200)
            handler.end_headers()
            for _ in range(30):
                handler.wfile.write(b" ")
                time.sleep(0.05)
            return
        status, headers, text = step
        handler.send_response(status)
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


HEAD = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
SLOW = {  # what is sent first, then what is sent again and again, and how long apart
    "status": (b"", b"H", 0.05),
    "headers": (HEAD % b"200 OK", b"X-Slow: 1\r\n", 0.05),
    "one header": (HEAD % b"200 OK" + b"X-Slow: ", b"1", 0.05),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
    "many continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0.0),
    "early hints": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", 0.05),
    "chunks": (HEAD % b"200 OK" + CHUNKED, b"1\r\n \r\n", 0.05),
    "chunk extension": (HEAD % b"200 OK" + CHUNKED + b"1;", b"x", 0.05),
    "error chunks": (HEAD % b"500 Error" + CHUNKED, b"1\r\n \r\n", 0.05),
    "body": (HEAD % b"200 OK" + b"Content-Length: 100000\r\n\r\n", b" ", 0.05),
    "silence": (HEAD % b"200 OK" + b"Content-Length: 10\r\n\r\n", b"", 0.05),
}
FLOODS = {
    "chunks": (HEAD % b"200 OK" + CHUNKED, b"fff0\r\n" + b" " * 0xFFF0 + b"\r\n", 0.0),
    "error chunks": (HEAD % b"500 Error" + CHUNKED, b"fff0\r\n" + b" " * 0xFFF0 + b"\r\n", 0.0),
}


@contextmanager
def endless_server(first, again, seconds):
    """The address of a server that reads a request and then never comes to an end, and how many bytes it could send."""
    sent = [0]

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            with suppress(OSError):
                self.request.recv(1 << 20)
                self.request.sendall(first)
                while not stopped.wait(seconds):
                    self.request.sendall(again)
                    sent[0] += len(again)

    stopped = threading.Event()
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", sent
    finally:
        stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()
