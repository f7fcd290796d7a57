"""CASES row 34: nothing is computed or saved that nobody needs, and the rest is right."""

import pytest
import torch
from reference import Case, assert_same_bits, run

import clowder

BF16, FP32, INT64 = 2, 4, 8


class Memory:
    """Bytes of storages that autograd saves, without the tensors that the caller owns."""

    def __init__(self, *owned):
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self.sizes = {}

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._owned:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self):
        return sum(self.sizes.values())


class Work:
    """Counts the engine's passes."""

    def __init__(self, monkeypatch, workspace):
        self.passes = []
        core = type(workspace._engine.core)
        for name in ("build_schedule", "forward", "backward"):
            original = getattr(core, name)
            monkeypatch.setattr(core, name, self._counted(name, original))

    def _counted(self, name, original):
        def method(*arguments):
            self.passes.append(name)
            return original(*arguments)

        return method


def saved_bytes(case, workspace, *needed):
    leaves = {name: tensor.clone().requires_grad_(name in needed) for name, tensor in case.inputs().items()}
    schedule = workspace.build_schedule(case.topk_idx)
    with Memory(*leaves.values(), schedule.table, workspace.handle) as memory:
        out = clowder.functional.routed(workspace, schedule, **leaves)
    return out, memory.bytes


def test_case_34_what_is_saved_is_what_the_design_says():
    """g and u of the routed rows up to saved_rows, the shared expert's, and nothing else."""
    case = Case(shared_intermediate=96)
    workspace = case.workspace(2, saved_rows=20)
    rows = 2 * 20 * 2 * case.intermediate * BF16
    shared = case.tokens * 2 * 96 * BF16
    for needed in ("x", "topk_weights", "w13", "w2"):
        assert saved_bytes(case, workspace, needed)[1] == rows + shared, needed
    for needed in ("shared_w13", "shared_w2"):
        assert saved_bytes(case, workspace, needed)[1] == shared, needed
    out, nothing = saved_bytes(case, workspace)
    assert nothing == 0 and not out.requires_grad
    with torch.no_grad():
        assert saved_bytes(case, workspace, "x", "w13")[1] == 0
    kept = case.workspace(2, saved_rows=20, keep_x=True)
    assert saved_bytes(case, kept, "w13")[1] == rows + shared + 2 * 20 * case.hidden * BF16


@pytest.mark.parametrize("needed", [("shared_w13",), ("shared_w2",), ("shared_w13", "shared_w2")])
def test_case_34_a_shared_expert_alone_is_trained(needed):
    """Its gradients are right though nothing of the routed rows is saved."""
    case = Case(shared_intermediate=96)
    expected = run(case, case.workspace(2))
    leaves = {name: tensor.clone().requires_grad_(name in needed) for name, tensor in case.inputs().items()}
    out = clowder.moe(topk_idx=case.topk_idx, workspace=case.workspace(2), **leaves)
    out.backward(case.dout)
    for name in needed:
        assert torch.equal(leaves[name].grad, expected[name])


def test_case_34_engine_passes(monkeypatch):
    case = Case()
    workspace = case.workspace(2)
    work = Work(monkeypatch, workspace)
    x = case.x.clone().requires_grad_()
    out = clowder.moe(x, case.topk_idx, case.topk_weights, case.w13, case.w2, workspace=workspace)
    assert work.passes == ["build_schedule", "forward"]
    torch.autograd.grad(x.float().sum(), x)
    assert work.passes == ["build_schedule", "forward"]
    out.backward(case.dout)
    assert work.passes == ["build_schedule", "forward", "backward"]
    work.passes.clear()
    out = clowder.moe(case.x, case.topk_idx, case.topk_weights, case.w13, case.w2, workspace=workspace)
    assert not out.requires_grad and work.passes == ["build_schedule", "forward"]


def make(**options):
    torch.manual_seed(0)
    return clowder.nn.MoE(64, 32, 8, 2, group=clowder.VirtualGroup(2), max_tokens=20, **options)


def test_case_34_a_frozen_module_saves_nothing():
    module = make(shared_intermediate=32).requires_grad_(False)
    x = torch.randn(40, 64).bfloat16()
    with Memory(x) as memory:
        out = module(x)
    assert memory.bytes == 0 and not out.requires_grad and not module.aux_loss.requires_grad


@pytest.mark.parametrize("router", ["softmax", "deepseek_v3"])
def test_case_34_the_router_saves_no_copy_of_x(router):
    """What it saves is of size [T, E] and [T, K]: a few of each, far from an fp32 copy of x."""
    module = make(router=router)
    x = torch.randn(40, 64).bfloat16().requires_grad_()
    with Memory(x, *module.parameters()) as memory:
        routes = module.router(x)
    assert memory.bytes <= 40 * (3 * 8 * FP32 + 2 * 2 * FP32 + 2 * INT64) + 2 * 40 * FP32
    assert memory.bytes < x.numel() * FP32
    routes.topk_weights.sum().backward()


def test_case_34_frozen_experts_leave_only_what_x_and_the_router_need():
    """No gradient of a weight is allocated or computed: checked by what the engine is asked for."""
    module = make()
    for parameter in (module.w13, module.w2):
        parameter.requires_grad_(False)
    x = torch.randn(40, 64).bfloat16()
    expected = make()
    leaf, other = (x.clone().requires_grad_() for _ in range(2))
    (module(leaf).float().square().mean() + module.aux_loss).backward()
    (expected(other).float().square().mean() + expected.aux_loss).backward()
    assert torch.equal(leaf.grad, other.grad)
    assert torch.equal(module.router.weight.grad, expected.router.weight.grad)
    assert module.w13.grad is None and module.w2.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_case_34_without_gradients(mode):
    module = make(shared_intermediate=32)
    x = torch.randn(40, 64).bfloat16()
    expected = module(x)
    with mode(), Memory(x) as memory:
        out = module(x)
    assert memory.bytes == 0 and not out.requires_grad
    assert torch.equal(out, expected)


def test_case_34_a_workspace_made_in_inference_mode_trains_later():
    case = Case()
    with torch.inference_mode():
        workspace = case.workspace(2)
        clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **case.inputs())
    assert_same_bits(run(case, workspace), run(case, case.workspace(2)))


def test_the_balance_loss_costs_nothing_without_a_coefficient(monkeypatch):
    from clowder.nn import moe

    def fail(*_):
        raise AssertionError("computed")

    monkeypatch.setattr(moe, "load_balance_loss", fail)
    module = make(aux_loss_coefficient=0.0)
    module(torch.randn(40, 64).bfloat16())
    assert module.aux_loss.item() == 0.0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_case_33_modules_on_one_workspace_in_any_order(order):
    """Three layers run forward on one workspace before any of them runs backward."""
    workspace = make().workspace
    modules = [clowder.nn.MoE(64, 32, 8, 2, workspace=workspace) for _ in range(3)]
    xs = [torch.randn(count, 64).bfloat16().requires_grad_() for count in (40, 7, 21)]
    outs = [module(x) for module, x in zip(modules, xs)]
    losses = [out.float().square().mean() + module.aux_loss for out, module in zip(outs, modules)]
    for i in order:
        losses[i].backward()
    for module, x in zip(modules, xs):
        actual = {name: parameter.grad.clone() for name, parameter in module.named_parameters()} | {"x": x.grad}
        module.zero_grad()
        leaf = x.detach().clone().requires_grad_()
        (module(leaf).float().square().mean() + module.aux_loss).backward()
        expected = {name: parameter.grad for name, parameter in module.named_parameters()} | {"x": leaf.grad}
        assert_same_bits(actual, expected)


def test_no_value_of_a_device_is_read_on_the_host():
    """A read would make the host wait for a device. Operators of our own are one call each for the dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operators = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operators.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    for router in ("softmax", "deepseek_v3"):
        module = make(router=router, shared_intermediate=32)
        with Recorder() as recorder:
            out = module(torch.randn(40, 64).bfloat16())
            (out.float().square().mean() + module.aux_loss).backward()
            if router == "deepseek_v3":
                module.router.update_bias(module.expert_counts)
        assert {"build_schedule", "forward", "backward"} <= set(recorder.operators)
        assert not {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"} & set(recorder.operators)
