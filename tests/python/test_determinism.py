"""The determinism contract, bit for bit, and orders of passes on one workspace."""

import pytest
import torch
from reference import Case, assert_close, assert_same_bits, reference, run

import clowder


@pytest.fixture(scope="module")
def case():
    return Case(tokens=101, hidden=96, intermediate=64, topk=3, dropped=0.1)


@pytest.fixture(scope="module")
def on_one_rank(case):
    return run(case, case.workspace(1))


def test_d1_run_to_run(case, on_one_rank):
    workspace = case.workspace(1)
    for _ in range(3):
        assert_same_bits(run(case, workspace), on_one_rank)


@pytest.mark.parametrize(
    "options",
    [
        {"saved_rows": 0},
        {"saved_rows": 40},
        {"keep_x": True},
        {"blocks": 1},
        {"blocks": 3, "chunk_rows": 32, "ring_rows": 128},
        {"poison": True},
        {"jitter_seed": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_d2_tuning(case, on_one_rank, options, ranks):
    assert_same_bits(run(case, case.workspace(ranks, **options)), on_one_rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_d3_ranks(case, on_one_rank, ranks):
    assert_same_bits(run(case, case.workspace(ranks)), on_one_rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_d3_ranks_with_a_shared_expert(ranks):
    case = Case(shared_intermediate=32, tokens=33)
    sharded, whole = run(case, case.workspace(ranks)), run(case, case.workspace(1))
    assert_same_bits(sharded, whole, leave_out=("shared_w13", "shared_w2"))
    assert_close(sharded, reference(case))


def test_d4_a_token_does_not_depend_on_the_others(case):
    """Also CASES row 27."""
    whole = run(case, case.workspace(2, max_tokens=101), [40, 61])
    changed = case.with_()
    changed.x[40:] = -2 * changed.x[40:]
    changed.topk_idx[40:] = 0
    other = run(changed, case.workspace(2, max_tokens=101), [40, 61])
    for name in ("out", "x", "topk_weights"):
        assert torch.equal(whole[name][:40], other[name][:40]), name


def test_case_21_recompute_equals_saved(case):
    """The schedule of the first pass serves a second forward, and gradients equal."""
    workspace = case.workspace(2)
    schedule = workspace.build_schedule(case.topk_idx)
    inputs = case.inputs()
    out, saved = clowder.forward(workspace, schedule, **inputs)
    first = clowder.backward(workspace, schedule, saved, case.dout, **inputs)
    nothing, none = clowder.forward(workspace, schedule, **inputs, save=False)
    assert none is None and torch.equal(out, nothing)
    again, saved = clowder.forward(workspace, workspace.build_schedule(case.topk_idx), **inputs)
    second = clowder.backward(workspace, schedule, saved, case.dout, **inputs)
    assert torch.equal(out, again)
    for a, b in zip(first[:4], second[:4]):
        assert torch.equal(a, b)


def test_checkpointed_recompute(case, on_one_rank):
    workspace = case.workspace(2)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.inputs().items()}
    out = torch.utils.checkpoint.checkpoint(
        lambda: clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **leaves), use_reentrant=False
    )
    out.backward(case.dout)
    assert_same_bits({"out": out.detach()} | {n: leaf.grad for n, leaf in leaves.items()}, on_one_rank)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["backward 1, 2", "backward 2, 1"])
def test_case_33_pipeline_order(order):
    """Forward 1, forward 2, then both backwards, on one workspace."""
    cases = [Case(seed=1, tokens=30), Case(seed=2, tokens=17)]
    separate = [run(case, case.workspace(2)) for case in cases]
    workspace = cases[0].workspace(2)
    leaves = [{n: t.clone().requires_grad_() for n, t in case.inputs().items()} for case in cases]
    outs = [clowder.moe(topk_idx=c.topk_idx, workspace=workspace, **leaf) for c, leaf in zip(cases, leaves)]
    for i in order:
        outs[i].backward(cases[i].dout)
    for out, leaf, expected in zip(outs, leaves, separate):
        assert_same_bits({"out": out.detach()} | {n: t.grad for n, t in leaf.items()}, expected)


def test_case_25_two_layers_on_one_workspace():
    case, second = Case(), Case(seed=5)
    workspace = case.workspace(2)
    x = case.x.clone().requires_grad_()
    hidden = clowder.moe(x, case.topk_idx, case.topk_weights, case.w13, case.w2, workspace=workspace)
    out = clowder.moe(hidden, second.topk_idx, second.topk_weights, second.w13, second.w2, workspace=workspace)
    out.backward(case.dout)

    second.x, second.dout = hidden.detach(), case.dout
    of_second = run(second, second.workspace(1))
    case.dout = of_second["x"]
    assert torch.equal(out.detach(), of_second["out"])
    assert torch.equal(x.grad, run(case, case.workspace(1))["x"])


def test_retained_graph_gives_the_same_gradients_twice():
    case = Case()
    w13 = case.w13.clone().requires_grad_()
    out = clowder.moe(case.x, case.topk_idx, case.topk_weights, w13, case.w2, workspace=case.workspace(2))
    (first,) = torch.autograd.grad(out, w13, case.dout, retain_graph=True)
    (second,) = torch.autograd.grad(out, w13, case.dout)
    assert torch.equal(first, second)
