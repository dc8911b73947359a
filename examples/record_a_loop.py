"""Record a loop of your own: no PyTorch, no profiler, less than a microsecond per span.

A loader thread reads batches ahead while the loop computes.  Each notes what it did in one line;
the trace then has two streams, and the loop's spans depend on the batches that they needed.
"""

import queue
import tempfile
import threading
import time
from pathlib import Path

import prismcalib
import prismtrace

STEPS = 5


def load_ahead(writer: prismtrace.SpanWriter, batches: queue.Queue[int]) -> None:
    """Hand over the index of the span that read each batch; it runs ahead, and is in no step."""
    for _ in range(STEPS):
        start_ns = time.perf_counter_ns()
        time.sleep(0.002)
        end_ns = time.perf_counter_ns()
        batches.put(writer.span("load", start_ns, end_ns, stream="loader"))


def train(writer: prismtrace.SpanWriter) -> None:
    """Compute on one batch after the other."""
    batches: queue.Queue[int] = queue.Queue(maxsize=1)
    thread = threading.Thread(target=load_ahead, args=(writer, batches))
    thread.start()
    for step in range(STEPS):
        loaded = batches.get()
        start_ns = time.perf_counter_ns()
        sum(range(100_000))
        end_ns = time.perf_counter_ns()
        writer.span("compute", start_ns, end_ns, step=step, phase="forward", after=[loaded])
    thread.join()


with tempfile.TemporaryDirectory() as folder:
    with prismtrace.SpanWriter(Path(folder) / "rank-0.spool") as writer:
        train(writer)
    # One spool per rank; of several ranks, and of a run that was killed, it is the same call.
    report = prismtrace.assemble(folder, Path(folder) / "loop.parquet")
    print(f"{report.nodes} spans of {len(report.steps)} steps on {len(report.ranks)} rank")

    trace = prismtrace.open(report.output)
    print(f"streams: {', '.join(trace.header.streams.values())}")
    print(f"rules broken: {len(prismtrace.validate(trace))}")
    merged = prismcalib.merge(trace).report
    print(f"the graph explains the time it took: {merged.propagated_ns == merged.recorded_ns}")
