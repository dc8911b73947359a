#!/usr/bin/env bash
# A job of 8 ranks on a machine that need not have 8 devices: emulate it, then run it truly and
# compare. Each command is printed before it runs, so that it can be typed again.
#
#   examples/demo.sh [FOLDER]      results go to FOLDER (default demo-out)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out="${1:-demo-out}"
ranks=8
job=(examples/train_gpt.py --tp 2 --pp 2 --steps 5) # and data parallelism of 2
mkdir -p "$out"

bold='' plain=''
if [[ -t 1 ]]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
explain() { printf '  %s\n' "$@"; }
run() {
    printf '\n$'
    printf ' %q' "$@"
    printf '\n\n'
    "$@"
}

say "1. Emulate: $ranks ranks of a small GPT, tensor, pipeline and data parallel, 2 of them for real"
explain "The program is plain PyTorch and knows nothing of it. Its ranks take turns, to tell what they" \
    "communicate; then each is measured once; in the end ranks 0 and 1 train in a virtual world."
rm -rf "$out/emulated"
run prismreplay emulate --world-size $ranks --devices 2 --sandbox 0-1 -o "$out/emulation" \
    -- "${job[@]}" --results "$out/emulated"

say "2. The truth beside it: the same program as $ranks processes over gloo"
rm -rf "$out/true"
run prismreplay record --nproc-per-node $ranks -o "$out/true.parquet" \
    -- "${job[@]}" --results "$out/true"

say "3. Compare"
run python examples/compare_with_truth.py "$out"

say "4. For your eyes: what the emulated job waits for"
run prismcalib report "$out/emulation/calibrated.parquet" -o "$out/report.html"
explain "Open $out/report.html in a browser. For the timeline of all ranks in https://ui.perfetto.dev:" \
    "prismtrace export $out/emulation/calibrated.parquet --to perfetto -o job.json.gz"

say "Done. Everything is in $out; docs/guides/emulate.md goes on from here."
explain "What profiler traces of a job of your own tell: examples/analyse_traces.sh"
activate="$(dirname "$(command -v prismreplay)")/activate"
if [[ -z "${VIRTUAL_ENV:-}" && -f "$activate" ]]; then
    explain "To type the commands, put them on your path first: source $activate"
fi
