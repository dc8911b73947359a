import pytest

from prismreplay.digests import file_digest, files_digest, texts_digest
from prismtrace.errors import InputFileError


def test_texts_are_told_apart_also_where_they_meet():
    assert texts_digest("ab", "c") != texts_digest("a", "bc") != texts_digest("abc")


def test_arguments_need_not_be_utf_8():
    # As Python reads the argument b"\\xff".
    assert texts_digest("\udcff") != texts_digest("\udcfe")


def test_files_are_known_by_what_they_hold(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"times")
    other.write_bytes(b"times")
    assert file_digest(one) == file_digest(other)
    assert files_digest([one]) != files_digest([one, other])
    other.write_bytes(b"Times")
    assert file_digest(one) != file_digest(other)


def test_what_cannot_be_read_is_told(tmp_path):
    with pytest.raises(InputFileError):
        file_digest(tmp_path / "missing")
