"""Tokenizers: round trips, byte counts, the Hugging Face format."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from difftransformer.data import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from difftransformer.errors import ConfigError, DataError

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = ["", "Hello, 1234567 wörld ☃\n\n  x", "\x00\r\n\t \u00a0", "<|endoftext|> and <|pad|>", "a" * 999, " " * 33]


@quick
@given(text=st.text(max_size=200))
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    lengths = tokenizer.token_byte_lengths()
    assert sum(int(lengths[index]) for index in ids) == len(text.encode())
    assert b"".join(tokenizer.token_bytes[index] for index in ids) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_awkward_texts_come_back_and_hold_no_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.end_of_text, tokenizer.pad} & set(ids)
    assert tokenizer.encode_batch([text, "other"]) == [ids, tokenizer.encode("other")]


def test_the_byte_tokenizer_gives_bytes():
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.pad) == (258, 256, 257)
    assert tokenizer.encode("aé\n") == list("aé\n".encode())
    assert tokenizer.token_bytes[:256] == [bytes([value]) for value in range(256)]
    assert tokenizer.token_byte_lengths().tolist() == [1] * 256 + [0, 0]
    assert tokenizer.token_byte_lengths().dtype == np.int32


def test_the_trained_bpe_has_the_size_asked_for_and_single_digits(bpe, corpus):
    assert bpe.vocab_size == 600
    assert {bpe.end_of_text, bpe.pad} == {598, 599}
    assert [bpe.decode([index]) for index in bpe.encode(" 90210")] == [" ", *"90210"]
    text = corpus[0].text
    assert len(bpe.encode(text)) < 0.6 * len(text.encode())
    assert not [token for token in bpe.token_bytes if len(token) > 1 and any(chr(b).isdigit() for b in token)]


def test_training_is_deterministic_and_depends_on_the_text(bpe, corpus):
    texts = [document.text for document in corpus]
    assert train_bpe(iter(texts), 600).sha256 == bpe.sha256
    assert train_bpe(texts[:10], 600).sha256 != bpe.sha256


def test_too_little_text_makes_a_smaller_vocabulary_and_too_small_a_size_is_refused():
    assert 258 < train_bpe(["ab ab ab"], 1000).vocab_size < 270
    assert train_bpe(["ab ab ab"], 258).vocab_size == 258
    with pytest.raises(ConfigError, match=r"vocab_size is 257; a byte-level BPE needs at least 258"):
        train_bpe(["ab"], 257)


def test_auto_tokenizer_opens_what_was_saved_and_encodes_the_same(tokenizer, corpus, tmp_path):
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (tokenizer.end_of_text,) * 2
    assert theirs.pad_token_id == tokenizer.pad
    assert len(theirs) == tokenizer.vocab_size
    texts = [document.text for document in corpus[:3]] + [text for text in TEXTS if "<|" not in text]
    for text in texts:
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == ids
        assert theirs.decode(ids) == text
    # What transformers writes in turn is still the same tokenizer to us.
    theirs.save_pretrained(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert (again.end_of_text, again.pad) == (tokenizer.end_of_text, tokenizer.pad)


def test_saving_keeps_the_fingerprint(tokenizer, tmp_path):
    folder = tokenizer.save(tmp_path / "folder")
    for spec in (folder, folder / "tokenizer.json"):
        loaded = load_tokenizer(str(spec))
        assert loaded.sha256 == tokenizer.sha256
        assert loaded.encode("<|endoftext|>") == tokenizer.encode("<|endoftext|>")
    assert load_tokenizer("byte").sha256 == byte_tokenizer().sha256 != train_bpe(["ab ab"], 300).sha256


def gpt2_like(tmp_path, corpus, **configuration):
    """A tokenizer as others publish them: merged digits, its own special tokens, truncation switched on."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>", "<fill>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([document.text for document in corpus], trainer)
    backend.add_tokens([tokenizers.AddedToken("  ☃", normalized=False)])
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    if configuration:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
    return backend


def test_a_pretrained_tokenizer_is_opened_with_its_own_special_tokens(tmp_path, corpus):
    gpt2_like(tmp_path, corpus)
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.end_of_text, loaded.pad) == (0, 0)
    text = "a text longer than three tokens  ☃ </s>"
    ids = loaded.encode(text)
    assert loaded.decode(ids) == text
    assert 0 not in ids
    assert loaded.vocab_size == 401
    assert loaded.token_byte_lengths()[[0, 1, 400]].tolist() == [0, 0, 5]
    assert int(loaded.token_byte_lengths()[ids].sum()) == len(text.encode())
    gpt2_like(tmp_path, corpus, eos_token={"content": "<fill>"}, pad_token="</s>")
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.end_of_text, loaded.pad) == (1, 0)


@pytest.mark.parametrize("place", ["a file of its own", "its configuration", "nowhere"])
def test_a_chat_template_travels(place, tmp_path):
    source, again = tmp_path / "source", tmp_path / "again"
    byte_tokenizer().save(source)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    if place == "a file of its own":
        (source / "chat_template.jinja").write_text(template)
    elif place == "its configuration":
        path = source / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    Tokenizer.load(source).save(again)
    opened = AutoTokenizer.from_pretrained(again)
    if place == "nowhere":
        assert opened.chat_template is None
    else:
        messages = [{"role": "user", "content": "hello"}]
        assert opened.apply_chat_template(messages, tokenize=False) == "hello"


def test_the_template_of_a_chat_names_the_token_that_begins_it(tmp_path):
    byte_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": "<|pad|>", "eos_token": "<|endoftext|>"}))
    assert Tokenizer.load(tmp_path).begin_of_text == 256
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert Tokenizer.load(tmp_path).begin_of_text == 257


def test_byte_fallback_tokens_have_their_bytes():
    vocabulary = {"<unk>": 0, "</s>": 1, "▁a": 2, "<0x0A>": 3, "<0xE9>": 4, "é": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, end_of_text="</s>", pad="</s>")
    assert tokenizer.token_bytes == [b"", b"", b" a", b"\n", b"\xe9", "é".encode()]


def test_bad_tokenizers_are_refused_in_one_line(tmp_path, corpus):
    with pytest.raises(DataError, match=r"nowhere: no such tokenizer; name a folder .*or byte"):
        load_tokenizer("nowhere")
    with pytest.raises(DataError, match=r"tokenizer\.json: no such tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a Hugging Face tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
    backend = gpt2_like(tmp_path, corpus, eos_token="<gone>")
    with pytest.raises(DataError, match="no token '<gone>'"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read as JSON"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text(backend.to_str().replace("</s>", "<stop>"))
    with pytest.raises(DataError, match=r"no end of text.*add eos_token"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_bytes_says_so():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = Tokenizer(backend, end_of_text="</s>", pad="</s>")
    with pytest.raises(DataError, match=r"WordLevel.*neither byte-level nor has byte fallback"):
        tokenizer.token_byte_lengths()


def of_bytes(normalizer=None):
    """The byte tokenizer behind a normaliser."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.normalizer = normalizer
    return Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.backend.to_str()))


def of_words():
    words = tokenizers.Tokenizer(
        models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "<|endoftext|>": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(words, pad="<|endoftext|>")


def of_pieces():
    """As SentencePiece in Llama: a space before the text that is not of the text, and bytes for what has no piece."""
    vocabulary = {"</s>": 0, "▁a": 1, "b": 2, "▁": 3} | {f"<0x{value:02X}>": 4 + value for value in range(256)}
    pieces = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(pieces, end_of_text="</s>", pad="</s>")


DECOMPOSED = "\u1112\u1161\u11ab\u1100\u1173\u11af"  # two syllables in six letters of 3 bytes, composed in 6 bytes


@pytest.mark.parametrize(
    ("tokenizer", "text", "sizes", "is_whole"),
    [
        (of_bytes(), "aé\n", [1, 1, 1, 1, 0], True),
        (of_bytes(normalizers.NFC()), "aé\n", [1, 1, 1, 1, 0], True),
        (of_bytes(normalizers.NFC()), DECOMPOSED, [0, 0, 9, 0, 0, 9, 0], False),
        (of_bytes(normalizers.NFKC()), "\ufb01x", [0, 3, 1, 0], False),
        (of_bytes(normalizers.Lowercase()), "ABc", [1, 1, 1, 0], False),
        (of_bytes(normalizers.StripAccents()), "e\u0301o", [3, 1, 0], False),
        (of_bytes(normalizers.Strip()), "  a b \n", [3, 1, 3, 0], False),
        (of_bytes(normalizers.Strip()), " \n ", [3], False),
        (of_words(), "one  four two\n", [5, 5, 4, 0], False),
        (of_pieces(), "ab aé", None, True),
        (of_bytes(), "", [0], True),
    ],
)
def test_the_bytes_of_a_text_are_those_that_were_given(tokenizer, text, sizes, is_whole):
    ids, found, whole = tokenizer.encode_sized(text)
    assert ids == tokenizer.encode(text)
    assert len(found) == len(ids) + 1
    assert sum(found) == len(text.encode())
    assert sizes is None or found == sizes
    assert whole == is_whole
