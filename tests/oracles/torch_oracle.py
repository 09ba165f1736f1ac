#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the library's SGD, Adam and AdamW with torch.optim, step by step.

    torch_oracle.py RULE_RUNNER

Every combination of the flags (momentum, dampening, nesterov, weight_decay, maximize; betas, eps, amsgrad) runs 20 steps
on the CPU, with a learning rate that changes every step, a zero gradient, and gradients of very different sizes. PyTorch
runs each twice, in float32 and in float64. The exit code is 0 if all agree, 1 if not, 77 if PyTorch is not installed.

What is allowed. Both programs compute in float32, but round in different places: each rounding errs by at most u = 2^-24 of
the rounded value. In one step a parameter is rounded at most three times on its own scale |p| (PyTorch: the factor of the
decay, the product, the sum; the library: the last two); the step s itself takes about
ten roundings. Where a gradient with its decay, a moment or a buffer cancels, the errors stay on the scale of what was
summed up: let s' be the step that sums of absolute values would give (for Adam lr * m' / (sqrt(v) + eps)), and v' the
second moment of them; v is rounded at most three times a step, of which the root halves the effect. So t steps err by
less than

    u * (3 * t * max |p| + sum of s' * (10 + 1.5 * t * v' / v)),

once for each program. The float64 run is exact on that scale, so the library must lie within that bound of it, and within
twice the bound of PyTorch's float32. State buffers are held to 10 * t * u of their own sums of absolute values.
"""

import itertools
import os
import struct
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
from installed import require  # noqa: E402

torch = require("torch", "Debian: apt install python3-torch")

ELEMENTS = 257
STEPS = 20
UNIT = 2.0**-24
BUFFERS = {
    "sgd": ["momentum_buffer"],
    "adam": ["exp_avg", "exp_avg_sq"],
    "adamw": ["exp_avg", "exp_avg_sq"],
    "adam_amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "adamw_amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
}


def cases():
    for momentum, dampening, nesterov, weight_decay, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.4), (False, True), (0.0, 0.05), (False, True)
    ):
        if nesterov and (momentum == 0 or dampening != 0):
            continue  # refused by both
        yield "sgd", dict(
            lr=0.05, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov, maximize=maximize
        )
    for rule, (beta1, beta2), eps, weight_decay, maximize in itertools.product(
        ("adam", "adam_amsgrad", "adamw", "adamw_amsgrad"),
        ((0.9, 0.999), (0.8, 0.95), (0.0, 0.99), (0.95, 0.4)),
        (1e-8, 1e-3),
        (0.0, 0.1),
        (False, True),
    ):
        yield rule, dict(lr=0.01, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, maximize=maximize)


def data(seed):
    """Parameters, learning-rate factors and gradients, as float32."""
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(ELEMENTS, generator=generator)
    scales = 10.0 ** (4 * torch.rand(ELEMENTS, generator=generator) - 3)
    gradients = torch.randn(STEPS, ELEMENTS, generator=generator) * scales
    gradients[5] = 0
    gradients[:, ::13] = 0
    gradients[::2, 1::17] *= 100
    factors = [1.0 / 2 ** (t % 3) * (1 + t % 5) / 4 for t in range(STEPS)]  # exact in float32
    return parameters, factors, gradients


def torch_optimizer(rule, settings, parameter):
    settings = dict(settings)
    if rule == "sgd":
        return torch.optim.SGD([parameter], **settings)
    settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
    kind = torch.optim.AdamW if rule.startswith("adamw") else torch.optim.Adam
    return kind([parameter], amsgrad=rule.endswith("amsgrad"), **settings)


def by_torch(rule, settings, inputs, dtype):
    """Parameters and state buffers after each step."""
    parameters, factors, gradients = inputs
    parameter = torch.nn.Parameter(parameters.to(dtype).clone())
    optimizer = torch_optimizer(rule, settings, parameter)
    history = []
    for factor, gradient in zip(factors, gradients):
        optimizer.param_groups[0]["lr"] = settings["lr"] * factor
        parameter.grad = gradient.to(dtype)
        optimizer.step()
        state = optimizer.state[parameter]
        row = {"parameter": parameter.detach().double().clone()}
        for name in BUFFERS[rule]:
            if state.get(name) is not None:
                row[name] = state[name].double().clone()
        history.append(row)
    return history


def by_library(runner, all_cases):
    """The same by rule_runner: one process for all cases."""
    request = bytearray()
    for rule, settings, inputs in all_cases:
        parameters, factors, gradients = inputs
        words = [f"{name}={float(value)!r}" for name, value in settings.items()]
        request += f"{rule} {ELEMENTS} {STEPS} {' '.join(words)}\n".encode()
        request += struct.pack(f"{ELEMENTS}f", *parameters.tolist())
        for factor, gradient in zip(factors, gradients):
            request += struct.pack(f"{ELEMENTS + 1}f", factor, *gradient.tolist())
    done = subprocess.run([runner], input=bytes(request), stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    values = memoryview(done.stdout).cast("f")
    position = 0
    results = []
    for rule, _, _ in all_cases:
        history = []
        for _ in range(STEPS):
            row = {}
            for name in ["parameter"] + BUFFERS[rule]:
                row[name] = torch.tensor(values[position : position + ELEMENTS].tolist(), dtype=torch.float64)
                position += ELEMENTS
            history.append(row)
        results.append(history)
    if position != len(values):
        sys.exit("torch_oracle: the runner wrote more than was asked for")
    return results


def bounds(rule, settings, inputs, exact):
    """For each step, how far each buffer may be from the exact one."""
    parameters, factors, gradients = inputs
    weight_decay = settings["weight_decay"]
    largest = parameters.double().abs()
    steps = torch.zeros(ELEMENTS, dtype=torch.float64)
    summed = torch.zeros(ELEMENTS, dtype=torch.float64)  # what a moment would be if nothing cancelled
    squares = torch.zeros(ELEMENTS, dtype=torch.float64)
    largest_squares = torch.zeros(ELEMENTS, dtype=torch.float64)
    result = []
    for t, (row, factor, gradient) in enumerate(zip(exact, factors, gradients.double()), start=1):
        rate = settings["lr"] * factor
        taken = gradient.abs()
        if rule in ("sgd", "adam", "adam_amsgrad"):
            taken = taken + weight_decay * largest
        largest = torch.maximum(largest, row["parameter"].abs())
        if rule == "sgd":
            summed = settings["momentum"] * summed + taken
            steps = steps + rate * (summed + taken)
            allowed = {"momentum_buffer": 10 * t * UNIT * summed}
        else:
            summed = settings["beta1"] * summed + (1 - settings["beta1"]) * taken
            squares = settings["beta2"] * squares + (1 - settings["beta2"]) * taken**2
            largest_squares = torch.maximum(largest_squares, squares)
            used = row[BUFFERS[rule][-1]]
            uncancelled = largest_squares if rule.endswith("amsgrad") else squares
            root = (used / (1 - settings["beta2"] ** t)).sqrt()
            step = rate * summed / (1 - settings["beta1"] ** t) / (root + settings["eps"])
            steps = steps + torch.nan_to_num(step * (10 + 1.5 * t * uncancelled / used)) / 10  # 0/0: no gradient yet
            allowed = {"exp_avg": 10 * t * UNIT * summed, "exp_avg_sq": 10 * t * UNIT * squares}
            allowed["max_exp_avg_sq"] = 10 * t * UNIT * largest_squares
        allowed["parameter"] = UNIT * (3 * t * largest + 10 * steps)
        result.append({name: bound + 1e-44 for name, bound in allowed.items()})  # subnormal steps are absolute
    return result


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    all_cases = [(rule, settings, data(seed)) for seed, (rule, settings) in enumerate(cases())]
    library = by_library(sys.argv[1], all_cases)
    failures = 0
    worst = {"float64": 0.0, "float32": 0.0, "torch": 0.0}
    for (rule, settings, inputs), ours in zip(all_cases, library):
        exact = by_torch(rule, settings, inputs, torch.float64)
        single = by_torch(rule, settings, inputs, torch.float32)
        allowed = bounds(rule, settings, inputs, exact)
        for t in range(STEPS):
            for name in exact[t]:
                bound = allowed[t][name]
                to_exact = ((ours[t][name] - exact[t][name]).abs() / bound).max().item()
                to_single = ((ours[t][name] - single[t][name]).abs() / (2 * bound)).max().item()
                of_torch = ((single[t][name] - exact[t][name]).abs() / bound).max().item()
                if name == "parameter":
                    worst["float64"] = max(worst["float64"], to_exact)
                    worst["float32"] = max(worst["float32"], to_single)
                    worst["torch"] = max(worst["torch"], of_torch)
                if not (to_exact <= 1 and to_single <= 1):  # NaN fails, too
                    failures += 1
                    if failures <= 20:
                        print(
                            f"FAILED: {rule} {settings}, step {t + 1}, {name}: {to_exact:.3g} of the bound to float64, "
                            f"{to_single:.3g} to float32 (PyTorch's own float32: {of_torch:.3g})"
                        )
    print(f"{len(all_cases)} cases of {STEPS} steps against PyTorch {torch.__version__}: {failures} failures")
    print(
        f"parameters use at most {worst['float64']:.2f} of the bound to float64 and {worst['float32']:.2f} of that to "
        f"float32; PyTorch's own float32 uses {worst['torch']:.2f} of the first"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
