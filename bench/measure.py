# SPDX-License-Identifier: Apache-2.0
"""measure.py: what `./run gpu` does where the programs are built.

measure.py manifest BUILD...           prints the programs and GPU tests of builds, as JSON
measure.py pack BUILD... FOLDER        copies them and all that they need, stripped, so that FOLDER/run needs neither compiler nor network
measure.py run FOLDER RESULTS [--minutes M] [--elements N] [--tests REGEX]
                                       runs what FOLDER/manifest.json lists: figures, PyTorch beside them, tests, benchmarks; writes
                                       RESULTS/results.json and RESULTS/results.md as it goes. Programs of the GPU run through the
                                       command in SHARDOPT_GPU_LAUNCHER if it is set.
"""

import argparse
import concurrent.futures
import datetime
import itertools
import json
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


def say(text: str) -> None:
    print(f"gpu: {text}", file=sys.stderr, flush=True)


# --- the manifest -----------------------------------------------------------------------------------------------------------------
def cached(build: str, variable: str) -> str | None:
    """A variable of a build's CMake cache."""
    with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as cache:
        found = re.search(rf"^{variable}:\w+=(.*)$", cache.read(), re.MULTILINE)
    return found.group(1) if found else None


def gpu_tests(build: str) -> list[dict]:
    """The quick tests of CTest that run a program of the build on the GPU, by their names."""
    ctest = cached(build, "CMAKE_CTEST_COMMAND") or "ctest"
    listing = subprocess.run([ctest, "--test-dir", build, "--show-only=json-v1", "-L", "quick"], capture_output=True, text=True, check=True)
    tests = []
    for test in json.loads(listing.stdout)["tests"]:
        command = test.get("command", [])
        if len(command) < 2 or os.path.basename(command[0]) != "on_gpu.sh" or not os.path.isfile(command[1]):
            continue
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        # A test that needs what no GPU does, such as failures on request, says so in a variable.
        environment = dict(item.split("=", 1) for item in properties.get("ENVIRONMENT", []))
        if any(name.startswith("SHARDOPT_TEST_") for name in environment):
            continue
        tests.append({"name": test["name"], "command": command[1:], "skip_code": properties.get("SKIP_RETURN_CODE", 4)})
    return tests


def manifest_of(builds: list[str]) -> dict:
    """Where a program is in several builds, the first one's."""
    manifest: dict = {"commit": "", "programs": {}, "tests": []}
    for build in builds:
        build = os.path.abspath(build)
        for name, path in (("figures", "bench/figures"), ("overlap", "bench/overlap"), *((b, f"bench/nvbench/{b}") for b in BENCHES)):
            if os.path.isfile(os.path.join(build, path)):
                manifest["programs"].setdefault(name, os.path.join(build, path))
        manifest["tests"] += gpu_tests(build)
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    manifest["commit"] = git.stdout.strip()
    return manifest


def pack(builds: list[str], folder: str) -> None:
    manifest = manifest_of(builds)
    for part in ("bin", "data", "lib/standard"):
        os.makedirs(os.path.join(folder, part), exist_ok=True)
    places: dict[str, str] = {}  # of files that are in the folder already

    def carry(path: str) -> str:
        """Copies a program or a file once; its place from now on."""
        executable = os.access(path, os.X_OK)
        place = os.path.join("bin" if executable else "data", os.path.basename(path))
        if places.setdefault(place, path) != path:
            sys.exit(f"measure.py: {path} and {places[place]} would be one file of {folder}")
        target = os.path.join(folder, place)
        if not os.path.exists(target):
            shutil.copy(path, target)
            if executable:
                subprocess.run(["strip", target], check=False)
        return place

    for test in manifest["tests"]:
        test["command"] = [carry(word) if os.path.isabs(word) and os.path.isfile(word) else word for word in test["command"]]
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


# --- running ----------------------------------------------------------------------------------------------------------------------
class Run:
    """One run: its folder, its results, its time, the size of what it measures."""

    def __init__(self, folder: str, results: str, minutes: float, elements: int) -> None:
        self.folder, self.place, self.elements = os.path.abspath(folder), os.path.abspath(results), elements
        self.end = time.monotonic() + 60 * minutes
        with open(os.path.join(self.folder, "manifest.json"), encoding="utf-8") as file:
            self.manifest = json.load(file)
        self.launcher = os.environ.get("SHARDOPT_GPU_LAUNCHER", "").split()
        self.results = {"commit": self.manifest["commit"], "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                        "machine": machine(), "elements": elements, "figures": [], "peers": [], "benches": [], "tests": [], "notes": []}
        os.makedirs(os.path.join(self.place, "logs"), exist_ok=True)

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
                return 127, str(error)
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = OUT_OF_TIME
            file.seek(0)
            return code, file.read()

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


def last_json(output: str) -> dict | None:
    begin = output.find("{\"elements\"")
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
        return run.note(f"figures: FAILED, exit code {code}: {output.strip()[-500:]}")
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
        return run.note(f"peers: {output.strip()[-500:]}" if code == 77 else f"peers: FAILED, exit code {code}: {output.strip()[-500:]}")
    run.results["peers"] = figures["figures"]
    run.results["torch"] = figures["torch"]


def run_test(run: Run, number: int, test: dict) -> dict:
    begin = time.monotonic()
    code, output = run.execute(f"{number:03} {test['name']}", [*run.launcher, *(run.path(word) for word in test["command"])], 60)
    result = {"name": test["name"], "seconds": round(time.monotonic() - begin, 2)}
    if code == 0:
        return {**result, "outcome": "passed"}
    if code in (4, test["skip_code"]):
        reason = re.search(r"(?:explicitly with messages?:|skipped:)\s*(.+)", output)
        return {**result, "outcome": "skipped", "reason": reason.group(1).strip() if reason else output.strip()[-200:]}
    if "error while loading shared libraries: libnccl" in output:
        return {**result, "outcome": "skipped", "reason": "libnccl.so.2 is not on this machine"}
    if code == OUT_OF_TIME and output == "no time was left":
        return {**result, "outcome": "skipped", "reason": output}
    reason = "ran out of time" if code == OUT_OF_TIME else f"exit code {code}"
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


def run_bench(run: Run, name: str, sizes: dict[str, str]) -> None:
    """One program of nvbench; `sizes`: of each benchmark, the axis that is set."""
    command = run.program(name)
    if command is None:
        return run.note(f"{name}: not built")
    file = os.path.join(run.place, f"{name}.json")
    for benchmark, axis in sizes.items():
        command += ["-b", benchmark, "-a", axis]
    say(name)
    code, output = run.execute(name, [*command, "--no-batch", "--timeout", "1", "--json", file], 120)
    if code != 0 or not os.path.isfile(file):
        return run.note(f"{name}: FAILED, exit code {code}: {output.strip()[-500:]}")
    with open(file, encoding="utf-8") as opened:
        content = json.load(opened)
    measured = 0
    for benchmark in content["benchmarks"]:
        for state in benchmark["states"]:
            where = f"{benchmark['name']} {state['name']}"
            if state.get("is_skipped"):  # nvbench calls it that too when something was thrown, and ends as if all were well
                reason = str(state.get("skip_reason"))
                run.note(f"{where}: {'FAILED: ' if reason.startswith('Unexpected error') else ''}{reason}")
                continue
            # Lists are null where they are empty; numbers are strings.
            summaries = {s["tag"]: {d["name"]: d["value"] for d in s["data"]}.get("value") for s in state["summaries"] or []}
            seconds, speed = summaries.get("nv/cold/time/gpu/mean"), summaries.get("nv/cold/bw/global/bytes_per_second")
            if seconds is None or speed is None:
                run.note(f"{where}: FAILED: nvbench measured no time")
                continue
            measured += 1
            axes = ", ".join(str(a.get("value", a.get("input_string"))) for a in state["axis_values"] or [])
            run.results["benches"].append({"name": f"{benchmark['name']}: {axes}", "microseconds": round(1e6 * float(seconds), 2),
                                           "gigabytes_per_second": round(float(speed) / 1e9, 1)})
    if measured == 0:
        run.note(f"{name}: FAILED: it measured nothing: {output.strip()[-500:]}")


def run_overlap(run: Run) -> None:
    command, layers = run.program("overlap"), 16
    gpus = run.results["machine"].get("devices", len(run.results["machine"]["gpus"]))
    if command is None or gpus < 2:
        return run.note(f"overlap: skipped: needs 2 GPUs, there are {gpus}" if command else "overlap: not built")
    say("overlap")
    # Buckets as large as the gradients of a layer; a layer's forward and backward copies what 4 of them hold.
    sizes = (gpus, run.elements, layers, run.elements // layers * 4, run.elements // layers * 16, 10)
    code, output = run.execute("overlap", [*command, *map(str, sizes)], 60)
    if code != 0:
        return run.note(f"overlap: FAILED, exit code {code}: {output.strip()[-500:]}")
    run.note(f"overlap: an iteration of {gpus} GPUs, {power_of_two(run.elements)} parameters in {layers} layers, takes {output.strip()} ms")


# --- the table --------------------------------------------------------------------------------------------------------------------
def power_of_two(number: int) -> str:
    return f"2^{number.bit_length() - 1}" if number & (number - 1) == 0 else f"{number:,}"


def table(header: list[str], lines: list[list]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(str(cell) for cell in row) + " |\n" for row in rows)


def markdown(results: dict) -> str:
    gpus = results["machine"]["gpus"] or [results["machine"].get("device", "no GPU named")]
    text = f"Commit {results['commit'][:12]}, {results['begun']}, {'; '.join(gpus)}\n\n"
    figures = [*results["figures"], *results["peers"]]
    copy = results["figures"][0]["gigabytes_per_second"] if results["figures"] else 0
    if figures:
        text += table([f"{power_of_two(results['elements'])} elements", "bytes an element", "GB/s", "of the copy"],
                      [[f["name"], f["bytes_per_element"], f["gigabytes_per_second"],
                        format(f["gigabytes_per_second"] / copy if copy else f["of_copy"], ".3f")] for f in figures]) + "\n"
    if results["benches"]:
        text += table(["nvbench", "us", "GB/s", "of the copy"],
                      [[b["name"], b["microseconds"], b["gigabytes_per_second"],
                        format(b["gigabytes_per_second"] / copy, ".3f") if copy else ""] for b in results["benches"]]) + "\n"
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


def measure(run: Run, pattern: str) -> int:
    begun = time.monotonic()
    benches = [("bench_update", {"copy": "bytes[pow2]=30", "update": "elements[pow2]=[20,28]"}), ("bench_norm", {"norm": "elements[pow2]=[20,28]"}),
               ("bench_step", {"step_one_rank": "elements[pow2]=[20,28]", "step_eight_ranks": "elements[pow2]=[20,27]"})]
    run_figures(run)
    run.save()
    run_peers(run)
    run.save()
    run_tests(run, pattern, reserve=min(150, run.left() / 3))
    run.save()
    for name, sizes in benches:
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
    command.add_argument("--minutes", type=float, default=7, help="until it stops what still runs (7)")
    command.add_argument("--elements", type=int, default=1 << 28, help="of figures, peers and overlap (2^28)")
    command.add_argument("--tests", default="", metavar="REGEX", help="only the tests whose names match")
    arguments = parser.parse_args()
    if arguments.command == "manifest":
        print(json.dumps(manifest_of(arguments.builds), indent=1))
        return 0
    if arguments.command == "pack":
        pack(arguments.builds, arguments.folder)
        return 0
    return measure(Run(arguments.folder, arguments.results, arguments.minutes, arguments.elements), arguments.tests)


if __name__ == "__main__":
    sys.exit(main())
