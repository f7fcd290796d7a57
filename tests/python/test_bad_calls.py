"""Broken calls of every kind: one ClowderError that names the argument, nothing crashes, and a good call works right after."""

import subprocess
import sys
import types

import pytest
import torch
from reference import Case, assert_same_bits, run

import clowder

NAN, INF = float("nan"), float("inf")
SIZES = {"hidden": 64, "intermediate": 32, "num_experts": 8, "topk": 2, "max_tokens": 16}
_EXPECTED = {}


@pytest.fixture
def good():
    """A layer that works: its case, workspace, schedule and saved values, and calls with something changed."""
    case = Case(shared_intermediate=32)
    workspace = case.workspace(2, max_tokens=24)
    schedule = workspace.build_schedule(case.topk_idx)
    _, saved = clowder.forward(workspace, schedule, **case.inputs())
    layer = types.SimpleNamespace(case=case, workspace=workspace, schedule=schedule, saved=saved)

    def moe(**changes):
        arguments = {"topk_idx": case.topk_idx, "workspace": workspace, **case.inputs()}
        return clowder.moe(**(arguments | changes))

    def forward(**changes):
        return clowder.forward(**({"workspace": workspace, "schedule": schedule, **case.inputs()} | changes))

    def backward(**changes):
        own = {"workspace": workspace, "schedule": schedule, "saved": saved, "dout": case.dout}
        return clowder.backward(**(own | case.inputs() | changes))

    layer.moe, layer.forward, layer.backward = moe, forward, backward
    return layer


def workspace(**changes):
    return lambda good: clowder.Workspace(**({**SIZES, "group": clowder.VirtualGroup(2)} | changes))


def module(**changes):
    return lambda good: clowder.nn.MoE(**({name: SIZES[name] for name in list(SIZES)[:4]} | changes))


def router(**options):
    return module(router="deepseek_v3", router_options=options)


def changed(call, name, change):
    """good.<call> with one of its tensors changed."""

    def broken(good):
        value = {"dout": good.case.dout, "topk_idx": good.case.topk_idx, **good.case.inputs()}[name]
        getattr(good, call)(**{name: change(value)})

    return broken


def other_saved(good):
    """What a workspace with other saved rows left."""
    other = good.case.workspace(2, max_tokens=24, saved_rows=5)
    _, saved = clowder.forward(other, good.schedule, **good.case.inputs())
    good.backward(saved=saved)


def other_schedule(good):
    other = good.case.workspace(4, max_tokens=24)
    good.forward(schedule=other.build_schedule(good.case.topk_idx))


def empty_schedule(good):
    good.forward(schedule=good.schedule._replace(table=torch.zeros_like(good.schedule.table)))


def out_of_place(tensor):
    """The same values with other strides."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


ARGUMENT = [
    # Sizes of a workspace: negative, zero, too large, not whole, of a wrong kind.
    ("hidden", workspace(hidden=-64)),
    ("hidden", workspace(hidden=0)),
    ("hidden", workspace(hidden=33)),
    ("hidden", workspace(hidden=2**31)),
    ("hidden", workspace(hidden=NAN)),
    ("hidden", workspace(hidden="64")),
    ("intermediate", workspace(intermediate=0)),
    ("intermediate", workspace(intermediate=31)),
    ("num_experts", workspace(num_experts=7)),  # that two ranks do not divide
    ("num_experts", workspace(num_experts=-8)),
    ("num_experts", workspace(group=clowder.VirtualGroup(3))),
    ("topk", workspace(topk=0)),
    ("topk", workspace(topk=17)),
    ("topk", workspace(topk=None)),
    ("max_tokens", workspace(max_tokens=-1)),
    ("max_tokens", workspace(max_tokens=2**31 - 1)),
    ("shared_intermediate", workspace(shared_intermediate=-32)),
    ("shared_intermediate", workspace(shared_intermediate=20)),
    # Options of a workspace.
    ("activation", workspace(activation="gelu")),
    ("activation", workspace(activation="swiglu-clamp:nan")),
    ("activation", workspace(activation="swiglu-clamp:-1")),
    ("activation", workspace(activation=None)),
    ("group", workspace(group=2)),
    ("ring_rows", workspace(ring_rows=0)),
    ("ring_rows", workspace(ring_rows=-1)),
    ("saved_rows", workspace(saved_rows=-1)),
    ("saved_rows", workspace(saved_rows=1.5)),
    ("chunk_rows", workspace(chunk_rows=0)),
    ("blocks", workspace(blocks=0)),
    ("blocks", workspace(blocks=2**20)),
    ("keep_x", workspace(keep_x="yes")),
    ("timeout_s", workspace(timeout_s=NAN)),
    ("timeout_s", workspace(timeout_s=INF)),
    ("timeout_s", workspace(timeout_s=-1)),
    ("timeout_s", workspace(timeout_s="60")),
    ("jitter_seed", workspace(jitter_seed=-1)),
    ("device", workspace(device="nowhere")),
    ("device", workspace(device=1.5)),
    ("ranks", lambda good: clowder.VirtualGroup(0)),
    ("ranks", lambda good: clowder.VirtualGroup(2.0)),
    # Modules and routers.
    ("router", module(router="sinkhorn")),
    ("router_options", module(router_options={"temperature": 1.0})),
    ("layout", module(layout="w13")),
    ("device", module(device="nowhere")),
    ("dtype", module(dtype=torch.int8)),
    ("aux_loss_coefficient", module(aux_loss_coefficient=NAN)),
    ("num_layers", module(num_layers=0)),
    ("topk", module(topk=9)),
    ("workspace", module(workspace=3)),
    ("n_group", router(n_group=3)),
    ("topk_group", router(n_group=2, topk_group=3)),
    ("scaling_factor", router(scaling_factor=NAN)),
    ("rate", lambda good: clowder.nn.DeepSeekV3Router(32, 4, 2).update_bias(torch.ones(4), NAN)),
    ("expert_counts", lambda good: clowder.nn.DeepSeekV3Router(32, 4, 2).update_bias(torch.ones(5))),
    ("x", lambda good: module()(good)(torch.zeros(4, 32).bfloat16())),
    ("x", lambda good: module()(good)([1.0])),
    ("x", lambda good: module()(good)(torch.tensor(1.0))),
    ("router", lambda good: module(router=torch.nn.Linear(64, 8, dtype=torch.bfloat16))(good)(good.case.x)),
    # Choices.
    ("topk_idx", changed("moe", "topk_idx", lambda t: t.float())),
    ("topk_idx", changed("moe", "topk_idx", lambda t: t.bool())),
    ("topk_idx", changed("moe", "topk_idx", lambda t: t[:, :1])),
    ("topk_idx", changed("moe", "topk_idx", lambda t: t[0, 0])),
    ("topk_idx", changed("moe", "topk_idx", lambda t: t.to("meta"))),
    ("topk_idx", changed("moe", "topk_idx", lambda t: t.to_sparse())),
    ("topk_idx", changed("moe", "topk_idx", lambda t: t.numpy())),
    ("tokens", changed("moe", "topk_idx", lambda t: t.repeat(3, 1))),  # more than max_tokens
    ("tokens_per_rank", lambda good: good.moe(tokens_per_rank=[24])),
    ("tokens_per_rank", lambda good: good.moe(tokens_per_rank=[25, -1])),
    ("tokens_per_rank", lambda good: good.moe(tokens_per_rank=[12, 13])),
    ("tokens_per_rank", lambda good: good.moe(tokens_per_rank=[12.0, 12.0])),
    ("tokens_per_rank", lambda good: good.moe(tokens_per_rank="12")),
    ("tokens_per_rank", lambda good: good.moe(tokens_per_rank=24)),
    # Tensors of a call: dtype, shape, device, layout, mismatched weights.
    ("x", changed("moe", "x", lambda t: t.double())),
    ("x", changed("moe", "x", lambda t: t[:, :32])),
    ("x", changed("moe", "x", lambda t: t[:-1])),
    ("x", changed("moe", "x", lambda t: t[None])),
    ("x", changed("moe", "x", lambda t: t.to("meta"))),
    ("x", changed("moe", "x", lambda t: t.to_sparse())),
    ("x", changed("moe", "x", lambda t: None)),
    ("topk_weights", changed("moe", "topk_weights", lambda t: t.half())),
    ("topk_weights", changed("moe", "topk_weights", lambda t: t.T)),
    ("topk_weights", changed("moe", "topk_weights", lambda t: t.to("meta"))),
    ("topk_weights", changed("moe", "topk_weights", lambda t: 1.0)),
    ("w13", changed("moe", "w13", lambda t: t.float())),
    ("w13", changed("moe", "w13", lambda t: t[:4])),
    ("w13", changed("moe", "w13", lambda t: t.transpose(1, 2)[:, :32])),
    ("w13", changed("moe", "w13", lambda t: t.to("meta"))),
    ("w13", changed("moe", "w13", lambda t: t.to_sparse())),
    ("w13", changed("moe", "w13", lambda t: t.flatten())),
    ("w13", changed("moe", "w13", lambda t: list(t)[:3])),
    ("w2", changed("moe", "w2", lambda t: t.transpose(1, 2))),
    ("w2", changed("moe", "w2", lambda t: None)),
    ("shared_w13", changed("moe", "shared_w13", lambda t: None)),
    ("shared_w13", changed("moe", "shared_w13", lambda t: t[:32])),
    ("shared_w2", changed("moe", "shared_w2", lambda t: t.T)),
    ("shared_w2", changed("moe", "shared_w2", lambda t: t.to("meta"))),
    ("workspace", lambda good: good.moe(workspace=None)),
    ("autocast", lambda good: _under_half(good)),
    # Passes by themselves.
    ("schedule", other_schedule),
    ("schedule", empty_schedule),
    ("schedule", lambda good: good.forward(schedule=good.schedule.table)),
    ("schedule", lambda good: good.forward(schedule=good.schedule._replace(table=good.schedule.table.to("meta")))),
    ("schedule", lambda good: good.forward(schedule=good.schedule._replace(table=good.schedule.table.long()))),
    ("x", lambda good: good.forward(schedule=good.workspace.build_schedule(good.case.topk_idx[:6]))),
    ("saved", lambda good: good.backward(saved=None)),
    ("saved.gate_up", other_saved),
    ("saved.gate_up", lambda good: good.backward(saved=good.saved._replace(gate_up=good.saved.gate_up.float()))),
    ("saved.gate_up", lambda good: good.backward(saved=good.saved._replace(gate_up=3))),
    ("saved.shared_gate_up", lambda good: good.backward(saved=good.saved._replace(shared_gate_up=torch.ones(2, 2)))),
    ("dout", changed("backward", "dout", lambda t: t.float())),
    ("dout", changed("backward", "dout", lambda t: t[:-1])),
    ("dout", changed("backward", "dout", lambda t: t.to("meta"))),
    ("dout", changed("backward", "dout", lambda t: None)),
    ("needs", lambda good: good.backward(needs=["w1"])),
    ("needs", lambda good: good.backward(needs=[True])),
    ("needs", lambda good: good.backward(needs=3)),
    ("weight_dtype", lambda good: good.backward(weight_dtype=torch.float16)),
    ("weight_dtype", lambda good: good.backward(weight_dtype="bf16")),
    ("main_grads", lambda good: good.backward(main_grads={"x": good.case.x})),
    ("main_grads", lambda good: good.backward(main_grads=[good.case.w13])),
    ("main_grads", lambda good: good.backward(main_grads={"w13": good.case.w13.double()})),
    ("main_grads", lambda good: good.backward(main_grads={"w13": good.case.w13[:2]})),
    ("main_grads", lambda good: good.backward(main_grads={"w13": out_of_place(good.case.w13)})),
    ("main_grads", lambda good: good.backward(main_grads={"w2": list(good.case.w2)})),
    ("main_grads", lambda good: good.moe(main_grads={"w2": good.case.w13})),
]
UNSUPPORTED = [
    ("device", workspace(device="meta")),
    ("device", module(device="cuda")),
]


def _under_half(good):
    with torch.autocast("cpu", dtype=torch.float16):
        good.moe()


@pytest.mark.parametrize(
    ("name", "code", "call"),
    [(name, "argument", call) for name, call in ARGUMENT] + [(name, "unsupported", call) for name, call in UNSUPPORTED],
)
def test_a_broken_call_is_refused_and_the_next_one_works(good, name, code, call):
    with pytest.raises(clowder.ClowderError) as error:
        call(good)
    assert error.value.code == code
    assert str(error.value).split(":")[0].split("[")[0] == name, str(error.value)
    if not _EXPECTED:
        _EXPECTED.update(run(good.case, good.case.workspace(2)))
    assert_same_bits(run(good.case, good.workspace), _EXPECTED)


_LITTLE_MEMORY = """
import resource
import clowder

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))
try:
    clowder.Workspace(4096, 32, 8, 16, 2**16)  # slots of 8 GiB
except clowder.ClowderError as error:
    assert error.code == "unsupported" and str(error).startswith("memory: "), error
else:
    raise AssertionError("was made")
clowder.Workspace(64, 32, 8, 2, 16)
"""


def test_too_little_memory():
    subprocess.run([sys.executable, "-c", _LITTLE_MEMORY], check=True)


def test_the_table_is_long():
    assert len(ARGUMENT) + len(UNSUPPORTED) >= 100
