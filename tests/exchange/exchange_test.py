#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""exchange_test.py RUNNER: training that began in shardopt goes on in PyTorch, and the other way round.

For each rule, on the same gradients: seven steps on four ranks, saved and merged, are converted by tools/torch_state.py;
seven more in shardopt and in PyTorch give the same parameters. Seven steps in PyTorch are converted, loaded on three ranks,
and go on likewise. Both conversions together change no bit. Exit code 0, or 77 if PyTorch is not installed.

What is allowed. Both programs begin with the same bits and compute in fp32, but round in different places. In a step, each
rounds a parameter at most three times on its own scale, and its step about ten times, plus 1.5 times a step for what the
moments carry on (tests/oracles/torch_oracle.py counts them). Where a moment cancels, its error stays on the scale of what
was summed up; the largest step S of all elements stands for that. With u = 2^-24, after t steps both together may differ by

    2 * u * t * (3 * max |p| + (10 + 1.5 * t) * S)

A count of updates that is off by one changes parameters by 25 times that, a lost moment by thousands.
"""

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest.mock

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
from installed import require  # noqa: E402

torch = require("torch", "Debian: apt install python3-torch")

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
sys.path[:0] = [os.path.join(ROOT, "tools"), os.path.join(ROOT, ".deps/python")]
import torch_state  # noqa: E402

STEPS = 7
UNIT = 2.0**-24


class Net(torch.nn.Module):
    """Two groups, a frozen parameter, a tied one, a scalar, one without elements, a buffer; names in another order."""

    table = [  # in the engine's order: name, shape, kind
        ("layer0.weight", (31, 29), "decay"), ("layer0.bias", (31,), "plain"), ("embedding.weight", (5, 3), "frozen"),
        ("layer10.weight", (3, 31), "decay"), ("head.weight", "layer10.weight", "alias"), ("gain", (), "plain"), ("empty", (0, 4), "plain"),
    ]

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.long))
        self.layer10 = torch.nn.Linear(31, 3, bias=False)
        self.head = torch.nn.Linear(31, 3, bias=False)
        self.head.weight = self.layer10.weight
        self.layer0 = torch.nn.Linear(29, 31)
        self.embedding = torch.nn.Embedding(5, 3)
        self.embedding.weight.requires_grad = False


class Plain(torch.nn.Module):
    """One group, all trained."""

    table = [("weight", (13, 17), "default"), ("bias", (13,), "default")]

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(13, 17))
        self.bias = torch.nn.Parameter(torch.zeros(13))


ADAM = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
CASES = [  # rule, settings, weight decay of "decay", model
    ("adamw", ADAM, 0.1, Net), ("adamw_amsgrad", ADAM, 0.1, Net), ("adam", ADAM, 0.05, Net), ("sgd", {**SGD, "nesterov": True}, 0.05, Net),
    ("sgd", {**SGD, "dampening": 0.4}, 0.0, Net), ("sgd", {**SGD, "momentum": 0.0}, 0.1, Net), ("adamw", ADAM, 0.1, Plain),
]


def groups_of(settings, decay, model):
    """Hyper-parameters of each group: unequal in more than the decay."""
    if model is Plain:
        return {"default": {**settings, "weight_decay": decay}}
    return {"decay": {**settings, "weight_decay": decay}, "plain": {**settings, "lr": settings["lr"] / 3, "weight_decay": 0.0}}


def trained(model):
    return [(name, shape) for name, shape, kind in model.table if kind not in ("frozen", "alias")]


def numel(shape):
    return int(torch.tensor(shape, dtype=torch.long).prod())


def data(model, seed):
    """Parameters, and gradients of twice STEPS steps: flat, in table order."""
    generator = torch.Generator().manual_seed(seed)
    elements = sum(numel(shape) for _, shape in trained(model))
    scales = 10.0 ** (2 * torch.rand(elements, generator=generator) - 1)
    gradients = torch.randn(2 * STEPS, elements, generator=generator) * scales + 0.3 * scales
    return torch.randn(elements, generator=generator), gradients


def by_library(runner, rule, groups, model, ranks, gradients, parameters=None, load="-", save="-"):
    """What the runner writes: the parameters at the beginning and after each step."""
    lines = [f"group {name} " + " ".join(f"{key}={float(value)!r}" for key, value in values.items()) for name, values in groups.items()]
    for name, shape, kind in model.table:
        if kind == "alias":
            lines.append(f"alias {name} {shape}")
        else:
            lines.append(f"{'frozen' if kind == 'frozen' else 'parameter'} {name} {'' if kind == 'frozen' else kind} {' '.join(map(str, shape))}")
    lines.append(f"run {rule} {ranks} {len(gradients)} {load} {save}")
    numbers = [*([] if parameters is None else parameters.tolist()), *gradients.flatten().tolist()]
    request = ("\n".join(lines) + "\n").encode() + struct.pack(f"{len(numbers)}f", *numbers)
    done = subprocess.run([runner], input=request, stdout=subprocess.PIPE, check=True)
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).reshape(len(gradients) + 1, -1)


class InTorch:
    """A model and its optimizer."""

    def __init__(self, rule, groups, model):
        self.kind = model
        self.model = model()
        self.parameters = dict(self.model.named_parameters())
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[rule.split("_")[0]]
        described = []
        for group, values in groups.items():
            values = dict(values)
            if "beta1" in values:
                values["betas"] = (values.pop("beta1"), values.pop("beta2"))
                values["amsgrad"] = rule.endswith("amsgrad")
            described.append({"params": [self.parameters[name] for name, _, kind in model.table if kind == group], **values})
        self.optimizer = kind(described, lr=1.0)

    def set(self, flat):
        at = 0
        for name, shape in trained(self.kind):
            with torch.no_grad():
                self.parameters[name].copy_(flat[at : at + numel(shape)].reshape(shape))
            at += numel(shape)

    def flat(self):
        return torch.cat([self.parameters[name].detach().flatten() for name, _ in trained(self.kind)])

    def step(self, gradients):
        """The parameters at the beginning and after each step."""
        rows = [self.flat()]
        for gradient in gradients:
            at = 0
            for name, shape in trained(self.kind):
                self.parameters[name].grad = gradient[at : at + numel(shape)].reshape(shape).clone()
                at += numel(shape)
            self.optimizer.step()
            rows.append(self.flat())
        return torch.stack(rows)


def tool(*arguments, code=0, saying="", without_package=False):
    """Runs tools/torch_state.py within this process: to start PyTorch anew takes seconds."""
    output, errors = io.StringIO(), io.StringIO()
    package = {"safetensors": None} if without_package else {}
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), unittest.mock.patch.dict(sys.modules, package):
        try:
            ended = torch_state.main(arguments)
        except SystemExit as exit:  # argparse's
            ended = exit.code
    told = output.getvalue() + errors.getvalue()
    assert ended == code and saying in told, f"{arguments}: exit code {ended}\n{told}"
    assert code == 0 or errors.getvalue().count("\n") == 1 or "usage:" in told, told


def require_close(what, ours, theirs, worst):
    assert torch.equal(ours[0], theirs[0]), f"{what}: they begin with other parameters"
    ours, theirs = ours.double(), theirs.double()
    largest_step = (theirs[1:] - theirs[:-1]).abs().max()
    for t in range(1, len(ours)):
        allowed = 2 * UNIT * t * (3 * theirs.abs().max() + (10 + 1.5 * t) * largest_step)
        used = ((ours[t] - theirs[t]).abs().max() / allowed).item()
        assert used <= 1, f"{what}: after {t} steps {used:.3g} of what rounding may do"
        worst.append(used)


def same_state_dicts(a, b):
    """Whether two state dicts hold the same bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_state_dicts(a[key], b[key]) for key in a)
    return a == b


def described(merged):
    """What a merged file says about itself, and its numbers' bytes by name."""
    with open(merged, "rb") as file:
        content = file.read()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    manifest = json.loads(header.pop("__metadata__")["shardopt"])
    return manifest, {name: content[8 + length :][slice(*entry["data_offsets"])] for name, entry in header.items()}


def exchange(runner, case, seed, worst):
    rule, settings, decay, model = case
    what = f"{rule} {settings}"
    groups = groups_of(settings, decay, model)
    parameters, gradients = data(model, seed)
    kind = rule.split("_")[0]
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)  # noqa: E731
        # From here to PyTorch.
        by_library(runner, rule, groups, model, 4, gradients[:STEPS], parameters, save=path("saved"))
        ours = by_library(runner, rule, groups, model, 4, gradients[STEPS:], load=path("saved"))
        tool("to-torch", path("saved.safetensors"), path("o.pt"), "--model", path("m.pt"), "--names", path("names.json"))
        there = InTorch(rule, groups, model)
        fresh = {key for key in there.optimizer.state_dict()["param_groups"][0]}
        there.optimizer.load_state_dict(torch.load(path("o.pt")))
        assert {key for key in torch.load(path("o.pt"))["param_groups"][0]} == fresh | {"name", "param_names"}
        missing, unexpected = there.model.load_state_dict(torch.load(path("m.pt")), strict=False)
        assert not unexpected and set(missing) <= {"seen", "embedding.weight"}, (missing, unexpected)
        require_close(f"{what}, to PyTorch", ours, there.step(gradients[STEPS:]), worst)
        # With and without the package the same is read.
        tool("to-torch", path("saved.safetensors"), path("o2.pt"), without_package=True)
        assert same_state_dicts(torch.load(path("o.pt")), torch.load(path("o2.pt"))), what
        # There and back: not a bit is changed.
        back = ["from-torch", path("o.pt"), path("m.pt"), path("back.safetensors"), "--optimizer", kind]
        if kind == "sgd":
            back += ["--updates", str(STEPS)]
        tool(*back)
        (before, numbers), (after, numbers_after) = described(path("saved.safetensors")), described(path("back.safetensors"))
        for name in numbers_after:  # PyTorch knows no momentum where there is none
            assert numbers_after[name] == numbers[name], f"{what}: {name}"
        assert numbers_after.keys() == numbers.keys(), numbers.keys() ^ numbers_after.keys()
        for key in ("iteration", "updates", "rule", "groups", "states"):
            assert before[key] == after[key], (key, before[key], after[key])
        # From PyTorch here, on three ranks.
        there = InTorch(rule, groups, model)
        there.set(parameters)
        there.step(gradients[:STEPS])
        torch.save(there.optimizer.state_dict(), path("o3.pt"))
        torch.save(there.model.state_dict(), path("m3.pt"))
        names = [] if model is Plain else ["--names", path("names.json")]
        tool("from-torch", path("o3.pt"), path("m3.pt"), path("from.safetensors"), "--optimizer", kind, *names)
        ours = by_library(runner, rule, groups, model, 3, gradients[STEPS:], load=path("from.safetensors"))
        require_close(f"{what}, from PyTorch", ours, there.step(gradients[STEPS:]), worst)
        open_by_package(path("from.safetensors"))


def open_by_package(merged):
    """The package `safetensors` opens what is written here."""
    try:
        from safetensors import safe_open
    except ImportError:
        return
    with safe_open(merged, framework="pt") as file:
        assert "shardopt" in file.metadata()
        for name in file.keys():
            assert file.get_tensor(name).dtype == torch.float32


def faults(runner):
    """What cannot be converted gets one line that says what to do."""
    _, settings, decay, model = CASES[0]
    groups = groups_of(settings, decay, model)
    parameters, gradients = data(model, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)  # noqa: E731
        by_library(runner, "adamw", groups, model, 2, gradients[:2], parameters, save=path("saved"))
        there = InTorch("adamw", groups, model)
        there.set(parameters)
        there.step(gradients[:2])
        torch.save(there.optimizer.state_dict(), path("o.pt"))
        torch.save(there.model.state_dict(), path("m.pt"))
        out = path("out.safetensors")
        adamw = ["--optimizer", "adamw"]
        program = [sys.executable, torch_state.__file__]
        for arguments, code in (["--help"], 0), ([], 2), (["to-torch", path("none.safetensors"), path("o2.pt")], 1):
            done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
            assert done.returncode == code and "torch_state.py" in done.stdout + done.stderr, done
        tool("to-torch", path("saved"), path("o2.pt"), code=2, saying="a merged checkpoint's name ends in .safetensors")
        tool("to-torch", path("none.safetensors"), path("o2.pt"), code=1)
        tool("from-torch", path("o.pt"), path("m.pt"), out, code=2, saying="--optimizer")
        tool("from-torch", path("o.pt"), path("m.pt"), out, *adamw, code=2, saying="has 2 groups and does not say which parameters are in them")
        tool("from-torch", path("o.pt"), path("m.pt"), out, "--optimizer", "sgd", code=1, saying="is not of torch.optim.SGD")
        tool("from-torch", path("o.pt"), path("m.pt"), out, *adamw, "--updates", "3", code=2, saying="--updates is for SGD only")
        tool("from-torch", path("m.pt"), path("m.pt"), out, *adamw, code=1, saying="save optimizer.state_dict()")
        tool("from-torch", path("o.pt"), path("o.pt"), out, *adamw, code=1, saying="save model.state_dict()")
        tool("from-torch", path("saved.safetensors"), path("m.pt"), out, *adamw, code=1, saying="cannot be read by torch.load")
        for named, code, saying in (
            ({"groups": [["layer0.weight"]]}, 1, "is no file of names"),
            ({"groups": [{"name": "a", "parameters": ["layer0.weight"]}, {"name": "b", "parameters": []}]}, 2, "2 + 3 parameters, but 1 + 0 names"),
            (names(["layer0.weight", "layer9.weight"]), 1, "has no parameter 'layer9.weight'"),
            (names(["layer0.weight", "layer0.weight"]), 1, "a name occurs twice: layer0.weight"),
            (names(["layer10.weight", "layer0.weight"]), 1, "are the names in order?"),
            ({**names(["layer0.weight", "layer10.weight"]), "aliases": {"head.weight": "embedding.weight"}}, 1, "an alias of 'embedding.weight'"),
        ):
            with open(path("names.json"), "w", encoding="ascii") as file:
                json.dump(named, file)
            tool("from-torch", path("o.pt"), path("m.pt"), out, *adamw, "--names", path("names.json"), code=code, saying=saying)
        there.optimizer.state[there.parameters["gain"]]["step"] += 1
        torch.save(there.optimizer.state_dict(), path("o.pt"))
        with open(path("names.json"), "w", encoding="ascii") as file:
            json.dump(names(["layer0.weight", "layer10.weight"]), file)
        tool("from-torch", path("o.pt"), path("m.pt"), out, *adamw, "--names", path("names.json"), code=1, saying="unequal numbers of updates")
        assert not os.path.exists(out)
        with open(path("saved.safetensors"), "rb") as file:
            content = file.read()
        for damaged, saying in ((content[:-1], "no whole safetensors file"), (content[:5], "no whole safetensors file"),
                                (content.replace(b"shardopt", b"sharpopt", 2), "is no merged checkpoint"),
                                (content.replace(b'\\"adamw\\"', b'\\"adamx\\"'), "is of the rule 'adamx'")):
            with open(path("damaged.safetensors"), "wb") as file:
                file.write(damaged)
            for without_package in (False, True):
                tool("to-torch", path("damaged.safetensors"), path("o2.pt"), code=1, saying=saying, without_package=without_package)
        assert not os.path.exists(path("o2.pt"))


def names(decay):
    return {"groups": [{"name": "decay", "parameters": decay}, {"name": "plain", "parameters": ["layer0.bias", "gain", "empty"]}]}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    worst = []
    for seed, case in enumerate(CASES):
        exchange(sys.argv[1], case, seed, worst)
    faults(sys.argv[1])
    print(f"{len(CASES)} cases both ways with PyTorch {torch.__version__}: at most {max(worst):.2f} of what rounding may do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
