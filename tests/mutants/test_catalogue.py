"""The seeded bugs still fit the library: quick to see here, long before they are run."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.catalogue import MUTANTS

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "regard"


def test_every_seeded_bug_still_has_its_place():
    texts = {mutant.file: (SOURCE / mutant.file).read_text(encoding="utf8") for mutant in MUTANTS}
    assert [mutant.bug for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1] == []


def test_every_seeded_bug_still_has_its_test():
    def exists(killer: str) -> bool:
        file, *_, name = killer.split("[")[0].split("::")
        return f"def {name}(" in (TESTS / file).read_text(encoding="utf8")

    assert [mutant.killer for mutant in MUTANTS if not exists(mutant.killer)] == []
