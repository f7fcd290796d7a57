"""The operators as torch.library sees them, and autograd at its edges."""

import gc
import weakref

import pytest
import torch
from reference import Case
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import clowder


def operator_arguments(ranks=1, shared_intermediate=32, requires_grad=True):
    """Arguments of forward and backward. Every saved row is real: opcheck compares whole outputs."""
    case = Case(tokens=16, shared_intermediate=shared_intermediate)
    # Token t goes to experts t and t + 1, so every rank receives the same number of rows.
    case.topk_idx = (torch.arange(16)[:, None] + torch.arange(2)) % case.num_experts
    workspace = case.workspace(ranks, saved_rows=32 // ranks, keep_x=True)
    schedule = workspace.build_schedule(case.topk_idx)
    x, topk_weights, *weights = (
        None if t is None else t.clone().requires_grad_(requires_grad) for t in _in_order(case)
    )
    flat = ([] if weight is None else [weight] for weight in weights)
    layer = (x, topk_weights, *flat, schedule.table, workspace.handle, None)
    with torch.no_grad():
        _, *saved = torch.ops.clowder.forward(*layer, *forward_options(workspace))
    needs = [True, True, True, True, shared_intermediate > 0, shared_intermediate > 0]
    return workspace, layer, (*saved, case.dout, needs, torch.bfloat16), case


def forward_options(workspace, save=True):
    """What forward takes beside the layer: nothing to accumulate into."""
    return (workspace.saved_rows, workspace.keep_x, save, save, [], [], [], [])


def _in_order(case):
    return (case.x, case.topk_weights, case.w13, case.w2, case.shared_w13, case.shared_w2)


def test_opcheck_build_schedule():
    case = Case(tokens=16)
    workspace = case.workspace(2)
    for tokens_per_rank in (None, [8, 8], [9, 7]):
        workspace = case.workspace(2, max_tokens=9)
        sizes = (workspace.ranks, workspace.num_experts, workspace.schedule_words)
        torch.library.opcheck(
            torch.ops.clowder.build_schedule.default, (case.topk_idx, workspace.handle, tokens_per_rank, *sizes)
        )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("save", [True, False])
def test_opcheck_forward(ranks, save):
    workspace, layer, _, _ = operator_arguments(ranks, requires_grad=save)
    torch.library.opcheck(torch.ops.clowder.forward.default, (*layer, *forward_options(workspace, save)))


def test_opcheck_forward_without_shared_expert():
    workspace, layer, _, _ = operator_arguments(shared_intermediate=0)
    torch.library.opcheck(torch.ops.clowder.forward.default, (*layer, *forward_options(workspace)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_opcheck_backward(ranks):
    workspace, layer, rest, _ = operator_arguments(ranks, requires_grad=False)
    torch.library.opcheck(torch.ops.clowder.backward.default, (*layer, *rest))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_backward_into(ranks, dtype):
    workspace, layer, rest, case = operator_arguments(ranks, requires_grad=False)
    into = [[torch.ones_like(w, dtype=dtype)] for w in (case.w13, case.w2, case.shared_w13)]
    arguments = (*layer, *rest[:-1], *into, [], [True, False, True, True])
    torch.library.opcheck(torch.ops.clowder.backward_into.default, arguments)


@pytest.mark.parametrize("n_group", [1, 4])
def test_opcheck_choose_experts(n_group):
    scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    torch.library.opcheck(torch.ops.clowder.choose_experts.default, (scores, 2, n_group, 2 if n_group > 1 else 1))


@pytest.mark.parametrize("form", ["pair", "list"])
def test_opcheck_other_forms_of_weights(form):
    workspace, layer, rest, case = operator_arguments(2, requires_grad=form == "list")
    w13, w2 = case.w13, case.w2
    parts = ([w13[:, :32].clone(), w13[:, 32:].clone()], [w2]) if form == "pair" else ([*w13.clone()], [*w2.clone()])
    layer = (*layer[:2], *parts, *layer[4:])
    torch.library.opcheck(torch.ops.clowder.forward.default, (*layer, *forward_options(workspace)))
    if form == "pair":
        torch.library.opcheck(torch.ops.clowder.backward.default, (*layer, *rest))


@pytest.mark.parametrize("ranks", [1, 2])
def test_fakes_have_the_strides_of_real_results(ranks):
    """opcheck does not compare them; a compiler trusts them. Inputs are transposed on purpose."""
    workspace, layer, rest, case = operator_arguments(ranks, requires_grad=False)

    def transposed(value):
        if isinstance(value, list):
            return [transposed(t) for t in value]
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)

    layer, rest = (*(transposed(t) for t in layer[:6]), *layer[6:]), (*rest[:3], transposed(rest[3]), *rest[4:])
    sizes = (workspace.ranks, workspace.num_experts, workspace.schedule_words)
    some = ([True, False, False, True, False, True], torch.float32)
    calls = [
        (torch.ops.clowder.build_schedule, (transposed(case.topk_idx), workspace.handle, None, *sizes)),
        (torch.ops.clowder.forward, (*layer, *forward_options(workspace))),
        (torch.ops.clowder.forward, (*layer, *forward_options(workspace, save=False))),
        (torch.ops.clowder.backward, (*layer, *rest)),
        (torch.ops.clowder.backward, (*layer, *rest[:4], *some)),
        (torch.ops.clowder.backward_into, (*layer, *rest[:-1], [torch.ones_like(case.w13)], [], [], [], [True] * 4)),
        (torch.ops.clowder.choose_experts, (transposed(case.x.float()), 3, 8, 2)),
    ]
    for operator, arguments in calls:
        real = tree_leaves(operator(*arguments))
        with FakeTensorMode() as mode:
            to_fake = lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a  # noqa: E731
            fake = tree_leaves(operator(*tree_map(to_fake, arguments)))
        assert len(real) == len(fake), operator
        for a, b in zip(real, fake):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), operator


def test_fake_tensors_in_fake_tensors_out():
    """As tools do that estimate memory. The module is real, its parameters made fake, or made among fakes."""
    real = clowder.nn.MoE(64, 32, 8, 2, max_tokens=16)
    with FakeTensorMode() as mode:
        for owner, name in ((real.router, "weight"), (real, "w13"), (real, "w2")):
            setattr(owner, name, torch.nn.Parameter(mode.from_tensor(getattr(owner, name))))
        for module in (real, clowder.nn.MoE(64, 32, 8, 2, max_tokens=16)):
            x = torch.empty(16, 64, dtype=torch.bfloat16, requires_grad=True)
            out = module(x)
            out.sum().backward()
            assert isinstance(out, FakeTensor) and out.shape == x.grad.shape == (16, 64)


def test_double_backward_is_refused():
    case = Case()
    x = case.x.clone().requires_grad_()
    out = clowder.moe(x, case.topk_idx, case.topk_weights, case.w13, case.w2, workspace=case.workspace())
    (dx,) = torch.autograd.grad(out, x, case.dout.clone().requires_grad_(), create_graph=True)
    with pytest.raises(clowder.ClowderError, match="double backward") as error:
        dx.float().sum().backward()
    assert error.value.code == "unsupported"


@pytest.mark.parametrize("needed", ["x", "topk_weights", "w13", "w2", "shared_w13", "shared_w2"])
def test_case_34_only_needed_gradients_are_computed(needed, monkeypatch):
    from clowder import ops

    asked = []
    original = ops.GradientAddresses

    def record(x, topk_weights, w1, w3, w2, shared_w1, shared_w3, shared_w2):
        tables = {"w13": (w1, w3), "w2": (w2,), "shared_w13": (shared_w1, shared_w3), "shared_w2": (shared_w2,)}
        asked.append({"x": x != 0, "topk_weights": topk_weights != 0})
        asked[-1] |= {name: any(table.addresses for table in given) for name, given in tables.items()}
        return original(x, topk_weights, w1, w3, w2, shared_w1, shared_w3, shared_w2)

    monkeypatch.setattr(ops, "GradientAddresses", record)
    case = Case(shared_intermediate=32)
    inputs = case.inputs()
    inputs[needed] = inputs[needed].clone().requires_grad_()
    out = clowder.moe(topk_idx=case.topk_idx, workspace=case.workspace(2), **inputs)
    out.backward(case.dout)
    assert asked == [{name: name == needed for name in inputs}]
    assert inputs[needed].grad.abs().sum() > 0


def test_case_34_nothing_is_saved_without_need(monkeypatch):
    from clowder import ops

    saves = []
    original = ops._empty_saved
    monkeypatch.setattr(
        ops, "_empty_saved", lambda *arguments: saves.append(any(arguments[-2:])) or original(*arguments)
    )
    case = Case()
    workspace = case.workspace()
    frozen = clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **case.inputs())
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.inputs().items()}
    with torch.no_grad():
        without_grad = clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **leaves)
    with_grad = clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **leaves)
    assert saves == [False, False, True]
    assert not frozen.requires_grad and not without_grad.requires_grad and with_grad.requires_grad
    assert torch.equal(frozen, with_grad) and torch.equal(without_grad, with_grad)


def test_unused_output_leaves_no_gradient():
    case = Case()
    x = case.x.clone().requires_grad_()
    clowder.moe(x, case.topk_idx, case.topk_weights, case.w13, case.w2, workspace=case.workspace())
    (gradient,) = torch.autograd.grad(x.float().sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


def test_saved_inputs_must_not_change_before_backward():
    case = Case()
    w13 = case.w13.clone().requires_grad_()
    x = case.x.clone()
    out = clowder.moe(x, case.topk_idx, case.topk_weights, w13, case.w2, workspace=case.workspace())
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(case.dout)


def test_main_grads_count_as_modified():
    workspace, layer, rest, case = operator_arguments(requires_grad=False)
    main = torch.zeros_like(case.w13)
    before = main._version
    torch.ops.clowder.backward_into(*layer, *rest[:-1], [main], [], [], [], [True] * 4)
    assert main._version > before


def test_a_graph_keeps_its_workspace_alive():
    case = Case()
    x = case.x.clone().requires_grad_()
    workspace = case.workspace()
    out = clowder.moe(x, case.topk_idx, case.topk_weights, case.w13, case.w2, workspace=workspace)
    number, engine = workspace.handle.clone(), weakref.ref(workspace._engine)
    sizes = (workspace.ranks, workspace.num_experts, workspace.schedule_words)
    del workspace
    gc.collect()
    out.backward(case.dout)
    assert x.grad.abs().sum() > 0
    del out
    gc.collect()
    assert engine() is None
    with pytest.raises(clowder.ClowderError, match="still alive"):
        torch.ops.clowder.build_schedule(case.topk_idx, number, None, *sizes)


def test_any_view_of_a_handle_keeps_its_workspace_alive():
    """Compilers save views of their inputs for backward."""
    case = Case()
    workspace = case.workspace()
    view, engine = workspace.handle.detach(), weakref.ref(workspace._engine)
    sizes = (workspace.ranks, workspace.num_experts, workspace.schedule_words)
    del workspace
    gc.collect()
    assert torch.ops.clowder.build_schedule(case.topk_idx, view, None, *sizes)[1].sum() == case.topk_idx.numel()
    del view
    gc.collect()
    assert engine() is None


# Gradients by hand: needs, main gradients, types.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_intermediate", [0, 32])
def test_main_grads_are_added_to_once(ranks, dtype, shared_intermediate):
    case = Case(shared_intermediate=shared_intermediate)
    workspace = case.workspace(ranks)
    schedule = workspace.build_schedule(case.topk_idx)
    _, saved = clowder.forward(workspace, schedule, **case.inputs())
    arguments = (workspace, schedule, saved, case.dout)
    exact = clowder.backward(*arguments, **case.inputs(), weight_dtype=torch.float32)
    mains = {n: torch.randn(t.shape).to(dtype) for n, t in case.inputs().items() if n.endswith(("w13", "w2"))}
    expected = {name: (main.float() + getattr(exact, name)).to(dtype) for name, main in mains.items()}
    gradients = clowder.backward(*arguments, **case.inputs(), main_grads=mains)
    for name, main in mains.items():
        assert getattr(gradients, name) is None
        assert torch.equal(main, expected[name]), name
    assert torch.equal(gradients.x, exact.x)


def test_main_grads_of_different_kinds():
    case = Case(shared_intermediate=32)
    workspace = case.workspace(2)
    schedule = workspace.build_schedule(case.topk_idx)
    _, saved = clowder.forward(workspace, schedule, **case.inputs())
    arguments = (workspace, schedule, saved, case.dout)
    plain = clowder.backward(*arguments, **case.inputs(), weight_dtype=torch.float32)
    mains = {"w13": torch.ones_like(case.w13, dtype=torch.float32), "shared_w2": torch.ones_like(case.shared_w2)}
    gradients = clowder.backward(*arguments, **case.inputs(), main_grads=mains)
    assert torch.equal(mains["w13"], 1 + plain.w13)
    assert torch.equal(mains["shared_w2"], (1 + plain.shared_w2).bfloat16())
    assert torch.equal(gradients.w2, plain.w2.bfloat16())
    assert torch.equal(gradients.shared_w13, plain.shared_w13.bfloat16())
    assert gradients.w13 is None and gradients.shared_w2 is None


@pytest.mark.parametrize("needs", [("x", "w2"), {"x": True, "w2": True}, (True, False, False, True, False, False)])
def test_needs(needs):
    case = Case()
    workspace = case.workspace(2)
    schedule = workspace.build_schedule(case.topk_idx)
    _, saved = clowder.forward(workspace, schedule, **case.inputs())
    everything = clowder.backward(workspace, schedule, saved, case.dout, **case.inputs())
    some = clowder.backward(workspace, schedule, saved, case.dout, **case.inputs(), needs=needs)
    assert [g is not None for g in some] == [True, False, False, True, False, False]
    assert torch.equal(some.x, everything.x) and torch.equal(some.w2, everything.w2)
