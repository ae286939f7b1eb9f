"""Classes that run transformers' test mixins for Llama and for our model with each attention type.

`layout.py` copies this file as `tests/test_cases.py` into the tests of transformers' source distribution, where its relative
imports find transformers' mixins. It does not run from here.
"""

import copy
from unittest import mock

import torch
import transformers
from transformers import CONFIG_MAPPING

import difftransformer as ours
from difftransformer.attention import VARIANTS
from difftransformer.families import family_config

from . import test_executorch, test_fsdp_mixin, test_tensor_parallel_mixin
from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_fsdp_mixin import FSDPTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_tensor_parallel_mixin import TensorParallelTesterMixin
from .test_training_mixin import TrainingTesterMixin

test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None  # every model type, not only theirs
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None

AUTO = ("AutoModel", *(f"AutoModelFor{kind}" for kind in (
    "CausalLM", "QuestionAnswering", "SequenceClassification", "TokenClassification"
)))  # fmt: skip
FAMILIES = {  # the options of each
    "qwen3": {},
    "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
}


def classes_of(config):
    """The configuration and the classes of its models, None for one that the family lacks."""
    return (config, *(getattr(transformers, auto)._model_mapping.get(config, None) for auto in AUTO))


SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Tester:
    """What the mixins ask about a model: its classes, a small configuration, inputs, and the shapes of its outputs."""

    is_training = True
    batch_size = 3
    seq_length = 7
    num_labels = 3
    encoder_seq_length = seq_length

    def __init__(self, classes, options):
        self.config_class, self.base_model_class, self.causal_lm_class = classes[:3]
        self.question_answering_class, self.sequence_classification_class = classes[3:5]
        self.token_classification_class = classes[5]
        self.options = options
        vars(self).update(SIZES)
        if hasattr(self.config_class, "head_layout"):
            self.num_attention_heads = (
                self.get_config().head_layout().num_heads
            )  # of the maps, which the mixins compare

    def get_config(self):
        return self.config_class(**SIZES, **self.options)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}


def taught(model):
    """Teach a model to count upwards from the last of any tokens, so that what it generates is decided."""
    model.train()
    vocabulary = model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        prompt = torch.randint(vocabulary, (16, 10))
        ids = torch.cat((prompt, (prompt[:, -1:] + torch.arange(1, 13)) % vocabulary), 1)
        labels = torch.cat((torch.full_like(prompt, -100), ids[:, 10:]), 1)
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1, loss  # from log(99) = 4.6
    return model.eval()


class Suite(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, TensorParallelTesterMixin, FSDPTesterMixin):
    """The suites of one model."""

    classes, options = (), {}
    model_tester = None

    def setUp(self):
        self.model_tester = Tester(self.classes, self.options)
        self.config_tester = ConfigTester(self, config_class=self.classes[0], **SIZES, **self.options)
        self.all_model_classes = tuple(filter(None, self.classes[1:]))
        self.pipeline_model_mapping = {"text-generation": self.classes[2]}
        model = self.classes[2](self.model_tester.get_config())
        with mock.patch.object(test_executorch.AutoModelForCausalLM, "from_pretrained", return_value=model):
            super().setUp()

    def _check_attentions_for_generate(self, *, config, **generated):
        config = copy.copy(config)
        config.num_attention_heads = self.model_tester.num_attention_heads  # of the maps that the model returns
        super()._check_attentions_for_generate(config=config, **generated)

    def attention_mask_padding_matches_padding_free_with_position_ids(self, *arguments, **options):
        # The test takes this attribute, which says that attention is dispatched by name, for support of packed rows.
        with mock.patch.object(self.classes[2], "_supports_attention_backend", True):
            super().attention_mask_padding_matches_padding_free_with_position_ids(*arguments, **options)

    def test_tp_generation_quantized(self):
        # Of untrained weights, two float8 copies with other scales agree by chance: stock Llama fails with two of eight seeds.
        model_class = self._get_tp_model_class()
        save = model_class.save_pretrained
        with mock.patch.object(model_class, "save_pretrained", lambda model, *a, **kw: save(taught(model), *a, **kw)):
            super().test_tp_generation_quantized()

    def test_config(self):
        self.config_tester.run_common_tests()


def suite(name, **attributes):
    """A class of tests with this name."""
    return type(name, (Suite, test_executorch.ExecutorchTest), attributes)


llama = suite("llama", classes=classes_of(CONFIG_MAPPING["llama"]))
OURS = classes_of(ours.DiffTransformerConfig)
for name in VARIANTS:
    globals()[name] = suite(name, classes=OURS, options={"attention_type": name, "initialization": "normal"})
for family, options in FAMILIES.items():
    for name, config in ((family, CONFIG_MAPPING[family]), (f"differential_{family}", family_config(family))):
        globals()[name] = suite(name, classes=classes_of(config), options=options)
