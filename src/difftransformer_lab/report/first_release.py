"""Results files of studies, among them those of release 0.1.0, which held evaluations in another form."""

import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from difftransformer.errors import ResultsError
from difftransformer.typed import build
from difftransformer_lab.evals.scores import details, mean, proportion
from difftransformer_lab.report.metrics import compare_metrics
from difftransformer_lab.results import (
    Comparison,
    DataIdentity,
    Environment,
    ItemScore,
    Measurement,
    ModelIdentity,
    Study,
    TaskResult,
    Upcycling,
    read_document,
    read_result,
)

CLASSES: dict[str, type[Comparison] | type[Upcycling]] = {"comparison": Comparison, "upcycling": Upcycling}
FIRST_VERSION = 1
_NAMES = {"nll": "perplexity", "needle": "needle", "allocation": "allocation"}


def read_study(path: Path | str) -> tuple[Study, bool]:
    """Read the results of a study. Its metrics are computed again from its runs, with the statistics of this release.

    Returns:
        The study, and whether the file is of release 0.1.0.

    Raises:
        ResultsError: no such file, another kind, or a damaged file.
    """
    kind, version, result = read_document(path)
    if kind not in CLASSES:
        raise ResultsError(
            f"{path}: holds a result of kind {kind!r}, expected {' or '.join(CLASSES)}; name another file"
        )
    if version != FIRST_VERSION:
        study = read_result(path, CLASSES[kind])
        return dataclasses.replace(
            study, metrics=compare_metrics(study.runs, [model.model for model in study.models])
        ), False
    try:
        return _study(kind, result, str(path)), True
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ResultsError(f"{path}: a damaged result of release 0.1.0 ({error!r}); run the command again") from None


def _study(kind: str, old: dict[str, Any], source: str) -> Study:
    models = {model["model"]: model for model in old["models"]}
    new = {key: value for key, value in old.items() if key not in ("differences", "metrics")} | {"metrics": []}
    new["runs"] = [
        {key: value for key, value in run.items() if key not in _NAMES}
        | {"evaluations": _evaluations(run, old, models[run["model"]], run["run"])}
        for run in old["runs"]
    ]
    if kind == "upcycling":
        new["before"] = _evaluations(old["before"], old, old["models"][-1], "before")
        new["seeds"] = [old["runs"][0]["seed"]]
    study: Study = build(CLASSES[kind], new, source=source, error=ResultsError)
    return dataclasses.replace(study, metrics=compare_metrics(study.runs, [model.model for model in study.models]))


def _evaluations(found: dict[str, Any], old: dict[str, Any], model: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a model's evaluations as the plain data of task results."""
    recipe, environment = old["recipe"]["evaluation"], Environment(**old["environment"])
    made = {}
    for key, task in _NAMES.items():
        if found[key] is None:
            continue
        measurements, items, requests = _READERS[key](found[key])
        result = TaskResult(
            task=task,
            model=ModelIdentity(
                name=name,
                architecture="DiffTransformerForCausalLM",
                attention=model["attention_type"],
                parameters=model["parameters"],
                dtype="float32",
                sha256="",
            ),
            data=DataIdentity(name="validation", sha256="", requests=requests),
            options={"text": "validation"} | recipe[key],
            choices=[],
            seed=recipe[key].get("seed", 0),
            command=old["command"],
            created=old["created"],
            environment=environment,
            measurements=measurements,
            items=items,
        )
        made[task] = dataclasses.asdict(result)
    return made


Figures = tuple[list[Measurement], list[ItemScore], int]


def _loss(nll: dict[str, Any]) -> Figures:
    windows, measurements, items = nll["documents"], [], []
    sizes = [("nll", "nats/token", "tokens", 1.0), ("bits per byte", "bits/byte", "bytes", math.log(2))]
    for name, unit, size, scale in sizes:
        scores = [window["nll_nats"] / scale for window in windows]
        weights = [float(window[size]) for window in windows]
        measurements.append(mean(name, unit, scores, {}, weights=weights, better="lower"))
        items += [
            ItemScore(name=name, item=f"window {index}", score=score, weight=weight)
            for index, (score, weight) in enumerate(zip(scores, weights, strict=True))
        ]
    for bucket in nll["by_position"]:
        value, at = bucket["nll_nats_per_token"], {"start": bucket["start_tokens"], "end": bucket["end_tokens"]}
        measurements += details([mean("nll by position", "nats/token", [value], at, better="lower")])
    return measurements, items, len(windows)


def _retrieval(needle: dict[str, Any]) -> Figures:
    groups: dict[tuple[tuple[str, Any], ...], list[bool]] = defaultdict(list)
    for cell in needle["cells"]:
        answers = [True] * cell["correct"] + [False] * (cell["trials"] - cell["correct"])
        places = [(key, cell[key]) for key in ("cities", "needles", "asked", "length_tokens", "depth")]
        for count in (1, 3, 4, 5):
            groups[tuple(places[:count])] += answers
    rows = [
        proportion("accuracy", found, dict(at)) for at, found in sorted(groups.items(), key=lambda one: len(one[0]))
    ]
    measurements = [row for row in rows if "depth" not in row.at] + details(row for row in rows if "depth" in row.at)
    return measurements, [], sum(cell["trials"] for cell in needle["cells"])


def _shares(allocation: dict[str, Any]) -> Figures:
    measurements = [
        Measurement(
            name="attention share",
            unit="share",
            value=share["share"],
            standard_error=share["standard_error"],
            n=allocation["documents"],
            at={key: share[key] for key in ("depth", "form", "segment")},
            detail=True,
        )
        for share in allocation["shares"]
    ]
    depths = len({share["depth"] for share in allocation["shares"]})
    heads = []
    for form in ("signed", "absolute", "positive"):
        values = [m.value for m in measurements if (m.at["form"], m.at["segment"]) == (form, "answer")]
        row = mean(f"{form} attention on the answer", "share", values, {}, better="higher")
        # The shares of single documents are not in the file, so that the error over them is unknown.
        heads.append(dataclasses.replace(row, standard_error=None, n=allocation["documents"] * depths))
    return [*heads, *measurements], [], allocation["documents"] * depths


_READERS = {"nll": _loss, "needle": _retrieval, "allocation": _shares}
