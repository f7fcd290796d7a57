"""Activation checkpointing and autocast: the gradients of the plain module, bit for bit."""

import pytest
import torch
from reference import Case, assert_same_bits, run
from torch.utils.checkpoint import checkpoint

import clowder

WAYS = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "keep_routes": {"use_reentrant": False, "context_fn": clowder.nn.keep_routes},
}


def make(**options):
    torch.manual_seed(0)
    return clowder.nn.MoE(64, 32, 8, 2, **{"group": clowder.VirtualGroup(2), **options})


def tokens(count=40):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def step(module, function, x, *, with_aux=True):
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    loss = out.float().square().mean()
    (loss + module.aux_loss if with_aux else loss).backward()
    return {"out": out.detach(), "x": leaf.grad} | {n: p.grad.clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "options", [{}, {"shared_intermediate": 32, "saved_rows": 9}, {"router": "deepseek_v3"}], ids=str
)
def test_case_21_gradients_equal_those_of_saved_activations(way, options):
    module = make(**options)
    with_aux = not way["use_reentrant"]
    expected = step(module, module, tokens(), with_aux=with_aux)
    actual = step(module, lambda x: checkpoint(module, x, **way), tokens(), with_aux=with_aux)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_case_21_a_model_of_layers(way):
    first, second = make(), make(max_tokens=40)
    results = []
    for is_checkpointed in (False, True):
        x = tokens().requires_grad_()
        hidden = x
        for module in (first, second):
            module.zero_grad()
            hidden = hidden + (checkpoint(module, hidden, **way) if is_checkpointed else module(hidden))
        hidden.float().square().mean().backward()
        results.append({"x": x.grad, "first": first.w13.grad, "second": second.router.weight.grad})
    assert_same_bits(*results)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_case_22_identical_logits_for_all_tokens(way):
    module = make()
    torch.nn.init.zeros_(module.router.weight)
    x = tokens()[:1].expand(40, -1)
    actual = step(module, lambda x: checkpoint(module, x, **way), x, with_aux=False)
    assert module.expert_counts.tolist() == [40, 40, 0, 0, 0, 0, 0, 0]
    assert_same_bits(actual, step(module, module, x, with_aux=False))


class FickleRouter(torch.nn.Module):
    """Chooses other experts each time it runs, as a router with noise would."""

    def __init__(self):
        super().__init__()
        self.inner = clowder.nn.SoftmaxRouter(64, 8, 2, dtype=torch.bfloat16)
        self.calls = 0

    def forward(self, x):
        scores = torch.softmax(self.inner.logits(x), dim=-1)
        shifted = scores.detach().roll(self.calls, dims=-1)
        self.calls += 1
        topk_idx = torch.ops.clowder.choose_experts(shifted, 2, 1, 1)
        return clowder.nn.Routes(topk_idx, scores.gather(1, topk_idx), scores)


def test_case_21_saved_routes_drive_recomputation(monkeypatch):
    module = make(router=FickleRouter())
    expected = step(module, module, tokens())
    schedules = []
    core = type(module.workspace._engine.core)
    build = core.build_schedule
    monkeypatch.setattr(core, "build_schedule", lambda *arguments: schedules.append(1) or build(*arguments))
    module.router.calls = 0
    actual = step(module, lambda x: checkpoint(module, x, **WAYS["keep_routes"]), tokens())
    assert module.router.calls == 2 and len(schedules) == 1
    assert_same_bits(actual, expected)
    module.router.calls = 0
    without = step(module, lambda x: checkpoint(module, x, **WAYS["plain"]), tokens())
    assert not torch.equal(without["w13"], expected["w13"])  # so the test can tell


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_layer_without_a_router(way):
    case = Case(shared_intermediate=32, dropped=0.1)
    workspace = case.workspace(2)
    expected = run(case, workspace)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.inputs().items()}

    def layer(*inputs):
        return clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **dict(zip(leaves, inputs)))

    out = checkpoint(layer, *leaves.values(), **way)
    out.backward(case.dout)
    assert_same_bits({"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}, expected)


def test_reentrant_checkpointing_does_not_lose_the_balance_loss_in_silence():
    module = make()
    out = checkpoint(module, tokens().requires_grad_(), use_reentrant=True)
    with pytest.raises(clowder.ClowderError, match="use_reentrant=False") as error:
        out.sum() + module.aux_loss
    assert error.value.code == "unsupported"
    with torch.no_grad():
        assert module.aux_loss > 0
    out.float().sum().backward()
    module.eval()
    with torch.no_grad():
        module(tokens())
    assert not module.aux_loss.requires_grad


@pytest.mark.parametrize("why", ["frozen router", "no coefficient"])
def test_a_balance_loss_without_a_graph_to_lose(why):
    module = make(aux_loss_coefficient=0.0 if why == "no coefficient" else 0.01)
    module.router.requires_grad_(why == "no coefficient")
    checkpoint(module, tokens().requires_grad_(), use_reentrant=True).float().sum().backward()
    assert not module.aux_loss.requires_grad
    assert module.w13.grad.abs().sum() > 0


def test_recomputation_is_no_call():
    module = make()
    out = checkpoint(module, tokens().requires_grad_(), use_reentrant=False)
    loss, counts = module.aux_loss, module.expert_counts
    out.float().sum().backward(retain_graph=True)
    assert module.aux_loss is loss and module.expert_counts is counts
    loss.backward()


# Autocast.


def test_autocast_leaves_the_router_in_fp32():
    """Routes, and gradients through them, are those of fp32 arithmetic, also where backward runs under autocast."""
    router = make(dtype=torch.float32, router="deepseek_v3").router
    plain = router(tokens().float())
    results = []
    for is_forward_inside, is_backward_inside in ((False, False), (True, False), (True, True)):
        router.zero_grad()
        x = tokens().float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_forward_inside):
            routes = router(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_backward_inside):
            (routes.topk_weights.square().sum() + routes.scores.square().sum()).backward()
        for actual, expected in zip(routes, plain):
            assert actual.dtype == expected.dtype and torch.equal(actual, expected)
        results.append({"x": x.grad, "weight": router.weight.grad.clone()})
    assert results[0]["weight"].dtype == torch.float32
    for result in results[1:]:
        assert_same_bits(result, results[0])
    x, weight = tokens().double().requires_grad_(), router.weight.detach().double().requires_grad_()
    scores = torch.sigmoid(x @ weight.T)
    chosen = scores.gather(1, plain.topk_idx)
    loss = sum((part / part.sum(-1, keepdim=True)).square().sum() for part in (chosen, scores))
    expected = dict(zip(("x", "weight"), torch.autograd.grad(loss, (x, weight))))
    for name, gradient in expected.items():
        # fp32: sums of 64 terms and fewer, and some twenty operations more.
        assert (results[0][name].double() - gradient).norm() <= 84 * 2.0**-24 * gradient.norm(), name


@pytest.mark.parametrize("layout", ["stacked", "separate", "per_expert"])
def test_autocast_runs_experts_in_bf16(layout):
    """The same bits as a module whose parameters were rounded before."""
    module = make(dtype=torch.float32, shared_intermediate=32, layout=layout)
    rounded = make(dtype=torch.float32, shared_intermediate=32, layout=layout)
    rounded.load_state_dict(module.state_dict())
    for name, parameter in rounded.named_parameters():
        if not name.startswith("router"):
            parameter.data = parameter.data.bfloat16()
    x = tokens().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = step(module, module, x)
    expected = step(rounded, rounded, x.bfloat16())
    assert torch.equal(actual["out"], expected["out"])
    for name, _ in rounded.named_parameters():
        assert actual[name].dtype == torch.float32
        assert torch.equal(actual[name], expected[name].float()), name


def test_fp32_inputs_raise_outside_autocast():
    module = make()
    with pytest.raises(clowder.ClowderError, match=r'x: torch\.float32, must be .* torch\.autocast\("cpu"'):
        module(tokens().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(tokens().float()), make()(tokens()))
