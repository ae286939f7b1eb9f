"""The distance of a converted model from its source is measured again when either model or the text has changed."""

import numpy as np

from difftransformer_lab.results import Drift, read_result
from difftransformer_lab.studies import comparison


def test_drift_is_that_of_the_models_and_the_text_as_they_are(tmp_path, monkeypatch, caplog):
    measured = []

    def measure(source, target, tokens):
        measured.append(tokens.tolist())
        return Drift(
            tokens=len(tokens), largest_logit_difference=0.0, largest_logit=1.0, mean_kl_nats=0.0, greedy_tokens=1,
            greedy_same_tokens=1,
        )  # fmt: skip

    class Text:
        ids = np.arange(3, dtype="<u2")

        def tokens(self, split):
            return self.ids

    monkeypatch.setattr(comparison, "measure_drift", measure)
    source, target, cached, text = tmp_path / "source", tmp_path / "target", tmp_path / "drift.json", Text()
    for folder in (source, target):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")

    def drift():
        return comparison._drift(source, target, cached, text)

    first = drift()
    assert drift() == first == read_result(cached, Drift)
    assert len(measured) == 1
    (source / "model.safetensors").write_bytes(b"other weights")
    second = drift()
    text.ids = np.arange(1, 4, dtype="<u2")
    assert drift() not in (first, second)
    assert measured == [[0, 1, 2], [0, 1, 2], [1, 2, 3]]
    cached.write_text(cached.read_text().replace('"tokens": 3', '"tokens": 4'))
    assert drift().tokens == 3
    assert len(measured) == 4
    assert [str(cached) in line for line in caplog.messages] == [True]
