# SPDX-License-Identifier: Apache-2.0
"""measure.py: what `./run gpu` does where the programs are built.

measure.py manifest BUILD...           prints the programs and GPU tests of builds, as JSON
measure.py pack BUILD... FOLDER        copies them and all that they need, stripped, so that FOLDER/run needs neither compiler nor network
measure.py run FOLDER RESULTS [--minutes M] [--elements N] [--tests REGEX] [--without-nvbench]
                                       runs what FOLDER/manifest.json lists: figures, PyTorch beside them, tests, benchmarks; writes
                                       RESULTS/results.json and RESULTS/results.md as it goes. Exit code 1: something failed, or a test
                                       could not be run in time. Programs of the GPU run through the command in SHARDOPT_GPU_LAUNCHER
                                       if it is set, PyTorch in the Python of SHARDOPT_PEERS_PYTHON (python3).
"""

from __future__ import annotations  # for Python 3.8

import argparse
import concurrent.futures
import datetime
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUT_OF_TIME = 1000  # an exit code of our own
BENCHES = ("bench_update", "bench_norm", "bench_step")
MOST_MEGABYTES = 60  # of a packed folder


def say(text: str) -> None:
    print(f"gpu: {text}", file=sys.stderr, flush=True)


# --- the manifest -----------------------------------------------------------------------------------------------------------------
def cached(build: str, variable: str) -> str | None:
    """A variable of a build's CMake cache."""
    with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as cache:
        found = re.search(rf"^{variable}:\w+=(.*)$", cache.read(), re.MULTILINE)
    return found.group(1) if found else None


def gpu_tests(build: str) -> tuple[list[dict], list[str]]:
    """The quick tests of CTest that run a program of the build on the GPU, by their names; and the names of those that need more than
    the program, such as a script around it, or a launcher that counts or lets calls fail."""
    ctest = cached(build, "CMAKE_CTEST_COMMAND") or "ctest"
    listing = subprocess.run([ctest, "--test-dir", build, "--show-only=json-v1"], stdout=subprocess.PIPE, text=True, check=True)
    tests, left_out = [], []
    for test in json.loads(listing.stdout)["tests"]:
        if test["name"].endswith("_cuda_NOT_BUILT"):
            sys.exit(f"measure.py: {test['name'][: -len('_NOT_BUILT')]} is not built in {build}")
        command = test.get("command", [])
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        runs = [os.path.basename(word) == "on_gpu.sh" for word in command]
        if "quick" not in properties.get("LABELS", []) or True not in runs:
            continue
        environment = dict(item.split("=", 1) for item in properties.get("ENVIRONMENT", []))
        if runs[0] and not any(name.startswith("SHARDOPT_TEST_") for name in environment):
            if not os.path.isfile(command[1]):
                sys.exit(f"measure.py: {test['name']}: {command[1]} is not built")
            tests.append({"name": test["name"], "command": command[1:], "skip_code": properties.get("SKIP_RETURN_CODE", 4)})
        else:
            left_out.append(test["name"])
    return tests, left_out


def commit() -> str:
    """Of the sources; `-dirty` if they are not quite that."""
    git = ["git", "-C", ROOT, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def manifest_of(builds: list[str]) -> dict:
    """Where a program is in several builds, the first one's."""
    manifest: dict = {"commit": commit(), "programs": {}, "tests": [], "left_out": []}
    for build in map(os.path.abspath, builds):
        paths = {"figures": "bench/figures", "overlap": "bench/overlap"}
        if cached(build, "SHARDOPT_NVBENCH") == "ON":  # else those of an earlier configuration may lie there
            paths.update((bench, f"bench/nvbench/{bench}") for bench in BENCHES)
        for name, path in paths.items():
            if os.path.isfile(os.path.join(build, path)):
                manifest["programs"].setdefault(name, os.path.join(build, path))
        tests, left_out = gpu_tests(build)
        manifest["tests"] += tests
        manifest["left_out"] += left_out
    return manifest


def pack(builds: list[str], folder: str) -> None:
    if os.path.exists(folder) and os.listdir(folder):
        sys.exit(f"measure.py: {folder} is not empty")
    manifest = manifest_of(builds)
    for part in ("bin", "data", "lib/standard"):
        os.makedirs(os.path.join(folder, part), exist_ok=True)
    places: dict[str, str] = {}  # of files that are in the folder already

    def carry(word: str) -> str:
        """Copies what an argument names, if it does name a file, once; the argument from now on."""
        if not os.path.isabs(word) or not os.path.exists(word):
            return word
        if os.path.isdir(word):
            sys.exit(f"measure.py: a test needs the folder {word}, which cannot be packed")
        executable = os.access(word, os.X_OK)
        place = os.path.join("bin" if executable else "data", os.path.basename(word))
        if place not in places:
            shutil.copy(word, os.path.join(folder, place))
            if executable:
                subprocess.run(["strip", os.path.join(folder, place)], check=False, stderr=subprocess.DEVNULL)  # no matter if a script
        if places.setdefault(place, word) != word:
            sys.exit(f"measure.py: {word} and {places[place]} would be one file of {folder}")
        return place

    for test in manifest["tests"]:
        test["command"] = [carry(word) for word in test["command"]]
    manifest["programs"] = {name: carry(path) for name, path in manifest["programs"].items()}
    for build in builds:
        nvbench = cached(build, "nvbench_DIR")
        if nvbench and any(bench in manifest["programs"] for bench in BENCHES):
            shutil.copy(os.path.join(nvbench, "../../libnvbench.so"), os.path.join(folder, "lib"))
    for library in ("libstdc++.so.6", "libgcc_s.so.1"):  # used where the machine's own are too old
        found = subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True)
        shutil.copy(found.stdout.strip(), os.path.join(folder, "lib/standard"))
    for script in ("measure.py", "peers.py"):
        shutil.copy(os.path.join(ROOT, "bench", script), folder)
    shutil.copy(os.path.join(ROOT, "bench/run_prebuilt"), os.path.join(folder, "run"))
    with open(os.path.join(folder, "manifest.json"), "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
    megabytes = sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names) / 1e6
    say(f"{folder}: {len(manifest['programs'])} programs, {len(manifest['tests'])} tests, {megabytes:.0f} MB")
    if megabytes > MOST_MEGABYTES:
        sys.exit(f"measure.py: {folder} is larger than {MOST_MEGABYTES} MB")


# --- running ----------------------------------------------------------------------------------------------------------------------
class Run:
    """One run: its folder, its results, its time, the size of what it measures."""

    def __init__(self, folder: str, results: str, minutes: float, elements: int) -> None:
        self.folder, self.place, self.elements = os.path.abspath(folder), os.path.abspath(results), elements
        self.end = time.monotonic() + 60 * minutes
        with open(os.path.join(self.folder, "manifest.json"), encoding="utf-8") as file:
            self.manifest = json.load(file)
        self.launcher = os.environ.get("SHARDOPT_GPU_LAUNCHER", "").split()
        self.processes: set[subprocess.Popen] = set()
        self.results = {"commit": self.manifest["commit"], "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                        "machine": machine(), "elements": elements, "figures": [], "peers": [], "benches": [], "tests": [], "notes": []}
        for old in ("results.json", "results.md", *(f"{bench}.json" for bench in BENCHES)):
            if os.path.exists(os.path.join(self.place, old)):
                os.remove(os.path.join(self.place, old))
        shutil.rmtree(os.path.join(self.place, "logs"), ignore_errors=True)
        os.makedirs(os.path.join(self.place, "logs"))

    def left(self) -> float:
        return self.end - time.monotonic()

    def note(self, text: str) -> None:
        say(text)
        self.results["notes"].append(text)

    def path(self, word: str) -> str:
        inside = os.path.join(self.folder, word)
        return inside if not os.path.isabs(word) and os.path.isfile(inside) else word

    def execute(self, name: str, command: list[str], limit: float) -> tuple[int, str]:
        """Exit code (negative: a signal; OUT_OF_TIME) and output, which also goes into a log."""
        limit = min(limit, self.left())
        if limit <= 1:
            return OUT_OF_TIME, "no time was left"
        log = os.path.join(self.place, "logs", re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:120] + ".txt")
        with open(log, "w+", encoding="utf-8", errors="replace") as file:
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            except OSError as error:
                file.write(str(error))
                return 127, str(error)
            self.processes.add(process)
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = OUT_OF_TIME
            self.kill(process)
            file.seek(0)
            return code, file.read()

    def kill(self, process: subprocess.Popen) -> None:
        """With all that it has started."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it waits in the driver, where nothing reaches it
            say(f"process {process.pid} cannot be ended")
        self.processes.discard(process)

    def failed(self, name: str, code: int, output: str) -> None:
        if output == "no time was left":
            return self.note(f"{name}: FAILED: {output}")
        reason = "it ran out of time" if code == OUT_OF_TIME else f"exit code {code}"
        self.note(f"{name}: FAILED: {reason}: {output.strip()[-500:]}")

    def program(self, name: str) -> list[str] | None:
        if name not in self.manifest["programs"]:
            return None
        return [*self.launcher, self.path(self.manifest["programs"][name])]

    def save(self) -> None:
        with open(os.path.join(self.place, "results.json"), "w", encoding="utf-8") as file:
            json.dump(self.results, file, indent=1)
        with open(os.path.join(self.place, "results.md"), "w", encoding="utf-8") as file:
            file.write(markdown(self.results))


def machine() -> dict:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):  # its complaints would read like names
        gpus = []
    return {"gpus": gpus, "cpus": os.cpu_count(), "system": platform.platform()}


NO_NCCL = "error while loading shared libraries: libnccl"


def last_json(output: str) -> dict | None:
    begin = output.rfind("{\"elements\"")
    try:
        return json.loads(output[begin:]) if begin >= 0 else None
    except ValueError:
        return None


def run_figures(run: Run) -> None:
    command = run.program("figures")
    if command is None:
        return run.note("figures: not built")
    say("figures")
    code, output = run.execute("figures", [*command, str(run.elements)], 120)
    figures = last_json(output)
    if code != 0 or figures is None:
        return run.failed("figures", code, output)
    run.results["figures"] = figures["figures"]
    run.results["machine"].update(device=figures["device"], devices=figures["devices"])


def run_peers(run: Run) -> None:
    script = os.path.join(run.folder, "peers.py")
    if not os.path.isfile(script):
        script = os.path.join(ROOT, "bench", "peers.py")
    say("peers")
    code, output = run.execute("peers", [os.environ.get("SHARDOPT_PEERS_PYTHON", "python3"), script, str(run.elements)], 120)
    figures = last_json(output)
    if code != 0 or figures is None:
        return run.note(f"peers: {output.strip()[-500:]}") if code == 77 else run.failed("peers", code, output)
    run.results["peers"] = figures["figures"]
    run.results["torch"] = figures["torch"]


def run_test(run: Run, number: int, test: dict) -> dict:
    begin = time.monotonic()
    code, output = run.execute(f"{number:03} {test['name']}", [*run.launcher, *(run.path(word) for word in test["command"])], 60)
    result = {"name": test["name"], "seconds": round(time.monotonic() - begin, 2)}
    if code == 0:
        return {**result, "outcome": "passed"}
    said = re.search(r"(?:explicitly with messages?:|skipped:)\s*(.+)", output)
    if said and code in (4, test["skip_code"]):  # 4 alone may be the number of failed assertions
        return {**result, "outcome": "skipped", "reason": said.group(1).strip()}
    if NO_NCCL in output:
        return {**result, "outcome": "skipped", "reason": "libnccl.so.2 is not on this machine"}
    if output == "no time was left":
        return {**result, "outcome": "not run", "reason": output}
    reason = "it ran out of time" if code == OUT_OF_TIME else f"exit code {code}"
    return {**result, "outcome": "failed", "reason": reason, "output": output[-2000:]}


def run_tests(run: Run, pattern: str, reserve: float) -> None:
    """The tests whose names match, a few at once, but for the time that is reserved for what follows."""
    tests = [test for test in run.manifest["tests"] if re.search(pattern, test["name"])]
    if not tests:
        return run.note("tests: " + (f"FAILED: none is called {pattern!r}" if run.manifest["tests"] else "not built"))
    say(f"{len(tests)} tests")
    run.end -= reserve
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for done, result in enumerate(pool.map(run_test, itertools.repeat(run), itertools.count(1), tests), 1):
            run.results["tests"].append(result)
            if result["outcome"] == "failed":
                say(f"FAILED: {result['name']}: {result['reason']}")
            if done % 25 == 0:
                say(f"{done} of {len(tests)} tests")
                run.save()
    run.end += reserve
    outcomes = [result["outcome"] for result in run.results["tests"]]
    if "not run" in outcomes:
        run.note(f"tests: FAILED: {outcomes.count('not run')} could not be run in time (--minutes)")
    if "passed" not in outcomes:
        run.note("tests: FAILED: none passed")


def run_bench(run: Run, name: str, sizes: dict[str, str]) -> None:
    """One program of nvbench; `sizes`: of each benchmark, the axis that is set."""
    command = run.program(name)
    if command is None:
        return run.note(f"{name}: not built")
    file = os.path.join(run.place, f"{name}.json")
    # What stands before the first benchmark is for all of them.
    command += ["--devices", "0", "--no-batch", "--timeout", "1", "--json", file]
    for benchmark, axis in sizes.items():
        command += ["-b", benchmark, "-a", axis]
    say(name)
    code, output = run.execute(name, command, 120)
    if code != 0 or not os.path.isfile(file):
        return run.failed(name, code, output)
    try:
        with open(file, encoding="utf-8") as opened:
            measured = read_bench(run, json.load(opened))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return run.note(f"{name}: FAILED: {file} cannot be read: {error!r}")
    if measured == 0:
        run.note(f"{name}: FAILED: it measured nothing: {output.strip()[-500:]}")


def read_bench(run: Run, content: dict) -> int:
    """The number of states that were measured. Lists are null where they are empty; numbers are strings."""
    measured = 0
    for benchmark in content["benchmarks"] or []:
        for state in benchmark["states"] or []:
            where = f"{benchmark['name']} {state['name']}"
            if state.get("is_skipped"):  # nvbench calls it that too when something was thrown, and ends as if all were well
                reason = str(state.get("skip_reason"))
                run.note(f"{where}: {'FAILED: ' if reason.startswith('Unexpected error') else ''}{reason}")
                continue
            summaries = {s["tag"]: {d["name"]: d["value"] for d in s["data"] or []}.get("value") for s in state["summaries"] or []}
            seconds, speed = summaries.get("nv/cold/time/gpu/mean"), summaries.get("nv/cold/bw/global/bytes_per_second")
            if seconds is None or speed is None:
                run.note(f"{where}: FAILED: nvbench measured no time")
                continue
            measured += 1
            axes = ", ".join(str(axis["value"]) for axis in state["axis_values"] or [])
            run.results["benches"].append({"name": f"{benchmark['name']}: {axes}", "microseconds": round(1e6 * float(seconds), 2),
                                           "gigabytes_per_second": round(float(speed) / 1e9, 1)})
    return measured


def run_overlap(run: Run) -> None:
    command, layers = run.program("overlap"), 16
    gpus = run.results["machine"].get("devices", len(run.results["machine"]["gpus"]))
    if command is None or gpus < 2:
        return run.note(f"overlap: skipped: needs 2 GPUs, there are {gpus}" if command else "overlap: not built")
    say("overlap")
    # Buckets as large as the gradients of a layer; a layer's forward and backward copies what 4 of them hold.
    sizes = (gpus, run.elements, layers, run.elements // layers * 4, run.elements // layers * 16, 10)
    code, output = run.execute("overlap", [*command, *map(str, sizes)], 60)
    if NO_NCCL in output:
        return run.note("overlap: skipped: libnccl.so.2 is not on this machine")
    if code != 0:
        return run.failed("overlap", code, output)
    run.note(f"overlap: an iteration of {gpus} GPUs, {power_of_two(run.elements)} parameters in {layers} layers, takes {output.strip()} ms")


# --- the table --------------------------------------------------------------------------------------------------------------------
def power_of_two(number: int) -> str:
    return f"2^{number.bit_length() - 1}" if number & (number - 1) == 0 else f"{number:,}"


def table(header: list[str], lines: list[list]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(str(cell) for cell in row) + " |\n" for row in rows)


def markdown(results: dict) -> str:
    gpu = results["machine"]
    where = f"{gpu['devices']} x {gpu['device']}" if "device" in gpu else "; ".join(gpu["gpus"]) or "no GPU named"
    text = f"Commit {results['commit']}, {results['begun']}, {where}\n\n"
    figures = [*results["figures"], *results["peers"]]
    copy = results["figures"][0]["gigabytes_per_second"] if results["figures"] else 0
    if figures:
        text += table([f"{power_of_two(results['elements'])} elements", "bytes an element", "GB/s", "of the copy"],
                      [[f["name"], f["bytes_per_element"], f["gigabytes_per_second"],
                        format(f["gigabytes_per_second"] / copy if copy else f["of_copy"], ".3f")] for f in figures]) + "\n"
    if results["benches"]:  # beside nvbench's own copy, which is not of the figures' size
        copies = [bench["gigabytes_per_second"] for bench in results["benches"] if bench["name"].startswith("copy:")]
        text += table(["nvbench", "us", "GB/s", "of its copy"],
                      [[bench["name"], bench["microseconds"], bench["gigabytes_per_second"],
                        format(bench["gigabytes_per_second"] / copies[0], ".3f") if copies else ""] for bench in results["benches"]]) + "\n"
    outcomes: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for test in results["tests"]:
        outcomes[test["outcome"]] = outcomes.get(test["outcome"], 0) + 1
        if test["outcome"] == "skipped":
            reasons[test["reason"]] = reasons.get(test["reason"], 0) + 1
    if outcomes:
        text += "Tests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) + ".\n\n"
        text += "".join(f"- {count} skipped: {reason}\n" for reason, count in sorted(reasons.items()))
        text += "".join(f"- FAILED: {test['name']}: {test['reason']}\n" for test in results["tests"] if test["outcome"] == "failed") + "\n"
    return text + "".join(f"- {note}\n" for note in results["notes"])


def measure(run: Run, pattern: str, nvbench: bool) -> int:
    def stop(number: int, _frame: object) -> None:
        for process in list(run.processes):
            run.kill(process)
        os._exit(128 + number)  # pylint: disable=protected-access # threads wait for what was just killed, and would begin the next

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    begun = time.monotonic()
    if run.manifest.get("left_out"):
        run.note(f"{len(run.manifest['left_out'])} more tests of the GPU need the sources, or what no GPU does: ./run test runs them")
    benches = [("bench_update", {"copy": "bytes[pow2]=30", "update": "elements[pow2]=[20,28]"}), ("bench_norm", {"norm": "elements[pow2]=[20,28]"}),
               ("bench_step", {"step_one_rank": "elements[pow2]=[20,28]", "step_eight_ranks": "elements[pow2]=[20,27]"})]
    run_figures(run)
    run.save()
    run_peers(run)
    run.save()
    run_tests(run, pattern, reserve=min(150, run.left() / 3))
    run.save()
    for name, sizes in benches if nvbench else []:
        run_bench(run, name, sizes)
        run.save()
    run_overlap(run)
    run.results["seconds"] = round(time.monotonic() - begun)
    run.save()
    with open(os.path.join(run.place, "results.md"), encoding="utf-8") as file:
        print(file.read())
    failed = any(test["outcome"] == "failed" for test in run.results["tests"]) or any("FAILED" in note for note in run.results["notes"])
    say(f"{'FAILED' if failed else 'done'} after {run.results['seconds']} s: {run.place}/results.json and results.md")
    return 1 if failed else 0


def parsed(text: str, kind: type, what: str):
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of {what}")
    return value


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def main() -> int:
    parser = argparse.ArgumentParser(prog="measure.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("manifest")
    command.add_argument("builds", nargs="+", metavar="BUILD")
    command = commands.add_parser("pack")
    command.add_argument("builds", nargs="+", metavar="BUILD")
    command.add_argument("folder", metavar="FOLDER")
    command = commands.add_parser("run")
    command.add_argument("folder", metavar="FOLDER")
    command.add_argument("results", metavar="RESULTS")
    command.add_argument("--minutes", type=lambda text: parsed(text, float, "minutes"), default=7, help="until it stops what still runs (7)")
    command.add_argument("--elements", type=lambda text: parsed(text, int, "elements"), default=1 << 28, help="of figures, peers and overlap (2^28)")
    command.add_argument("--tests", type=pattern, default="", metavar="REGEX", help="only the tests whose names match")
    command.add_argument("--without-nvbench", action="store_true", help="leave its benchmarks out")
    command.add_argument("--check", action="store_true", help="only whether the options can be understood")
    arguments = parser.parse_args()
    try:
        if arguments.command == "manifest":
            print(json.dumps(manifest_of(arguments.builds), indent=1))
        elif arguments.command == "pack":
            pack(arguments.builds, arguments.folder)
        elif not arguments.check:
            run = Run(arguments.folder, arguments.results, arguments.minutes, arguments.elements)
            return measure(run, arguments.tests, not arguments.without_nvbench)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"measure.py: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
