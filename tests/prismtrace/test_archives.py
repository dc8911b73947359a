"""Archives stand for the traces in them."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

import pytest

from prismtrace.converters import convert
from prismtrace.converters.inputs import expand_inputs
from prismtrace.converters.kept import count_kept
from prismtrace.errors import InputFileError, RankError, TraceError, ValidationError
from prismtrace.headers import read_header
from tests.prismtrace.chakra_traces import COLL, framed, node
from tests.prismtrace.kineto_events import run
from tests.prismtrace.operation_logs import simulate
from tests.prismtrace.test_pytorch_et import told_apart


def archive(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as file:
        for name, text in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            file.addfile(entry, io.BytesIO(text))
        link = tarfile.TarInfo("job/link.9.et")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    return path


TRACE = framed(node(1, dur=3), node(2, COLL, dur=5, comm_type=0, comm_size=8, data=[1]))


@pytest.mark.parametrize(("name", "mode"), [("job.tgz", "w:gz"), ("job.tar", "w"), ("job", "w:gz")])
def test_members_are_converted(tmp_path, name, mode):
    members = {"job/run.1.et": TRACE, "job/run.0.et": TRACE, "job/._run.0.et": b"x", "notes": b"x"}
    path = archive(tmp_path / name, members, mode)
    found = expand_inputs(path)
    assert [member.name for member in found] == ["run.0.et", "run.1.et"]
    _, report = run(tmp_path, path)
    assert (report.ranks, report.matched) == ((0, 1), {"by-order": 1})


def test_nothing_stays_unpacked(tmp_path, monkeypatch):
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    whole = archive(tmp_path / "a.tgz", {"run.0.et": TRACE, "run.1.et": TRACE})
    cut = archive(tmp_path / "b.tgz", {"run.0.et": TRACE[:-2]})
    convert(whole, tmp_path / "out.parquet")
    for path in (cut, whole, cut):
        with pytest.raises(InputFileError, match="damaged"):
            convert([path, cut], tmp_path / "out.parquet")
    assert list(place.iterdir()) == []


def test_members_are_known_again(tmp_path):
    path = archive(tmp_path / "job.tgz", {"run.0.et": TRACE, "run.1.et": TRACE[:-2]})
    out = tmp_path / "out.parquet"
    for _ in range(2):
        with pytest.raises(InputFileError, match="damaged"):
            convert(path, out, resume=True)
        assert count_kept(out) == 1


def test_members_beside_others_are_known_again(tmp_path, monkeypatch):
    folder = tmp_path / "in"
    folder.mkdir()
    profiles, traces = told_apart(folder, "2.4")
    members = {path.name: path.read_bytes() for path in (*profiles, *traces)}
    path = archive(tmp_path / "job.tgz", members)
    out = tmp_path / "out.parquet"
    (tmp_path / "used").mkdir()
    # Whatever fails comes after all files have been read.
    with monkeypatch.context() as patch:
        patch.setattr("prismtrace.converters.pipeline.match", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(path, out, resume=True)
    monkeypatch.setattr("prismtrace.converters.kept.convert_file", lambda *_: 1 / 0)
    assert convert(path, out, resume=True).ranks == tuple(range(len(profiles)))


def test_json_of_other_programs_is_left_out(tmp_path):
    notes = b'{"learning_rate": 0.1}'
    members = {"run.0.et": TRACE, "config.json": notes, "list.json": b"[1, 2]"}
    path = archive(tmp_path / "job.tgz", members)
    folder = tmp_path / "job"
    folder.mkdir()
    for name, text in members.items():
        (folder / name).write_bytes(text)
    for given in (path, folder):
        found = expand_inputs(given)
        assert [member.name for member in found.skipped] == ["config.json", "list.json"]
        _, report = run(tmp_path, given)
        assert (report.ranks, report.repairs["skipped-json"]) == ((0,), 2)
        with pytest.raises(ValidationError, match="skipped-json 2"):
            run(tmp_path, given, strict=True)
    # What is named, or damaged, is not passed over.
    with pytest.raises(InputFileError, match="no traceEvents"):
        run(tmp_path, [folder / "run.0.et", folder / "config.json"])
    for text in (b"", b"\x1f\x8b{"):
        (folder / "list.json").write_bytes(text)
        assert folder / "list.json" in expand_inputs(folder)
    (folder / "run.0.et").unlink()
    (folder / "list.json").write_bytes(notes)
    with pytest.raises(InputFileError, match=r"none .* is a trace: config.json, list.json"):
        expand_inputs(folder)


def test_json_of_other_programs_beside_an_operation_level_log(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    log, notes = folder / "log.csv", folder / "config.json"
    simulate().table.write_csv(log)
    notes.write_text('{"learning_rate": 0.1}')
    report = convert(folder, tmp_path / "run.parquet")
    assert report.repairs == read_header(report.output).policies == {"skipped-json": 1}
    with pytest.raises(ValidationError, match="skipped-json 1"):
        convert(folder, report.output, strict=True)
    for named in ([log, notes], [notes, log]):
        with pytest.raises(TraceError, match=r"no column|no traceEvents") as caught:
            convert(named, report.output)
        assert caught.value.where == str(notes)


def test_nothing_is_unpacked_outside(tmp_path):
    path = archive(tmp_path / "job.tgz", {"../../out.0.et": TRACE, "/abs.1.et": TRACE})
    with pytest.raises(InputFileError, match="holds no trace"):
        expand_inputs(path)


def test_damaged_archives_are_refused(tmp_path):
    path = archive(tmp_path / "job.tgz", {"run.0.et": TRACE * 9000})
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputFileError, match="not a whole archive") as error:
        expand_inputs(path)
    assert error.value.where == str(path)


def test_a_recorded_archive(data_dir, tmp_path):
    (found,) = expand_inputs(data_dir / "chakra" / "1.0.2-chakra.0.0.4.tgz")
    trace, report = run(
        tmp_path, data_dir / "chakra" / "1.0.2-chakra.0.0.4.tgz", ranks={found.name: 0}
    )
    assert (trace.header.kind, report.world_size, report.matched) == ("bare", 2, {"alone": 10})


@pytest.mark.parametrize(
    "names",
    [
        ("a/run.et", "run.b"),
        ("job.tgz!a/run.et", "run.b"),
        ("job/a/run.et", "a.b/run.b"),
    ],
)
def test_a_member_is_named_by_the_end_of_its_path(tmp_path, names):
    first, second = names
    members = {"a/run.et": TRACE, "a.b/run.b.et": TRACE}
    if first.startswith("job/"):
        members = {f"job/{name}": trace for name, trace in members.items()}
    path = archive(tmp_path / "job.tgz", members)
    _, report = run(tmp_path, path, ranks={first: 1, f"{second}.et": 0})
    assert report.ranks == (0, 1)


def test_a_name_of_several_members_lists_them(tmp_path):
    path = archive(tmp_path / "job.tgz", {f"{folder}/run.et": TRACE for folder in ("a", "b", "xa")})
    a, b, c = (f"{path}!{folder}/run.et" for folder in ("a", "b", "xa"))
    with pytest.raises(RankError, match=r"^run\.et=1 names more than one input file") as several:
        run(tmp_path, path, ranks={"run.et": 1})
    assert several.value.hint == f"it may be: {a}, {b}, {c}"
    # Half a name is none.
    with pytest.raises(RankError, match="names no input file") as none:
        run(tmp_path, path, ranks={"un.et": 1})
    assert none.value.hint == f"inputs: {a}, {b}, {c}"
    with pytest.raises(RankError, match="is given two ranks, 1 and 2"):
        run(tmp_path, path, ranks={"b/run.et": 1, b: 2})
    _, report = run(tmp_path, path, ranks={"a/run.et": 1, "b/run.et": 0, "xa/run.et": 2})
    assert report.ranks == (0, 1, 2)


def test_a_whole_path_is_one_file_even_if_others_end_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (Path(), Path("a")):
        folder.mkdir(exist_ok=True)
        (folder / "run.et").write_bytes(TRACE)
    _, report = run(tmp_path, ["run.et", "a/run.et"], ranks={"run.et": 1, "a/run.et": 0})
    assert report.ranks == (0, 1)


def test_errors_name_the_archive_and_its_member(tmp_path):
    path = archive(tmp_path / "job.tgz", {"a/run.0.et": TRACE, "b/run.0.et": TRACE})
    names = [f"{path}!{folder}/run.0.et" for folder in "ab"]
    with pytest.raises(RankError, match="is in two files") as twice:
        run(tmp_path, path)
    assert twice.value.where == " and ".join(names)
    _, report = run(tmp_path, path, ranks={names[1]: 1})
    assert report.ranks == (0, 1)
    path = archive(tmp_path / "cut.tgz", {"job/run.0.et": TRACE[:-2]})
    with pytest.raises(InputFileError, match="damaged") as damaged:
        run(tmp_path, path)
    assert damaged.value.where == f"{path}!job/run.0.et"
