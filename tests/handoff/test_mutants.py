"""Without any one rule of the protocol the explorer finds a wrong state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.handoff.explorer import explore
from tests.handoff.mutants import MUTANTS, SIDE_MUTANTS, Mutant
from tests.handoff.nodes import D
from tests.handoff.scenarios import FINDERS, SCENARIOS
from tests.handoff.world import World

FLAWS = ("transport_fence", "transport_order", "has_bar", "incompatible")


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=[pytest.mark.matrix] * mutant.is_long)
        for mutant in [*MUTANTS, *SIDE_MUTANTS]
    ],
)
def test_a_protocol_without_the_rule_is_found_out(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.patch(monkeypatch)
    report = explore(mutant.scenario)
    print(f"rule {mutant.rule}, {mutant.name}: {report}")
    assert report.violation is not None, "the explorer saw nothing wrong"


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", [*MUTANTS, *SIDE_MUTANTS], ids=lambda mutant: mutant.name)
def test_the_protocol_with_the_rule_is_right_there(mutant: Mutant) -> None:
    """Else finding the mutant out proves nothing."""
    right = {"transport_fence": True, "transport_order": True, "has_bar": True, "incompatible": False}
    assert explore(replace(mutant.scenario, **right)).violation is None


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "mutant"), [(name, mutant) for name in FINDERS for mutant in FINDERS[name]])
def test_what_the_suite_explores_finds_it_out(name: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = [each for each in (*MUTANTS, *SIDE_MUTANTS) if each.name == mutant]
    found.patch(monkeypatch)
    # Some mutants are worlds, not protocols.
    flaws = {flaw: getattr(found.scenario, flaw) for flaw in FLAWS}
    assert explore(replace(SCENARIOS[name], **flaws)).violation is not None


def test_what_the_suite_explores_is_there_for_all_mutants() -> None:
    named = {name for names in FINDERS.values() for name in names}
    assert {mutant.name for mutant in (*MUTANTS, *SIDE_MUTANTS) if not mutant.is_long} <= named


def test_each_rule_has_a_mutant() -> None:
    """Rule 6 needs two incarnations (``test_ledgers``), 10 is what the explorer always checks."""
    assert {mutant.rule for mutant in MUTANTS} == {1, 2, 3, 4, 5, 7, 8, 9}
    assert len(MUTANTS) >= 10


def test_a_change_of_role_that_ends_what_came_through_the_door_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = World.do_narrow

    def narrow_at_once(self: World, number: int) -> None:
        narrow(self, number)
        if number != D:
            self.ps[number].held = frozenset()

    monkeypatch.setattr(World, "do_narrow", narrow_at_once)
    report = explore(SCENARIOS["push, roles change"])
    assert report.violation is not None
    assert ("narrow", 0) in report.trace
