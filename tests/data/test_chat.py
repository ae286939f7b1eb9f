"""Conversations: the tokens of the answers, and no others, are learned; compared with what transformers says."""

import gzip
import importlib.util
import json
import shutil

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from difftransformer.data import (
    DataConfig,
    Document,
    SourceConfig,
    Tokenizer,
    byte_tokenizer,
    prepare_shards,
    read_documents,
    train_bpe,
)
from difftransformer.data.chat import DEFAULT_TEMPLATE, ChatTemplate
from difftransformer.data.documents import Conversation
from difftransformer.errors import DataError
from tests.data.conftest import request, stored

# ChatML, as most chat models write it; and with marks around what the assistant writes.
PLAIN = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
# Shows the thoughts of the last answer only, so that an earlier one is written in another way when more follows.
FORGETS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversations(count=30):
    made = []
    for index in range(count):
        turns = [
            ("user", f"What is {index} + 1?\n\nSay it in words, naïve ☃."),
            ("assistant", f" It is {index + 1}.\n"),
            ("user", "Why?  "),
            ("assistant", f"Because {index} is followed by {index + 1},\nas everyone knows."),
        ][: 2 + 2 * (index % 2)]
        if index % 3 == 0:
            turns.insert(0, ("system", "You are a clerk."))
        made.append([{"role": role, "content": content} for role, content in turns])
    return made


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """A pretrained tokenizer with the tokens of ChatML, for a template."""

    def save(template):
        folder = tmp_path_factory.mktemp("chat")
        texts = [message["content"] for messages in conversations() for message in messages]
        backend = train_bpe(texts + ["system", "user", "assistant"] * 9, 400).backend
        backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
        named = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "bos_token": "<|im_start|>"}
        theirs = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)
        theirs.save_pretrained(folder)
        return folder

    return save


def write(path, rows):
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def prepared(tmp_path, tokenizer, rows=None, **options):
    source = tmp_path / "chats.jsonl.gz"
    write(source, [{"messages": messages} for messages in conversations()] if rows is None else rows)
    config = request(source, tmp_path / "shards", tokenizer=str(tokenizer), validation_share=0.3)
    return prepare_shards(config, **options)


def by_transformers(folder, template):
    theirs, found = AutoTokenizer.from_pretrained(folder), []
    for messages in conversations():
        said = theirs.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        labels = [token if own else -100 for token, own in zip(said["input_ids"], said["assistant_masks"], strict=True)]
        found.append(list(zip(said["input_ids"][:-1], labels[1:], strict=True)))
    return sorted(found)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by marks"])
def test_answers_are_the_ones_that_transformers_marks(tmp_path, chat_folder, template):
    folder = chat_folder(template)
    found = stored(prepared(tmp_path, folder))
    assert found == by_transformers(folder, MARKED)
    assert any(target == -100 for example in found for _, target in example)


def test_an_answer_begins_where_the_prompt_of_a_model_ends(tmp_path, chat_folder):
    """Also where the tokenizer would join the two: here a line feed after a line feed."""
    folder = chat_folder(PLAIN)
    backend = json.loads((folder / "tokenizer.json").read_text())
    backend["model"]["vocab"]["ĊĊ"] = max(backend["model"]["vocab"].values()) + 100
    backend["model"]["merges"].insert(0, ["Ċ", "Ċ"])
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert len(theirs.encode("\n\n")) == 1
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "\nGone."}]
    found = stored(prepared(tmp_path, folder, [{"messages": messages}] * 9))[0]
    prompt = theirs.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = [*theirs.encode("\nGone."), theirs.eos_token_id]
    assert [token for token, _ in found[: len(prompt)]] == prompt
    assert [target for _, target in found] == [-100] * (len(prompt) - 1) + answer + [-100]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_tokenizers_without_a_template_get_one_which_a_trained_model_keeps(tmp_path, tokenizer):
    shards = prepared(tmp_path, tokenizer)
    shards.tokenizer.save(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    found = stored(shards)
    assert found == by_transformers(tmp_path / "model", DEFAULT_TEMPLATE)
    texts = {theirs.decode([token for token, _ in example]) for example in found}
    written = "### user\nWhat is 4 + 1?\n\nSay it in words, naïve ☃.\n\n### assistant\n It is 5.\n<|endoftext|>"
    assert written in {text.strip() for text in texts}
    answers = {theirs.decode([target for _, target in example if target != -100]) for example in found}
    assert " It is 5.\n<|endoftext|>" in answers
    assert " It is 2.\n<|endoftext|>Because 1 is followed by 2,\nas everyone knows.<|endoftext|>" in answers


def test_parquet_and_data_sets_give_the_same(tmp_path, monkeypatch, chat_folder):
    monkeypatch.setattr("difftransformer.data.writing.BATCH_CHARACTERS", 100)  # less than a conversation
    folder = chat_folder(PLAIN)
    expected = prepared(tmp_path, folder)
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.Table.from_pylist([{"messages": messages} for messages in conversations()])
    parquet.write_table(table, tmp_path / "chats.parquet")
    sources = [str(tmp_path / "chats.parquet")]
    if importlib.util.find_spec("datasets"):
        (tmp_path / "set").mkdir()
        shutil.copy(sources[0], tmp_path / "set")
        sources += [f"hf:{tmp_path / 'set'}", f"hf-stream:{tmp_path / 'set'}"]
    for index, source in enumerate(sources):
        config = request(source, tmp_path / f"shards-{index}", tokenizer=str(folder), validation_share=0.3)
        assert stored(prepare_shards(config)) == stored(expected)


@pytest.mark.parametrize("order", [("chat", "text"), ("text", "chat")])
def test_a_mixture_with_conversations_keeps_their_template(tmp_path, order):
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations()))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Some words."}) + "\n" + json.dumps({"text": "More."}))
    mixture = [SourceConfig(source=str(tmp_path / f"{name}.jsonl")) for name in order]
    mixed = prepare_shards(
        DataConfig(mixture=mixture, tokenizer="byte", validation_share=0.5, folder=str(tmp_path / "shards"))
    )
    assert mixed.tokenizer.chat_template == DEFAULT_TEMPLATE


def test_another_template_makes_other_shards(tmp_path, chat_folder, caplog):
    folder = chat_folder(PLAIN)
    first = prepared(tmp_path, folder)
    with caplog.at_level("INFO"):
        assert prepared(tmp_path, folder).folder == first.folder
    assert caplog.messages[-1] == f"using {first.folder}"
    template = PLAIN.replace("Be kind.", "Be quick.")
    (folder / "chat_template.jinja").write_text(template)
    assert prepared(tmp_path, folder).manifest.fingerprint != first.manifest.fingerprint


def test_conversations_are_text_elsewhere(tmp_path):
    write(tmp_path / "a.jsonl", [{"messages": conversations(2)[1]}, {"text": "plain", "messages": None}])
    first, second = read_documents(str(tmp_path / "a.jsonl"))
    assert "Because 1 is followed by 2" in first.text
    assert second == Document("a.jsonl:2", "plain")


def ask(*roles):
    return [{"role": role, "content": f"by {role}"} for role in roles]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": ask("user")}, "messages without an answer: the last one is of the user"),
        ({"messages": ask("user", "assistant", "user")}, "messages without an answer"),
        ({"messages": []}, r"messages is \[\]"),
        ({"messages": "hello"}, "give a list of messages"),
        ({"messages": ["hello"]}, "message 1 has the role None"),
        ({"messages": ask("user", "robot")}, "message 2 has the role 'robot'; allowed are system, user, assistant"),
        ({"messages": [*ask("user"), {"role": "assistant", "content": " "}]}, r"2 \(assistant\) has the content ' '"),
        ({"messages": [*ask("user"), {"role": "assistant", "content": None}]}, "has the content None"),
        ({"messages": [*ask("user"), {**ask("assistant")[0], "tool_calls": [1]}]}, "2 has tool_calls; only role"),
        ({"messages": [{"role": "user", "content": "<|im_end|>"}, *ask("assistant")]}, "the user holds '<|im_end|>'"),
        ({"text": "no messages"}, "chats.jsonl.gz:4 holds text, and what comes before it messages; divide"),
    ],
)
def test_bad_conversations_are_named(tmp_path, chat_folder, row, words):
    good = {"messages": ask("user", "assistant")}
    with pytest.raises(DataError, match=words.replace("|", r"\|")) as met:
        prepared(tmp_path, chat_folder(PLAIN), [good, good, good, row, *[good] * 9])
    assert "chats.jsonl.gz: line 4" in str(met.value) or "chats.jsonl.gz:4" in str(met.value)
    assert "\n" not in str(met.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (FORGETS, "line 2: the chat template writes message 2 .* in another way when more follows"),
        (
            PLAIN + "{{ raise_exception('Roles must\nalternate') }}",
            r"line 1: the chat template refuses .*Roles must alternate",
        ),
        ("{% if messages[-1].role == 'user' %}a{% endif %}", "line 1: the chat template writes"),
        (MARKED.replace("== 'assistant'", "== 'nobody'"), "line 1: the chat template writes no answer"),
        ("{{ messages", "line 1: the chat template refuses"),
        (
            "{% generation %}a{% endgeneration %}",
            "line .: the chat template writes no token of an answer after the first",
        ),
        (
            "{% generation %}a{% endgeneration %}b",
            "line .: the chat template writes no token of an answer after the first",
        ),
    ],
)
def test_templates_that_cannot_be_learned_from_are_named(tmp_path, chat_folder, template, words):
    thought = [{"role": "assistant", "content": "<think>hm</think>Yes."}]
    rows = [{"messages": ask("user") + thought}, {"messages": (ask("user") + thought) * 2}]
    with pytest.raises(DataError, match=words) as met:
        prepared(tmp_path, chat_folder(template), rows * 5)
    assert "\n" not in str(met.value)


@pytest.mark.parametrize("specials", [("<e>", "<e><f>"), ("<e><f>", "<e>")])
def test_of_special_tokens_the_longest_ends_an_answer(specials):
    """In whatever order the tokenizer has them."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    template = "{% for message in messages %}{{ message.content }}<e><f>{% endfor %}"
    chat = ChatTemplate(Tokenizer(tokenizer.backend, chat_template=template))
    conversation = Conversation("name", (("user", "Why?"), ("assistant", "So.")), "place")
    assert list(chat.segments(conversation)) == [("Why?<e><f>", False), ("So.<e><f>", True)]


@pytest.mark.parametrize("row", [{"text": "Words."}, {"messages": conversations(1)[0]}])
def test_a_tokenizer_of_ids_takes_no_words(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    with pytest.raises(
        DataError, match=r"rows.jsonl holds (text|messages), and the ids of its tokenizer stand for no text"
    ):
        prepare_shards(request(tmp_path / "rows.jsonl", tmp_path / "s", tokenizer="ids:50"))


def test_a_tokenizer_that_begins_every_text_with_a_space_is_refused(tmp_path):
    vocabulary = {"</s>": 0, "<0x0A>": 1, "▁A": 2, "A": 3, "▁": 4}
    backend = Backend(models.BPE(vocabulary, [("▁", "A")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["</s>"])
    Tokenizer(backend, end_of_text="</s>", pad="</s>").save(tmp_path / "tokenizer")
    with pytest.raises(DataError, match="encodes a text in another way after other text"):
        prepared(tmp_path, tmp_path / "tokenizer")


def test_the_template_of_a_chat_names_the_token_that_begins_it(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": "<|pad|>", "eos_token": "<|endoftext|>"}))
    assert Tokenizer.load(tmp_path).begin_of_text == 256
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}" + DEFAULT_TEMPLATE)
    assert Tokenizer.load(tmp_path).begin_of_text == 257
