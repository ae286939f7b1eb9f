"""Conversations with the tokenizer and the template of a published chat model, SmolLM2-135M-Instruct."""

import json

from transformers import AutoTokenizer

from difftransformer.data import prepare_shards
from tests.data.conftest import request, stored

WRITTEN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
MARKED = (
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{message['content'] + '<|im_end|>'}}{% endgeneration %}"
    "{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}"
)


def test_the_answers_of_a_published_template(smollm, tmp_path):
    theirs = AutoTokenizer.from_pretrained(smollm)
    template = theirs.chat_template.replace("\\n", "\n").replace(WRITTEN, MARKED)
    assert "{% generation %}" in template
    chats = [
        [
            {"role": "user", "content": f"What is {index} times 7?\n"},
            {"role": "assistant", "content": f"It is {7 * index}.\n\nDo you agree? naïve ☃"},
            {"role": "user", "content": "  Yes."},
            {"role": "assistant", "content": "Good."},
        ]
        for index in range(20)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    config = request(path, tmp_path / "shards", tokenizer=str(smollm), validation_share=0.3)
    expected = []
    for messages in chats:
        said = theirs.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        labels = [token if own else -100 for token, own in zip(said["input_ids"], said["assistant_masks"], strict=True)]
        expected.append(list(zip(said["input_ids"][:-1], labels[1:], strict=True)))
        assert said["input_ids"] == theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert stored(prepare_shards(config)) == sorted(expected)
