"""Which language models of transformers can be made differential, what each has beyond Llama's layout, and why others cannot.

The forward of a family's attention counts its heads from the rows of its projections, so that a line here is all that a family
needs. `docs/upcycling.md` shows both tables.
"""

WINDOWS = "windows by layer"
NORMS = "norms on queries and keys"
STATES = "layers of Mamba-2 between attention layers"
EXPERTS = "mixture of experts (attention alone changes)"

FAMILIES = {  # model_type -> what the model has beyond Llama's layout
    "apertus": f"{NORMS}, another MLP",
    "arcee": "another MLP",
    "bamba": f"{STATES}, partial rotation",
    "cohere": "blocks in parallel, LayerNorm, norms with a gain for each head, scaled logits",
    "cohere2": f"blocks in parallel, LayerNorm, {WINDOWS}, layers without rotation, scaled logits",
    "ernie4_5": "biases, rotation of neighbours",
    "exaone4": f"{NORMS}, norms after, {WINDOWS}, layers without rotation",
    "falcon_h1": "a mixer of Mamba-2 beside each attention, scaled keys",
    "gemma": "scaled embeddings, another MLP",
    "gemma2": f"scale of the maps' logits, norms after, {WINDOWS}; soft-capped attention logits are refused",
    "gemma3_text": f"{NORMS}, scale of the maps' logits, norms after, {WINDOWS}, two rotations",
    "glm": "biases, partial rotation of neighbours, fused MLP",
    "glm4": "biases, partial rotation of neighbours, norms after, fused MLP",
    "granite": "biases, scale of the maps' logits, scaled embeddings, residuals and logits",
    "granitemoehybrid": f"{STATES}, {EXPERTS}",
    "helium": "biases, rotation of neighbours",
    "hunyuan_v1_dense": f"biases, {NORMS} after the rotation",
    "lfm2": f"layers of convolution between attention layers, {NORMS}",
    "llama": "biases",
    "ministral": WINDOWS,
    "ministral3": "queries scaled by position, windows",
    "mistral": "windows",
    "mixtral": f"{EXPERTS}, windows",
    "nemotron": "biases, LayerNorm, partial rotation, another MLP",
    "nemotron_h": STATES,
    "olmo": "biases, LayerNorm without gain, clipped projections",
    "olmo2": "biases, norms over all queries and all keys, norms after",
    "olmo3": f"biases, norms over all queries and all keys, norms after, {WINDOWS}",
    "olmoe": f"{EXPERTS}, biases, norms over all queries and all keys, clipped projections",
    "phi": f"biases, LayerNorm, {NORMS}, partial rotation, blocks in parallel",
    "phi3": "fused projections, partial and scaled rotation",
    "qwen2": "biases on queries, keys and values",
    "qwen2_moe": f"{EXPERTS}, biases on queries, keys and values, windows",
    "qwen3": NORMS,
    "qwen3_moe": f"{EXPERTS}, biases, {NORMS}, windows",
    "seed_oss": "biases",
    "smollm3": "layers without rotation",
    "starcoder2": "biases, LayerNorm, another MLP, windows",
}
_ONE_COUNT = "its forward divides keys and values by the same number of heads, but two maps have more keys than values"
_LATENT = "multi-head latent attention, whose queries and keys are not rows of one projection"
_ENCODER = "it is an encoder; difftransformer has encoders of its own (is_causal=False)"
REFUSED = {  # model_type -> why
    "bert": _ENCODER,
    "bloom": "its forward calls no attention function of transformers",
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon": "its forward calls no attention function of transformers",
    "gemma3": "it has an encoder of images beside its text model; save the text model alone, as gemma3_text",
    "gpt2": _ONE_COUNT,
    "gpt_neox": _ONE_COUNT,
    "gpt_oss": "attention sinks, which differential attention does not have",
    "modernbert": _ENCODER,
    "opt": _ONE_COUNT,
    "qwen2_vl": "it has an encoder of images, and its text model is not a language model by itself",
    "stablelm": _ONE_COUNT,
    "vit": "it is not a language model; DifferentialEncoderLayer builds encoders of images",
}
