"""The seeded bugs still fit the library: quick to see here, long before they are run."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.catalogue import MUTANTS

SOURCE = Path(__file__).parents[2] / "src" / "regard"


def test_every_seeded_bug_still_has_its_place():
    texts = {mutant.file: (SOURCE / mutant.file).read_text(encoding="utf8") for mutant in MUTANTS}
    assert [mutant.bug for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1] == []
