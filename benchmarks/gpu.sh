#!/bin/sh
# Build, check and time everything that needs a GPU, in at most 8 minutes on a fresh machine.
#   benchmarks/gpu.sh FOLDER     writes tests.xml, attention.json, models.json, memory.json, speedrun.log and log to FOLDER
# Run it from the root of a checkout, with the package and its extras "lab", "test" and "gpu" installed or src on PYTHONPATH.
# PYTHON names the interpreter. Each part has a limit of its own, so that a part which hangs does not cost the others.
out=${1:?usage: benchmarks/gpu.sh FOLDER}
python=${PYTHON:-python3}
mkdir -p "$out"
exec >"$out/log" 2>&1
nvidia-smi || exit

part() { # SECONDS COMMAND...
    echo "== $(date +%T) $*"
    timeout --signal=INT --kill-after=10 "$@"
    echo "== ended with $?"
}
command="$python -m difftransformer_lab"
part 60 $command doctor --device cuda
part 150 "$python" -m pytest -n 12 --dist worksteal -p no:benchmark -m gpu --junitxml "$out/tests.xml" ${TESTS:-tests}
part 90 $command bench attention --device cuda --lengths 2048,8192 --backends triton,cudnn --repeats 20 --seconds 1 \
    --modes forward,forward+backward --out "$out"
part 120 $command bench models --device cuda --works 'training step' --repeats 20 --seconds 1 --out "$out"
part 30 "$python" benchmarks/memory.py --device cuda --out "$out"
part 120 "$python" examples/speedrun.py --width 384 --layers 6 --batch 32768 \
    --context 512 --seeds 2 --minutes 0.1 --timed 3 --out "$out/speedrun.log"
echo "== $(date +%T) done"
