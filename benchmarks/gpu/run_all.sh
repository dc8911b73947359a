#!/usr/bin/env bash
# Everything that needs a GPU: tests, compute-sanitizer, benchmarks. Goes on after a part that
# fails; each part has a time limit; the end of the output sums up, and OUT holds the rest.
#
#   benchmarks/gpu/run_all.sh [--full] [--out FOLDER]
#
# PYTHON is the interpreter (python3). By default it ends within 130 s, and tests only the plugin;
# --full runs all GPU tests, longer benchmarks, those of record and collect (which need what
# prismreplay needs: polars, pydantic and so on), and takes up to half an hour.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out="${OUT:-gpu-results}" full=()
while (($#)); do
    case "$1" in
        --full) full=(--full) ;;
        --out) out="$2"; shift ;;
        *) sed -n '2,10p' "${BASH_SOURCE[0]}"; exit 2 ;;
    esac
    shift
done
python="${PYTHON:-python3}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
scale=1
((${#full[@]})) && scale=5

names=() states=()
# part NAME SECONDS COMMAND...: runs it, shows it, keeps its output and how it ended.
part() {
    local name="$1" limit="$2" begun=$SECONDS state
    shift 2
    echo "=== $name (at most $((limit * scale)) s): $*"
    timeout --signal=INT --kill-after=5 "$((limit * scale))" "$@" 2>&1 | tee "$out/$name.log"
    state=${PIPESTATUS[0]}
    names+=("$name")
    states+=("exit $state after $((SECONDS - begun)) s")
}

sanitize() {
    # Each tensor memory of its own: what lies beyond one is then beyond bounds.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    local tool pids=() state=0
    for tool in memcheck racecheck synccheck; do
        # cuda-python asks the driver for functions that it may lack; the answer is no error.
        more=()
        [ "$tool" = memcheck ] && more=(--report-api-errors no)
        timeout --signal=INT --kill-after=5 "$((40 * scale))" \
            compute-sanitizer --tool "$tool" "${more[@]}" --error-exitcode 9 --print-limit 20 \
            "$python" benchmarks/gpu/sanitize.py >"$out/.$tool" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || state=$?; done
    for tool in memcheck racecheck synccheck; do
        echo "--- $tool"
        head -c 20000 "$out/.$tool"
        tail -n 2 "$out/.$tool"
        rm -f "$out/.$tool"
    done
    return "$state"
}
export python

part machine 30 bash -c 'nvidia-smi; "$python" -c "
import sys, torch, cuda.core, cuda.bindings
from cuda.bindings import nvrtc
print(sys.version, torch.__version__, torch.version.cuda, cuda.core.__version__,
      cuda.bindings.__version__, nvrtc.nvrtcVersion())"'
part compile 25 "$python" benchmarks/gpu/compile_all.py

# Beside the tests, whose times do not matter; the benchmarks have the machine to themselves.
sanitizer=
if command -v compute-sanitizer >/dev/null; then
    (
        begun=$SECONDS
        sanitize >"$out/sanitizer.log" 2>&1
        echo "exit $? after $((SECONDS - begun)) s" >"$out/.sanitizer"
    ) &
    sanitizer=$!
fi
tests=(tests/prismreplay/plugin)
((${#full[@]})) && tests=()
part tests 40 "$python" -m pytest -m gpu -q -W default -p no:cacheprovider --maxfail 12 \
    --tb=short --durations=5 -o faulthandler_timeout=30 "${tests[@]}"
names+=(sanitizer)
if [[ -n "$sanitizer" ]]; then
    wait "$sanitizer"
    states+=("$(cat "$out/.sanitizer")")
    rm -f "$out/.sanitizer"
    echo "=== sanitizer, beside the tests"
    head -c 6000 "$out/sanitizer.log"
else
    states+=("not run: no compute-sanitizer")
fi
part benchmarks 35 "$python" benchmarks/gpu/kernels.py --out "$out" "${full[@]}"
if ((${#full[@]})); then
    part record 90 "$python" benchmarks/gpu/record_overhead_cuda.py --repeats 2 --budget 400 \
        --out "$out/record_overhead_cuda.json"
    part collect 90 "$python" benchmarks/gpu/collect_cuda.py --out "$out" --budget 420
fi
gpus="$(nvidia-smi -L 2>/dev/null | grep -c UUID)"
if ((gpus > 1)); then
    part peers 60 "$python" -m torch.distributed.run --nproc-per-node "$gpus" \
        benchmarks/gpu/ring_peers.py --out "$out"
fi

echo "=== summary"
bad=0
for number in "${!names[@]}"; do
    printf '%-12s %s\n' "${names[number]}" "${states[number]}"
    [[ "${states[number]}" == "exit 0 "* ]] || bad=1
done
grep -hE "^(FAILED|ERROR) |passed|failed" "$out/tests.log" | tail -15
grep -hE "(SUMMARY|--- |Error: |Race reported)" "$out/sanitizer.log" 2>/dev/null | head -30
exit "$bad"
