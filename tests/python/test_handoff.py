"""Copies, pickles, forks and threads, and transformations of autograd that the layer has no rule for."""

import copy
import io
import multiprocessing
import pickle
import threading
import traceback

import pytest
import torch
from reference import Case, assert_same_bits, run
from torch.autograd import forward_ad

import clowder


def make(**options):
    torch.manual_seed(0)
    return clowder.nn.MoE(64, 32, 8, 2, **{"group": clowder.VirtualGroup(2), "max_tokens": 20, **options})


def tokens():
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def step(module):
    module.zero_grad()
    x = tokens().requires_grad_()
    out = module(x)
    (out.float().square().mean() + module.aux_loss).backward()
    return {"out": out.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in module.named_parameters()}


MODULES = {
    "softmax": {},
    "deepseek_v3": {"router": "deepseek_v3", "shared_intermediate": 32},
    "separate": {"layout": "separate"},
    "per_expert": {"layout": "per_expert", "max_tokens": None},
}


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module):
    memory = io.BytesIO()
    torch.save(module, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, through_pickle, through_torch_save])
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_copies_of_modules_compute_the_same(way, options):
    module = make(**options)
    module(tokens())  # results of a call do not travel
    twin = way(module)
    assert twin.aux_loss is None and twin.expert_counts is None
    assert_same_bits(step(twin), step(module))


def test_copies_do_not_share_parameters():
    module = make()
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.w13.zero_()
    assert module.w13.abs().sum() > 0
    assert twin.workspace is module.workspace


def test_groups_schedules_and_saved_values_travel():
    case = Case()
    workspace = case.workspace(2)
    expected = run(case, workspace)
    group = pickle.loads(pickle.dumps(clowder.VirtualGroup(3)))
    assert group.ranks == 3 and copy.deepcopy(group).ranks == 3
    schedule = workspace.build_schedule(case.topk_idx)
    _, saved = clowder.forward(workspace, schedule, **case.inputs())
    other = pickle.loads(pickle.dumps(workspace))
    schedule, saved = pickle.loads(pickle.dumps((schedule, saved)))
    gradients = clowder.backward(other, schedule, saved, case.dout, **case.inputs())
    assert torch.equal(gradients.w13, expected["w13"]) and torch.equal(gradients.x, expected["x"])


def test_a_module_made_without_memory():
    """As for models that are too large to be made twice: on "meta", then to_empty and reset_parameters."""
    with torch.device("meta"):
        module = clowder.nn.MoE(64, 32, 8, 2, max_tokens=40, router="deepseek_v3")
    other = clowder.nn.MoE(64, 32, 8, 2, max_tokens=40, router="deepseek_v3", device="meta")
    for layer in (module, other):
        assert {p.device.type for p in layer.parameters()} == {"meta"}
        layer.to_empty(device="cpu")
        torch.manual_seed(0)
        layer.reset_parameters()
    assert_same_bits(step(module), step(make(group=None, max_tokens=40, router="deepseek_v3")))
    assert_same_bits(step(module), step(other))


# Processes and threads.


def _in_child(pipe, work):
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    try:
        pipe.send(work())
    except BaseException:
        pipe.send(traceback.format_exc())
    pipe.close()


def in_fork(work):
    """work() in a forked process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_in_child, args=(there, work), daemon=True)
    process.start()
    try:
        assert here.poll(30), "the child hangs"
        return here.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_goes_on():
    case = Case()
    workspace = case.workspace(2)
    expected = run(case, workspace)

    def work():
        return {name: tensor.float().numpy() for name, tensor in run(case, workspace).items()}

    result = in_fork(work)
    assert isinstance(result, dict), result
    for name, tensor in expected.items():
        assert torch.equal(torch.from_numpy(result[name]), tensor.float()), name
    assert_same_bits(run(case, workspace), expected)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_pass():
    """The lock of the pass that another thread was in is not there to wait for."""
    case = Case(tokens=400, hidden=256, intermediate=128)
    workspace = case.workspace(2)
    run(case, workspace)
    stop = threading.Event()

    def keep_busy():
        while not stop.is_set():
            run(case, workspace)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        for _ in range(3):
            result = in_fork(lambda: workspace.build_schedule(case.topk_idx).expert_counts.sum().item())
            assert result == case.topk_idx.numel(), result
    finally:
        stop.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_graph_made_before_a_fork_runs_backward_after_it():
    case = Case()
    workspace = case.workspace(2)
    w13 = case.w13.clone().requires_grad_()
    out = clowder.moe(case.x, case.topk_idx, case.topk_weights, w13, case.w2, workspace=workspace)

    def work():
        out.backward(case.dout)
        return w13.grad.float().numpy()

    result = in_fork(work)
    assert not isinstance(result, str), result
    out.backward(case.dout)
    assert torch.equal(torch.from_numpy(result), w13.grad.float())


def test_case_25_layers_of_several_threads_share_a_workspace():
    """Forward and backward of four modules, each in a thread of its own, at the same time."""
    workspace = make().workspace
    modules = [clowder.nn.MoE(64, 32, 8, 2, workspace=workspace) for _ in range(4)]
    expected = [step(module) for module in modules]
    results = [[] for _ in modules]

    def work(i):
        for _ in range(5):
            results[i].append(step(modules[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for of_module, right in zip(results, expected):
        assert len(of_module) == 5
        for result in of_module:
            assert_same_bits(result, right)


def test_skipped_ids_are_counted_from_all_threads():
    case = Case()
    case.topk_idx[0, 0] = 99
    workspace = case.workspace(2)

    def work():
        for _ in range(50):
            workspace.build_schedule(case.topk_idx)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.warns(clowder.SkippedIdsWarning, match="200 ids"):
        workspace.check()


def test_handles_mean_nothing_elsewhere():
    case = Case()
    workspace = case.workspace(2)
    sizes = (workspace.ranks, workspace.num_experts, workspace.schedule_words)
    for handle in (torch.tensor(10**9), torch.tensor(1.5), torch.tensor([1]), workspace.handle.to("meta")):
        with pytest.raises(clowder.ClowderError, match="workspace: ") as error:
            clowder.engine.engine_of(handle)
        assert error.value.code == "argument"
    with pytest.raises(clowder.ClowderError, match="schedule_words: 5"):
        torch.ops.clowder.build_schedule(case.topk_idx, workspace.handle, None, *sizes[:2], 5)


# Transformations.


def layer(case, workspace):
    return lambda x: clowder.moe(x, case.topk_idx, case.topk_weights, case.w13, case.w2, workspace=workspace)


@pytest.mark.parametrize("is_module", [False, True], ids=["moe", "MoE"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(is_module, requires_grad):
    """PyTorch would give a derivative of zero."""
    case = Case()
    function = make() if is_module else layer(case, case.workspace(2))
    x = case.x.clone().requires_grad_(requires_grad)
    with forward_ad.dual_level():
        function(x)  # a tensor without a tangent is fine
        with pytest.raises(clowder.ClowderError, match="forward-mode differentiation") as error:
            function(forward_ad.make_dual(x, torch.ones_like(x)))
    assert error.value.code == "unsupported"


def test_forward_mode_is_refused_for_every_input():
    case = Case(shared_intermediate=32)
    workspace = case.workspace(2)
    for name in case.inputs():
        with forward_ad.dual_level():
            inputs = case.inputs()
            inputs[name] = forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
            with pytest.raises(clowder.ClowderError, match="forward-mode differentiation"):
                clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **inputs)


@pytest.mark.parametrize("is_module", [False, True], ids=["moe", "MoE"])
@pytest.mark.parametrize("transform", ["jvp", "vmap", "grad", "vjp", "jacrev", "jacfwd", "hessian"])
def test_torch_func_is_refused(transform, is_module):
    case = Case()
    function = make() if is_module else layer(case, case.workspace(2))

    def total(x):
        return function(x).float().sum()

    calls = {
        "jvp": lambda: torch.func.jvp(function, (case.x,), (torch.ones_like(case.x),)),
        "vmap": lambda: torch.func.vmap(function)(torch.stack([case.x, case.x])),
        "vjp": lambda: torch.func.vjp(function, case.x),
        "grad": lambda: torch.func.grad(total)(case.x),
        "jacrev": lambda: torch.func.jacrev(total)(case.x),
        "jacfwd": lambda: torch.func.jacfwd(total)(case.x),
        "hessian": lambda: torch.func.hessian(total)(case.x),
    }
    with pytest.raises(clowder.ClowderError) as error:
        calls[transform]()
    assert error.value.code == "unsupported"
    run(case, case.workspace(2))


def test_vmap_over_gradients_is_refused():
    case = Case()
    x = case.x.clone().requires_grad_()
    out = layer(case, case.workspace(2))(x)
    with pytest.raises(clowder.ClowderError, match="vmap") as error:
        torch.autograd.grad(out, x, torch.stack([case.dout, case.dout]), is_grads_batched=True)
    assert error.value.code == "unsupported"


@pytest.mark.parametrize("is_module", [False, True], ids=["moe", "MoE"])
def test_second_derivatives_are_refused(is_module):
    case = Case()
    x = case.x.clone().requires_grad_()
    out = (make() if is_module else layer(case, case.workspace(2)))(x)
    (dx,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    with pytest.raises(clowder.ClowderError, match="double backward") as error:
        dx.float().square().sum().backward()
    assert error.value.code == "unsupported"


def test_functional_call_works():
    module = make()
    parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    out = torch.func.functional_call(module, parameters, (tokens(),))
    assert torch.equal(out, module(tokens()))
