"""A `diffllama` folder in processes that cannot import this package: transformers, PEFT, lm-eval, transformers serve."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from tests.support.tiny_folders import logits, stock, tokens

# On the path before anything else: an import of ours fails.
BLOCK = """import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "difftransformer":
            raise ImportError("difftransformer was asked for")
sys.meta_path.insert(0, Refuse())
"""
SERVER_SECONDS = 120


@pytest.fixture
def outside(tmp_path):
    """Run code where this package cannot be imported; returns standard output."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(BLOCK)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "path")}

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.environment = environment
    assert "blocked" in run("try:\n    import difftransformer\nexcept ImportError:\n    print('blocked')")
    return run


def test_transformers_and_peft_open_it(outside, needs, tmp_path):
    needs("peft")
    ours = stock(tmp_path / "m")
    ids = tokens(2, 20)
    torch.save(ids, tmp_path / "ids.pt")
    outside("""if True:
        import torch
        from peft import LoraConfig, PeftModel, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer
        ids = torch.load("ids.pt", weights_only=True)
        model = AutoModelForCausalLM.from_pretrained("m").eval()
        AutoTokenizer.from_pretrained("m")
        with torch.no_grad():
            before = model(ids).logits
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
        seen = []
        for _ in range(6):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad(); seen.append(loss.item())
        assert seen[-1] < seen[0] - 0.02, seen
        model.save_pretrained("adapter")
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("m"), "adapter").eval()
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model.eval()(ids).logits)
            merged = model.merge_and_unload()
            assert torch.allclose(merged(ids).logits, again(ids).logits, atol=1e-5)
        torch.save(before, "before.pt")
    """)
    stock_logits = torch.load(tmp_path / "before.pt", weights_only=True)
    torch.testing.assert_close(stock_logits, logits(ours, ids), atol=1e-5, rtol=1e-5)


def test_transformers_serve_answers_as_generate_does(outside, needs, tmp_path):
    for name in ("fastapi", "uvicorn", "openai"):
        needs(name)
    ours = stock(tmp_path / "m")
    prompt = "the quick brown"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "from transformers.cli.transformers import main; main()"
    words = ["serve", str(tmp_path / "m"), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with (tmp_path / "log.txt").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=outside.environment, stdout=log, stderr=log
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + SERVER_SECONDS
        while True:
            assert server.poll() is None, (tmp_path / "log.txt").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log.txt").read_text()
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                    assert json.load(answer) == {"status": "ok"}
                break
            except OSError:
                time.sleep(0.5)

        def ask(place, **question):
            body = json.dumps({"model": str(tmp_path / "m"), "temperature": 0, **question}).encode()
            request = urllib.request.Request(
                f"{address}/v1/{place}", body, headers={"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]

        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = tokenizer.decode(ours.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :])
        assert ask("completions", prompt=prompt, max_tokens=8)["text"] == expected
        message = [{"role": "user", "content": "hello"}]
        reply = ask("chat/completions", messages=message, max_tokens=4, stream=False)["message"]
        assert reply["role"] == "assistant"
        assert isinstance(reply["content"], str)
    finally:
        server.terminate()
        server.wait(timeout=30)
