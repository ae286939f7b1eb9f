"""Fixtures: a small model of every kind."""

import pytest
from small_models import SHAPES, make_model


@pytest.fixture(params=list(SHAPES))
def shape(request):
    return request.param


@pytest.fixture
def model(shape):
    return make_model(shape)
