"""``--upstream-dir`` reaches the plugin unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

import plugin.main
from plugin.main import PluginSettings
from scrubber.cli.main import main


@pytest.fixture
def received_directories(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """Replace the plugin by one that exits with 7; return the upstream directories that it was given."""
    noted: list[Path | None] = []

    async def run(settings: PluginSettings) -> int:
        noted.append(settings.upstream_dir)
        return 7

    monkeypatch.setattr(plugin.main, "run", run)
    monkeypatch.delenv("SCRUBBER_UPSTREAM_DIR", raising=False)
    return noted


@pytest.mark.parametrize(
    ("words", "variable", "directory"),
    [
        ((), "", None),
        (("--upstream-dir", "vendor"), "", "vendor"),
        ((), "from-the-variable", "from-the-variable"),
        (("--upstream-dir", "vendor"), "from-the-variable", "vendor"),
    ],
)
def test_upstream_directory_is_given_by_flag_or_variable_or_not_at_all(
    received_directories: list[Path | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    variable: str,
    directory: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv("SCRUBBER_UPSTREAM_DIR", variable)
    with pytest.raises(SystemExit) as ended:
        main(["plugin", *words])
    assert ended.value.code == 7
    assert received_directories == [tmp_path / directory if directory else None]
