"""A report is written whole, where it belongs, or the file is what it was."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from dsv4.errors import RunError
from dsv4.serve.destination import Destination


def test_a_file_is_replaced_with_its_permissions_and_through_its_link(tmp_path: Path) -> None:
    """Opening changes nothing; what was open before still has the old text."""
    file, link = tmp_path / "report", tmp_path / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    destination = Destination(str(link))
    assert file.read_text() == "before" and set(tmp_path.iterdir()) == {file, link}
    with file.open() as reader:
        destination.write("after")
        assert reader.read() == "before"
    assert file.read_text() == "after" and link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert set(tmp_path.iterdir()) == {file, link}


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    Destination(str(tmp_path / "report")).write("text")
    assert (tmp_path / "report").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    """It is not opened before: that would wait for its reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    destination = Destination(str(pipe))
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    destination.write("text")
    reader.join()
    assert found == ["text"] and pipe.is_fifo()


def test_a_folder_that_vanished_is_an_error_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    destination = Destination(str(folder / "report"))
    folder.rmdir()
    with pytest.raises(RunError, match="report' cannot be written: No such file"):
        destination.write("text")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "No such file"),
        (".", "Is a directory"),
        ("absent/report", "No such file"),
        ("file/report", "Not a directory"),
        ("x" * 300, "File name too long"),
    ],
    ids=lambda text: text[:20],
)
def test_what_cannot_be_written_is_refused_before_there_is_a_report(
    name: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(RunError, match=rule) as refused:
        Destination(name)
    assert refused.value.fields["path"] == name
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    """Though its folder would let it be replaced."""
    file = tmp_path / "report"
    file.write_text("before")
    file.chmod(0o444)
    with pytest.raises(RunError, match="Permission denied"):
        Destination(str(file))
