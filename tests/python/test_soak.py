"""Many steps with changing shapes and routes: the same bits each time, and no growth of memory, threads or descriptors."""

import gc
import itertools
import os
import threading
import time

import pytest
import torch

import clowder
from clowder import engine

# Every tensor of a step that could be left behind (schedules, saved values, activations, gradients) has at least this size
# on the average of a cycle, so a leak of one of them a step exceeds the limit below.
SMALLEST_TENSOR = 16 * 1024
LEAST_STEPS = 300
PAGE = os.sysconf("SC_PAGESIZE")


class Cycle:
    """Layers of several shapes on workspaces of their own or in common, and the steps of one cycle over them."""

    def __init__(self):
        torch.manual_seed(0)
        shared = clowder.Workspace(96, 64, 8, 3, 384, group=clowder.VirtualGroup(2), saved_rows=100, keep_x=True)
        self.modules = [
            clowder.nn.MoE(96, 64, 8, 3, workspace=shared),
            clowder.nn.MoE(96, 64, 8, 3, workspace=shared, layout="per_expert", router="deepseek_v3"),
            clowder.nn.MoE(128, 96, 4, 2, shared_intermediate=64, max_tokens=2048, saved_rows=200),
            clowder.nn.MoE(96, 96, 16, 4, group=clowder.VirtualGroup(4), ring_rows=96, max_tokens=80),
        ]
        self.counts = (256, 190, 129, 33, 1, 0)

    def steps(self):
        """Names of the steps; each is the same work, bit for bit, in every cycle."""
        return itertools.product(range(len(self.modules)), self.counts)

    def step(self, which, count):
        """One step of training, without the update. Returns a number that any changed bit would change."""
        module = self.modules[which]
        generator = torch.Generator().manual_seed(1000 * which + count)
        x = torch.randn(count, module.hidden, generator=generator).bfloat16().requires_grad_()
        if count == 129:  # all to the same experts
            x = (x.detach() * 0.0 + 1.0).requires_grad_()
        module.zero_grad(set_to_none=True)
        is_checkpointed = which == 2
        out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) if is_checkpointed else module(x)
        (out.float().square().sum() + module.aux_loss).backward()
        tensors = [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]
        return [hash(tensor.contiguous().view(torch.uint8).numpy().tobytes()) for tensor in tensors]

    def short_lived(self):
        """A workspace and a graph that are dropped at once."""
        module = clowder.nn.MoE(64, 32, 4, 2, group=clowder.VirtualGroup(2))
        module(torch.randn(40, 64).bfloat16())


def resources():
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * PAGE
    threads = len(os.listdir("/proc/self/task"))
    return resident, threads, len(os.listdir("/proc/self/fd")), len(engine._engines), threading.active_count()


def soak(steps, *, most_seconds=float("inf")):
    """Up to so many steps, fewer where time runs out, but enough that a leak stands out."""
    cycle = Cycle()
    expected = {}
    for name in cycle.steps():  # the largest of everything has been there once
        expected[name] = cycle.step(*name)
    for name in [*cycle.steps(), *cycle.steps()]:
        assert cycle.step(*name) == expected[name]
    cycle.short_lived()

    resident, *counts = resources()
    done, deadline = 0, time.monotonic() + most_seconds
    for name in itertools.cycle(cycle.steps()):
        if done >= steps or (done >= LEAST_STEPS and time.monotonic() > deadline):
            break
        assert cycle.step(*name) == expected[name], name
        if done % 20 == 0:
            cycle.short_lived()
        done += 1
    later, *later_counts = resources()
    print(f"{done} steps, {(later - resident) / 1024:.0f} KiB more")
    assert later_counts == counts
    # Half of what one such tensor a step would leave; what an allocator keeps back does not grow with the steps.
    assert later - resident <= done * SMALLEST_TENSOR / 2


def test_smallest_tensor():
    """The sizes that the limit relies on, averaged over a cycle's counts of tokens."""
    cycle = Cycle()
    mean_tokens = sum(cycle.counts) / len(cycle.counts)
    for module in cycle.modules:
        space = module.workspace
        sizes = {
            "schedule": 4 * space.ranks * space.schedule_words,
            "gate_up": 4 * space.ranks * space.saved_rows * space.intermediate,
            "activations": 2 * mean_tokens * space.hidden,
            "gradients of weights": 2 * space.num_experts * space.hidden * space.intermediate,
        }
        for name, size in sizes.items():
            assert size >= SMALLEST_TENSOR, (name, size, space)


def test_some_steps():
    soak(2000, most_seconds=12)


@pytest.mark.long
def test_long_2000_steps():
    soak(2000)
