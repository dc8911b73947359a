#!/usr/bin/env bash
# True jobs on all GPUs of this host, 2 or more, beside emulated ones (level D of docs/fidelity.md).
#
#   benchmarks/gpu/fidelity_multi.sh [--out FOLDER] [--work FOLDER] [--budget SECONDS] ...
#
# Ends before its budget (560 s) is over and goes on where it stopped when it is called again with
# the same --work; exit code 3: there is more to do, 1: parts have failed. --help has all options.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# NVLink multicast stays off, in truth and emulation.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" benchmarks/gpu/fidelity_multi.py "$@"
