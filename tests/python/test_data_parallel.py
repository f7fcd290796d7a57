"""Modules under PyTorch's data parallelism, in one process: wrapped layers compute the same bits."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import clowder


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make(**options):
    torch.manual_seed(0)
    return clowder.nn.MoE(64, 32, 8, 2, max_tokens=40, shared_intermediate=32, **options)


def step(module, call):
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    out = call(x)
    (out.float().square().mean() + module.aux_loss).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    return {"out": out.detach(), "x": x.grad} | whole


@pytest.mark.parametrize("options", [{}, {"router": "deepseek_v3", "layout": "per_expert"}], ids=str)
@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
def test_wrapped_modules(mesh, wrap, options):
    plain, module = make(**options), make(**options)
    call = fully_shard(module, mesh=mesh) if wrap == "fully_shard" else DistributedDataParallel(module)
    expected, actual = step(plain, plain), step(module, call)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_distributed_tensors_are_refused(mesh):
    module = make()
    x = torch.randn(40, 64).bfloat16()
    with pytest.raises(clowder.ClowderError, match="x: a DTensor"):
        module(distribute_tensor(x, mesh, [Replicate()]))
    module.w2 = torch.nn.Parameter(distribute_tensor(module.w2.detach(), mesh, [Replicate()]))
    with pytest.raises(clowder.ClowderError, match="w2: a DTensor") as error:
        module(x)
    assert error.value.code == "argument"
