"""Function transforms and derivatives of higher order."""

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
INPUTS = torch.randn(5, 4)


def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return functional_call(MODEL, weights, (x,)).square().sum()


def weights() -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in MODEL.named_parameters()}


def ensemble() -> None:
    """Models stacked and mapped."""
    models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    vmap(lambda p, b: functional_call(MODEL, (p, b), (INPUTS,)))(parameters, buffers)


def gradients() -> None:
    """Of each sample."""
    MODEL(INPUTS)
    vmap(grad(loss), in_dims=(None, 0))(weights(), INPUTS)


def jacobians() -> None:
    MODEL(INPUTS)
    jacrev(MODEL)(INPUTS[0])
    jacfwd(MODEL)(INPUTS[0])
    vmap(jacrev(MODEL))(INPUTS)


def hessians() -> None:
    MODEL(INPUTS)
    hessian(lambda x: MODEL(x).square().sum())(INPUTS[0])


def products() -> None:
    """Jacobians times vectors, forward and in reverse."""
    _, pull = vjp(MODEL, INPUTS)
    pull(torch.ones(5, 3))
    jvp(MODEL, (INPUTS,), (torch.ones_like(INPUTS),))


def higher_order() -> None:
    """A gradient penalty: the gradient's own norm is learned."""
    x = INPUTS.clone().requires_grad_()
    (slope,) = torch.autograd.grad(MODEL(x).sum(), x, create_graph=True)
    (slope.norm(dim=-1) - 1).square().mean().backward()


def attention() -> None:
    """Attention mapped over heads."""
    layer = nn.Linear(4, 4)
    heads = layer(torch.randn(3, 6, 4))
    vmap(nn.functional.scaled_dot_product_attention)(heads, heads, heads).sum().backward()


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program
    for program in (ensemble, gradients, jacobians, hessians, products, higher_order, attention)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
