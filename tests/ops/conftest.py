"""What the tests of the op ask for."""

import pytest

from tests.support.op_backends import force_forms


@pytest.fixture
def backend(request, monkeypatch):
    """A row of the table of backends, made available."""
    request.param.provide(monkeypatch)
    return request.param


@pytest.fixture
def take(monkeypatch):
    """`force_forms` for one test."""
    return lambda *names: force_forms(monkeypatch, *names)
