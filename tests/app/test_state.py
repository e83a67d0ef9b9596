import stat
from pathlib import Path

import pytest

from app.state import StateFolder, read_keys
from engine.errors import ConfigError


def test_one_service_at_a_time(tmp_path: Path) -> None:
    first = StateFolder(tmp_path / "state")
    with pytest.raises(ConfigError, match="another ullage is running with it"):
        StateFolder(tmp_path / "state")
    first.close()
    StateFolder(tmp_path / "state").close()


def test_the_admin_key_is_private_and_stays(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    path, key = state.admin_key()
    assert path == tmp_path / "state" / "admin.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(key) >= 43
    assert path.read_text() == key + "\n"
    path.chmod(0o644)
    assert state.admin_key() == (path, key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    state.close()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--state-dir .*file/state: Not a directory"):
        StateFolder(tmp_path / "file" / "state")


def test_keys_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\n key-one \nkey-two\n")
    assert read_keys(path, "--api-key-file") == ["key-one", "key-two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no key"),
        (b"# only a comment\n", "holds no key"),
        (b"one two\n", "line 1: a key has no spaces"),
        (b"fine\nb\x01d\n", "line 2: a key has no spaces or control"),
        ("schlüssel\n".encode(), "is not plain ASCII"),
    ],
)
def test_bad_key_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file .*keys: {message}"):
        read_keys(path, "--api-key-file")


def test_a_key_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--api-key-file /none: No such file"):
        read_keys(Path("/none"), "--api-key-file")
