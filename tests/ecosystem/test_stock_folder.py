"""A `diffllama` folder in processes that cannot import this package: transformers, PEFT, lm-eval, transformers serve."""

import torch

from tests.support.serve import check_answers, serving
from tests.support.tiny_folders import logits, stock, tokens


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
    with serving(tmp_path / "m", outside.environment) as ask:
        check_answers(ask, ours, tmp_path / "m")
