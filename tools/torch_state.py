#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts a merged shardopt checkpoint to what PyTorch's optimizers load, and back.

A merged checkpoint is one safetensors file with whole tensors in fp32 (`shardopt merge`): parameters under their own
names, states as "name/exp_avg", "name/exp_avg_sq", "name/max_exp_avg_sq" or "name/momentum_buffer", and a description in
the metadata. PyTorch's side is the state dict of torch.optim.AdamW, Adam or SGD, and that of the model, each in a file of
torch.save. All numbers are kept bit by bit; what PyTorch stores in 16 bits is widened.
"""

import argparse
import json
import os
import struct
import sys
import uuid

try:
    import torch
except ImportError:
    torch = None

METADATA = "shardopt"
RULES = {  # by shardopt's names: PyTorch's class, whether it is AMSGrad, the states
    "adam": ("Adam", False, ["exp_avg", "exp_avg_sq"]),
    "adam_amsgrad": ("Adam", True, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    "adamw": ("AdamW", False, ["exp_avg", "exp_avg_sq"]),
    "adamw_amsgrad": ("AdamW", True, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    "sgd": ("SGD", False, ["momentum_buffer"]),
}


class Fault(Exception):
    """A file that cannot be converted: one line, exit code 1."""


class Usage(Exception):
    """What the caller got wrong: one line, exit code 2."""


# --- safetensors ------------------------------------------------------------------------------------------------------


def read_safetensors(path):
    """Tensors and metadata of a file: by the package `safetensors` where it is installed."""
    try:
        import safetensors
    except ImportError:
        return read_plainly(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise Fault(f"{path} is no whole safetensors file: {error}") from error


def read_plainly(path):
    """The same without the package: 8 bytes of length, a header in JSON, then the numbers."""
    with open(path, "rb") as file:
        content = bytearray(file.read())
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "F32" or not 0 <= begin <= end <= len(content) - 8 - length:
                raise ValueError(f"tensor '{name}' is not of type F32 or reaches beyond the end")
            numbers = torch.empty(0)
            if end > begin:
                numbers = torch.frombuffer(content, dtype=torch.float32, offset=8 + length + begin, count=(end - begin) // 4)
            tensors[name] = numbers.reshape(entry["shape"])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Fault(f"{path} is no whole safetensors file: {error}") from error
    return tensors, metadata


def write_safetensors(path, tensors, metadata):
    """Writes fp32 tensors one behind the other."""
    header = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + 4 * tensor.numel()]}
        at += 4 * tensor.numel()
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 64)  # numbers begin at a multiple of 64 bytes

    def write(file):
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.numpy().tobytes())

    write_whole(path, write)


def write_whole(path, write):
    """Writes a file under another name first, so that a failure leaves no half of one."""
    unfinished = f"{path}.{uuid.uuid4().hex[:8]}.unfinished"
    try:
        with open(unfinished, "xb") as file:
            write(file)
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.remove(unfinished)
        raise


# --- to PyTorch -------------------------------------------------------------------------------------------------------


def to_torch(arguments):
    """Writes the state dict of an optimizer, and that of the model's parameters if it is asked for."""
    tensors, manifest = read_merged(arguments.merged)
    rule = manifest["rule"]["name"]
    trained = [p for p in manifest["parameters"] if not p.get("frozen") and not p.get("alias_of")]
    groups = [(group, [p["name"] for p in trained if p["group"] == group["name"]]) for group in manifest["groups"]]
    groups = [(group, names) for group, names in groups if names]
    for parameter in trained:
        for name in (parameter["name"], *(f"{parameter['name']}/{s}" for s in manifest["states"] if s != "master")):
            if name not in tensors or list(tensors[name].shape) != parameter["shape"]:
                raise Fault(f"{arguments.merged} has no tensor '{name}' of shape {parameter['shape']}")
    state_dict = torch_optimizer(rule, groups).state_dict()
    for described, (group, names) in zip(state_dict["param_groups"], groups):
        described["name"] = group["name"]  # PyTorch carries both through load_state_dict() and state_dict()
        described["param_names"] = names
        for number, name in zip(described["params"], names):
            state = state_of(rule, manifest, described, tensors, name)
            if state:
                state_dict["state"][number] = state
    write_whole(arguments.optimizer, lambda file: torch.save(state_dict, file))
    print(f"{arguments.optimizer}: torch.optim.{RULES[rule][0]}, {count(len(groups), 'group')}, "
          f"{count(len(trained), 'parameter')}, {count(manifest['updates'], 'update')}")
    for group, names in groups:
        print(f"  group '{group['name']}': {', '.join(names)}")
    aliases = {p["name"]: p["alias_of"] for p in manifest["parameters"] if p.get("alias_of")}
    frozen = [p["name"] for p in manifest["parameters"] if p.get("frozen")]
    if arguments.names:
        described = [{"name": group["name"], "parameters": names} for group, names in groups]
        text = json.dumps({"groups": described, "frozen": frozen, "aliases": aliases}, indent=1, ensure_ascii=False)
        write_whole(arguments.names, lambda file: file.write(text.encode() + b"\n"))
        print(f"{arguments.names}: the names, for from-torch")
    if arguments.model:
        model = {p["name"]: tensors[p["name"]] for p in trained}
        model.update({name: model[target] for name, target in aliases.items() if target in model})
        write_whole(arguments.model, lambda file: torch.save(model, file))
        print(f"{arguments.model}: {count(len(model), 'tensor')}"
              + (f"; not in a checkpoint, because they are frozen: {', '.join(frozen)}" if frozen else ""))


def read_merged(path):
    """Tensors and description of a merged checkpoint, of a rule that PyTorch has."""
    tensors, metadata = read_safetensors(path)
    if METADATA not in metadata:
        raise Fault(f"{path} is no merged checkpoint: its metadata lack '{METADATA}'. `shardopt merge` makes one")
    try:
        manifest = json.loads(metadata[METADATA])
        version, rule, of_rule = manifest["format_version"], manifest["rule"]["name"], manifest["rule"]["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise Fault(f"the description in {path} is damaged: {error!r}") from error
    if version != 1:
        raise Fault(f"{path} has format version {version}; this program knows version 1")
    if rule not in RULES or of_rule != 1:
        raise Fault(f"{path} is of the rule '{rule}' version {of_rule}, which torch.optim does not have")
    return tensors, manifest


def torch_optimizer(rule, groups):
    """PyTorch's optimizer over parameters without elements: its state dict has this PyTorch's own keys."""
    kind, amsgrad, _ = RULES[rule]
    described = []
    for group, names in groups:
        values = dict(group["hyper_parameters"])
        if kind != "SGD":
            values["betas"] = (values.pop("beta1"), values.pop("beta2"))
            values["amsgrad"] = amsgrad
        described.append({"params": [torch.nn.Parameter(torch.empty(0)) for _ in names], **values})
    return getattr(torch.optim, kind)(described, lr=1.0)


def state_of(rule, manifest, group, tensors, name):
    """A parameter's state, or nothing where PyTorch would have none yet."""
    kind, _, states = RULES[rule]
    if manifest["updates"] == 0 or (kind == "SGD" and group["momentum"] == 0):
        return {}
    state = {} if kind == "SGD" else {"step": torch.tensor(float(manifest["updates"]))}
    state.update({s: tensors[f"{name}/{s}"] for s in states})
    return state


def count(number, what):
    return f"{number} {what}" + ("" if number == 1 else "s")


# --- from PyTorch -----------------------------------------------------------------------------------------------------


def from_torch(arguments):
    """Writes a merged checkpoint from the state dicts of an optimizer and its model."""
    kind = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[arguments.kind]
    if arguments.updates is not None and kind != "SGD":
        raise Usage(f"--updates is for SGD only: {kind} counts its steps itself")
    optimizer = load(arguments.optimizer)
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= set(optimizer):
        raise Fault(f"{arguments.optimizer} holds no optimizer's state dict: save optimizer.state_dict() with torch.save")
    require_kind(arguments, kind, optimizer["param_groups"])
    model = load(arguments.model)
    if not isinstance(model, dict) or not all(isinstance(value, torch.Tensor) for value in model.values()):
        raise Fault(f"{arguments.model} holds no model's state dict: save model.state_dict() with torch.save")
    groups, frozen, aliases = names_of(arguments, optimizer["param_groups"], model)
    rule = kind.lower() + ("_amsgrad" if any(group.get("amsgrad") for group in optimizer["param_groups"]) else "")
    states = RULES[rule][2]
    if kind == "SGD" and all(group["momentum"] == 0 for group in optimizer["param_groups"]):
        states = []
    updates = updates_of(arguments, optimizer, groups)
    tensors, parameters = {}, []
    for (group_name, names), group in zip(groups, optimizer["param_groups"]):
        for number, name in zip(group["params"], names):
            tensors.update(tensors_of(arguments, name, model[name], optimizer["state"].get(number, {}), states, group, updates))
            parameters.append({"name": name, "shape": list(model[name].shape), "group": group_name})
    order = {name: at for at, name in enumerate(model)}
    parameters += [{"name": name, "shape": list(model[name].shape), "group": "default", "frozen": True} for name in frozen]
    parameters.sort(key=lambda parameter: order[parameter["name"]])
    of = {parameter["name"]: parameter for parameter in parameters}
    parameters += [{**of[target], "name": name, "alias_of": target} for name, target in aliases.items()]
    manifest = {
        "format": "shardopt-checkpoint", "format_version": 1, "library_version": "torch_state.py", "sequence": 0,
        "id": uuid.uuid4().hex[:16], "iteration": updates if arguments.iteration is None else arguments.iteration,
        "updates": updates, "rule": {"name": rule, "version": 1},
        "groups": [{"name": name, "hyper_parameters": hyper_parameters_of(kind, group)}
                   for (name, _), group in zip(groups, optimizer["param_groups"])],
        "precision": {"parameter": "fp32", "gradient": "fp32", "state": "fp32"}, "sharding": "none", "world": 1,
        "coordinates": [], "parameters": parameters, "states": [*states, "master"], "extras": {},
        "checksum_algorithm": "xxh3-64", "block_bytes": 1 << 20, "files": [],
    }
    write_safetensors(arguments.merged, tensors, {METADATA: json.dumps(manifest, ensure_ascii=False)})
    print(f"{arguments.merged}: rule '{rule}', {count(len(groups), 'group')}, {count(sum(len(n) for _, n in groups), 'parameter')}, "
          f"{count(updates, 'update')}")
    left = [name for name in model if name not in of and name not in aliases]
    if left:
        print(f"not taken, because the optimizer does not have them: {', '.join(left)}")


def load(path):
    """What torch.save wrote, in host memory. From PyTorch 2 on a file cannot run code; before, that reads no plain numbers."""
    options = {"weights_only": True} if int(torch.__version__.split(".")[0]) >= 2 else {}
    try:
        return torch.load(path, map_location="cpu", **options)
    except OSError:
        raise
    except Exception as error:  # whatever pickle and zip find wrong
        raise Fault(f"{path} cannot be read by torch.load: {str(error).splitlines()[0]}") from error


def require_kind(arguments, kind, groups):
    key = "momentum" if kind == "SGD" else "betas"
    if not groups or any(key not in group for group in groups):
        raise Fault(f"{arguments.optimizer} is not of torch.optim.{kind}: its groups have no '{key}'; set --optimizer")
    decoupled = groups[0].get("decoupled_weight_decay")  # told by PyTorch from 2.7 on
    if decoupled is not None and kind != "SGD" and decoupled != (kind == "AdamW"):
        raise Fault(f"{arguments.optimizer} is of torch.optim.{'AdamW' if decoupled else 'Adam'}: set --optimizer")
    if kind != "SGD" and len({bool(group["amsgrad"]) for group in groups}) > 1:
        raise Fault(f"{arguments.optimizer} has amsgrad in some groups only; in shardopt that is another rule")


def names_of(arguments, groups, model):
    """Name and parameters of each group, frozen parameters, aliases: from --names, from what the state dict says itself, or
    from the model where there is one group."""
    named, frozen, aliases = None, [], {}
    if arguments.names:
        try:
            with open(arguments.names, encoding="utf-8") as file:
                described = json.load(file)
            named = [(group["name"], list(group["parameters"])) for group in described["groups"]]
            frozen, aliases = list(described.get("frozen", [])), dict(described.get("aliases", {}))
        except (ValueError, KeyError, TypeError) as error:
            raise Fault(f"{arguments.names} is no file of names (see --help): {error!r}") from error
    elif all("name" in group and "param_names" in group for group in groups):
        named = [(group["name"], list(group["param_names"])) for group in groups]
    elif len(groups) == 1:
        named = [("default", list(groups[0].get("param_names", model)))]
    else:
        raise Usage(f"{arguments.optimizer} has {len(groups)} groups and does not say which parameters are in them: give --names")
    if [len(names) for _, names in named] != [len(group["params"]) for group in groups]:
        raise Usage(f"{arguments.optimizer} has groups of {sizes(group['params'] for group in groups)} parameters, but "
                    f"{sizes(names for _, names in named)} names are known: give --names")
    listed = [*(name for _, names in named for name in names), *frozen, *aliases]
    for name in listed:
        if name not in model:
            raise Fault(f"{arguments.model} has no parameter '{name}'")
    twice = sorted({name for name in listed if listed.count(name) > 1})
    if twice or len({name for name, _ in named}) < len(named):
        raise Fault(f"a name occurs twice: {', '.join(twice) or 'that of a group'}")
    for name, target in aliases.items():
        if target not in listed or target in aliases:
            raise Fault(f"'{name}' is called an alias of '{target}', which is no parameter of the optimizer")
    return named, frozen, aliases


def sizes(lists):
    return " + ".join(str(len(list(each))) for each in lists)


def updates_of(arguments, optimizer, groups):
    """How many updates were made: shardopt counts them for all parameters together."""
    if arguments.kind == "sgd":
        started = any(state.get("momentum_buffer") is not None for state in optimizer["state"].values())
        return int(started) if arguments.updates is None else arguments.updates
    steps = {}
    for (_, names), group in zip(groups, optimizer["param_groups"]):
        for number, name in zip(group["params"], names):
            steps.setdefault(int(optimizer["state"].get(number, {}).get("step", 0)), []).append(name)
    if len(steps) > 1:
        told = "; ".join(f"{count(number, 'update')}: {names[0]}{' and others' * (len(names) > 1)}" for number, names in steps.items())
        raise Fault(f"{arguments.optimizer} has made unequal numbers of updates ({told}); shardopt counts them for all together")
    return next(iter(steps), 0)


def tensors_of(arguments, name, parameter, state, states, group, updates):
    """A parameter and its states, in fp32."""
    result = {name: parameter}
    for each in states:
        buffer = state.get(each)
        if buffer is None:
            if updates > 0 and group.get("momentum") and group.get("dampening"):
                raise Fault(f"{arguments.optimizer} has no momentum of '{name}' yet, and its first is not dampened: make a step first")
            buffer = torch.zeros(parameter.shape)
        result[f"{name}/{each}"] = buffer
    for each, tensor in result.items():
        if tensor.shape != parameter.shape:
            raise Fault(f"'{each}' has shape {list(tensor.shape)}, the model's '{name}' {list(parameter.shape)}: are the names in order?")
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            raise Fault(f"'{each}' is of type {tensor.dtype}, which fp32 does not hold")
    return {each: tensor.detach().to(torch.float32).contiguous() for each, tensor in result.items()}


def hyper_parameters_of(kind, group):
    """By shardopt's names. A schedule's learning rate is lr_factor there: the rate it began with is taken."""
    rate = float(group.get("initial_lr", group["lr"]))
    common = {"weight_decay": float(group["weight_decay"])}
    maximize = {"maximize": bool(group.get("maximize", False))}
    if kind == "SGD":
        return {"lr": rate, "momentum": float(group["momentum"]), "dampening": float(group["dampening"]), **common,
                "nesterov": bool(group["nesterov"]), **maximize}
    beta1, beta2 = group["betas"]
    return {"lr": rate, "beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"]), **common, **maximize}


# --- the command line -------------------------------------------------------------------------------------------------

NAMES_HELP = """\
--names FILE is JSON: the groups in the optimizer's order, each with its parameters in order, as the model calls them.
"frozen" and "aliases" may be left out; shardopt wants to find in a checkpoint what stands in its table.

    {"groups": [{"name": "decay", "parameters": ["layer.weight"]}, {"name": "plain", "parameters": ["layer.bias"]}],
     "frozen": ["embedding.weight"], "aliases": {"head.weight": "layer.weight"}}

Without it the names are those that the state dict has itself (PyTorch's param_names and a name of each group; to-torch
writes them), or all of the model's where there is one group, which is then called "default".
"""


def parse(words):
    summary, more = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(prog="torch_state.py", description=summary, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=f"{more}\nExit codes: 0 converted, 1 a file cannot be converted, 2 bad usage.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="to-torch|from-torch")
    there = commands.add_parser("to-torch", help="a merged checkpoint to a state dict of torch.optim", description=to_torch.__doc__)
    there.add_argument("merged", help="the merged checkpoint, to be read")
    there.add_argument("optimizer", help="the optimizer's state dict, to be written: optimizer.load_state_dict(torch.load(FILE))")
    there.add_argument("--model", metavar="FILE", help="write the parameters, too: model.load_state_dict(torch.load(FILE), strict=False)")
    there.add_argument("--names", metavar="FILE", help="write the names of groups and parameters, which from-torch takes")
    there.set_defaults(run=to_torch)
    back = commands.add_parser("from-torch", help="state dicts of PyTorch to a merged checkpoint", description=from_torch.__doc__,
                               epilog=NAMES_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    back.add_argument("optimizer", help="torch.save(optimizer.state_dict(), FILE), to be read")
    back.add_argument("model", help="torch.save(model.state_dict(), FILE), to be read")
    back.add_argument("merged", help="the merged checkpoint, to be written; its name ends in .safetensors")
    back.add_argument("--optimizer", dest="kind", choices=["adam", "adamw", "sgd"], required=True,
                      help="what the state dict is of: it does not say so itself")
    back.add_argument("--names", metavar="FILE", help="names of groups and parameters (see below)")
    back.add_argument("--updates", type=whole, metavar="N", help="updates that SGD has made, which it does not count (1 if it has momenta)")
    back.add_argument("--iteration", type=whole, metavar="N", help="iterations, skipped ones included (as many as updates)")
    back.set_defaults(run=from_torch)
    arguments = parser.parse_args(words)
    if not arguments.merged.endswith(".safetensors"):
        parser.error(f"'{arguments.merged}': a merged checkpoint's name ends in .safetensors")
    return arguments


def whole(text):
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def main(words=None):
    """Runs the command line. Gives the exit code."""
    arguments = parse(sys.argv[1:] if words is None else words)
    try:
        if torch is None:
            raise Fault(f"PyTorch is not installed for {sys.executable}. Debian's python3-torch is for /usr/bin/python3")
        arguments.run(arguments)
        return 0
    except Usage as error:
        print(f"torch_state.py: {error}", file=sys.stderr)
        return 2
    except (Fault, OSError) as error:
        print(f"torch_state.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
