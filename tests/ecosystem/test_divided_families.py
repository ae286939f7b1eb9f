"""Families made differential whose weights two processes divide by FSDP2, by our reader of parts and by transformers' own.

transformers' own suites try a Qwen3, a Gemma 3 and a Phi-3 besides.
"""

import json

from tests.families.test_families import source_model, upcycled
from tests.support.parallel_steps import start_code

RENAMED = ("mixtral", "nemotron_h")  # weights that transformers renames or merges
PLAIN = ("apertus", "falcon_h1")
IN_EACH_PROCESS = """
    import json, os, sys
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from difftransformer.errors import CheckpointError
    from difftransformer.hub import open_model
    from difftransformer.train.parallel import joined
    from tests.families.test_families import ids

    def opened_by_transformers(folder, processes):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(fsdp_size=processes.count)
        )

    def opened_in_parts(folder, processes):
        return open_model(folder, dtype="bf16", divided_by=processes)

    found = {}
    with joined("cpu") as processes:
        for family in sys.argv[2:]:
            folder = f"{sys.argv[1]}/{family}/diff"
            expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids()).logits
            for name, opened in (("transformers", opened_by_transformers), ("parts", opened_in_parts)):
                try:
                    model = opened(folder, processes)
                except CheckpointError as error:
                    found[f"{family} {name}"] = str(error)
                    continue
                with torch.no_grad():
                    equal = torch.equal(model(ids()).logits, expected)
                whole = sum(parameter.numel() for parameter in model.parameters())
                held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
                found[f"{family} {name}"] = [equal, held / whole]
        torch.distributed.barrier()  # process 0 holds the store through which the others meet, so it must not leave first
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


def test_two_processes_answer_to_the_bit_as_one(needs, tmp_path):
    needs("accelerate")
    families = PLAIN + RENAMED
    for family in families:
        (tmp_path / family).mkdir()
        upcycled(source_model(family), tmp_path / family, "diff")
    for worker in start_code(2, IN_EACH_PROCESS, tmp_path, *families):
        done = worker.finish(timeout=400)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert len(found) == 2 * len(families)
        for name, outcome in found.items():
            family, how = name.split()
            if family in RENAMED and how == "parts":
                assert "omit --divide-weights, or in Python call from_pretrained with distributed_config" in outcome
            else:
                equal, share = outcome
                assert equal, name
                assert share < 0.6, name
