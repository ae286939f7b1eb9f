"""Damage files and folders in every way that a seed draws: wrong JSON, weights that are none, links, junk."""

import json
import os
import shutil
import struct

NUMBERS = (0, -1, 1, 3, 2**31, 2**63, 10**7, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-320)
TEXTS = (
    "",
    "x",
    "diff",
    "\x00",
    "a\x1b[31mred\x1b[0m\x07",
    "\ud800",
    "[bold]x[/nope]",
    "../../x",
    "/etc/passwd",
    "\u202ex",
    "y" * 70_000,
)
OTHERS = (None, True, False, [], {}, [[]], {"": {}}, [None], {"a": [1]}, [1, "2", 3.0])
DOCUMENTS = (
    "",
    "null",
    "3",
    '"text"',
    "[]",
    "[1, 2]",
    "{}",
    "{",
    "nul",
    "NaN",
    '{"a": NaN}',
    '{"a": 1,}',
    "\x00" * 40,
    "\ufeff{}",
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"model_type": "difftransformer"}',
    '{"model_type": ["llama"]}',
    '{"model_type": "llama"}',
    "9" * 5_000,
    '{"hidden_size": ' + "9" * 5_000 + "}",
    '{"a": "\\ud800"}',
    "\x1b[2J",
    "[" + "1," * 200_000 + "1]",
)
JUNK = (b"", b"\x00", b"\xff\xfe\x00", b"\x80\x04\x95.", b"PK\x03\x04", b"\x89PNG\r\n", bytes(range(256)) * 40)


def value(draw):
    """A value that no field expects."""
    return draw.choice(draw.choice((NUMBERS, TEXTS, OTHERS)))


def places(document, path=()):
    """Every path in a document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, item in items:
        yield (*path, key)
        if len(path) < 6:
            yield from places(item, (*path, key))


def change_value(draw, document):
    """Put another value at a random place, drop the place, or add one beside it."""
    found = list(places(document))
    shallow = [path for path in found if len(path) <= 2]
    path = draw.choice(shallow if draw.random() < 0.7 else found)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    what = draw.choice(("change", "change", "change", "drop", "add"))
    if what == "drop":
        del parent[path[-1]]
    elif what == "add" and isinstance(parent, dict):
        parent[draw.choice(TEXTS[1:])] = value(draw)
    else:
        parent[path[-1]] = value(draw)
    return what, path


def damage_json(draw, path):
    """Damage a JSON file in one of its values, as a whole, or as a text."""
    if draw.random() < 0.7:
        document = json.loads(path.read_text(encoding="utf-8"))
        what = change_value(draw, document)
        path.write_text(json.dumps(document), encoding="utf-8")
        return f"{path.name} {what}"
    if draw.random() < 0.6:
        text = draw.choice(DOCUMENTS)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return f"{path.name} is {text[:30]!r}"
    return damage_bytes(draw, path)


def damage_bytes(draw, path):
    """Cut a file, change a byte, fill it with junk, or replace it by a folder or a link."""
    content, what = (
        path.read_bytes(),
        draw.choice(("cut", "flip", "junk", "folder", "loop", "dangling", "outside", "gone", "fifo", "closed")),
    )
    if what == "cut":
        path.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif what == "flip" and content:
        at = draw.randrange(min(len(content), 4000))
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :])
    elif what == "junk":
        path.write_bytes(draw.choice(JUNK))
    else:
        path.unlink()
        if what == "folder":
            path.mkdir()
        elif what == "loop":
            path.symlink_to(path.name)
        elif what == "dangling":
            path.symlink_to("nowhere")
        elif what == "outside":
            path.symlink_to(draw.choice(("/etc/passwd", "/etc", "/dev/null", "/proc/self/mem", "../text.txt")))
        elif what == "fifo":
            os.mkfifo(path)
        elif what == "closed":
            path.write_bytes(content)
            path.chmod(0)
    return f"{path.name} {what}"


def damage_safetensors(draw, path):
    """Rewrite the header of a safetensors file, or damage its bytes."""
    if draw.random() < 0.25:
        return damage_bytes(draw, path)
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    what = draw.choice(
        ("size", "offsets", "dtype", "shape", "value", "drop", "rename", "twice", "text", "metadata", "data")
    )
    if what == "offsets":
        header[name]["data_offsets"] = draw.choice(([0, 10**18], [-1, 4], [8, 4], [0, 0], [0], "x", [0.5, 1]))
    elif what == "dtype":
        header[name]["dtype"] = draw.choice(("I8", "BOOL", "F64", "I64", "F99", "", 3, None, "BF16", "F8_E4M3"))
    elif what == "shape":
        header[name]["shape"] = draw.choice(
            ([], [0], [-1, 4], [10**30], [2**32, 2**32], "x", [1.5], [[]], header[name]["shape"][::-1])
        )
    elif what == "value":
        change_value(draw, header)
    elif what == "drop":
        del header[name]
    elif what == "rename":
        header[
            draw.choice(
                (
                    "",
                    "x",
                    "\x1b[31m",
                    "model.layers.-1.x",
                    "lm_head.weight",
                    "model.layers.10000000000.mlp.up_proj.weight",
                )
            )
        ] = header.pop(name)
    elif what == "twice":
        header[name + ".base_layer"] = header[name]
    elif what == "metadata":
        header["__metadata__"] = draw.choice(({"format": "tf"}, {"format": 3}, [], None, {"format": "\x1b[31m"}, {}))
    text = json.dumps(header).encode()
    if what == "text":
        text = draw.choice((b"", b"null", b"[]", b"{", b"{}", b"[" * 50_000, text[: len(text) // 2], b"\xff" * 9))
    if what == "data":
        data = draw.choice((b"", data[:-1], data + b"x", b"\xff" * len(data), b"\x00" * len(data)))
    length = draw.choice((0, 1, 2**63, 2**64 - 1, len(text) + 1, 10**9)) if what == "size" else len(text)
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return f"{path.name} {what} of {name}"


def damage_folder(draw, folder):
    """Damage one file of a folder, or put a file there that should not be; return what was done."""
    if draw.random() < 0.15:
        return foreign_file(draw, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    wanted = [path for path in files if path.name not in ("README.md",)]
    path = draw.choice(wanted)
    if path.suffix == ".safetensors":
        return damage_safetensors(draw, path)
    if path.suffix == ".json":
        return damage_json(draw, path)
    if path.suffix == ".jsonl":
        return damage_jsonl(draw, path)
    return damage_bytes(draw, path)


def damage_jsonl(draw, path):
    """Damage one line."""
    lines = path.read_text(encoding="utf-8").split("\n")
    at = draw.randrange(len(lines))
    lines[at] = draw.choice((*DOCUMENTS[:14], '{"step": "x"}', '{"step": 1e400}', '{"step": 1}'))
    path.write_text("\n".join(lines), encoding="utf-8")
    return f"{path.name} line {at}"


PICKLE = b"cos\nsystem\n(S'touch pickled'\ntR."


def foreign_file(draw, folder):
    """Put a pickle, an index that leads elsewhere, an adapter or a setting there that names other files."""
    what = draw.choice(("pickle", "index", "adapter", "explicit", "generation", "template", "template", "auto_map"))
    config = folder / "config.json"
    weights = folder / "model.safetensors"
    if what == "pickle":
        weights.unlink(missing_ok=True)
        (folder / draw.choice(("pytorch_model.bin", "model.pt", "model.ckpt", "consolidated.00.pth"))).write_bytes(
            PICKLE
        )
    elif what == "index":
        name = draw.choice(
            (
                "pytorch_model.bin",
                "../outside.safetensors",
                "/etc/passwd",
                "x.safetensors",
                "",
                ".",
                "..",
                3,
                None,
                "a\x00b",
            )
        )
        weights.unlink(missing_ok=True)
        (folder / "pytorch_model.bin").write_bytes(PICKLE)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    elif what == "adapter":
        (folder / "adapter_config.json").write_text(
            draw.choice(('{"peft_type": "LORA", "base_model_name_or_path": "/etc"}', "[]", "{"))
        )
        (folder / "adapter_model.bin").write_bytes(PICKLE)
    elif what == "generation":
        (folder / "generation_config.json").write_text(
            draw.choice(
                (
                    *DOCUMENTS,
                    '{"eos_token_id": "x"}',
                    '{"max_length": -5}',
                    '{"num_beams": 1e99}',
                    '{"do_sample": "x", "temperature": "hot"}',
                )
            )
        )
    elif what == "template":
        (folder / "chat_template.jinja").write_text(draw.choice(TEMPLATES))
    elif config.is_file():
        document = json.loads(config.read_text())
        if what == "explicit":
            document["transformers_weights"] = draw.choice(
                ("pytorch_model.bin", "../x.safetensors", "adapter_model.bin", 3, ["x"], "a.safetensors.index.json")
            )
        else:
            document["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
            (folder / "evil.py").write_text("open('pickled', 'w')\nraise SystemExit(3)\n")
        config.write_text(json.dumps(document))
    return f"a foreign {what}"


TEMPLATES = (
    "{% for",
    "{{ messages[5].x.y }}",
    "{{ 1 / 0 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no\x1b[31m') }}",
    "{% include 'x' %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages | tojson(indent='x') }}",
    "",
    "\x00",
    "{{ messages[0]['content'] | upper }}",
    "{{ messages[0].content }}",
    "{% set x = messages.append(1) %}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%x' % 'a' }}",
    "{{ '%1000000000d' % 3 }}",
)


def copied(source, target):
    """A copy to damage."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copyfile(source, target)
    return target
