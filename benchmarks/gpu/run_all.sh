#!/usr/bin/env bash
# Everything that needs a GPU, in parts of at most 150 s each: goes on after a command that fails;
# the end of the output sums up, and OUT holds the rest. A part prints its table of results last.
#
#   benchmarks/gpu/run_all.sh [--only PART,PART] [--full] [--out FOLDER]
#
#   tests      all tests that need a GPU, but those of plugin and runs (TESTS: paths in their place)
#   plugin     the plugin's tests, compute-sanitizer beside them, its kernels measured
#   runs       tests of jobs emulated and run, beside true ones
#   record     what recording costs a step, against torch's profiler
#   collect    many ranks on one GPU: same numbers, moves, context switches
#   emulate    slices, plan and sandbox of GPTs, end to end
#   vanilla    every rank through NCCL on one GPU against pruned communication and holds
#   memory     a mixture of experts: peaks in the sandbox and truly; out of memory
#   costs      where the host's time goes; what recording does to memory, action by action
#   peers      rings over peer memory, with two GPUs or more
#
# Without --only: all of them. PYTHON is the interpreter (python3); it needs torch with CUDA,
# cuda-python, pytest, and what prismreplay needs. --full gives every part five times as long, and
# measures more.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out="${OUT:-gpu-results}" full=() only=tests,plugin,runs,record,collect,emulate,vanilla,memory,costs,peers
while (($#)); do
    case "$1" in
        --full) full=(--full) ;;
        --out) out="$2"; shift ;;
        --only) only="$2"; shift ;;
        *) sed -n '2,20p' "${BASH_SOURCE[0]}"; exit 2 ;;
    esac
    shift
done
python="${PYTHON:-python3}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
export python PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
scale=1
((${#full[@]})) && scale=5
gpus="$(nvidia-smi -L 2>/dev/null | grep -c UUID)"

names=() states=()
# run NAME SECONDS COMMAND...: runs it, shows it, keeps its output and how it ended.
run() {
    local name="$1" limit="$2" begun=$SECONDS state
    shift 2
    echo "=== $name (at most $((limit * scale)) s): $*"
    timeout --signal=INT --kill-after=10 "$((limit * scale))" "$@" 2>&1 | tee "$out/$name.log"
    state=${PIPESTATUS[0]}
    names+=("$name")
    states+=("exit $state after $((SECONDS - begun)) s")
}

# measure NAME SECONDS SCRIPT...: a benchmark that bounds itself.
measure() {
    local name="$1" limit="$2" script="$3"
    shift 3
    if [[ ! -f "benchmarks/gpu/$script" ]]; then
        names+=("$name")
        states+=("not run: there is no $script")
        return
    fi
    run "$name" "$limit" "$python" "benchmarks/gpu/$script" "$@"
}

budget() { echo "$(($1 * scale))"; }

pytests() {
    local name="$1" limit="$2"
    shift 2
    run "$name" "$limit" "$python" -m pytest -m gpu -q -W default -p no:cacheprovider \
        --maxfail 12 --tb=short --durations=8 -o faulthandler_timeout=60 "$@"
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

# Files with tests that need a GPU: others need not even be imported.
files_of() { grep -rlE 'mark\.(multi_)?gpu' "$@" --include='test_*.py' | sort; }

part_tests() {
    local files
    files="${TESTS:-$(files_of tests | grep -vE '^tests/prismreplay/(plugin|run)/')}"
    # shellcheck disable=SC2086  several paths
    pytests tests 148 $files
}
part_runs() {
    local files
    files="${TESTS:-$(files_of tests/prismreplay/run)}"
    # shellcheck disable=SC2086  several paths
    pytests runs 148 $files
}

part_plugin() {
    run compile 25 "$python" benchmarks/gpu/compile_all.py
    # The sanitizer beside the tests, whose times do not matter; the benchmarks are alone.
    local sanitizer=
    if command -v compute-sanitizer >/dev/null; then
        (
            begun=$SECONDS
            sanitize >"$out/sanitizer.log" 2>&1
            echo "exit $? after $((SECONDS - begun)) s" >"$out/.sanitizer"
        ) &
        sanitizer=$!
    fi
    pytests plugin-tests 45 tests/prismreplay/plugin
    names+=(sanitizer)
    if [[ -n "$sanitizer" ]]; then
        wait "$sanitizer"
        states+=("$(cat "$out/.sanitizer")")
        rm -f "$out/.sanitizer"
        echo "=== sanitizer, beside the tests"
        head -c 4000 "$out/sanitizer.log"
    else
        states+=("not run: no compute-sanitizer")
    fi
    measure advance 35 advance.py --out "$out"
    measure kernels 35 kernels.py --out "$out" "${full[@]}"
}

part_record() {
    measure record 148 record_overhead_cuda.py --budget "$(budget 140)" \
        --out "$out/record_overhead_cuda.json"
}
part_collect() {
    measure collect 148 collect_cuda.py --out "$out" --budget "$(budget 140)" "${full[@]}"
}
part_emulate() { measure emulate 150 emulate_cuda.py --out "$out" --budget "$(budget 140)"; }
part_vanilla() { measure vanilla 148 vanilla.py --out "$out" --budget "$(budget 140)"; }
part_memory() { measure memory 100 moe_memory_cuda.py --out "$out" --budget "$(budget 90)"; }
part_costs() {
    measure host-cost 70 host_cost.py --out "$out/host_cost.json"
    measure kept-tensors 60 kept_tensors.py
}
part_peers() {
    if ((gpus > 1)); then
        run peers 60 "$python" -m torch.distributed.run --nproc-per-node "$gpus" \
            benchmarks/gpu/ring_peers.py --out "$out"
    else
        names+=(peers)
        states+=("not run: $gpus GPU")
    fi
}

for name in ${only//,/ }; do
    if ! declare -F "part_$name" >/dev/null; then
        echo "no part is called $name" >&2
        exit 2
    fi
done
run machine 30 bash -c 'nvidia-smi; "$python" -c "
import sys, torch, cuda.core, cuda.bindings
from cuda.bindings import nvrtc
print(sys.version, torch.__version__, torch.version.cuda, cuda.core.__version__,
      cuda.bindings.__version__, nvrtc.nvrtcVersion())"'
for name in ${only//,/ }; do "part_$name"; done

echo "=== summary"
bad=0
for number in "${!names[@]}"; do
    printf '%-12s %s\n' "${names[number]}" "${states[number]}"
    [[ "${states[number]}" == "exit 0 "* || "${states[number]}" == "not run: "* ]] || bad=1
done
for log in tests plugin-tests runs; do
    [[ " ${names[*]} " == *" $log "* ]] &&
        grep -hE "^(FAILED|ERROR) |passed|failed" "$out/$log.log" | tail -15
done
[[ " ${names[*]} " == *" sanitizer "* ]] &&
    grep -hE "(SUMMARY|--- |Error: |Race reported)" "$out/sanitizer.log" 2>/dev/null | head -20
exit "$bad"
