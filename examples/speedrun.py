"""Train small language models that differ in their attention alone, with seeds, at equal tokens and at equal time.

One file, plain PyTorch and the attention layers of `difftransformer`. Every model has the same recipe: bf16 autocast, compiled
blocks, Muon for the matrices of layers and AdamW for the rest, projections back into the residual stream that start at zero,
normalised queries and keys, and a rate that warms up, stays and decays. Parameters are made equal through the width of the MLP.

    python examples/speedrun.py --attention softmax diff diff_v2 --seeds 3 --tokens 2e6     # a CPU, minutes
    python examples/speedrun.py --width 384 --layers 8 --batch 32768 --minutes 1            # a GPU

The first attention is the reference. Runs of all arms and seeds are made twice where their speeds differ: with as many tokens,
and with as many steps as take the reference's time. The log holds this source, the environment, every run and both tables; a
run that it holds is not made again, so an interrupted comparison goes on with the same command.
"""

import argparse
import json
import math
import platform
import statistics
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import difftransformer
from difftransformer.attention import VARIANTS
from difftransformer.ops import inverse_frequencies, rotary_tables
from difftransformer.train import MuonWithAdamW, muon_parameter_groups

ARMS = ("softmax", "diff", "diff_v2", "xsa", "gate", "softmax_norm")
VALID_SHARE = 0.05  # of the text, its end
SAME_STEPS = 0.01  # runs at equal time whose steps differ by less from those at equal tokens are the same runs


class Block(nn.Module):
    """Attention and a SwiGLU, each behind an RMSNorm, with output projections that start at zero."""

    def __init__(self, kind: str, width: int, heads: int, inner: int, index: int) -> None:
        super().__init__()
        layer = VARIANTS[kind]
        self.attention = layer(width, heads // getattr(layer, "twin_heads", 1), layer_index=index, qk_norm=True)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.attention.o_proj.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm_1(x), position_embeddings=tables)[0]
        gate, up = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """A language model; forward returns the mean loss in nats a token, a scalar."""

    def __init__(self, kind: str, args: argparse.Namespace, inner: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.width)
        self.blocks = nn.ModuleList(Block(kind, args.width, args.heads, inner, i) for i in range(args.layers))
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)
        nn.init.zeros_(self.head.weight)
        cos, sin = rotary_tables(
            torch.arange(args.context), inverse_frequencies(self.blocks[0].attention.layout.head_dim)
        )
        self.register_buffer("cos", cos[None], persistent=False)
        self.register_buffer("sin", sin[None], persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = F.rms_norm(self.embedding(ids), (self.embedding.embedding_dim,))
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def build(kind: str, args: argparse.Namespace, seed: int) -> Model:
    """Return the model of an arm, with as many parameters as the softmax model to within a row of the MLP."""
    torch.manual_seed(seed)
    inner = args.inner or round(8 / 3 * args.width / 16) * 16
    with torch.device("meta"):
        counts = [sum(p.numel() for p in Model(name, args, inner).parameters()) for name in ("softmax", kind)]
    inner -= round((counts[1] - counts[0]) / (3 * args.width * args.layers))
    model = Model(kind, args, inner).to(args.device)
    if args.compile:
        for block in model.blocks:
            block.compile()
    return model


def read_tokens(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return the training and the held-out tokens: an .npy array of token numbers, or the bytes of a folder's files."""
    if args.data and args.data.suffix == ".npy":
        ids = torch.from_numpy(np.load(args.data).astype(np.int32))
    else:
        folder = args.data or Path(sysconfig.get_path("stdlib"))
        files = sorted(p for p in folder.rglob("*.py" if args.data is None else "*") if p.is_file())
        files = [p for p in files if not {"site-packages", "encodings", "pydoc_data", "idlelib"} & set(p.parts)]
        np.random.default_rng(0).shuffle(files)
        text = b"\0".join(p.read_bytes() for p in files)  # a zero between files
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    args.vocab = args.vocab or math.ceil((int(ids.max()) + 1) / 64) * 64
    cut = len(ids) - max(int(VALID_SHARE * len(ids)), args.valid + 1)
    return ids[:cut].to(args.device), ids[cut:].to(args.device)


def rows(ids: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (rows, context) each, from positions in the text."""
    window = ids[starts[:, None] + torch.arange(context + 1, device=ids.device)].long()
    return window[:, :-1], window[:, 1:]


def optimizer_of(model: Model, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return Muon for the matrices of layers and AdamW for the rest."""
    return MuonWithAdamW(muon_parameter_groups(model), lr=args.rate, weight_decay=0.01)


def share_of_peak(done: float) -> float:
    """The rate's share of its peak after a share of the steps: 5 % warmup, then stable, then 30 % decay to zero."""
    return min(1.0, done / 0.05 + 1e-3, (1 - done) / 0.3)


def precision(device: str) -> torch.autocast:
    """Autocast to bf16 on a GPU; many CPUs multiply fp32 faster."""
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


def step_of(model: Model, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], rate: float) -> Tensor:
    with precision(batch[0].device.type):
        loss = model(*batch)
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def held_out_loss(model: Model, ids: Tensor, args: argparse.Namespace) -> float:
    """Return the mean loss of the first `--valid` held-out tokens, in nats a token."""
    count, size = args.valid // args.context, max(1, args.batch // args.context)
    starts = torch.arange(count, device=ids.device) * args.context
    with precision(ids.device.type):
        losses = [model(*rows(ids, part, args.context)) * len(part) for part in starts.split(size)]
    return float(torch.stack(losses).sum()) / count


def train(kind: str, seed: int, steps: int, train_ids: Tensor, valid_ids: Tensor, args: argparse.Namespace) -> dict:
    """Train one model and return its figures. Arms of one seed see the same rows in the same order."""
    model = build(kind, args, seed)
    optimizer = optimizer_of(model, args)
    order = torch.Generator().manual_seed(1000 + seed)
    size = args.batch // args.context
    begun = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(len(train_ids) - args.context - 1, (size,), generator=order)
        batch = rows(train_ids, starts.to(args.device, non_blocking=True), args.context)
        step_of(model, optimizer, batch, args.rate * share_of_peak(step / steps))
    loss = held_out_loss(model.eval(), valid_ids, args)
    parameters = sum(p.numel() for p in model.parameters())
    seconds = time.perf_counter() - begun
    return {"arm": kind, "seed": seed, "steps": steps, "loss": loss, "seconds": seconds, "parameters": parameters}


def step_seconds(args: argparse.Namespace, train_ids: Tensor) -> dict[str, float]:
    """Return the median time of a step of each arm; the arms take turns."""
    size = args.batch // args.context
    batch = rows(train_ids, torch.arange(size, device=args.device) * args.context, args.context)
    models = {kind: build(kind, args, 0) for kind in args.attention}
    optimizers = {kind: optimizer_of(model, args) for kind, model in models.items()}
    taken: dict[str, list[float]] = {kind: [] for kind in models}
    for turn in range(-2, args.timed):
        for kind, model in models.items():
            begun = time.perf_counter()
            for _ in range(5 if turn >= 0 else 1):
                step_of(model, optimizers[kind], batch, 1e-5)
            if args.device == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                taken[kind].append((time.perf_counter() - begun) / 5)
    return {kind: statistics.median(values) for kind, values in taken.items()}


def table(title: str, runs: list[dict], arms: list[str], seconds: dict[str, float]) -> str:
    """Return a table of the arms; the difference from the first arm and its p (paired t-test) are by seed."""
    losses = {arm: {run["seed"]: run["loss"] for run in runs if run["arm"] == arm} for arm in arms}
    lines = [
        f"{title}: held-out loss in nats a token",
        f"{'arm':14} n  mean    sd      minus {arms[0]:9} p       ms/step",
    ]
    for arm, by_seed in losses.items():
        values, sd = list(by_seed.values()), f"{statistics.stdev(by_seed.values()):.4f}" if len(by_seed) > 1 else "-"
        line = f"{arm:14} {len(values)}  {statistics.mean(values):.4f}  {sd:6}  "
        if arm == arms[0]:
            line += f"{'':15} {'':7} "
        else:
            pairs = [(loss, losses[arms[0]][seed]) for seed, loss in by_seed.items() if seed in losses[arms[0]]]
            difference = statistics.mean(a - b for a, b in pairs)
            p = f"{stats.ttest_rel(*zip(*pairs, strict=True)).pvalue:.4f}" if len(pairs) > 1 else "-"
            line += f"{difference:+.4f}         {p:7} "
        lines.append(line + f"{1e3 * seconds[arm]:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--attention", nargs="+", choices=VARIANTS, default=list(ARMS), help="the first is the reference"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=float, help="tokens of a run; 20 a parameter unless --minutes is given")
    parser.add_argument("--minutes", type=float, help="minutes of a run of the reference, in place of --tokens")
    parser.add_argument(
        "--data", type=Path, help="folder of text, or .npy of tokens; default: Python's standard library"
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, help="of the softmax model; by default 16 or, from width 256 on, 64 wide")
    parser.add_argument("--inner", type=int, help="width of the softmax model's MLP; 8/3 of --width by default")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--vocab", type=int, default=0, help="by default from the data")
    parser.add_argument("--valid", type=int, default=2**17, help="held-out tokens")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--timed", type=int, default=5, help="turns of the measurement of a step, five steps each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--out", type=Path, default=Path("speedrun.log"))
    args = parser.parse_args()
    args.heads = args.heads or args.width // (16 if args.width < 256 else 64)
    if args.batch % args.context:
        parser.error(f"--batch {args.batch} is no multiple of --context {args.context}")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # the arms share the code of a block, and each has graphs of its own

    train_ids, valid_ids = read_tokens(args)
    same = {
        k: str(v) for k, v in vars(args).items() if k not in ("out", "seeds", "attention", "tokens", "minutes", "timed")
    }
    done = {}
    if args.out.exists():
        records = [json.loads(x) for x in args.out.read_text().splitlines() if x.startswith('{"arm"')]
        done = {(r["arm"], r["seed"], r["steps"]): r for r in records if r["settings"] == same}
    log = args.out.open("a", buffering=1)

    def say(text: str) -> None:
        print(text, flush=True)
        log.write(text + "\n")

    if not done:
        log.write(Path(__file__).read_text() + "\n" + "=" * 100 + "\n")
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    versions = f"torch {torch.__version__}, difftransformer {difftransformer.__version__}"
    say(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {card}, {versions}")
    say(f"{vars(args)}; {len(train_ids):,} tokens to train on")

    seconds = step_seconds(args, train_ids)
    reference = args.attention[0]
    if args.minutes:
        tokens = args.minutes * 60 / seconds[reference] * args.batch
    else:
        tokens = args.tokens or 20 * sum(p.numel() for p in build(reference, args, 0).parameters())
    by_tokens = {kind: round(tokens / args.batch) for kind in args.attention}
    by_time = {kind: round(count * seconds[reference] / seconds[kind]) for kind, count in by_tokens.items()}
    by_time = {k: by_tokens[k] if abs(n / by_tokens[k] - 1) < SAME_STEPS else n for k, n in by_time.items()}
    plan = [
        (kind, seed, n)
        for seed in range(args.seeds)
        for kind in args.attention
        for n in {by_tokens[kind], by_time[kind]}
    ]
    begun, left = time.perf_counter(), sum(n * seconds[kind] for kind, seed, n in plan if (kind, seed, n) not in done)
    say(f"{len(plan)} runs, about {left / 60:.1f} minutes")
    for key in plan:
        if key in done:
            continue
        done[key] = train(*key, train_ids, valid_ids, args)
        log.write(json.dumps(done[key] | {"settings": same}) + "\n")
        print(f"{key[0]:14} seed {key[1]}  {key[2]:5} steps  loss {done[key]['loss']:.4f}  "
              f"{(time.perf_counter() - begun) / 60:.1f} min", flush=True)  # fmt: skip
    for title, steps in (("Equal tokens", by_tokens), ("Equal time", by_time)):
        runs = [done[kind, seed, steps[kind]] for kind in args.attention for seed in range(args.seeds)]
        say("\n" + table(title, runs, args.attention, seconds))


if __name__ == "__main__":
    main()
