"""The layer's values: out and the gradients of all inputs against fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import Case, assert_close, reference, relative_error, run

import clowder


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shared_intermediate", [0, 96])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu-clamp:0.7", "geglu", "reglu", "gpt-oss"])
def test_values(ranks, shared_intermediate, activation):
    case = Case(shared_intermediate=shared_intermediate, activation=activation, tokens=50)
    assert_close(run(case, case.workspace(ranks)), reference(case))


@given(
    hidden=st.sampled_from([32, 64, 96]),
    intermediate=st.sampled_from([32, 64, 160]),
    shared_intermediate=st.sampled_from([0, 32]),
    experts_per_rank=st.integers(1, 5),
    topk=st.sampled_from([1, 2, 3, 6, 16]),
    tokens_per_rank=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    dropped=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 3),
)
def test_values_for_any_shape(tokens_per_rank, experts_per_rank, **shape):
    ranks = len(tokens_per_rank)
    case = Case(tokens=sum(tokens_per_rank), num_experts=ranks * experts_per_rank, **shape)
    workspace = case.workspace(ranks, max_tokens=max(tokens_per_rank))
    actual, expected = run(case, workspace, tokens_per_rank), reference(case)
    for name in expected:
        # Few elements average little: the bound of each block.
        assert torch.isfinite(actual[name]).all()
        assert relative_error(actual[name], expected[name]) <= 2 * 5 * 2.0**-8, name


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_types_of_routes(index_dtype, weights_dtype):
    case = Case(weights_dtype=weights_dtype)
    case.topk_idx = case.topk_idx.to(index_dtype)
    actual = run(case, case.workspace())
    assert actual["topk_weights"].dtype == weights_dtype
    assert actual["out"].dtype == actual["x"].dtype == actual["w13"].dtype == torch.bfloat16
    assert_close(actual, reference(case))


def test_case_13_all_widths_different():
    case = Case(hidden=512, intermediate=384, shared_intermediate=640, num_experts=4, tokens=12)
    assert_close(run(case, case.workspace(2)), reference(case))


def test_case_30_weights_zero_and_negative():
    case = Case()
    case.topk_weights[::3] = 0.0
    case.topk_weights[1::3] *= -1.0
    actual, expected = run(case, case.workspace(2)), reference(case)
    assert_close(actual, expected)
    assert actual["topk_weights"][::3].abs().min() > 0


def test_non_contiguous_inputs_are_copied():
    case = Case()
    expected = run(case, case.workspace(2))
    case.x = case.x.T.contiguous().T
    case.w13 = case.w13.transpose(1, 2).contiguous().transpose(1, 2)
    case.w2 = torch.stack([case.w2, case.w2], dim=-1)[..., 0]
    case.topk_idx = case.topk_idx.T.contiguous().T
    case.topk_weights = case.topk_weights.T.contiguous().T
    case.dout = case.dout[:, :1].expand(-1, case.hidden)
    assert not any(t.is_contiguous() for t in (case.x, case.w13, case.w2, case.topk_idx, case.topk_weights, case.dout))
    actual = run(case, case.workspace(2))
    assert torch.equal(actual["out"], expected["out"])
    assert_close(actual, reference(case))


def test_gradients_agree_with_differences():
    """The derivative along each input's gradient, by central differences of the fp64 reference."""
    case = Case(tokens=10, shared_intermediate=32)
    gradients = run(case, case.workspace(2))

    def loss(name, step):
        moved = {n: t.double() for n, t in case.inputs().items()}
        moved[name] = moved[name] + step * gradients[name].double()
        other = case.with_()
        for n, t in moved.items():
            setattr(other, n, t)
        return (reference(other)["out"] * case.dout.double()).sum().item()

    for name in case.inputs():
        step = 1e-6 / gradients[name].double().norm().item()
        slope = (loss(name, step) - loss(name, -step)) / (2 * step)
        square = gradients[name].double().square().sum().item()
        assert abs(slope - square) <= 5 * 2.0**-8 * square, name


def test_autocast_casts_and_keeps_fp32_gradients():
    case = Case()
    expected = run(case, case.workspace())
    leaves = {name: tensor.float().requires_grad_() for name, tensor in case.inputs().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = clowder.moe(topk_idx=case.topk_idx, workspace=case.workspace(), **leaves)
    out.backward(case.dout)
    assert torch.equal(out, expected["out"])
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad, expected[name].float()), name
