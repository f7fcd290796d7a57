"""Gradients that are added to the caller's: by hand, through autograd, and in Megatron-LM's way."""

import pytest
import torch
from reference import Case

import clowder

NAMES = ("w13", "w2", "shared_w13", "shared_w2")


def exact_gradients(case, workspace):
    """The weights' gradients in fp32, by name."""
    schedule = workspace.build_schedule(case.topk_idx)
    _, saved = clowder.forward(workspace, schedule, **case.inputs())
    gradients = clowder.backward(workspace, schedule, saved, case.dout, **case.inputs(), weight_dtype=torch.float32)
    return {name: getattr(gradients, name) for name in NAMES if getattr(gradients, name) is not None}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_intermediate", [0, 32])
def test_micro_batches_add_up(ranks, dtype, shared_intermediate):
    """Each adds once, in fp32, with one rounding; all forward passes run before all backward passes."""
    cases = [Case(shared_intermediate=shared_intermediate, seed=seed) for seed in range(3)]
    for case in cases[1:]:
        for name in NAMES:
            setattr(case, name, getattr(cases[0], name))
    workspace = cases[0].workspace(ranks)
    weights = {name: getattr(cases[0], name) for name in NAMES if getattr(cases[0], name) is not None}
    expected = {name: torch.randn(weight.shape).to(dtype) for name, weight in weights.items()}
    mains = {name: main.clone() for name, main in expected.items()}
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    outs = [
        clowder.moe(case.x, case.topk_idx, case.topk_weights, **leaves, workspace=workspace, main_grads=mains)
        for case in cases
    ]
    for case, out in zip(cases, outs):
        out.backward(case.dout)
        for name, gradient in exact_gradients(case, workspace).items():
            expected[name] = (expected[name].float() + gradient).to(dtype)
    for name, leaf in leaves.items():
        assert leaf.grad is None
        assert torch.equal(mains[name], expected[name]), name


def test_some_weights_only():
    """The others' gradients come as usual."""
    case = Case(shared_intermediate=32)
    workspace = case.workspace(2)
    exact = exact_gradients(case, workspace)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.inputs().items()}
    mains = {"w2": torch.ones_like(case.w2, dtype=torch.float32), "shared_w13": torch.ones_like(case.shared_w13)}
    out = clowder.moe(topk_idx=case.topk_idx, workspace=workspace, main_grads=mains, **leaves)
    out.backward(case.dout)
    assert torch.equal(mains["w2"], 1 + exact["w2"])
    assert torch.equal(mains["shared_w13"], (1 + exact["shared_w13"]).bfloat16())
    assert torch.equal(leaves["w13"].grad, exact["w13"].bfloat16())
    assert torch.equal(leaves["shared_w2"].grad, exact["shared_w2"].bfloat16())
    assert leaves["w2"].grad is None and leaves["shared_w13"].grad is None
    assert leaves["x"].grad.abs().sum() > 0


def make(layout="stacked", **options):
    torch.manual_seed(0)
    return clowder.nn.MoE(
        64, 32, 8, 2, group=clowder.VirtualGroup(2), layout=layout, gradient_accumulation_fusion=True, **options
    )


def experts(module):
    return [parameter for name, parameter in module.named_parameters() if not name.startswith("router")]


@pytest.mark.parametrize("layout", ["stacked", "separate", "per_expert"])
@pytest.mark.parametrize("way", ["plain", "checkpointed", "autocast"])
def test_a_module_adds_to_main_grad(layout, way):
    module = make(layout, shared_intermediate=32, dtype=torch.float32 if way == "autocast" else None)
    for parameter in experts(module):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    x = torch.randn(30, 64).bfloat16()

    def call():
        if way == "checkpointed":
            return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
            return module(x)

    for _ in range(2):
        call().float().square().sum().backward()
    assert all(parameter.grad is None for parameter in experts(module))
    assert module.router.weight.grad is not None
    for parameter in experts(module):
        twice = parameter.main_grad.clone()
        parameter.main_grad.zero_()
        parameter.twice = twice
    call().float().square().sum().backward()
    for parameter in experts(module):
        assert parameter.main_grad.abs().sum() > 0
        assert torch.equal(parameter.twice, 2 * parameter.main_grad)  # doubling is exact


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_in_megatron_lms_way(is_checkpointed):
    """Its hooks run, find a gradient to throw away and the mark that says why."""
    module = make()
    seen = []

    def hook(parameter):
        assert parameter.grad_added_to_main_grad and not parameter.grad.any()
        parameter.grad = None
        seen.append(parameter)

    for parameter in experts(module):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(hook)
    x = torch.randn(30, 64).bfloat16()
    out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) if is_checkpointed else module(x)
    out.float().square().sum().backward()
    assert {id(parameter) for parameter in seen} == {id(parameter) for parameter in experts(module)}
    assert all(parameter.main_grad.abs().sum() > 0 for parameter in experts(module))


def test_case_34_frozen_experts_need_no_main_grad():
    module = make()
    module.w2.requires_grad_(False)
    module.w13.main_grad = torch.zeros_like(module.w13)
    module(torch.randn(30, 64).bfloat16()).float().sum().backward()
    assert module.w13.main_grad.abs().sum() > 0


def test_missing_and_wrong_main_grads():
    module = make()
    x = torch.randn(30, 64).bfloat16()
    with pytest.raises(clowder.ClowderError, match="main_grad: none on w13"):
        module(x)
    with torch.no_grad():
        module(x)
    module.w13.main_grad = torch.zeros_like(module.w13)
    module.w2.main_grad = torch.zeros(3)
    with pytest.raises(clowder.ClowderError, match=r"main_grads\['w2'\]: shape"):
        module(x)
    module.w2.main_grad = torch.zeros_like(module.w2)
    module(x).float().sum().backward()
