"""The table of commands is that of the commands."""

from __future__ import annotations

from regard.cli import command_table_writer
from regard.cli.command_table import FILE
from regard.cli.command_table_writer import as_text, describe
from regard.cli.commands import app


def test_the_table_is_that_of_the_commands():
    assert as_text(describe(app)) == FILE.read_text("utf-8"), "run python -m regard.cli.command_table_writer"


def test_the_table_is_written_as_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(command_table_writer, "FILE", tmp_path / "table.json")
    command_table_writer.write_table()
    assert (tmp_path / "table.json").read_bytes() == FILE.read_bytes()
