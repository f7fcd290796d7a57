"""torch.compile: the same bits for the same routes, one graph for all layers of a shape, errors that say what is wrong."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from reference import Case

import clowder


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make(seed=0, ranks=2, **options):
    torch.manual_seed(seed)
    return clowder.nn.MoE(64, 32, 8, 2, group=clowder.VirtualGroup(ranks), **options)


def step(function, module, x):
    """Results and all gradients of one training step."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = function(x)
    (out.float().square().mean() + module.aux_loss).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    results = {"out": out.detach(), "x": x.grad, "aux_loss": module.aux_loss.detach()}
    return results | {"expert_counts": module.expert_counts} | gradients


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def tokens(count=24, seed=0):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Recompiles:
    """Counts graphs that Dynamo makes."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.parametrize("forms", ["stacked", "separate", "per_expert"])
@pytest.mark.parametrize("tokens_per_rank", [None, [20, 4]])
def test_the_operator_gives_eagers_bits(forms, tokens_per_rank):
    case = Case(shared_intermediate=32)
    workspace = case.workspace(2, max_tokens=24)

    def as_form(w13):
        if forms == "per_expert":
            return list(w13)
        return tuple(w13.chunk(2, dim=1)) if forms == "separate" else w13

    def function(x, topk_weights, w13, w2, shared_w13, shared_w2):
        return (
            clowder.moe(
                x * 2,
                case.topk_idx,
                topk_weights,
                as_form(w13),
                w2,
                shared_w13,
                shared_w2,
                workspace=workspace,
                tokens_per_rank=tokens_per_rank,
            )
            * 0.5
        )

    results = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.inputs().items()}
        out = run(**leaves)
        out.backward(case.dout)
        results.append({"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()})
    assert_equal(*results)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared_intermediate": 32, "router": "deepseek_v3", "router_options": {"n_group": 4, "topk_group": 2}},
        {"layout": "separate", "shared_intermediate": 32},
        {"layout": "per_expert"},
        {"saved_rows": 7, "keep_x": True},
    ],
    ids=str,
)
def test_the_module_gives_eagers_bits(options):
    module = make(max_tokens=24, **options)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_equal(step(compiled, module, tokens()), step(module, module, tokens()))


def test_under_autocast():
    module = make(max_tokens=24, dtype=torch.float32)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(step(compiled, module, tokens().float()), step(module, module, tokens().float()))


def test_a_compiled_module_trains():
    """The same losses as eager, step by step."""
    losses = []
    for compile_it in (False, True):
        module = make(max_tokens=24, dtype=torch.float32)
        function = torch.compile(module, backend="aot_eager", fullgraph=True) if compile_it else module
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        target = tokens(seed=1).float()
        losses.append([])
        for _ in range(12):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = function(tokens().float())
            loss = (out.float() - target).square().mean() + module.aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_twelve_layers_with_workspaces_of_their_own_share_one_graph():
    backend = Recompiles()
    for seed in range(12):
        module = make(seed, max_tokens=24)
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        assert_equal(step(compiled, module, tokens(seed=seed)), step(module, module, tokens(seed=seed)))
    assert backend.graphs == 1


def test_counts_of_tokens_are_dynamic():
    """One graph for the first count and one for all others, whatever their remainder on the ranks."""
    backend = Recompiles()
    module = make(ranks=4, max_tokens=40)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for count in (24, 25, 26, 27, 28, 97, 160):
        assert_equal(step(compiled, module, tokens(count)), step(module, module, tokens(count)))
    assert backend.graphs == 2


def test_a_layer_without_max_tokens_does_not_grow_in_compiled_code():
    module = make()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with pytest.raises(clowder.ClowderError, match=r"max_tokens = 0.*call it once before") as error:
        compiled(tokens())
    assert error.value.code == "argument"
    module(tokens())
    assert_equal(step(compiled, module, tokens()), step(module, module, tokens()))


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("message", "bad"),
    [
        (r"x: torch\.float32, must be torch\.bfloat16", lambda x: x.float()),
        (r"x: shape \[24, 32\], must be", lambda x: x[:, :32]),
        (r"tokens: 100 on one rank, must be at most max_tokens = 24", lambda x: x.repeat(9, 1)[:200]),
    ],
)
def test_argument_errors_keep_their_message(fullgraph, message, bad):
    """What Dynamo itself finds, it wraps where it may not leave the graph; the message stands in its own."""
    module = make(max_tokens=24)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=fullgraph)
    expected = (clowder.ClowderError, torch._dynamo.exc.Unsupported) if fullgraph else clowder.ClowderError
    with pytest.raises(expected, match=message):
        compiled(bad(tokens()))
    assert_equal(step(compiled, module, tokens()), step(module, module, tokens()))


def test_main_grads_are_refused_in_a_graph():
    case = Case()
    mains = {"w13": torch.zeros_like(case.w13)}
    workspace = case.workspace()

    def function(w13):
        return clowder.moe(
            case.x, case.topk_idx, case.topk_weights, w13, case.w2, workspace=workspace, main_grads=mains
        )

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"main_grads: not under torch\.compile"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(case.w13.clone().requires_grad_())


def test_a_compiled_graph_keeps_what_it_needs_alive():
    case = Case()

    def make_function():
        workspace = case.workspace(2)

        def function(x):
            return clowder.moe(x, case.topk_idx, case.topk_weights, case.w13, case.w2, workspace=workspace)

        return torch.compile(function, backend="aot_eager", fullgraph=True), weakref.ref(workspace._engine)

    function, engine = make_function()
    x = case.x.clone().requires_grad_()
    out = function(x)
    del function
    torch.compiler.reset()
    gc.collect()
    out.backward(case.dout)
    assert x.grad.abs().sum() > 0
    del out
    gc.collect()
    assert engine() is None


@torch._inductor.config.patch({"cpp_cache_precompile_headers": False})
def test_inductor_agrees_within_the_rounding_of_the_router():
    """Its router differs from eager's in the last bits: the logits are H products and sums in fp32, then come softmax and a
    division, so a weight moves by at most (H + 8) * 2**-24 of itself. That is far below half a step of bf16: an element of a
    result in bf16 is the same, or where it stood next to a border, its neighbour."""
    module = make(max_tokens=24)
    compiled = torch.compile(module, fullgraph=True)
    actual, expected = step(compiled, module, tokens()), step(module, module, tokens())
    assert torch.equal(actual["expert_counts"], expected["expert_counts"])  # no near tie in this input
    for name in ("out", "x", "w13", "w2", "router.weight"):
        difference = (actual[name].double() - expected[name].double()).norm()
        assert difference <= (2 * 2.0**-8 + 72 * 2.0**-24) * expected[name].double().norm(), name


_OTHER_PROCESS = """
import sys
import torch
from reference import Case
import clowder

case = Case(shared_intermediate=32)
workspace = case.workspace(2, saved_rows=int(sys.argv[1]))

def function(x, w13):
    return clowder.moe(
        x, case.topk_idx, case.topk_weights, w13, case.w2, case.shared_w13, case.shared_w2, workspace=workspace
    )

results = []
for run in (function, torch.compile(function, fullgraph=True)):
    x, w13 = case.x.clone().requires_grad_(), case.w13.clone().requires_grad_()
    out = run(x, w13)
    out.backward(case.dout)
    results.append((out, x.grad, w13.grad))
assert all(torch.equal(a, b) for a, b in zip(*results))
print("hits", torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_warm_cache_of_inductor_serves_other_processes(tmp_path):
    """One with the same sizes finds its graphs; one with other saved rows finds none that fits only the first."""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    hits = []
    for saved_rows in (30, 11, 30):
        command = [sys.executable, "-c", _OTHER_PROCESS, str(saved_rows)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        hits.append(result.stdout.split()[-1])
    assert hits == ["0", "0", "1"]


@pytest.mark.parametrize("context", [{}, {"context_fn": clowder.nn.keep_routes}], ids=["plain", "keep_routes"])
@torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
def test_checkpointing_inside_a_graph(context):
    """It needs PyTorch's switch for modules that keep results of a call, as MoE does."""
    module = make(max_tokens=24)

    def function(x):
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False, **context)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_equal(step(compiled, module, tokens()), step(module, module, tokens()))


def test_checkpointing_around_a_graph():
    module = make(max_tokens=24)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)

    def function(x):
        return torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=False)

    assert_equal(step(function, module, tokens()), step(module, module, tokens()))
