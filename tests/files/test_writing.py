"""Files are replaced in one step, by writers that do not disturb each other."""

import multiprocessing
import os
import shutil
import stat
import threading

import pytest
import torch

from fst.files.checkpoint import (
    discard_unfinished,
    load_checkpoint_safely,
    replacing,
    save_atomically,
    write_text_atomically,
)


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    return path


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_file_and_nothing_else(old, error):
    with pytest.raises(error), replacing(old) as partial:
        partial.write_text("ne")
        raise error
    assert old.read_text() == "old" and _names(old.parent) == ["file.txt"]


def test_what_is_not_written_replaces_nothing(old):
    with pytest.raises(FileNotFoundError), replacing(old):
        pass
    assert old.read_text() == "old" and _names(old.parent) == ["file.txt"]


def test_files_of_the_user_stay(old):
    names = ["file.txt.tmp", "file.partial.txt", ".file.txt.tmp"]
    for name in names:
        (old.parent / name).write_text("mine")
    write_text_atomically("new", old)
    assert old.read_text() == "new"
    assert all((old.parent / name).read_text() == "mine" for name in names)


def test_a_link_stays_a_link(old, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.txt"
    link.symlink_to(old)
    write_text_atomically("new", link)
    assert link.is_symlink() and old.read_text() == "new"
    dangling = tmp_path / "elsewhere" / "dangling.txt"
    dangling.symlink_to(tmp_path / "absent.txt")
    write_text_atomically("new", dangling)
    assert dangling.is_symlink() and (tmp_path / "absent.txt").read_text() == "new"


def test_permissions_are_those_of_the_old_file_or_the_usual_ones(old):
    old.chmod(0o640)
    write_text_atomically("new", old)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    usual, written = old.with_name("usual"), old.with_name("written")
    usual.write_text("")
    write_text_atomically("", written)
    assert usual.stat().st_mode == written.stat().st_mode


def test_what_cannot_be_written_is_said_before_the_work(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent" / "file", tmp_path / "pipe"):
        with pytest.raises(OSError, match=str(path.parent)), replacing(path):
            pytest.fail("the work began")
    assert _names(tmp_path) == ["pipe"]


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path):
    path = tmp_path / ("n" * 255)
    write_text_atomically("new", path)
    assert path.read_text() == "new"


def _write(path, value, count):
    for _ in range(count):
        save_atomically({"value": torch.full((3000,), value)}, path)


def test_writers_of_one_path_do_not_disturb_each_other(tmp_path):
    """Threads and processes: readers find a whole file of one of them at any time."""
    path = tmp_path / "shared.pth"
    save_atomically({"value": torch.zeros(3000)}, path)
    errors = []

    def write(value):
        try:
            _write(path, value, 20)
        except OSError as error:
            errors.append(error)

    processes = [
        multiprocessing.get_context("fork").Process(target=_write, args=(path, value, 20))
        for value in (1.0, 2.0)
    ]
    threads = [threading.Thread(target=write, args=(value,)) for value in (3.0, 4.0)]
    for writer in (*processes, *threads):
        writer.start()
    while any(writer.is_alive() for writer in (*processes, *threads)):
        assert load_checkpoint_safely(path)["value"].unique().numel() == 1
    for writer in (*processes, *threads):
        writer.join()
    assert not errors and [process.exitcode for process in processes] == [0, 0]
    assert _names(tmp_path) == ["shared.pth"]


def test_what_a_killed_writer_left_is_discarded(old):
    def killed():
        with replacing(old) as partial:
            partial.write_text("half")
            os._exit(9)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == 9 and old.read_text() == "old" and len(_names(old.parent)) == 2
    discard_unfinished(old.parent)
    assert _names(old.parent) == ["file.txt"]


def test_a_full_disk_is_said_with_the_file(old, monkeypatch):
    with pytest.raises(RuntimeError, match="inline_container"), replacing(old):
        raise RuntimeError("enforce fail at inline_container.cc")
    usage = shutil.disk_usage(old.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(OSError, match="No space left on device.*file.txt"), replacing(old):
        raise RuntimeError("enforce fail at inline_container.cc")
    assert old.read_text() == "old" and _names(old.parent) == ["file.txt"]
