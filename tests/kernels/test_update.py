import math
from itertools import pairwise

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from kernels.update import Rule, State
from tests.kernels.interpreter import interpret

RULE = Rule(beta1=0.8, beta2=0.99, eps=1e-8, decay=0.3, clip_momentum=0.4, alpha=1.05)
NO_MOMENTUM = RULE._replace(beta1=0.0, beta2=0.0)
BOUNDS = 0, 1616, 1680, 1680, 5120  # units of more than a block, of less, of nothing; the last is not shared with keys


def arguments(clip, keys=True, half=torch.float32, steps=3.0, scale=1.0, wrong=None):
    """State, gradient, rates. The gradient of the first unit is below its limit, the others are above theirs."""
    generator, n = torch.Generator().manual_seed(0), BOUNDS[-1]

    def normal(size):
        return torch.randn(size, generator=generator)

    average = {"vector": normal(n), "norm": torch.tensor([b - a for a, b in pairwise(BOUNDS)]).sqrt(), "off": normal(0)}
    shared, copied = BOUNDS[-2] * keys, half is not None
    state = State(
        normal(n), normal(n) / 10, normal(n).square() / 10, torch.tensor(steps), average[clip] * (steps > 0),
        normal(shared), *(torch.full((size * copied,), 7.0, dtype=half) for size in (n, shared)),
    )  # fmt: skip
    gradient = 1.3 * scale * normal(n)
    gradient[: BOUNDS[1]] *= 0.7
    if wrong:
        gradient[-1] = wrong
    return state, gradient, torch.tensor([3e-3, 0.1], dtype=torch.float64)


CASES = {
    "vector": ("vector",),
    "norm": ("norm",),
    "no clip": ("off",),
    "first step": ("vector", True, None, 0.0),
    "first step, norm": ("norm", True, torch.float16, 0.0, 1e-9),
    "late, no keys": ("norm", False, torch.float32, 3e6),
    "nan": ("norm", True, torch.float32, 3.0, 1.0, math.nan),
    "inf": ("vector", True, torch.float32, 0.0, 1.0, math.inf),
}


def updated(state, gradient, rates, rule=RULE):
    """The state after a step, none of the arguments changed, and whether the gradient was finite."""
    state = State(*(x.clone() for x in state))
    flats = [gradient, state.average] if len(state.average) == len(gradient) else [gradient]
    norms = kernels.unit_norms(flats, bounds=BOUNDS)
    return *state, kernels.update_parameters(state, gradient.clone(), norms, rates, bounds=BOUNDS, rule=rule)


def restated(state, gradient, rates, rule=RULE):
    """The same by the equations, in float64, unit by unit, with what is to be rounded in place of the copies."""
    if not gradient.isfinite().all():
        return *state, torch.tensor(False)
    values, first, second, step, average, keys = (x.double() for x in state[:6])
    gradient, (rate, share), t = gradient.double(), rates.tolist(), int(step) + 1
    vector, used = len(average) == len(values), gradient.clone()
    for unit, (a, b) in enumerate(pairwise(BOUNDS if len(average) else ())):
        part, g = slice(a, b) if vector else slice(unit, unit + 1), gradient[a:b]
        before, measured = average[part].clone(), g if vector else g.norm()
        average[part] = measured
        if t > 1:
            average[part] = rule.clip_momentum * before + (1 - rule.clip_momentum) * measured
            if g.norm() > rule.alpha * before.norm():
                used[a:b] = g * before.norm() / g.norm()
    first = rule.beta1 * first + (1 - rule.beta1) * used
    second = rule.beta2 * second + (1 - rule.beta2) * used**2
    direction = first / (1 - rule.beta1**t) / ((second / (1 - rule.beta2**t)).sqrt() + rule.eps)
    values = (1 - rate * rule.decay) * values - rate * direction
    keys = keys + share * (values[: len(keys)] - keys)
    copies = (values[: len(state.copies)], keys[: len(state.key_copies)])
    return values, first, second, torch.tensor(t), average, keys, *copies, torch.tensor(True)


def check(found, args, rule=RULE):
    """Within a few roundings of float32: sums in another order, products added with one rounding or with two. A state
    that no step has changed, and the copies of what the kernel itself computed, are the same bits."""
    expected = restated(*args, rule)
    finite = expected[-1]
    for name, one, other in zip((*State._fields, "finite"), found, expected, strict=True):
        one, other = one.cpu(), other.to(one.dtype)
        if finite and name not in ("copies", "key_copies"):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=5e-7, msg=lambda said, name=name: f"{name}: {said}")
        elif not finite:
            assert torch.equal(one, other), name
    values, keys, copies, key_copies = (found[State._fields.index(x)] for x in ("values", "keys", *State._fields[-2:]))
    if finite:
        assert torch.equal(copies, values[: len(copies)].to(copies.dtype))
        assert torch.equal(key_copies, keys[: len(key_copies)].to(key_copies.dtype))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    calls = [(updated, arguments(*case), {}) for case in CASES.values()]
    calls.append((updated, arguments("norm"), {"rule": NO_MOMENTUM}))
    return dict(zip([*CASES, "no momentum"], interpret(calls, tmp_path_factory.mktemp("update")), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_reference_and_interpreted_kernels_are_the_equations(interpreted, name):
    args = arguments(*CASES[name])
    check(updated(*args), args)
    check(interpreted[name], args)


def test_moments_may_be_the_gradient_itself(interpreted):
    args = arguments("norm")
    for found in (updated(*args, NO_MOMENTUM), interpreted["no momentum"]):
        check(found, args, rule=NO_MOMENTUM)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_device_is_the_equations(name):
    state, *rest = arguments(*CASES[name])
    args = state._replace(copies=state.copies.bfloat16(), key_copies=state.key_copies.bfloat16()), *rest
    on_device = State(*(x.cuda() for x in args[0])), *(x.cuda() for x in rest)
    found = updated(*on_device)
    check(found, args)
    assert all(torch.equal(one, other) for one, other in zip(found, updated(*on_device), strict=True))  # run to run


def test_the_clip_passes_what_is_at_the_limit():
    """Eq. 10 clips what is longer than alpha times the average, in numbers without rounding."""
    state, *_ = arguments("vector")
    state = state._replace(average=torch.zeros(16), step=torch.tensor(1.0), first=torch.zeros(16), keys=torch.zeros(0))
    rates, rule, bounds = torch.zeros(2).double(), RULE._replace(alpha=1.25, beta1=0.0), (0, 16)
    for length, passed in ((5.0, 5.0), (5.5, 4.0)):
        state.average[:2], gradient = torch.tensor([0.0, 4.0]), torch.tensor([0.6, -0.8] + [0.0] * 14) * length
        one = State(*(x[:16].clone() if x.dim() else x.clone() for x in state[:6]), *(torch.zeros(0),) * 2)
        norms = kernels.unit_norms([gradient, one.average], bounds=bounds)
        kernels.update_parameters(one, gradient, norms, rates, bounds=bounds, rule=rule)
        assert one.first.norm() == passed


def test_operators_keep_what_differs_from_step_to_step_out_of_a_graph():
    state, gradient, rates = arguments("vector", half=torch.bfloat16)
    norms = kernels.unit_norms([gradient, state.average], bounds=BOUNDS)
    tests = "test_schema", "test_faketensor"  # the graph below is the rest
    args = list(state), gradient, norms, rates, list(BOUNDS), list(RULE)
    torch.library.opcheck(torch.ops.aps.unit_norms.default, ([gradient], list(BOUNDS)), test_utils=tests)
    torch.library.opcheck(torch.ops.aps.update_parameters.default, args, test_utils=tests)
    graph = make_fx(lambda state, gradient, rates: updated(state, gradient, rates))(
        *arguments("vector", wrong=math.nan)
    )
    for steps in (0.0, 5.0):
        args = arguments("vector", steps=steps)
        args[2].mul_(1 + steps)
        for one, other in zip(graph(*args), updated(*args), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"gradient": torch.zeros(5120).double()}, TypeError, "gradient.*float32.*float64"),
        ({"values": torch.zeros(5119)}, ValueError, r"values.*\[5120\].*\[5119\]"),
        ({"second": torch.zeros(5120, device="meta")}, ValueError, "second.*cpu.*meta"),
        ({"step": torch.zeros(1)}, ValueError, r"step.*\[\].*\[1\]"),
        ({"average": torch.zeros(5)}, ValueError, "average.*4 units.*5120, got 5"),
        ({"keys": torch.zeros(1600)}, ValueError, r"keys.*whole units.*1600"),
        ({"copies": torch.zeros(16)}, ValueError, r"copies.*\[5120\].*\[16\]"),
        ({"key_copies": torch.zeros(0)}, ValueError, r"key_copies.*\[1680\].*\[0\]"),
        ({"norms": torch.zeros(1, 4)}, ValueError, r"norms.*\[2, 4\].*\[1, 4\]"),
        ({"rates": torch.zeros(2)}, TypeError, "rates.*float64.*float32"),
        ({"bounds": (0, 8, 5120)}, ValueError, "bounds.*multiples of 16 from 0 to 5120"),
    ],
)
def test_errors_name_what_was_expected(change, error, words):
    state, gradient, rates = arguments("vector")
    given = state._asdict() | {"gradient": gradient, "norms": torch.zeros(2, 4), "rates": rates, "bounds": BOUNDS}
    given |= change
    with pytest.raises(error, match=words):
        state = State(*(given.pop(name) for name in State._fields))
        kernels.update_parameters(
            state, given.pop("gradient"), given.pop("norms"), given.pop("rates"), **given, rule=RULE
        )
