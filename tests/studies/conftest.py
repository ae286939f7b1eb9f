"""A small study, its design, and runs that are trained in the test's own process."""

import pytest
import yaml

from difftransformer.errors import EXIT_DIVERGED
from difftransformer_lab.studies import Design, load_study
from difftransformer_lab.studies.jobs import tell
from difftransformer_lab.studies.run import main as run_main
from tests.support.cases import threads


@pytest.fixture
def document(toy, tmp_path):
    """A study of two arms at two numbers of needles, beside its recipe."""
    toy["training"] |= {"steps": 4, "checkpoint_every": 4, "context_stages": [[0, 64]], "validate_every": 2}
    del toy["evaluation"][2], toy["compare"]
    toy["evaluation"][1]["options"]["lengths"] = [96]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(toy))
    return {
        "name": "small",
        "question": "Does it work?",
        "recipe": "recipe.yaml",
        "reference": "twin",
        "arms": {
            "diff": {"label": "DIFF", "set": {"model.attention_type": "diff"}},
            "twin": {"label": "Transformer", "set": {"model.attention_type": "softmax"}},
        },
        "axes": {
            "needles": {"values": {"one": {"set": {"training.retrieval.max_needles": 1}, "number": 1.0}, "two": {}}}
        },
        "figures": [{"label": "loss", "task": "perplexity", "name": "nll", "unit": "nats/token"}],
        "presets": {"laptop": {"seeds": 1}},
    }


@pytest.fixture
def design(document, tmp_path):
    """Return the design of a changed document."""

    def make(preset="laptop", **options):
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(document))
        return Design(load_study(path), preset, **options)

    return make


@pytest.fixture
def trained(monkeypatch):
    """Runs that were trained, in this process instead of one each."""
    titles = []

    def here(jobs, *, at_once, on_done):
        with threads(1):
            for job in jobs:
                if not job.done:
                    tell(jobs)
                    job.prepare()
                    code = run_main([str(job.folder), "1", "cpu", *map(str, job.shards)])
                    job.has_diverged = job.may_diverge and code == EXIT_DIVERGED
                    assert code == 0 or job.has_diverged
                    titles.append(job.label)
                    job.done, job.seconds = True, 1e6
                    on_done(job)

    monkeypatch.setattr("difftransformer_lab.studies.study.run_jobs", here)
    return titles
