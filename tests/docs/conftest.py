"""The committed studies, read once."""

import pytest

from difftransformer_lab.analysis import read_studies
from tests.support.pages import DOCS


@pytest.fixture(scope="session")
def found():
    return read_studies(DOCS / "results" / "studies")


@pytest.fixture(scope="session")
def studies(found):
    return {one.records.slug: one.records for one in found}
