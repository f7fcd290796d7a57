"""Every form of the weights: the same bits, and gradients where the parameters are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import Case, run

import clowder

FORMS = ("stacked", "pair", "list", "pair of lists")


def as_form(w13, w2, form):
    """Tensors of their own in this form, from w13 [E, 2I, H] and w2 [E, H, I]."""
    gate, up = (half.clone() for half in w13.chunk(2, dim=1))
    if form == "stacked":
        return w13.clone(), w2.clone()
    if form == "pair":
        return (gate, up), w2.clone()
    experts = [expert.clone() for expert in w2]
    if form == "list":
        return [expert.clone() for expert in w13], experts
    return ([expert.clone() for expert in gate], [expert.clone() for expert in up]), experts


def to_stacked(w13, form):
    """[E, 2I, H] from gradients in a form."""
    if form == "stacked":
        return w13
    if form == "pair":
        return torch.cat(tuple(w13), dim=1)
    if form == "list":
        return torch.stack(list(w13))
    return torch.cat([torch.stack(list(half)) for half in w13], dim=1)


def leaves_of(weight):
    if isinstance(weight, torch.Tensor):
        return [weight]
    return [leaf for part in weight for leaf in leaves_of(part)]


def gradients_of(weight):
    return weight.grad if isinstance(weight, torch.Tensor) else [gradients_of(part) for part in weight]


def assert_form(form, ranks, case):
    expected = run(case, case.workspace(ranks))
    weights = dict(zip(("w13", "w2"), as_form(case.w13, case.w2, form)))
    if case.shared_intermediate:
        is_split = "pair" in form
        weights["shared_w13"] = (
            tuple(t.clone() for t in case.shared_w13.chunk(2)) if is_split else case.shared_w13.clone()
        )
        weights["shared_w2"] = case.shared_w2.clone()
    inputs = {"x": case.x.clone(), "topk_weights": case.topk_weights.clone()} | weights
    for value in inputs.values():
        for leaf in leaves_of(value):
            leaf.requires_grad_()
    out = clowder.moe(topk_idx=case.topk_idx, workspace=case.workspace(ranks), **inputs)
    out.backward(case.dout)
    assert torch.equal(out, expected["out"])
    assert torch.equal(inputs["x"].grad, expected["x"])
    assert torch.equal(inputs["topk_weights"].grad, expected["topk_weights"])
    assert torch.equal(to_stacked(gradients_of(weights["w13"]), form), expected["w13"])
    w2 = gradients_of(weights["w2"])
    assert torch.equal(w2 if isinstance(w2, torch.Tensor) else torch.stack(w2), expected["w2"])
    if case.shared_intermediate:
        shared = gradients_of(weights["shared_w13"])
        shared = shared if isinstance(shared, torch.Tensor) else torch.cat(shared)
        assert torch.equal(shared, expected["shared_w13"])
        assert torch.equal(weights["shared_w2"].grad, expected["shared_w2"])


@given(
    form=st.sampled_from(FORMS),
    ranks=st.sampled_from([1, 2]),
    experts_per_rank=st.integers(1, 4),  # with one or two experts in all, forms look alike
    shared_intermediate=st.sampled_from([0, 32]),
    seed=st.integers(0, 5),
)
def test_forms_have_the_same_bits(form, ranks, experts_per_rank, shared_intermediate, seed):
    case = Case(
        tokens=17, num_experts=ranks * experts_per_rank, shared_intermediate=shared_intermediate, seed=seed, dropped=0.2
    )
    assert_form(form, ranks, case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_by_themselves(form, ranks):
    case = Case()
    workspace = case.workspace(ranks)
    schedule = workspace.build_schedule(case.topk_idx)
    w13, w2 = as_form(case.w13, case.w2, form)
    out, saved = clowder.forward(workspace, schedule, case.x, case.topk_weights, w13, w2)
    arguments = (workspace, schedule, saved, case.dout, case.x, case.topk_weights)
    gradients = clowder.backward(*arguments, w13, w2, weight_dtype=torch.float32)
    expected = clowder.backward(*arguments, case.w13, case.w2, weight_dtype=torch.float32)
    assert torch.equal(to_stacked(gradients.w13, form), expected.w13)
    assert torch.equal(torch.stack(tuple(gradients.w2)), expected.w2)
    assert gradients.shared_w13 is None and gradients.shared_w2 is None

    mains13, mains2 = as_form(torch.ones_like(expected.w13), torch.ones_like(expected.w2), form)
    none = clowder.backward(*arguments, w13, w2, main_grads={"w13": mains13, "w2": mains2})
    assert none.w13 is None and none.w2 is None
    assert torch.equal(to_stacked(mains13, form), 1 + expected.w13)
    assert torch.equal(torch.stack(tuple(mains2)), 1 + expected.w2)


def test_experts_frozen_one_by_one():
    case = Case()
    expected = run(case, case.workspace(2))
    w13, w2 = as_form(case.w13, case.w2, "list")
    for expert in (1, 4):
        w13[expert].requires_grad_()
    out = clowder.moe(case.x, case.topk_idx, case.topk_weights, w13, w2, workspace=case.workspace(2))
    out.backward(case.dout)
    for expert in range(8):
        if expert in (1, 4):
            assert torch.equal(w13[expert].grad, expected["w13"][expert])
        else:
            assert w13[expert].grad is None


def test_parts_that_are_not_contiguous():
    """w1 and w3 as views of one tensor: the engine reads copies, and the views get the gradients."""
    case = Case()
    expected = run(case, case.workspace(2))
    w13 = case.w13.clone().requires_grad_()
    w2 = case.w2.transpose(1, 2).contiguous().requires_grad_()
    w1, w3 = w13.chunk(2, dim=1)
    assert not w1.is_contiguous()
    out = clowder.moe(
        case.x, case.topk_idx, case.topk_weights, (w1, w3), w2.transpose(1, 2), workspace=case.workspace(2)
    )
    out.backward(case.dout)
    assert torch.equal(w13.grad, expected["w13"])
    assert torch.equal(w2.grad.transpose(1, 2), expected["w2"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w13", lambda w13, w2: (list(w13[:7]), w2)),
        ("w13", lambda w13, w2: ([*w13, w13[0]], w2)),
        ("w13[1]", lambda w13, w2: ((w13[:, :32], w13[:, :31]), w2)),
        ("w13[0]", lambda w13, w2: ((w13, w13), w2)),
        ("w13", lambda w13, w2: ((w13[:, :32],) * 3, w2)),
        ("w13[2]", lambda w13, w2: ([*w13[:2], w13[2].float(), *w13[3:]], w2)),
        ("w13[7]", lambda w13, w2: ([*w13[:7], w13[7, :, :32]], w2)),
        ("w13", lambda w13, w2: ([*w13[:7], "w13"], w2)),
        ("w13", lambda w13, w2: ([], w2)),
        ("w13", lambda w13, w2: (3, w2)),
        ("w2", lambda w13, w2: (w13, (w2, w2))),
        ("w2", lambda w13, w2: (w13, list(w2[:4]))),
        ("w2", lambda w13, w2: (w13, None)),
    ],
)
def test_wrong_forms(name, change):
    case = Case()
    workspace = case.workspace(2)
    w13, w2 = change(case.w13, case.w2)
    with pytest.raises(clowder.ClowderError) as error:
        clowder.moe(case.x, case.topk_idx, case.topk_weights, w13, w2, workspace=workspace)
    assert error.value.code == "argument" and str(error.value).startswith(f"{name}: ")
    run(case, workspace)


# The module's layouts.


def make(layout, **options):
    torch.manual_seed(0)
    return clowder.nn.MoE(64, 32, 8, 2, group=clowder.VirtualGroup(2), layout=layout, **options)


def test_layouts_of_the_module():
    stacked, separate, per_expert = (
        make(layout, shared_intermediate=32) for layout in ("stacked", "separate", "per_expert")
    )
    assert set(separate.state_dict()) == {"router.weight", "w1", "w3", "w2", "shared_w1", "shared_w3", "shared_w2"}
    experts = {f"{name}.{e}" for name in ("w13", "w2") for e in range(8)}
    assert set(per_expert.state_dict()) == {"router.weight", "shared_w13", "shared_w2", *experts}
    w1, w3 = stacked.w13.detach().chunk(2, dim=1)
    shared_w1, shared_w3 = stacked.shared_w13.detach().chunk(2)
    common = {name: tensor for name, tensor in stacked.state_dict().items() if name in ("router.weight", "shared_w2")}
    separate.load_state_dict(
        common | {"w1": w1, "w3": w3, "w2": stacked.w2, "shared_w1": shared_w1, "shared_w3": shared_w3}
    )
    per_expert.load_state_dict(
        common
        | {"shared_w13": stacked.shared_w13}
        | {f"w13.{e}": stacked.w13[e] for e in range(8)}
        | {f"w2.{e}": stacked.w2[e] for e in range(8)}
    )
    x = torch.randn(20, 64).bfloat16()
    outs = []
    for module in (stacked, separate, per_expert):
        out = module(x)
        out.float().square().mean().backward()
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert torch.equal(torch.cat((separate.w1.grad, separate.w3.grad), dim=1), stacked.w13.grad)
    assert torch.equal(torch.stack([expert.grad for expert in per_expert.w13]), stacked.w13.grad)
    assert torch.equal(torch.stack([expert.grad for expert in per_expert.w2]), stacked.w2.grad)
    assert torch.equal(torch.cat((separate.shared_w1.grad, separate.shared_w3.grad)), stacked.shared_w13.grad)
    assert torch.equal(separate.router.weight.grad, stacked.router.weight.grad)


@pytest.mark.parametrize("layout", ["stacked", "separate", "per_expert"])
def test_initialisation(layout):
    """normal(0, 0.02), and smaller towards the residual stream; means and deviations within five of their own."""
    module = clowder.nn.MoE(128, 96, 16, 2, shared_intermediate=64, layout=layout, num_layers=8, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        std = 0.02 / 4.0 if name.startswith(("w2", "shared_w2")) else 0.02
        count = parameter.numel()
        assert abs(parameter.mean()) <= 5 * std / count**0.5, name
        assert abs(parameter.std() - std) <= 5 * std / (2 * count) ** 0.5, name


def test_unknown_layout():
    with pytest.raises(clowder.ClowderError, match="layout: 'fused', must be 'stacked' or 'separate' or 'per_expert'"):
        make("fused")
