#!/usr/bin/env bash
# Fifteen minutes on a GPU, the most valuable part first. Each step has a time limit of
# its own, and what it found is on disk before the next one begins.
#
#   benchmarks/gpu/fifteen_minutes.sh OUT          on a machine with a GPU
#   benchmarks/gpu/fifteen_minutes.sh OUT --dry    the same steps on a CPU, in minutes
#
# With the same OUT, steps that ended well are not run again. FIFTEEN_SECONDS is the
# time for all steps, 840 by default, so that a minute is left for starting and copying.
set -u
out=${1:?"usage: fifteen_minutes.sh OUT [--dry]"}
dry=${2:-}
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$out/done" "$out/models" && touch "$out/steps.tsv" || exit 1
out=$(cd "$out" && pwd)
python=${PYTHON:-$(command -v .venv/bin/python || command -v python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" XDG_CACHE_HOME="$out/cache"
end=$((SECONDS + ${FIFTEEN_SECONDS:-840}))
failed=0

# step NAME LIMIT COMMAND..: runs it within LIMIT seconds and what is left of all.
step() {
    local name=$1 limit=$2 left=$((end - SECONDS)) status
    shift 2
    [ -e "$out/done/$name" ] && { echo "== $name: done before"; return; }
    [ "$left" -lt 20 ] && { echo "== $name: left out, $left s remain"; return; }
    [ "$left" -lt "$limit" ] && limit=$left
    echo "== $name, at most $limit s: $*"
    local begun=$SECONDS
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    printf '%s\t%s\t%s s\n' "$name" "$status" "$((SECONDS - begun))" >>"$out/steps.tsv"
    if [ "$status" -eq 0 ]; then
        touch "$out/done/$name"
    else
        failed=1
        echo "== $name: exit status $status"
        tail -n 15 "$out/$name.log"
    fi
}

paths() { # paths NAME LIMIT ARGUMENTS..: the proof in full, and each path on and off
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" -m benchmarks.gpu.fast_paths \
        --out "$out" --models "$out/models" --budget-s "$limit" "$@"
}

tiny_paths() { # tiny_paths PAIR BACKEND
    paths "paths-$1-$2" 40 --pair "$1" --backend "$2" --context 128 --batches 1 8 \
        --repeats 3
}

servers() { # servers NAME LIMIT ARGUMENTS..: whole servers
    local name=$1 limit=$2
    shift 2
    mkdir -p "$out/$name"
    step "$name" "$limit" "$python" -m benchmarks.gpu.serve --out "$out" \
        --models "$out/models" --logs "$out/$name" --budget-s "$limit" "$@"
}

exactness() { # exactness LIMIT: exact mode and no drafts, a temperature, a grammar
    step exactness "$1" "$python" -m pytest -x -p no:cacheprovider \
        --junitxml "$out/exactness.xml" tests/gpu/test_server_gpu.py \
        -k "default or adaptive or sampled or head"
}

if [ "$dry" = --dry ]; then
    tiny=(--context 64 --window 8 --batches 1 2 --repeats 3 --replay)
    step machine 60 uname -a
    # On a CPU the backend is our own, and these are one process.
    paths paths-tiny 300 --pair embedded tiny-latent tiny-windows "${tiny[@]}"
    SGLANG_PARSE_TEST_DRY=1 exactness 450
    servers servers 450 --pair embedded --answers --switch-paths \
        --arms target parse-0.9-adaptive hostile \
        --context 64 --output 16 --window 32 --segment 8 --concurrency 1 --repeats 1
else
    large=qwen3-32b-1.7b
    step machine 60 nvidia-smi
    # 1. Which paths are right at all, on each attention backend that serves the model.
    for backend in flashinfer triton fa3; do
        tiny_paths embedded "$backend"
    done
    for backend in flashinfer triton; do tiny_paths tiny-latent "$backend"; done
    for backend in triton fa3; do tiny_paths tiny-windows "$backend"; done
    # 2. The same with the shapes that users run, and what each path gives.
    paths paths-large 240 --pair "$large" --repeats 6
    # 3. Answers of whole servers: exact mode and no drafts equal the target, also with
    #    temperature 0.7 and under a grammar.
    exactness 240
    # 4. Exact mode, a temperature and a grammar with the large shapes, then speed with
    #    good drafts and with hostile ones, and each path on and off under both.
    servers servers 560 --pair "$large" --answers --switch-paths \
        --concurrency 1 8 32 --arms target parse-0.9-adaptive hostile
fi
cat "$out/steps.tsv"
exit "$failed"
