"""Options that several commands of prismreplay have, and what their texts mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Inject",
    "Json",
    "LocalWorldSize",
    "MockRouter",
    "Program",
    "ShmDir",
    "VirtualTensors",
    "WorldSize",
    "read_ranks",
    "shown_ranks",
    "tensor_sources",
]


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise typer.BadParameter(f"{path} is no folder")
    return path


Program = Annotated[
    list[str],
    typer.Argument(
        metavar="-- SCRIPT.py [ARGUMENTS]...",
        help="The program and its own arguments, after two dashes. -m NAME runs a module.",
    ),
]
WorldSize = Annotated[int, typer.Option(min=1, help="Ranks of the job.")]
LocalWorldSize = Annotated[
    int | None,
    typer.Option(min=1, help="Ranks of one host, as the program sees it. Default: all."),
]
ShmDir = Annotated[
    Path | None,
    typer.Option(
        callback=_folder,
        metavar="DIR",
        help="Folder for tensors that ranks hand over. Default: memory.",
    ),
]
MockRouter = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml", help="Shares of tokens that experts get."),
]
Inject = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WHAT",
        help="Change virtual ranks, as in rank=12,kind=compute,scale=1.4. Repeatable.",
    ),
]
VirtualTensors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULES|FOLDER|builtin:NAME",
        help="What virtual ranks send: rules, or a recording. Repeatable; the first that "
        "answers counts. Default: the recording beside the graph.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def read_ranks(option: str, text: str, world_size: int) -> tuple[int, ...]:
    """Ranks as an option names them; wrong ones are wrong usage."""
    from prismtrace.ranks import parse_ranks

    try:
        ranks = parse_ranks(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text}: {error}") from error
    if any(rank >= world_size for rank in ranks):
        raise typer.BadParameter(f"{option} {text}: there are {world_size} ranks, from 0")
    return ranks


def shown_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks that --show-rank names.

    Raises:
        typer.BadParameter: as `read_ranks`.
    """
    if text == "all":
        return tuple(range(world_size))
    return () if text in ("none", "") else read_ranks("--show-rank", text, world_size)


def tensor_sources(graph: Path, tensors: list[str] | None) -> list[str]:
    """What --tensors names; by default the recording beside the graph, if there is one."""
    beside = graph.with_suffix(".tensors")
    if tensors is None and beside.is_dir():
        return [str(beside)]
    return tensors or []
