"""Fine-tune a model on conversations with TRL's SFTTrainer: the loss covers the assistant's answers alone.

    python examples/sft_trl.py MODEL chats.jsonl --out tuned
    difftransformer generate tuned "What is 2 + 3?" --chat

MODEL is a folder with a tokenizer, such as `difftransformer export` or `upcycle` writes. Each line of the file is a
conversation: {"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]}.
Conversations share rows without seeing one another. Needs `pip install trl`.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import difftransformer  # noqa: F401 - makes the model types known to transformers

# For tokenizers without a chat template. The loss covers what stands between the marks of generation.
TEMPLATE = r"""
{%- for message in messages -%}
{{ "### " + message.role + "\n" }}
{%- if message.role == "assistant" -%}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else -%}
{{ message.content }}
{%- endif -%}
{{ "\n\n" }}
{%- endfor -%}
{{ "### assistant\n" if add_generation_prompt else "" }}"""


def main() -> SFTTrainer:
    """Tune a model, and save it with its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--out", default="tuned")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row")
    parser.add_argument("--rate", type=float, default=2e-5, help="peak learning rate")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    has_gpu = torch.cuda.is_available()
    batches = {"per_device_train_batch_size": args.batch, "max_length": args.length, "packing": True}
    rates = {"learning_rate": args.rate, "lr_scheduler_type": "cosine", "warmup_steps": 0.05}
    device = {"bf16": has_gpu, "use_cpu": not has_gpu}
    files = {"save_strategy": "no", "report_to": []}
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model),
        args=SFTConfig(
            args.out, num_train_epochs=args.epochs, assistant_only_loss=True, **batches, **rates, **device, **files
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(args.out)
    return trainer


if __name__ == "__main__":
    main()
