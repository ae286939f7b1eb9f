"""A task's result with given figures and nothing else of interest."""

from difftransformer_lab.results import DataIdentity, Environment, ModelIdentity, TaskResult

ENVIRONMENT = Environment(
    difftransformer="0", python="3", torch="2", transformers="5", platform="p", processor="c", device="cpu", threads=1
)


def task_result(task, model, measurements, *, scores=(), grids=(), data="text", **options):
    """A result whose `options` are the last keywords."""
    return TaskResult(
        task=task,
        model=ModelIdentity(name=model, architecture="A", attention="diff", parameters=1, dtype="float32", sha256="0"),
        data=DataIdentity(name=data, sha256="0", requests=1),
        options=options, choices=[], seed=0, command="", created="", environment=ENVIRONMENT,
        measurements=list(measurements), items=list(scores), grids=list(grids),
    )  # fmt: skip
