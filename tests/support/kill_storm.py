"""Kill `train`, `compare` and `eval` again and again, and compare what is left with what an undisturbed command leaves.

`python -m tests.support.kill_storm --train 100 --compare 20 --eval 20 --ranks 30 --term 20` prints what it found. It exits with
1 if a result differs, a line is lost or doubled, a process outlives its parent by more than 5 s, or a run of two processes does
not end as it should. The commands are forked from a server that has imported the package, so that a kill costs a fraction of a
second. The children of `compare` start as they always do.
"""

import abc
import argparse
import contextlib
import copy
import dataclasses
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import yaml

from tests.conftest import TOY
from tests.support.parallel_steps import free_port

ORPHAN_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
CLOCKS = ("seconds", "tokens_per_second", "mfu", "peak_bytes")
PRELOADED = ("cli.progress", "cli.train", "cli.compare", "cli.eval_task", "studies.comparison", "studies.run", "report")


def _be(words, folder, output, environment=()):
    """Be the command."""
    os.environ.update(environment)
    import torch

    from difftransformer_lab.cli.main import main
    from difftransformer_lab.studies import comparison

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.argv = ["difftransformer", *words]
    torch.set_num_threads(1)
    comparison.measure_costs = lambda *_, **__: []  # seconds, which differ anyway
    os._exit(main(words))


class Storm(abc.ABC):
    """One kind of command, killed in one folder after another.

    Args:
        folder: Folder for everything.
        kills: Number of kills.
        seed: Seed of the moments.
    """

    kills_each = 10  # in one folder, before the command may end
    name = ""

    def __init__(self, folder, kills, seed=0):
        self.folder, self.kills, self.draw = folder / self.name, kills, random.Random(seed)
        self.folder.mkdir(parents=True)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([f"difftransformer.{name}" for name in PRELOADED])
        self.counts = {"kills": 0, "folders": 0}
        self.faults = []
        self.slowest = 0.0

    def start(self, out):
        words = [str(word) for word in self.words(out)]
        process = self.context.Process(target=_be, args=(words, str(self.folder), str(self.folder / "output.txt")))
        process.start()
        return process

    def run(self):
        self.finish(self.folder / "reference")
        expected = self.result(self.folder / "reference")
        while self.counts["kills"] < self.kills:
            out = self.folder / f"killed-{self.counts['folders']}"
            self.counts["folders"] += 1
            wanted = min(self.kills, self.counts["kills"] + self.kills_each)
            while self.counts["kills"] < wanted and self.kill_once(out):
                self.check_lines(out)
            self.finish(out)
            if self.result(out) != expected:
                self.faults.append(f"{out}: another result")
            self.check_lines(out)
            leftovers = [path for path in out.rglob("*") if path.name == ".lock" or path.name.endswith(".tmp")]
            if leftovers:
                self.faults.append(f"left over: {leftovers}")
        return self

    def kill_once(self, out):
        """Start the command and kill it at some moment; False if it ended before."""
        process = self.start(out)
        self.wait(process, out)
        if process.exitcode is not None:
            if process.exitcode:
                self.faults.append(f"{out}: exit status {process.exitcode}: {self.last_line()}")
            return process.exitcode != 0
        children = children_in(out)
        self.note(out, children)
        self.strike(process, out)
        self.counts["kills"] += 1
        begun = time.monotonic()
        while any(map(is_alive, children)) and time.monotonic() - begun < 2 * ORPHAN_SECONDS:
            time.sleep(0.02)
        seconds = time.monotonic() - begun if children else 0.0
        self.slowest = max(self.slowest, seconds)
        if seconds > ORPHAN_SECONDS:
            self.faults.append(f"{out}: a child lived for {seconds:.1f} s without its parent")
        return True

    def strike(self, process, out):
        """Do what the storm is about."""
        process.kill()
        process.join()

    def finish(self, out):
        process = self.start(out)
        process.join(PATIENCE_SECONDS)
        if process.exitcode != 0:
            self.faults.append(f"{out}: exit status {process.exitcode} at the end: {self.last_line()}")
            process.kill()

    def last_line(self):
        lines = (self.folder / "output.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def until(self, condition, process, seconds=PATIENCE_SECONDS):
        end = time.monotonic() + seconds
        while not condition() and process.exitcode is None and time.monotonic() < end:
            time.sleep(0.002)

    def pause(self, most):
        time.sleep(self.draw.uniform(0, most))

    @abc.abstractmethod
    def words(self, out):
        """The command line."""

    @abc.abstractmethod
    def wait(self, process, out):
        """Wait for the moment of the next kill."""

    @abc.abstractmethod
    def result(self, out):
        """What must be the same."""

    @abc.abstractmethod
    def check_lines(self, out):
        """Look for lost and doubled lines."""

    def note(self, out, children):
        """Count what the kill meets."""
        self.counts["children"] = self.counts.get("children", 0) + len(children)


class TrainStorm(Storm):
    """Every other kill meets a checkpoint that is being written."""

    name = "train"

    def words(self, out):
        return ["train", self.folder.parent / "train.yaml", "--out", out, "--threads", "1"]

    def wait(self, process, out):
        before = steps_done(out)
        if self.draw.random() < 0.5:
            self.until(lambda: any(out.glob("checkpoints/.step-*.tmp")), process)
            self.pause(0.02)
        elif self.draw.random() < 0.5:
            self.until(lambda: steps_done(out) > before + 5, process)
            self.pause(0.1)
        else:
            self.pause(1.0)

    def note(self, out, children):
        saving = any(out.glob("checkpoints/.step-*.tmp"))
        self.counts["while saving"] = self.counts.get("while saving", 0) + saving

    def result(self, out):
        return run_bits(out)

    def check_lines(self, out):
        check_steps(self, out)


class Ranks:
    """Processes of one command, as torchrun starts them."""

    def __init__(self, context, arguments, count=2):
        everywhere = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        everywhere |= {"GLOO_SOCKET_IFNAME": "lo"}
        self.processes = [
            context.Process(target=_be, args=(*arguments, everywhere | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    @property
    def exitcodes(self):
        return [process.exitcode for process in self.processes]

    @property
    def exitcode(self):
        """That of the first process that has failed; None while all others run."""
        codes = self.exitcodes
        return next((code for code in codes if code), None if None in codes else 0)

    def terminate(self):
        for process in self.processes:
            process.terminate()

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()

    def join(self, timeout):
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))


class RanksStorm(TrainStorm):
    """Two processes, of which one is killed: the other ends by itself. Every other folder saves beside training."""

    name = "ranks"
    alone_seconds, most_seconds = 10.0, 60.0

    def words(self, out):
        beside = str(out.name[-1] in "13579").lower()
        return [*super().words(out), "--set", f"training.checkpoint.asynchronous={beside}"]

    def start(self, out):
        return Ranks(
            self.context, ([str(word) for word in self.words(out)], str(self.folder), str(self.folder / "output.txt"))
        )

    def strike(self, process, out):
        self.hit(process, out, lambda one: one.kill())

    def hit(self, process, out, blow):
        begun = time.monotonic()
        blow(self.draw.choice(process.processes))
        process.join(self.alone_seconds)
        if None in process.exitcodes:  # it has not met the other one yet: torchrun ends it
            self.counts["ended by torchrun"] = self.counts.get("ended by torchrun", 0) + 1
            process.terminate()
            process.join(self.most_seconds - self.alone_seconds)
        seconds = time.monotonic() - begun
        self.slowest = max(self.slowest, seconds)
        if None in process.exitcodes:
            self.faults.append(f"{out}: the other process lived for {seconds:.1f} s")
            process.kill()


class TermStorm(RanksStorm):
    """SIGTERM to one of two processes at a moment of its training: both save the same step, and end with status 75."""

    name = "term"
    alone_seconds = most_seconds = 30.0

    def wait(self, process, out):
        before = steps_done(out)
        self.until(lambda: steps_done(out) > before + 1, process)
        self.pause(0.5)

    def strike(self, process, out):
        self.hit(process, out, lambda one: os.kill(one.pid, signal.SIGTERM))
        newest = max((path.name for path in out.glob("checkpoints/step-*")), default="none")
        if process.exitcodes != [75, 75] or newest != f"step-{steps_done(out):06d}":
            self.faults.append(
                f"{out}: {process.exitcodes}, {newest} saved, step {steps_done(out)} done: {self.last_line()}"
            )


class CompareStorm(Storm):
    """Every other kill meets children that are still importing."""

    name = "compare"

    def words(self, out):
        return ["compare", self.folder.parent / "compare.yaml", "--out", out]

    def wait(self, process, out):
        runs = [out / "runs" / f"{model}-seed0" for model in ("diff", "softmax")]
        before = [steps_done(run) for run in runs]
        self.importing = self.draw.random() < 0.5
        if self.importing:
            self.until(lambda: children_in(out), process)
            self.pause(1.5)
        else:
            self.until(lambda: any(steps_done(run) > done for run, done in zip(runs, before, strict=True)), process)
            self.pause(1.0)

    def note(self, out, children):
        super().note(out, children)
        self.counts["while importing"] = self.counts.get("while importing", 0) + (self.importing and bool(children))

    def result(self, out):
        from difftransformer_lab.results import StudyIndex, TaskResult, read_result

        members = read_result(out / "results.json", StudyIndex).members
        runs = [f"runs/{member.arm}-seed{member.seed}" for member in members]
        bits = {name: run_bits(out / name) for name in runs}
        figures = {}
        for name in runs:
            for path in sorted((out / name / "evals").glob("*/*.json")):
                result = read_result(path, TaskResult)
                figures[name, path.name] = (result.measurements, result.items, result.grids)
        return bits, figures

    def check_lines(self, out):
        for run in sorted(out.glob("runs/*")):
            check_steps(self, run)


class EvalStorm(Storm):
    """Kills between and in answers."""

    name = "eval"

    def words(self, out):
        base = self.folder.parent
        options = ["--text", base / "words.txt", "--window", "64", "--windows", "400", "--batch_tokens", "64"]
        return ["eval", "perplexity", base / "train" / "reference", *options, "--out", out]

    def wait(self, process, out):
        before = len(self.answered(out))
        if self.draw.random() < 0.3:
            self.pause(1.0)
        else:
            self.until(lambda: len(self.answered(out)) > before + self.draw.randint(1, 60), process)

    def answered(self, out):
        path = out / "perplexity.answers.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [int(found[1]) for line in lines if (found := re.search(rb'"request": ?(\d+)', line))]

    def result(self, out):
        from difftransformer_lab.results import TaskResult, read_result

        result = read_result(out / "perplexity.json", TaskResult)
        return result.measurements, result.items, sorted(self.answered(out))

    def check_lines(self, out):
        found = self.answered(out)
        if len(set(found)) < len(found):
            self.faults.append(f"{out}: an answer is there twice")
        if lost := getattr(self, "last", {}).get(out, set()) - set(found):
            self.faults.append(f"{out}: answers {sorted(lost)} are lost")
        self.last = {out: set(found)}
        self.counts["answers"] = max(self.counts.get("answers", 0), len(found))


STORMS = {storm.name: storm for storm in (TrainStorm, CompareStorm, EvalStorm, RanksStorm, TermStorm)}


def children_in(folder):
    """Processes that were started for a folder below this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"difftransformer_lab.child" in (line := path.read_bytes()) and str(folder).encode() + b"/" in line:
                found.append(int(path.parent.name))
    return found


def is_alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def steps_done(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"loss_nats"') if path.exists() else 0


def run_bits(run):
    """Metrics without clocks, and the tensors of the last checkpoint."""
    from safetensors.torch import load_file

    from difftransformer.train import checkpoints, read_metrics

    steps, validations = read_metrics(run / "metrics.jsonl")
    lines = [{key: value for key, value in dataclasses.asdict(line).items() if key not in CLOCKS} for line in steps]
    newest = checkpoints(run)[-1]
    tensors = {
        (file.name, name): tensor.numpy().tobytes()
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name
        != "random/cpu"  # PyTorch seeds its own generator anew in each process, and training draws nothing from it
    }
    return newest.name, lines, validations, tensors


def check_steps(storm, run):
    """Steps are there once each, without a gap, and none that a checkpoint holds is missing."""
    from difftransformer.train import checkpoints
    from difftransformer.train.metrics import read_lines

    path = run / "metrics.jsonl"
    lines = list(read_lines(path)) if path.exists() else []
    steps = [line["step"] for line in lines if "loss_nats" in line]
    saved = [int(found.name.removeprefix("step-")) for found in checkpoints(run)]
    if steps != list(range(1, len(steps) + 1)) or (saved and saved[-1] > len(steps)):
        storm.faults.append(f"{path}: steps {steps}, saved {saved}")


def prepare(folder):
    """Write text and recipes."""
    draw = random.Random(5)
    words = ["".join(draw.choices("etaoinshrdlucmfwyp", k=draw.randint(2, 9))) for _ in range(300)]
    (folder / "text").mkdir(parents=True)
    for index in range(40):
        lines = (" ".join(draw.choices(words, k=draw.randint(3, 10))) + "\n" for _ in range(40))
        (folder / "text" / f"{index:02d}.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "words.txt").write_text("".join(f"line {i} tells of {i * i} things\n" for i in range(9000)))
    recipe = copy.deepcopy(TOY)
    recipe["data"] |= {"source": str(folder / "text"), "folder": str(folder / "shards")}
    recipe["training"] |= {"steps": 120, "checkpoint_every": 4, "validate_every": 20, "context_stages": [[0, 64]]}
    recipe["evaluation"] = recipe["evaluation"][:2]
    recipe["evaluation"][1]["options"]["lengths"] = [96]
    recipe["compare"] = {"seeds": 1, "jobs": 2}
    (folder / "train.yaml").write_text(yaml.safe_dump(recipe))
    recipe["training"] |= {"steps": 400, "checkpoint_every": 20, "validate_every": 100}
    (folder / "compare.yaml").write_text(yaml.safe_dump(recipe))


def run_storms(folder, **kills):
    """Run storms, by name the number of kills, and return them; `eval` needs the model of `train`."""
    prepare(folder)
    return [STORMS[name](folder, number).run() for name, number in kills.items()]


def main():
    parser = argparse.ArgumentParser(description="Kill train, compare and eval, and look at what is left.")
    for name, number in (("train", 100), ("compare", 20), ("eval", 20), ("ranks", 30), ("term", 20)):
        parser.add_argument(f"--{name}", type=int, default=number, help="number of kills")
    parser.add_argument("--folder", help="where the runs are, such as a folder in memory")
    kills = vars(parser.parse_args())
    os.environ["OMP_NUM_THREADS"] = "1"
    faults = 0
    if parent := kills.pop("folder"):
        Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        prepare(Path(folder))
        for name, number in kills.items():
            if not number:
                continue
            storm = STORMS[name](Path(folder), number).run()
            counts = ", ".join(f"{count} {what}" for what, count in storm.counts.items())
            print(f"{name}: {counts}; slowest child {storm.slowest:.1f} s; {len(storm.faults)} faults", flush=True)
            print(*(f"  {fault}\n" for fault in storm.faults), sep="", end="", flush=True)
            faults += len(storm.faults)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
