"""How long a communication takes, from what others took: latency and bandwidth of a link.

    time = alpha * steps + bytes * volume / bandwidth

Steps and volume follow from the kind and the number of ranks; alpha and bandwidth are fitted,
for links within a host and between hosts apart, to times that were measured.  NCCL goes around a
ring (steps grow with the ranks) or through a tree (with their logarithm); the form that explains
the times better is taken.

Errors count relative to the time, so that small and large operations weigh the same.  What the
fit leaves unexplained is the error of every answer.  Where times do not grow with the bytes, they
tell no bandwidth: then nothing is said of operations larger than those measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prismcalib.comm_logs import bus_factor
from prismcalib.comm_table import Estimate, Operation
from prismtrace.schema import P2P_KINDS, Kind

__all__ = ["CommModel", "LinkFit", "fit_comm_model"]

Link = Literal["within a host", "between hosts"]
"""Which connections an operation is held up by."""
Form = Literal["ring", "tree"]
"""How its steps grow with the number of ranks: in proportion, or as the logarithm."""
_FloatArray = NDArray[np.float64]

_LEAST_SAMPLES = 3
_ROUNDS = 60
_LEAST_MOVING = 0.05  # share of the largest operation's time, below which bytes tell nothing
_UNKNOWN = frozenset({Kind.OTHER_COMM, Kind.BARRIER})


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """Latency and bandwidth of one class of links.

    Attributes:
        link: within a host, or between hosts.
        kind: kind of communication it was fitted to; None: all kinds together.
        form: ring or tree.
        alpha_ns: time of a step that moves nothing.
        gb_per_s: bytes over the slowest link per ns; None: unknown, the times do not grow with
            the bytes.
        residual: root mean square of the relative errors (of logs of times).
        error: largest such error (of 40 samples or more: that of 19 in 20).
        samples: operations it was fitted to.
        bytes, ranks: least and most that were measured.
    """

    link: Link
    kind: str | None
    form: Form
    alpha_ns: float
    gb_per_s: float | None
    residual: float
    error: float
    samples: int
    bytes: tuple[int, int]
    ranks: tuple[int, int]

    def estimate(self, operation: Operation) -> Estimate | None:
        """Time of an operation; beyond what was measured, the error counts twice.

        None if it is larger than those measured and the bandwidth is unknown.
        """
        steps, volume = _work(operation.kind, operation.ranks, self.form)
        time = self.alpha_ns * steps
        if self.gb_per_s is not None:
            time += operation.bytes * volume / self.gb_per_s
        elif operation.bytes > self.bytes[1]:
            return None
        inside = (
            self.bytes[0] <= operation.bytes <= self.bytes[1]
            and self.ranks[0] <= operation.ranks <= self.ranks[1]
        )
        error = self.error * (1 if inside else 2)
        return Estimate(max(1, round(time)), math.exp(-error), math.exp(error), not inside)

    def as_dict(self) -> dict[str, Any]:
        """The fit as JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class CommModel:
    """Fits by class of links; one for each kind with enough samples, and one for all kinds."""

    fits: tuple[LinkFit, ...]

    def estimate(self, operation: Operation) -> Estimate | None:
        """Time of an operation; None if no link of its class was measured, or too little of it."""
        if operation.bytes <= 0 or operation.kind in _UNKNOWN or operation.ranks < 2:
            return None
        link = _link(operation.hosts)
        kind = _plain(operation.kind)
        fits = {fit.kind: fit for fit in self.fits if fit.link == link}
        for fit in (fits.get(kind), fits.get(None)):
            if fit is not None and (found := fit.estimate(operation)) is not None:
                return found
        return None


def fit_comm_model(measured: Sequence[tuple[Operation, float]]) -> CommModel:
    """Fit to operations and their times in ns, each of which counts the same.

    A class of links needs three operations of two sizes, else it gets no fit.
    """
    parts: dict[tuple[Link, str | None], list[tuple[Operation, float]]] = {}
    for operation, time in measured:
        if operation.bytes > 0 and time > 0 and operation.ranks > 1:
            kind = _plain(operation.kind)
            if kind not in _UNKNOWN:
                link = _link(operation.hosts)
                parts.setdefault((link, kind), []).append((operation, time))
                parts.setdefault((link, None), []).append((operation, time))
    fits = [
        _best(link, kind, part)
        for (link, kind), part in sorted(
            parts.items(), key=lambda item: (item[0][0], item[0][1] or "")
        )
        if len(part) >= _LEAST_SAMPLES and len({operation.bytes for operation, _ in part}) > 1
    ]
    return CommModel(tuple(fits))


def _best(link: Link, kind: str | None, part: list[tuple[Operation, float]]) -> LinkFit:
    forms: tuple[Form, ...] = ("ring", "tree")
    fits = [_fit(link, kind, form, part) for form in forms]
    return min(fits, key=lambda fit: (fit.residual, fit.form))


def _fit(link: Link, kind: str | None, form: Form, part: list[tuple[Operation, float]]) -> LinkFit:
    work = np.array([_work(op.kind, op.ranks, form) for op, _ in part])
    steps, moved = work[:, 0], work[:, 1] * np.array([op.bytes for op, _ in part], np.float64)
    time = np.array([time for _, time in part], np.float64)
    beta: float | None
    alpha, beta, errors = _least_squares(steps, moved, np.log(time))
    largest = int(moved.argmax())
    by_bytes = beta * moved[largest]
    if by_bytes < _LEAST_MOVING * (alpha * steps[largest] + by_bytes):
        beta, constant = None, np.log(time / steps)
        alpha, errors = float(np.exp(constant.mean())), constant.mean() - constant
    size = np.sort(np.abs(errors))
    worst = size[-1] if len(size) < 40 else size[math.ceil(0.95 * len(size)) - 1]
    # Two numbers were fitted, so the errors seen are smaller than those to come.
    freedom = math.sqrt(len(size) / (len(size) - 2))
    sizes, ranks = [op.bytes for op, _ in part], [op.ranks for op, _ in part]
    return LinkFit(
        link=link,
        kind=kind,
        form=form,
        alpha_ns=alpha,
        gb_per_s=None if beta is None else 1 / beta,
        residual=float(np.sqrt(np.mean(errors**2))),
        error=float(worst) * freedom,
        samples=len(part),
        bytes=(min(sizes), max(sizes)),
        ranks=(min(ranks), max(ranks)),
    )


def _least_squares(
    steps: _FloatArray, moved: _FloatArray, log_time: _FloatArray
) -> tuple[float, float, _FloatArray]:
    """Alpha and beta > 0 with the least squares of log(alpha steps + beta moved) - log_time.

    Levenberg-Marquardt over their logs, which keeps both positive.
    """
    time = np.exp(log_time)
    guess = np.log([max((time / steps).min(), 1e-3), max((time / moved).min(), 1e-12)])
    damping = 1e-3
    errors = _errors(guess, steps, moved, log_time)
    for _ in range(_ROUNDS):
        share = np.exp(guess[0]) * steps
        share = share / (share + np.exp(guess[1]) * moved)
        slope = np.stack([share, 1 - share], axis=1)
        normal, right = slope.T @ slope, slope.T @ errors
        step = np.linalg.solve(normal + damping * np.eye(2), -right)
        tried = guess + np.clip(step, -2, 2)
        left = _errors(tried, steps, moved, log_time)
        if (left**2).sum() < (errors**2).sum():
            guess, errors, damping = tried, left, damping / 5
        else:
            damping *= 5
    return float(np.exp(guess[0])), float(np.exp(guess[1])), errors


def _errors(
    guess: _FloatArray, steps: _FloatArray, moved: _FloatArray, log_time: _FloatArray
) -> _FloatArray:
    result: _FloatArray = np.log(np.exp(guess[0]) * steps + np.exp(guess[1]) * moved) - log_time
    return result


def _work(kind: str, ranks: int, form: Form) -> tuple[float, float]:
    """Steps one after the other, and bytes over the slowest link for a byte of payload."""
    if kind in P2P_KINDS:
        return 1.0, 1.0
    steps = ranks - 1 if form == "ring" else math.ceil(math.log2(ranks))
    return (2.0 if kind == Kind.ALL_REDUCE else 1.0) * steps, bus_factor(Kind(kind), ranks)


def _plain(kind: str) -> str:
    return Kind.SEND.value if kind == Kind.RECV else kind


def _link(hosts: int) -> Link:
    return "within a host" if hosts < 2 else "between hosts"
