"""The committed bytes against b12x running now: the file cannot drift from its oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.golden import oracle
from tests.golden.make_golden import outputs, read
from tests.layouts.ours import same

GOLDEN = read()


@pytest.fixture
def b12x() -> None:
    oracle.require()


@pytest.mark.usefixtures("b12x")
@pytest.mark.parametrize("case", GOLDEN)
def test_b12x_still_makes_the_committed_bytes(case: str) -> None:
    made = outputs(case, GOLDEN[case])
    assert made
    for field, value in made.items():
        assert same(GOLDEN[case][field], value), field


@pytest.fixture
def no_b12x(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(oracle, "unavailable", lambda: "b12x is not installed")
    yield monkeypatch


def test_without_b12x_the_oracle_tests_are_skipped_with_the_reason(no_b12x: pytest.MonkeyPatch) -> None:
    no_b12x.delenv("HYBRID_PACK_REQUIRE_B12X", raising=False)
    with pytest.raises(pytest.skip.Exception, match="b12x is not installed"):
        oracle.require()


def test_without_a_promised_b12x_the_oracle_tests_fail(no_b12x: pytest.MonkeyPatch) -> None:
    no_b12x.setenv("HYBRID_PACK_REQUIRE_B12X", "1")
    with pytest.raises(pytest.fail.Exception, match="but b12x is not installed"):
        oracle.require()
