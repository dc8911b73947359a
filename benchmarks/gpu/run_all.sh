#!/usr/bin/env bash
# Everything that needs a GPU, in parts: goes on after a command that fails. A part prints its table of
# results last; the end of the output sums up, and OUT holds the rest.
#
#   benchmarks/gpu/run_all.sh [--only PART,PART] [--budget SECONDS] [--full] [--out FOLDER]
#
# Parts in which times count:
#   kernels    the plan on a device, the plugin's kernels
#   record     what recording costs a step, against torch's profiler
#   vanilla    every rank through NCCL on one GPU against pruned communication and holds
#   costs      where the host's time goes
#   overhead   a rank of a job emulated, beside the same program as a job of one rank
#   emulate    slices, plan and sandbox of GPTs, end to end
#   moves      context switches: out of the GPU and back
# Others:
#   plugin     the plugin's tests, compute-sanitizer beside them
#   tests      all other tests that need a GPU, but those of runs (TESTS: paths in their place)
#   runs       tests of jobs emulated and run, beside true ones
#   memory     a mixture of experts: peaks in the sandbox and truly; out of memory
#   kept       what recording does to memory, action by action
#   collect    many ranks on one GPU: same numbers, 8 and 32 ranks
#   spin       tests of pieces at another pace
# With all GPUs:
#   peers      rings over peer memory, and tests that need two GPUs
#
# Without --only: all of them; with --budget: all but overhead, emulate, moves and peers. Parts in which times
# count run one after another; of the others some run at once, with two GPUs or more on the second,
# beside the first ones, which then have half of the cores. Limits are meant for slow machines: CPUs
# of one kind of machine differ by two. PYTHON is the interpreter (python3); it needs torch with CUDA,
# cuda-python, pytest, and what prismreplay needs. --full gives every part five times as long, and
# measures more. --budget ends everything in so many seconds; OUT then has two files, summary.txt and
# results.tar with all logs and raw numbers, both as far as parts have ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

timed=kernels,record,vanilla,costs,overhead,emulate,moves
others=plugin,tests,runs,memory,kept,collect,spin
out="${OUT:-gpu-results}" full=() only= budget=
while (($#)); do
    case "$1" in
        --full) full=(--full) ;;
        --out) out="$2"; shift ;;
        --only) only="$2"; shift ;;
        --budget) budget="$2"; shift ;;
        *) sed -n '2,32p' "${BASH_SOURCE[0]}"; exit 2 ;;
    esac
    shift
done
if [[ -z "$only" ]]; then
    only="$timed,$others,peers"
    [[ -n "$budget" ]] && only="kernels,record,vanilla,costs,$others"
fi
python="${PYTHON:-python3}"
mkdir -p "$out"
out="$(cd "$out" && pwd)" raw="$out"
[[ -n "$budget" ]] && raw="$(mktemp -d)"
export python PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
scale=1
((${#full[@]})) && scale=5
until=$((EPOCHSECONDS + ${budget:-1000000}))
gpus="$(nvidia-smi -L 2>/dev/null | grep -c UUID)"
if [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
    IFS=, read -ra shown <<<"$CUDA_VISIBLE_DEVICES"
    gpus=${#shown[@]}
else
    mapfile -t shown < <(seq 0 $((gpus - 1)))
fi
cores="$(nproc)"
lane= # set in parts that run beside others: they do not write to the terminal
: >"$raw/states"

has() { [[ ",$only," == *",$1,"* ]]; }

# note NAME STATE: how a command ended; with --budget, put what there is where it survives.
note() {
    (
        flock 9
        printf '%-13s %s\n' "$1" "$2" >>"$raw/states"
        [[ -n "$lane" ]] && echo "--- $1: $2"
        [[ "$raw" == "$out" ]] && exit
        tar -C "$raw" -cf "$out/.results.tar" --exclude=.lock . 2>/dev/null
        mv "$out/.results.tar" "$out/results.tar"
        summary >"$out/summary.txt"
    ) 9>"$raw/.lock"
}

# within SECONDS: so many (more with --full), or fewer if the end is near.
within() {
    local seconds=$(($1 * scale)) left=$((until - EPOCHSECONDS))
    echo "$((left < seconds ? left : seconds))"
}

# run NAME SECONDS COMMAND...: runs it, shows it, keeps its output and how it ended.
run() {
    local name="$1" limit begun=$EPOCHSECONDS state
    limit="$(within "$2")"
    shift 2
    if ((limit < 10)); then
        note "$name" "not run: no time is left"
        return
    fi
    if [[ -n "$lane" ]]; then
        # What bash puts beside itself ignores the signal that has parts tidy up.
        env --default-signal=INT timeout --signal=INT --kill-after=8 "$limit" "$@" \
            >"$raw/$name.log" 2>&1
        state=$?
    else
        echo "=== $name (at most $limit s): $*"
        timeout --signal=INT --kill-after=8 "$limit" "$@" 2>&1 | tee "$raw/$name.log"
        state=${PIPESTATUS[0]}
    fi
    note "$name" "exit $state after $((EPOCHSECONDS - begun)) s"
}

# measure NAME SECONDS SCRIPT...: a benchmark that bounds itself by `--budget`, if it is last.
measure() {
    local name="$1" limit="$2" script="$3" inner
    shift 3
    if [[ ! -f "benchmarks/gpu/$script" ]]; then
        note "$name" "not run: there is no $script"
        return
    fi
    if [[ "${*: -1}" == --budget ]]; then
        inner=$(($(within "$limit") - 8))
        set -- "$@" "$((inner > 0 ? inner : 0))"
    fi
    run "$name" "$limit" "$python" "benchmarks/gpu/$script" "$@"
}

pytests() {
    local name="$1" limit="$2"
    shift 2
    run "$name" "$limit" "$python" -m pytest -m gpu -q -W default -p no:cacheprovider \
        --maxfail 12 --tb=short --durations=8 -o faulthandler_timeout=90 "$@"
}

# sanitize TOOL: one of compute-sanitizer's, over a little of every kernel.
sanitize() {
    local more=()
    # cuda-python asks the driver for functions that it may lack; the answer is no error.
    [[ "$1" == memcheck ]] && more=(--report-api-errors no)
    # Each tensor memory of its own: what lies beyond one is then beyond bounds.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 run "$1" 60 compute-sanitizer --tool "$1" "${more[@]}" \
        --error-exitcode 9 --print-limit 20 "$python" benchmarks/gpu/sanitize.py
}

# Files with tests that need a GPU: others need not even be imported.
files_of() { grep -rlE 'mark\.(multi_)?gpu' "$@" --include='test_*.py' | sort; }

part_tests() {
    local files
    files="${TESTS:-$(files_of tests | grep -vE '^tests/prismreplay/(plugin|run)/')}"
    # shellcheck disable=SC2086  several paths
    pytests tests 280 $files
}
part_runs() {
    local files
    files="${TESTS:-$(files_of tests/prismreplay/run | grep -v test_spinning)}"
    # shellcheck disable=SC2086  several paths
    pytests runs 330 $files
}
part_spin() { pytests spin 200 tests/prismreplay/run/test_spinning_on_gpu.py; }
part_plugin() {
    # The sanitizer beside the tests, whose times do not matter.
    local tool tools=() was="$lane"
    lane=beside
    for tool in memcheck racecheck synccheck; do
        if command -v compute-sanitizer >/dev/null; then
            sanitize "$tool" &
            tools+=($!)
        else
            note "$tool" "not run: no compute-sanitizer"
        fi
    done
    lane="$was"
    pytests plugin-tests 200 tests/prismreplay/plugin
    ((${#tools[@]})) && wait "${tools[@]}"
}
part_kernels() {
    measure advance 40 advance.py --out "$raw"
    measure kernels 40 kernels.py --out "$raw" "${full[@]}"
}
part_record() {
    measure record 200 record_overhead_cuda.py --out "$raw/record_overhead_cuda.json" --budget
}
part_vanilla() { measure vanilla 80 vanilla.py --out "$raw" --budget; }
part_costs() { measure host-cost 65 host_cost.py --out "$raw/host_cost.json"; }
part_overhead() { measure overhead 200 overhead.py --out "$raw" --budget; }
part_emulate() { measure emulate 150 emulate_cuda.py --out "$raw" --budget; }
part_moves() {
    measure moves 60 collect_cuda.py --out "$raw/moves.json" "${full[@]}" --parts moves --budget
}
part_memory() { measure memory 110 moe_memory_cuda.py --out "$raw" --budget; }
part_kept() { measure kept 100 kept_tensors.py; }
part_collect() {
    collect_few
    collect_many
}
collect_few() {
    measure collect-8 200 collect_cuda.py --out "$raw/collect-8.json" "${full[@]}" \
        --parts same 8 --budget
}
collect_many() {
    measure collect-32 180 collect_cuda.py --out "$raw/collect-32.json" "${full[@]}" \
        --parts 32 --budget
}
part_peers() {
    if ((gpus > 1)); then
        run peers 60 "$python" -m torch.distributed.run --nproc-per-node "$gpus" \
            benchmarks/gpu/ring_peers.py --out "$raw"
        local files
        files="$(grep -rl 'mark\.multi_gpu' tests --include='test_*.py')"
        # shellcheck disable=SC2086  several paths
        pytests multi-gpu 80 -m multi_gpu $files
    else
        note peers "not run: $gpus GPU"
    fi
}

# enter LANE: this subshell has a GPU and a half of the cores of its own.
enter() {
    lane="$1"
    export CUDA_VISIBLE_DEVICES="${shown[$1]}"
    local half=$((cores / 2))
    if ((half >= 4)); then
        taskset -pc "$(($1 * half))-$(($1 * half + half - 1))" "$BASHPID" >/dev/null 2>&1
    fi
}

# untimed: they take little of the GPU, and little of what they wait for is the GPU. (What collects
# many ranks is alone: of what others have on the GPU it takes its share for its own. So is what paces.)
untimed() {
    lane=beside
    local name
    for name in plugin tests runs memory kept; do
        has "$name" && "part_$name" &
    done
    wait
    has collect && part_collect
    has spin && part_spin
}

in_turn() {
    local name
    for name in ${1//,/ }; do
        has "$name" && "part_$name"
    done
}

summary() {
    local log
    echo "=== summary: $gpus GPUs, $cores cores"
    cat "$raw/states"
    for log in "$raw"/{tests,plugin-tests,runs,spin,multi-gpu}.log; do
        [[ -f "$log" ]] || continue
        grep -hE "^(FAILED|ERROR) |passed|failed" "$log" | tail -15 |
            sed "s/^/$(basename "$log" .log): /"
    done
    for log in "$raw"/{memcheck,racecheck,synccheck}.log; do
        [[ -f "$log" ]] && echo "$(basename "$log"): $(grep -hE "SUMMARY|Race reported" "$log" | head -5)"
    done
    [[ "$raw" == "$out" ]] && return
    for log in "$raw"/*.log; do
        case "$(basename "$log" .log)" in
            machine | compile | memcheck | racecheck | synccheck) ;;
            *) printf -- '\n--- the end of %s\n' "$(basename "$log")"; tail -n 45 "$log" | cut -c 1-400 ;;
        esac
    done
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
if has plugin || has kernels; then
    run compile 25 "$python" benchmarks/gpu/compile_all.py
fi
if ((gpus > 1)); then
    (
        enter 1
        untimed
    ) &
    (
        enter 0
        in_turn "$timed"
    ) &
    wait
else
    in_turn "$timed"
    (untimed)
fi
has peers && part_peers

summary
[[ "$raw" != "$out" ]] && echo "all logs and numbers: $out/results.tar"
grep -qvE ' (exit 0 after|not run: )' "$raw/states" && exit 1
exit 0
