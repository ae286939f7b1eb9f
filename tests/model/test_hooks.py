"""A weight is read only while the module that holds it runs: tools fetch it in that module's hooks and free it afterwards."""

import pytest
import torch

from tests.support.tiny_models import tiny, tokens

CASES = {
    "softmax": {},
    "diff": {},
    "diff, head": {"lambda_form": "head"},
    "diff_v2": {},
    "grouped_diff": {},
    "dex": {},
    "gate": {},
}


def offload(model):
    """Keep every weight as NaN, except while its module runs."""
    weights = [
        (module, {name: parameter.detach().clone() for name, parameter in module.named_parameters(recurse=False)})
        for module in model.modules()
    ]
    for module, own in weights:

        def load(module, _, kept=own):
            for name, parameter in module.named_parameters(recurse=False):
                parameter.data = kept[name]

        def free(module, *_):
            for parameter in module.parameters(recurse=False):
                parameter.data = torch.full_like(parameter, torch.nan)

        module.register_forward_pre_hook(load)
        module.register_forward_hook(free)
        free(module)
    return model


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, None) for name in CASES), ("diff", "eager"), ("dex", "eager")]
)
def test_weights_are_read_in_their_modules(name, implementation):
    fields = CASES[name] | {"attention_type": name.partition(",")[0]}
    ids = tokens(2, 7)
    plain, hooked = (
        tiny(implementation=implementation, **fields),
        offload(tiny(implementation=implementation, **fields)),
    )
    maps = {"output_attentions": True} if implementation else {}
    with torch.no_grad():
        assert torch.equal(hooked(ids, **maps).logits, plain(ids, **maps).logits)
