"""Labelled texts that tell their labels, and a model that chooses labels by a function of its prompt."""

import json

from difftransformer.data import byte_tokenizer


class Reader:
    """Chooses the label that a function of the prompt's text names."""

    def __init__(self, choose, labels=(), context_tokens=10**6, tokenizer=None):
        self.choose, self.labels, self.context_tokens = choose, sorted(labels), context_tokens
        self.prompt_tokens = context_tokens
        self.tokenizer = tokenizer or byte_tokenizer()

    def answer(self, requests):
        for index, request in enumerate(requests):
            yield index, self.labels.index(self.choose(self.tokenizer.decode(request.prompt)))


def write_labelled(path, counts):
    """Write as many texts of each label into a JSONL file and return its name."""
    rows = [
        {"text": f"{path.name[:2]} {n} of {label}", "label": label} for label in counts for n in range(counts[label])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def truth(prompt):
    return prompt.rsplit("\n==\n", 1)[-1].partition(" of ")[2].removesuffix("\nLabel:")


def figures(scores, name):
    return [row for row in scores.measurements if row.name == name]
