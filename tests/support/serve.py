"""`transformers serve` in a process of its own, and questions to it."""

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from transformers import AutoTokenizer

from tests.support.ports import free_port

SERVER_SECONDS = 120
COMMAND = ("-c", "from transformers.cli.transformers import main; main()")


@contextmanager
def serving(folder, environment, *options, command=COMMAND):
    """Serve a folder; the value is ask(place, **question), which returns the first choice of the answer."""
    port = free_port()
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *options]
    log_file, address = folder.with_name("log.txt"), f"http://127.0.0.1:{port}"
    with log_file.open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, *command, *words], cwd=folder.parent, env=environment, stdout=log, stderr=log
        )

    def ask(place, **question):
        body = json.dumps({"model": str(folder), "temperature": 0, **question}).encode()
        request = urllib.request.Request(f"{address}/v1/{place}", body, headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]

    try:
        deadline = time.monotonic() + SERVER_SECONDS
        while True:
            assert server.poll() is None, log_file.read_text()
            assert time.monotonic() < deadline, log_file.read_text()
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                    assert json.load(answer) == {"status": "ok"}
                break
            except OSError:
                time.sleep(0.5)
        yield ask
    finally:
        server.terminate()
        server.wait(timeout=30)


def check_answers(ask, model, folder):
    """Check that a completion is what the model generates, and that a chat is answered."""
    prompt, tokenizer = "the quick brown", AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :])
    assert ask("completions", prompt=prompt, max_tokens=8)["text"] == expected
    message = [{"role": "user", "content": "hello"}]
    reply = ask("chat/completions", messages=message, max_tokens=4, stream=False)["message"]
    assert reply["role"] == "assistant"
    assert isinstance(reply["content"], str)
