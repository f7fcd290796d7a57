"""Routers against loops over tokens, ties included, and the balance by bias."""

import multiprocessing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clowder
from clowder.nn import DeepSeekV3Router, SoftmaxRouter


def choose_by_loop(scores, topk, n_group, topk_group):
    """Each token by itself, in plain Python: the largest first, the lower index first where two are equal."""
    chosen = []
    for token in scores.tolist():
        size = len(token) // n_group
        groups = [token[g * size : (g + 1) * size] for g in range(n_group)]
        # In fp32, as the operator adds.
        of_group = [torch.tensor(sorted(group, reverse=True)[:2]).sum().item() for group in groups]
        best = sorted(range(n_group), key=lambda g: (-of_group[g], g))[:topk_group]
        allowed = [e for e in range(len(token)) if e // size in best]
        chosen.append(sorted(allowed, key=lambda e: (-token[e], e))[:topk])
    return torch.tensor(chosen, dtype=torch.int64).reshape(-1, topk)


@st.composite
def choices(draw):
    n_group = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.integers(1, 6))
    topk_group = draw(st.integers(1, n_group))
    topk = draw(st.integers(1, min(16, topk_group * size)))
    tokens = draw(st.integers(0, 20))
    levels = draw(st.sampled_from([1, 2, 5, 10_000]))  # few levels: many ties
    seed = draw(st.integers(0, 100))
    scores = torch.randint(-levels, levels, (tokens, n_group * size), generator=torch.Generator().manual_seed(seed))
    return scores.float() / levels, topk, n_group, topk_group


@given(choices())
def test_choose_experts(choice):
    scores, topk, n_group, topk_group = choice
    actual = torch.ops.clowder.choose_experts(scores, topk, n_group, topk_group)
    assert actual.is_contiguous() and actual.dtype == torch.int64
    assert torch.equal(actual, choose_by_loop(scores, topk, n_group, topk_group))


def test_a_bias_may_make_every_score_negative():
    """Experts of groups that were not chosen stay out all the same."""
    scores = torch.tensor([[-5.0, -6.0, -1.0, -9.0, -3.0, -4.0, -7.0, -8.0]])
    assert torch.ops.clowder.choose_experts(scores, 4, 2, 1).tolist() == [[2, 0, 1, 3]]


@given(
    n_group=st.sampled_from([1, 2, 4]),
    topk=st.sampled_from([1, 2, 4]),
    renormalise=st.booleans(),
    scaling_factor=st.sampled_from([1.0, 2.5]),
    seed=st.integers(0, 50),
)
def test_deepseek_v3_equals_a_loop(n_group, topk, renormalise, scaling_factor, seed):
    generator = torch.Generator().manual_seed(seed)
    topk_group = (n_group + 1) // 2
    router = DeepSeekV3Router(
        32, 16, topk, n_group=n_group, topk_group=topk_group, scaling_factor=scaling_factor, renormalise=renormalise
    )
    with torch.no_grad():
        router.weight.copy_(torch.randn(16, 32, generator=generator))
        router.expert_bias.copy_(torch.randn(16, generator=generator) * 0.3)
    x = torch.randn(9, 32, generator=generator).bfloat16()
    routes = router(x)
    scores = torch.sigmoid(x.float() @ router.weight.T)
    expected_idx = choose_by_loop(scores.detach() + router.expert_bias, topk, n_group, topk_group)
    assert torch.equal(routes.topk_idx, expected_idx)
    for t in range(9):
        weights = [scores[t, e].item() for e in expected_idx[t]]
        total = sum(weights) if renormalise else 1.0
        expected = torch.tensor([w / total * scaling_factor for w in weights])
        # fp32: at most K - 1 additions, a division and a product, each with a rounding of 2**-24.
        assert torch.allclose(routes.topk_weights[t], expected, rtol=(topk + 2) * 2.0**-24, atol=0.0)
    assert torch.allclose(routes.scores.sum(-1), torch.ones(9))


def test_the_bias_selects_and_does_not_weigh():
    router = DeepSeekV3Router(32, 8, 2, renormalise=False)
    x = torch.randn(6, 32)
    with torch.no_grad():
        router.expert_bias[5] = 10.0
    routes = router(x)
    assert (routes.topk_idx[:, 0] == 5).all()
    scores = torch.sigmoid(x @ router.weight.T)
    assert torch.allclose(routes.topk_weights, scores.gather(1, routes.topk_idx), rtol=64 * 2.0**-24)


def test_gradients_reach_the_weight_through_the_chosen_scores():
    """Against autograd of the formula on the same choice."""
    router = DeepSeekV3Router(32, 8, 3, scaling_factor=2.0).double()
    router.weight.data = router.weight.data.float()
    x = torch.randn(5, 32, requires_grad=True)
    routes = router(x)
    upstream = torch.randn(5, 3)
    routes.topk_weights.backward(upstream)
    actual = x.grad, router.weight.grad
    y, weight = x.detach().double().requires_grad_(), router.weight.detach().double().requires_grad_()
    scores = torch.sigmoid(y @ weight.T).gather(1, routes.topk_idx)
    (scores / scores.sum(-1, keepdim=True) * 2.0).backward(upstream.double())
    for a, e in zip(actual, (y.grad, weight.grad)):
        # fp32 all the way: sums of 32 terms and fewer, some ten operations more.
        assert (a.double() - e).norm() <= 64 * 2.0**-24 * e.norm()


def test_equal_scores_go_to_the_lower_experts():
    for router in (SoftmaxRouter(32, 64, 4), DeepSeekV3Router(32, 64, 4, n_group=8, topk_group=3)):
        torch.nn.init.zeros_(router.weight)
        assert router(torch.randn(100, 32)).topk_idx.tolist() == [[0, 1, 2, 3]] * 100


def test_update_bias():
    router = DeepSeekV3Router(32, 4, 2)
    router.update_bias(torch.tensor([10, 2, 6, 6]), 0.25)
    assert router.expert_bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    router.update_bias(torch.tensor([0, 0, 1, 0]), 0.25)
    assert router.expert_bias.tolist() == [0.0, 0.5, -0.25, 0.25]
    with pytest.raises(clowder.ClowderError, match="expert_counts: shape"):
        router.update_bias(torch.ones(5))
    with pytest.raises(clowder.ClowderError, match="expert_counts: 3"):
        router.update_bias(3)


def test_the_bias_evens_out_the_load():
    """Tokens that all lean to a few experts spread out once the bias has moved."""
    torch.manual_seed(0)
    module = clowder.nn.MoE(64, 32, 8, 2, router="deepseek_v3", aux_loss_coefficient=0.0)
    x = torch.randn(400, 64) + 2.0
    with torch.no_grad():
        module.router.weight += torch.linspace(0.0, 0.01, 8)[:, None]
        module(x.bfloat16())
        before = module.expert_counts.max()
        for _ in range(300):
            module(x.bfloat16())
            module.router.update_bias(module.expert_counts, 2e-3)
    assert before > 300 and module.expert_counts.max() < 130


def _process(rank, folder):
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    router = DeepSeekV3Router(32, 2, 1)
    router.update_bias(torch.tensor([[0, 9], [20, 0]][rank]), 0.5, process_group=torch.distributed.group.WORLD)
    assert router.expert_bias.tolist() == [-0.5, 0.5]
    torch.distributed.destroy_process_group()


def test_counts_of_several_processes_are_added_up(tmp_path):
    """One process alone would move its bias the other way."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_process, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_the_bias_stays_fp32_and_in_the_state_dict():
    router = DeepSeekV3Router(32, 4, 2, dtype=torch.bfloat16)
    router.update_bias(torch.tensor([4, 0, 1, 1]), 1e-3)
    before = router.expert_bias.clone()
    router.half().bfloat16()
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, before)
    assert router.weight.dtype == torch.bfloat16
    assert set(router.state_dict()) == {"weight", "expert_bias"}
    other = DeepSeekV3Router(32, 4, 2, dtype=torch.bfloat16)
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.expert_bias, before)
    router.reset_parameters()
    assert not router.expert_bias.any()
    assert router.to("meta").expert_bias.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("n_group", {"n_group": 3}),
        ("n_group", {"n_group": 0}),
        ("topk_group", {"n_group": 4, "topk_group": 5}),
        ("topk_group", {"n_group": 4, "topk_group": 0}),
        ("topk", {"n_group": 8, "topk_group": 1}),
        ("router_options", {"n_groups": 4}),
    ],
)
def test_arguments(name, options):
    with pytest.raises(clowder.ClowderError, match=f"^{name}: ") as error:
        clowder.nn.MoE(64, 32, 8, 2, router="deepseek_v3", router_options=options)
    assert error.value.code == "argument"


def test_nan_stays_with_its_token():
    for router in (SoftmaxRouter(32, 8, 2), DeepSeekV3Router(32, 8, 2, n_group=4, topk_group=2)):
        x = torch.randn(4, 32)
        clean = router(x)
        x[2] = float("nan")
        dirty = router(x)
        others = torch.tensor([0, 1, 3])
        assert torch.isnan(dirty.topk_weights[2]).all()
        assert dirty.topk_idx.min() >= 0 and dirty.topk_idx.max() < 8
        assert torch.equal(dirty.topk_weights[others], clean.topk_weights[others])
