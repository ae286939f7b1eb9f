"""What the tests of the Triton kernels ask for."""

import pytest


@pytest.fixture
def take(monkeypatch):
    """Let passes be made by the forms of some names, where they have one; returns the names of those that were taken.

    "both_maps" is for calls without gradients, whose few queries are then not decoded either.
    """
    from difftransformer.ops.triton_kernels import launch

    def take(*names):
        taken = []
        if "both_maps" in names:
            monkeypatch.setattr(launch, "DECODE_ROWS", 0)

        def choose(forms, key, run):
            form = next((form for form in forms if form.name in names), forms[0])
            taken.append(form.name)
            return form

        monkeypatch.setattr(launch, "choose", choose)
        return taken

    return take
