"""Files that are replaced: the old one or the new one, whatever ends the writer."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tinydit_ray.atomic import remove_stale, replace_text, replacing

KILLED = """
import os, signal, sys
from pathlib import Path
from tinydit_ray.atomic import replacing

with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path):
    path = tmp_path / "größe.json"
    for text in ("old", "new\n"):
        replace_text(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_alone(error: BaseException, tmp_path: Path):
    path = tmp_path / "x"
    replace_text(path, "old")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_forgot_to_write_is_an_error(tmp_path: Path):
    replace_text(tmp_path / "x", "old")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "x"):
        pass
    assert (tmp_path / "x").read_text() == "old"


def test_a_killed_writer_leaves_the_old_file_and_a_rest_that_can_be_removed(tmp_path: Path):
    path = tmp_path / "x[1]"  # no pattern
    replace_text(path, "old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / ".other.1.tmp").touch()
    remove_stale(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".other.1.tmp", "x[1]"]
