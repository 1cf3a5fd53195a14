"""The IR prints to a text that parses back, and refuses what is not a chain."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnfuse.chain import (
    FLOAT_DTYPES,
    OPS,
    Chain,
    Dropout,
    GroupNorm,
    Op,
    Step,
    chain_from_steps,
    format_steps,
    op,
    parse_steps,
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    name = draw(st.sampled_from(["dropout", *OPS]))
    if name == "dropout":
        return Dropout(draw(st.floats(0, 1, exclude_min=True, exclude_max=True)))
    if name == "to":
        return Op("to", (draw(st.sampled_from(FLOAT_DTYPES)),))
    return Op(name, tuple(draw(st.floats()) for _ in OPS[name].params))


@given(st.lists(steps(), max_size=6))
def test_the_text_of_any_steps_parses_back_to_them(given_steps: list[Step]) -> None:
    assert parse_steps(format_steps(given_steps)) == tuple(given_steps)


def test_ops_with_a_nan_bound_are_equal_to_themselves() -> None:
    assert op("minimum", float("nan")) == op("minimum", math.nan)


def test_a_chain_splits_at_its_dropout_and_joins_again() -> None:
    text = "relu(); dropout(0.5); clamp(0.0, 1.0)"
    chain = chain_from_steps(GroupNorm(2, 1e-5), parse_steps(text))
    assert (chain.before, chain.dropout, chain.after) == ((op("relu"),), Dropout(0.5), (op("clamp", 0, 1),))
    assert chain.text == text


def test_the_pattern_reads_as_people_write_it() -> None:
    chain = chain_from_steps(
        GroupNorm(8, 1e-5), parse_steps("minimum(0.0); clamp(0.0, inf); dropout(0.2); to(bfloat16)")
    )
    assert chain.pretty() == "group_norm → minimum(0) → clamp_min(0) → dropout(0.2) → to(bfloat16)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("relu", "not a step: 'relu'"),
        ("relu(1.0)", "relu takes"),
        ("frobnicate()", "unknown pointwise op 'frobnicate'"),
        ("to(int8)", "could not convert"),
        ("dropout(1.0)", "0 < p < 1"),
        ("dropout()", "dropout takes"),
    ],
)
def test_a_text_that_is_no_chain_is_refused_with_the_part_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_steps(text)


def test_a_second_dropout_and_ops_after_none_are_refused() -> None:
    with pytest.raises(ValueError, match="one dropout"):
        chain_from_steps(GroupNorm(1, 1e-5), parse_steps("dropout(0.5); dropout(0.5)"))
    with pytest.raises(ValueError, match="need the dropout"):
        Chain(GroupNorm(1, 1e-5), (), None, (op("relu"),))
