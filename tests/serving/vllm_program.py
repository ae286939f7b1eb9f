"""Run by tests/serving/test_vllm.py under vLLM's interpreter: greedy tokens of prompts by vLLM's engine, as JSON.

    python vllm_program.py FOLDER... < {"prompts": [[3, 4]], "new": 8, "options": {FOLDER: {"enable_lora": true}}}

An engine with `enable_lora` answers with the adapter in FOLDER/adapter. vLLM finds the models by the entry point of the
installed package.
"""

import gc
import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main():
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    asked = json.load(sys.stdin)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    how = SamplingParams(temperature=0.0, max_tokens=asked["new"], detokenize=False, ignore_eos=True)
    for folder in sys.argv[1:]:
        options = asked["options"].get(folder, {})
        adapter = LoRARequest("adapter", 1, f"{folder}/adapter") if options.get("enable_lora") else None
        # Blocks and passes shorter than the prompts: prefills go in parts beside decoding requests.
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            block_size=32,
            **options,
        )
        # The second from cached prefixes.
        rounds = [engine.generate(prompts, how, use_tqdm=False, lora_request=adapter) for _ in range(2)]
        tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in rounds]
        cached = [output.num_cached_tokens for output in rounds[1]]
        spec = next(iter(engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()))
        heads = {"query": spec.num_heads, "key_value": spec.num_kv_heads, "width": spec.head_size}
        print("RESULT", json.dumps({"tokens": tokens, "cached": cached, "heads": heads}), flush=True)
        # The end of an engine ends the process group, so it comes before the next engine's start.
        del engine, spec
        gc.collect()


if __name__ == "__main__":
    main()
