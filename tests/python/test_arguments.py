"""What is refused, and how: one error that names the argument, before anything runs."""

import copy
import gc
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from reference import Case, assert_same_bits, run

import clowder


class refused:
    """Expects a ClowderError of this code whose message begins with this name."""

    def __init__(self, name, code="argument"):
        self.name, self.code = name, code

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        assert kind is not None, f"{self.name} was not refused"
        if not issubclass(kind, clowder.ClowderError):
            return False
        assert error.code == self.code
        assert str(error).startswith(self.name), str(error)
        return True


GOOD = {"hidden": 64, "intermediate": 32, "num_experts": 8, "topk": 2, "max_tokens": 16}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", 0),
        ("hidden", 48),
        ("hidden", 64.0),
        ("intermediate", -32),
        ("intermediate", 40),
        ("num_experts", 0),
        ("num_experts", 7),
        ("num_experts", 2**40),
        ("topk", 0),
        ("topk", 17),
        ("max_tokens", -1),
        ("shared_intermediate", 33),
        ("activation", "relu"),
        ("activation", "swiglu-clamp:0"),
        ("activation", "swiglu-clamp:"),
        ("activation", 3),
        ("ring_rows", 1),
        ("ring_rows", -5),
        ("saved_rows", -5),
        ("group", 2),
        ("timeout_s", 0.0),
    ],
)
def test_workspace(name, value):
    arguments = {**GOOD, "group": clowder.VirtualGroup(2), name: value}
    with refused(name):
        clowder.Workspace(**arguments)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, "2"])
def test_virtual_group(ranks):
    with refused("ranks"):
        clowder.VirtualGroup(ranks)


def test_devices_without_engine():
    with refused("device", "unsupported"):
        clowder.Workspace(**GOOD, device="meta")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda t: t.float()),
        ("x", lambda t: t.half()),
        ("x", lambda t: t[:, :32]),
        ("x", lambda t: t[None]),
        ("x", lambda t: t[:-1]),
        ("topk_weights", lambda t: t.double()),
        ("topk_weights", lambda t: t[:, :1]),
        ("topk_weights", lambda t: t[:-1]),
        ("w13", lambda t: t.float()),
        ("w13", lambda t: t[:-1]),
        ("w13", lambda t: t[:, :32]),
        ("w2", lambda t: t.float()),
        ("w2", lambda t: t[:, :, :16]),
        ("shared_w13", lambda t: None),
        ("shared_w13", lambda t: t.float()),
        ("shared_w2", lambda t: t[:32]),
        ("topk_idx", lambda t: t.float()),
        ("topk_idx", lambda t: t[:, :1]),
        ("topk_idx", lambda t: t.to(torch.int16)),
    ],
)
def test_tensors(name, change):
    case = Case(shared_intermediate=32)
    workspace = case.workspace(2)
    arguments = {"topk_idx": case.topk_idx, **case.inputs()}
    arguments[name] = change(arguments[name])
    with refused(name):
        clowder.moe(**arguments, workspace=workspace)
    run(case, workspace)  # the workspace lives


def test_shared_expert_that_the_workspace_does_not_have():
    case = Case()
    with refused("shared_w13"):
        clowder.moe(topk_idx=case.topk_idx, workspace=case.workspace(), **case.inputs(), shared_w13=case.w13[0])


@pytest.mark.parametrize("tokens_per_rank", [[24], [8, 8, 8], [20, 5], [-1, 25], [12.0, 12.0]])
def test_tokens_per_rank(tokens_per_rank):
    case = Case()
    with refused("tokens_per_rank"):
        case.workspace(2, max_tokens=100).build_schedule(case.topk_idx, tokens_per_rank=tokens_per_rank)


def test_more_tokens_than_max_tokens():
    case = Case()
    with refused("tokens"):
        case.workspace(2, max_tokens=11).build_schedule(case.topk_idx)
    with refused("tokens"):
        case.workspace(2, max_tokens=20).build_schedule(case.topk_idx, tokens_per_rank=[24, 0])


def test_schedule_of_another_layout_or_batch():
    case = Case()
    workspace = case.workspace(2)
    for other in (case.workspace(1), case.workspace(2, max_tokens=13), Case(num_experts=4).workspace(2)):
        with refused("schedule"):
            clowder.forward(workspace, other.build_schedule(case.topk_idx % 4), **case.inputs())
    with refused("x"):
        clowder.forward(workspace, workspace.build_schedule(case.topk_idx[:5]), **case.inputs())
    with refused("schedule"):
        clowder.forward(workspace, case.topk_idx, **case.inputs())
    with refused("workspace"):
        clowder.forward("workspace", workspace.build_schedule(case.topk_idx), **case.inputs())


def test_backward():
    case = Case()
    workspace = case.workspace(2)
    schedule = workspace.build_schedule(case.topk_idx)
    _, saved = clowder.forward(workspace, schedule, **case.inputs())

    def backward(saved=saved, dout=case.dout, **options):
        clowder.backward(workspace, schedule, saved, dout, **case.inputs(), **options)

    with refused("saved"):
        backward(saved=None)
    with refused("dout"):
        backward(dout=case.dout.float())
    with refused("dout"):
        backward(dout=case.dout[:-1])
    with refused("needs"):
        backward(needs=["w1"])
    with refused("needs"):
        backward(needs=[True])
    with refused("weight_dtype"):
        backward(weight_dtype=torch.float16)
    with refused("main_grads"):
        backward(main_grads={"w1": case.w13})
    for bad in (case.w13.double(), case.w13[:-1], case.w13.transpose(1, 2).contiguous().transpose(1, 2)):
        with refused("main_grads"):
            backward(main_grads={"w13": bad})
    with refused("saved.gate_up"):
        backward(saved=saved._replace(gate_up=saved.gate_up[:, :-1]))


def test_backward_without_saved_values():
    case = Case()
    workspace = case.workspace()
    inputs = case.inputs() | {"x": case.x.clone().requires_grad_()}
    out, _ = clowder.forward(workspace, workspace.build_schedule(case.topk_idx), **inputs, save=False)
    with refused("save"):
        out.backward(case.dout)


def test_autocast_to_another_type():
    case = Case()
    with torch.autocast("cpu", dtype=torch.float16), refused("autocast"):
        clowder.moe(topk_idx=case.topk_idx, workspace=case.workspace(), **case.inputs())


def test_a_dead_workspace_says_so(monkeypatch):
    workspace = Case().workspace(2)

    class DeadCore:
        def check(self):
            raise clowder.ClowderError("timeout", "rank 0 waited for rank 1 (inputs_ready) in forward dispatch")

    monkeypatch.setattr(workspace._engine, "_core", DeadCore())
    with pytest.raises(clowder.ClowderError, match="rank 0 waited for rank 1") as error:
        workspace.check()
    assert error.value.code == "timeout"


def test_operators_refuse_tokens_that_are_not_the_schedules():
    case = Case()
    workspace = case.workspace(2, max_tokens=24)
    schedule = workspace.build_schedule(case.topk_idx, tokens_per_rank=[20, 4])
    layer = [case.x, case.topk_weights, [case.w13], [case.w2], [], [], schedule.table, workspace.handle]
    options = (workspace.saved_rows, False, False, False, [], [], [], [])
    with refused("tokens_per_rank"):
        torch.ops.clowder.forward(*layer, [12, 12], *options)
    layer[0], layer[1] = layer[0][:8], layer[1][:8]
    with refused("tokens_per_rank"):
        torch.ops.clowder.forward(*layer, None, *options)


def test_gradients_have_none_of_their_own():
    case = Case()
    workspace = case.workspace()
    schedule = workspace.build_schedule(case.topk_idx)
    inputs = {name: tensor.clone().requires_grad_() for name, tensor in case.inputs().items()}
    _, saved = clowder.forward(workspace, schedule, **inputs)
    gradients = clowder.backward(workspace, schedule, saved, case.dout, **inputs)
    assert not any(gradient.requires_grad for gradient in gradients if gradient is not None)


def test_what_is_no_tensor():
    case = Case()
    workspace = case.workspace()
    for name in ("x", "topk_weights", "w13", "w2"):
        with refused(name):
            clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **(case.inputs() | {name: [1.0]}))
    with refused("x"):
        clowder.moe(topk_idx=case.topk_idx, workspace=workspace, **(case.inputs() | {"x": case.x[None]}))
    with refused("workspace"):
        clowder.moe(topk_idx=case.topk_idx, workspace=None, **case.inputs())


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(clowder.ClowderError("timeout", "rank 3")))
    assert (error.code, str(error)) == ("timeout", "rank 3")


def test_workspaces_are_copied_by_reference_and_pickled_by_arguments():
    case = Case()
    workspace = case.workspace(2, saved_rows=5)
    assert copy.deepcopy(workspace) is workspace
    other = pickle.loads(pickle.dumps(workspace))
    assert (other.layout, other.saved_rows) == (workspace.layout, 5)
    assert_same_bits(run(case, other), run(case, workspace))


def test_case_25_calls_from_two_threads_take_turns():
    cases = [Case(seed=seed, tokens=40) for seed in range(2)]
    workspace = cases[0].workspace(2)
    expected = [run(case, workspace) for case in cases]
    results = [[], []]

    def work(i):
        for _ in range(5):
            results[i].append(run(cases[i], workspace))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(results[i]) == 5
        for result in results[i]:
            assert_same_bits(result, expected[i])


def test_workspaces_are_freed():
    case = Case()
    for _ in range(3):
        run(case, case.workspace(2))
    gc.collect()
    from clowder import engine

    before = len(engine._engines)
    for _ in range(5):
        run(case, case.workspace(2))
    gc.collect()
    assert len(engine._engines) <= before


def test_importing_touches_no_gpu():
    code = "import clowder, torch; assert not torch.cuda.is_initialized(); print('done')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "done\n" and result.stderr == ""
