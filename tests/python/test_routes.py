"""Choices of every kind: none, repeated, out of range, all alike, no tokens at all."""

import warnings

import pytest
import torch
from reference import Case, assert_close, assert_same_bits, reference, run

import clowder


def test_case_3_half_of_the_slots_without_route_five_steps():
    for step in range(5):
        case = Case(dropped=0.5, seed=step, tokens=40)
        assert_close(run(case, case.workspace(2, poison=True)), reference(case))


def test_repeated_experts_are_rows_of_their_own():
    case = Case(topk=3)
    case.topk_idx[:] = case.topk_idx[:, :1]
    workspace = case.workspace(2)
    schedule = workspace.build_schedule(case.topk_idx)
    assert schedule.expert_counts.sum() == 3 * case.tokens
    assert_close(run(case, workspace), reference(case))


def test_case_9_bad_ids_are_counted_and_skipped():
    case = Case()
    case.topk_idx[0] = torch.tensor([case.num_experts, -2])
    case.topk_idx[5, 1] = case.num_experts + 7
    case.topk_idx[7, 0] = 2**40
    case.topk_idx[9, 0] = -1
    workspace = case.workspace(2)
    actual = run(case, workspace)
    assert_close(actual, reference(case))
    assert workspace.build_schedule(case.topk_idx).skipped_ids == 4
    with pytest.warns(clowder.SkippedIdsWarning, match="8 ids"):
        workspace.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workspace.check()


def test_expert_counts():
    case = Case(dropped=0.3, tokens=60)
    counts = torch.bincount(case.topk_idx[case.topk_idx >= 0], minlength=case.num_experts)
    for ranks in (1, 2, 4):
        schedule = case.workspace(ranks).build_schedule(case.topk_idx)
        assert schedule.expert_counts.dtype == torch.int64
        assert torch.equal(schedule.expert_counts, counts)
        assert schedule.skipped_ids.shape == () and schedule.skipped_ids == 0


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("shared_intermediate", [0, 32])
def test_no_tokens(ranks, shared_intermediate):
    case = Case(tokens=0, shared_intermediate=shared_intermediate)
    actual = run(case, case.workspace(ranks))
    assert actual["out"].shape == actual["x"].shape == (0, case.hidden)
    for name in ("w13", "w2"):
        assert not actual[name].any()


def test_case_7_ranks_that_hold_or_receive_nothing():
    case = Case(tokens=20)
    case.topk_idx = case.topk_idx % 2 + 2  # only rank 1's experts
    expected = run(case, case.workspace(1))
    assert_same_bits(run(case, case.workspace(4, max_tokens=20), [0, 13, 0, 7]), expected)
    assert not expected["w13"][4:].any()


def test_every_slot_without_route():
    case = Case(dropped=1.1)
    actual = run(case, case.workspace(2, poison=True))
    assert all(not tensor.any() for tensor in actual.values())


def test_case_10_unnormalised_weights_on_two_ranks():
    case = Case()
    case.topk_weights *= 37.0
    actual = run(case, case.workspace(2))
    assert torch.equal(actual["topk_weights"], run(case, case.workspace(1))["topk_weights"])
    assert_close(actual, reference(case))


def test_case_22_identical_logits():
    """The indices that forward used drive backward, however ties were broken."""
    case = Case(num_experts=8, topk=2, tokens=16)
    case.topk_idx = torch.topk(torch.zeros(16, 8), 2).indices
    case.x[:] = case.x[:1]
    assert_close(run(case, case.workspace(2)), reference(case))


def test_case_23_uneven_ranks():
    case = Case(tokens=41)
    actual = run(case, case.workspace(4, max_tokens=17), [17, 16, 7, 1])
    assert_close(actual, reference(case))
    assert_same_bits(actual, run(case, case.workspace(4), None))


def test_nan_stays_with_its_token():
    case = Case()
    clean = run(case, case.workspace(2))
    case.x[3] = float("nan")
    dirty = run(case, case.workspace(2))
    others = torch.arange(case.tokens) != 3
    assert torch.isnan(dirty["out"][3]).all()
    assert torch.equal(dirty["out"][others], clean["out"][others])
    assert torch.equal(dirty["x"][others], clean["x"][others])
    untouched = [e for e in range(case.num_experts) if e not in case.topk_idx[3]]
    assert torch.equal(dirty["w13"][untouched], clean["w13"][untouched])
