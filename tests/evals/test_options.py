"""Options that no task can have are refused before anything is read, with their names and values."""

import pytest

from difftransformer.errors import ConfigError
from difftransformer_lab.evals.tasks import task_kind

REFUSED = [
    ("needle", {"needles": [[1, 2]]}, r"needles=\[\[1, 2\]\]"),
    ("needle", {"needles": [[1]]}, r"needles=\[\[1\]\]"),
    ("needle", {"lengths": [0]}, "lengths"),
    ("needle", {"depths": [1.5]}, r"depths=\[1.5\]: give shares of the context"),
    ("needle", {"depths": []}, "depths"),
    ("needle", {"documents": 0}, "documents=0"),
    ("needle", {"digits": 10}, "digits=10: give .* 1 to 9 digits"),
    ("needle", {"seed": -1}, "seed=-1"),
    ("allocation", {"depths": [-0.1]}, "depths"),
    ("allocation", {"needles": 0}, "needles=0"),
    ("allocation", {"length": 0}, "length=0"),
    ("perplexity", {"windows": 0}, "windows=0"),
    ("perplexity", {"window": 1}, "window=1"),
    ("perplexity", {"stride": 0}, "stride=0"),
    ("perplexity", {"stride": 2, "spread": True}, "stride=2: windows that are spread"),
    ("perplexity", {"position_buckets": -1}, "position_buckets=-1"),
    ("recall", {"ngram": 1}, "ngram=1"),
    ("recall", {"max_train_count": -1}, "max_train_count=-1"),
    ("recall", {"windows": 0}, "windows=0"),
    ("order", {"shots": 0}, "shots=0: give at least 1"),
    ("order", {"orders": 1}, "orders=1: give at least 2"),
    ("order", {"items": 0}, "items=0: give at least 1"),
    ("icl", {"shots": [0]}, r"shots=\[0\]: give different numbers, none below 1"),
    ("icl", {"shots": [1], "demonstrations": [2]}, r"shots=\[1\], demonstrations=\[2\]: give one of the two"),
    ("icl", {"items": 0}, "items=0: give at least 1"),
    ("icl", {"seed": -1}, "seed=-1: give at least 0"),
    ("icl", {"draws": 0}, "draws=0: give at least 1"),
    ("icl", {"data": "trec", "train_file": "a"}, "data='trec', train_file='a': give one of the two"),
    ("icl", {"test_file": "a"}, "test_file='a': there is no train_file; give both"),
    ("icl", {"text_word": "a\nb"}, r"text_word='a\\nb': give a word"),
    ("icl", {"text_word": " " * 3000}, r"text_word='.{,60}': give a word"),
    ("outliers", {"window": 1}, "window=1"),
    ("outliers", {"tokens": 0}, "tokens=0"),
    ("outliers", {"largest": 0}, "largest=0"),
    ("outliers", {"seed": -1}, "seed=-1: give at least 0"),
    ("maps", {"prompt": ""}, "prompt='': give a text"),
    ("maps", {"layers": [-1]}, r"layers=\[-1\]: give at least 0"),
    ("synthetic", {"task": "copy"}, "task='copy': choose one of mqar"),
    ("synthetic", {"seed": 1}, "seed=1: the examples of the run's task"),
    ("synthetic", {"variations": []}, r"variations=\[\]"),
    ("synthetic", {"examples": 0}, "examples=0: give at least 1"),
    ("math", {"shots": 5}, "shots=5"),
    ("math", {"problems": 0}, "problems=0"),
    ("math", {"max_new_tokens": 0}, "max_new_tokens=0"),
    ("math", {"seed": -1}, "seed=-1"),
    ("hallucination", {"items": 0}, "items=0"),
    ("quantized", {"task": "quantized"}, "task='quantized': choose one of allocation, ask"),
    ("quantized", {"bits": []}, r"bits=\[\]"),
    ("quantized", {"bits": [1]}, r"bits=\[1\]: give different numbers from 2 to 16"),
    ("quantized", {"granularity": []}, "granularity=.*one or more of row, head, tensor"),
    ("quantized", {"task_options": {"windoes": 3}}, "task_options: windoes: unknown key; did you mean windows"),
    ("quantized", {"task_options": {"windows": "3"}}, "task_options: windows: expected int"),
    ("quantized", {"task_options": {"windows": 0}}, "task_options: windows=0"),
    ("harness", {"seed": -1}, "seed=-1: give at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "options", "words"), REFUSED)
def test_impossible_options_are_refused(task, options, words):
    with pytest.raises(ConfigError, match=words) as met:
        task_kind(task).options(**options)
    assert len(str(met.value)) < 300
