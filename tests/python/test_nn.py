"""The module: parameters, router, balance loss, and the same bits on any number of ranks."""

import copy

import pytest
import torch
from reference import Case, assert_close, reference

import clowder
from clowder.nn.router import load_balance_loss


def make(ranks=1, **options):
    torch.manual_seed(0)
    return clowder.nn.MoE(64, 32, 8, 2, group=clowder.VirtualGroup(ranks), **options)


def step(module, x):
    """Results and all gradients of one training step."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x)
    (out.float().square().mean() + module.aux_loss).backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "aux_loss": module.aux_loss.detach()} | gradients


def test_state_dict():
    module = make(shared_intermediate=96)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert shapes == {
        "router.weight": (8, 64),
        "w13": (8, 64, 64),
        "w2": (8, 64, 32),
        "shared_w13": (192, 64),
        "shared_w2": (64, 96),
    }
    assert set(make().state_dict()) == {"router.weight", "w13", "w2"}
    other = make(shared_intermediate=96)
    other.reset_parameters()
    x = torch.randn(5, 64).bfloat16()
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))


def test_values_equal_the_layer_on_the_routers_choice():
    module = make(2, shared_intermediate=32)
    case = Case(shared_intermediate=32)
    with torch.no_grad():
        for name in ("w13", "w2", "shared_w13", "shared_w2"):
            getattr(module, name).copy_(getattr(case, name))
    x = case.x.clone().requires_grad_()
    routes = module.router(x)
    case.topk_idx, case.topk_weights = routes.topk_idx, routes.topk_weights.detach()
    assert torch.allclose(routes.topk_weights.sum(-1), torch.ones(case.tokens))
    assert torch.allclose(routes.scores.sum(-1), torch.ones(case.tokens))
    out = module(x)
    assert_close({"out": out.detach()}, {"out": reference(case)["out"]})


def test_router_weight_gets_the_gradient_of_routes_and_balance():
    module = make(2, aux_loss_coefficient=0.5)
    x = torch.randn(30, 64).bfloat16()
    (out, aux) = (module(x), module.aux_loss)
    (from_aux,) = torch.autograd.grad(aux, module.router.weight, retain_graph=True)
    (from_out,) = torch.autograd.grad(out.float().square().mean(), module.router.weight)
    assert from_aux.abs().sum() > 0 and from_out.abs().sum() > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_d3_same_bits_on_any_number_of_ranks(ranks):
    x = torch.randn(3, 7, 64).bfloat16()
    one, several = step(make(1), x), step(make(ranks), x)
    for name in one:
        assert torch.equal(one[name], several[name]), name


def test_shapes_and_workspace_growth():
    module = make(2)
    assert module(torch.zeros(64).bfloat16()).shape == (64,)
    assert module(torch.zeros(0, 3, 64).bfloat16()).shape == (0, 3, 64)
    assert module(torch.zeros(2, 3, 5, 64).bfloat16()).shape == (2, 3, 5, 64)
    assert module.workspace.max_tokens == 15
    module(torch.zeros(2, 64).bfloat16())
    assert module.workspace.max_tokens == 15
    assert module.expert_counts.sum() == 4


def test_growth_between_forward_and_backward():
    module = make(2)
    first, second = module(torch.randn(4, 64).bfloat16()), module(torch.randn(40, 64).bfloat16())
    (first.float().sum() + second.float().sum()).backward()
    assert torch.isfinite(module.w13.grad).all()


def test_fixed_max_tokens():
    module = make(2, max_tokens=4)
    module(torch.zeros(8, 64).bfloat16())
    with pytest.raises(clowder.ClowderError, match="tokens: 5 on one rank"):
        module(torch.zeros(9, 64).bfloat16())


def test_balance_loss():
    even = torch.full((4, 8), 1 / 8)
    assert load_balance_loss(even, torch.ones(8), topk=2).item() == pytest.approx(1.0)
    one_expert = torch.zeros(4, 8).index_fill(1, torch.tensor([3]), 1.0)
    counts = torch.zeros(8).index_fill(0, torch.tensor([3]), 8)
    assert load_balance_loss(one_expert, counts, topk=2).item() == pytest.approx(8.0)
    assert load_balance_loss(torch.zeros(0, 8), torch.zeros(8), topk=2).item() == 0.0
    module = make(aux_loss_coefficient=0.0)
    module(torch.randn(4, 64).bfloat16())
    assert module.aux_loss.item() == 0.0


def test_without_renormalisation():
    module = make(renormalise=False)
    routes = module.router(torch.randn(6, 64).bfloat16())
    assert torch.equal(routes.topk_weights, routes.scores.gather(1, routes.topk_idx))


def test_case_34_frozen_router_and_frozen_experts():
    x = torch.randn(20, 64).bfloat16()
    full = step(make(2), x)
    for frozen in (["router.weight"], ["w13", "w2"], ["router.weight", "w13", "w2"]):
        module = make(2)
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        leaf = x.clone().requires_grad_()
        (module(leaf).float().square().mean() + module.aux_loss).backward()
        assert torch.equal(leaf.grad, full["x"])
        for name, parameter in module.named_parameters():
            if name in frozen:
                assert parameter.grad is None
            else:
                assert torch.equal(parameter.grad, full[name]), name


def test_fp32_parameters_need_autocast():
    module = make(dtype=torch.float32)
    x = torch.randn(6, 64)
    with pytest.raises(clowder.ClowderError, match=r"x: torch\.float32"):
        module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


def test_shared_workspace():
    first = make(2, max_tokens=16)
    second = make(2, workspace=first.workspace)
    x = torch.randn(20, 64).bfloat16()
    assert second.workspace is first.workspace
    second(first(x)).float().sum().backward()
    with pytest.raises(clowder.ClowderError, match="workspace: of intermediate = 32, must be of 64"):
        clowder.nn.MoE(64, 64, 8, 2, workspace=first.workspace)
    for option in ({"group": clowder.VirtualGroup(4)}, {"max_tokens": 3}, {"saved_rows": 5}, {"keep_x": True}):
        with pytest.raises(clowder.ClowderError, match=next(iter(option))):
            clowder.nn.MoE(64, 32, 8, 2, workspace=first.workspace, **option)


def test_copies():
    module = make(2)
    x = torch.randn(6, 64).bfloat16()
    module(x)
    twin = copy.deepcopy(module.requires_grad_(False))
    assert torch.equal(twin(x), module(x))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("router", {"router": "sinkhorn"}),
        ("num_experts", {"group": clowder.VirtualGroup(3)}),
        ("activation", {"activation": "gelu"}),
        ("topk", {"num_experts": 1}),
    ],
)
def test_arguments(name, options):
    with pytest.raises(clowder.ClowderError, match=name) as error:
        clowder.nn.MoE(**({"hidden": 64, "intermediate": 32, "num_experts": 8, "topk": 2} | options))
    assert error.value.code == "argument"
    with pytest.raises(clowder.ClowderError, match="x: shape"):
        make()(torch.zeros(3, 32).bfloat16())
