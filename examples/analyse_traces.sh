#!/usr/bin/env bash
# Profiler traces, from training to prediction, on one machine without a GPU: train a small job for
# real, then align, explain and predict it. Each command is printed before it runs, so that it can
# be typed again. The commands must be on the path, as they are after `source .venv/bin/activate`.
#
#   examples/analyse_traces.sh [FOLDER]      results go to FOLDER (default traces-out)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out="${1:-traces-out}"
mkdir -p "$out"
export KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-99}" # the profiler's own chatter

bold='' plain=''
if [[ -t 1 ]]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
explain() { printf '  %s\n' "$@"; }
run() {
    printf '\n$'
    printf ' %q' "$@"
    printf '\n'
    "$@"
}

say "1. Train: 4 ranks, DistributedDataParallel over gloo, profiled by PyTorch"
explain "Rank 2 gets sequences twice as long as the others: remember that for step 4."
rm -rf "$out/traces"
run python examples/train_ddp.py --world-size 4 --trace-dir "$out/traces" --long-rank 2

say "2. Convert: one profiler file per rank becomes one typed trace"
run prismtrace convert "$out"/traces/rank*.json.gz -o "$out/run.parquet"
run prismtrace info "$out/run.parquet"
explain "Every all_reduce of every rank is now matched with its partners on the other ranks."

say "3. Merge: put all ranks on one clock and split every collective into wait and transfer"
run prismcalib merge "$out/run.parquet" -o "$out/aligned.parquet"
explain "With the recorded idle times kept, durations and dependencies give the recorded time again," \
    "to about 1 %: the graph is right. That is a check, not yet a prediction."

say "4. Critical path: what would have to be faster for the step to be shorter"
run prismcalib critical-path "$out/aligned.parquet"
explain "Rank 2 should hold most of the path, for it computes on the long sequences while the others" \
    "wait. On fewer cores than ranks, whom the operating system let wait shows up as well."

say "5. Stragglers: what each rank costs, and the likely cause"
run prismcalib stragglers "$out/aligned.parquet" --limit 4

say "6. For your eyes: a report for any browser, and the timeline for Perfetto"
run prismcalib report "$out/aligned.parquet" -o "$out/report.html"
run prismtrace export "$out/aligned.parquet" --to perfetto -o "$out/aligned.json.gz"
explain "Open $out/aligned.json.gz at https://ui.perfetto.dev; arrows join partners."

say "7. Predict: the step time this graph implies"
run prismcalib predict "$out/aligned.parquet"

say "Done. Everything is in $out; the commands above work on your own traces as well."
