"""Lines outlive the process that wrote them, one kept file deep, and a disk that fails costs nothing but lines."""

import logging
from pathlib import Path

import pytest

from app.journal import Journal


def test_lines_are_read_by_the_next_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    for number in range(5):
        journal.append(b"%d" % number)
    journal.close()
    later = Journal(tmp_path / "j.jsonl")
    assert later.read(3) == [b"2", b"3", b"4"]
    later.append(b"5")
    later.close()
    assert later.read(100) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert (tmp_path / "j.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_large_file_becomes_the_older_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl", large_bytes=10)
    for number in range(100, 112):
        journal.append(b"%d" % number)
    journal.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.1.jsonl", "j.jsonl"]
    assert (tmp_path / "j.jsonl").read_text().split() == ["109", "110", "111"]
    assert (tmp_path / "j.1.jsonl").read_text().split() == ["106", "107", "108"]
    assert journal.read(4) == [b"108", b"109", b"110", b"111"]


def test_a_line_cut_off_by_a_death_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").write_bytes(b'{"a":1}\n{"b"')
    journal = Journal(tmp_path / "j.jsonl")
    journal.append(b'{"c":3}')
    journal.append(b'{"d":4}')
    journal.close()
    assert journal.read(9) == [b'{"a":1}', b'{"b"', b'{"c":3}', b'{"d":4}']


def test_a_disk_that_fails_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "gone" / "j.jsonl")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            journal.append(b"1")
        journal.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/gone/j.jsonl: No such file or directory: some lines are missing from it"
    ]


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "j.jsonl").mkdir()
    with caplog.at_level(logging.WARNING):
        assert Journal(tmp_path / "j.jsonl").read(9) == []
    assert "what it says is left out" in caplog.text
