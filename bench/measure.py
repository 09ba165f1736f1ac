# SPDX-License-Identifier: Apache-2.0
"""measure.py: what `./run gpu` does where the programs are built.

measure.py manifest BUILD [--cmake CMAKE] [--into DIR]   lists the programs and GPU tests of a build; with --into copies them, stripped,
                                                         so that DIR/run needs neither compiler nor network
measure.py run FOLDER RESULTS [--minutes M]              runs what FOLDER/manifest.json lists: figures, PyTorch beside them, tests,
                                                         benchmarks; writes RESULTS/results.json and RESULTS/results.md as it goes
"""

import argparse
import concurrent.futures
import datetime
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
def gpu_tests(build: str, cmake: str) -> list[dict]:
    """The quick tests of CTest that run a program of the build on the GPU, by their names."""
    ctest = os.path.join(os.path.dirname(cmake), "ctest")
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


def write_manifest(build: str, cmake: str, into: str | None) -> None:
    build = os.path.abspath(build)
    programs = {}
    for name, path in (("figures", "bench/figures"), ("overlap", "bench/overlap"), *((b, f"bench/nvbench/{b}") for b in BENCHES)):
        if os.path.isfile(os.path.join(build, path)):
            programs[name] = os.path.join(build, path)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    manifest = {"commit": commit, "programs": programs, "tests": gpu_tests(build, cmake)}
    if not into:
        with open(os.path.join(build, "manifest.json"), "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
        return

    for part in ("bin", "lib", "data"):
        os.makedirs(os.path.join(into, part), exist_ok=True)

    def carry(path: str) -> str:
        """Copies a program or a file once; its place from now on."""
        executable = os.access(path, os.X_OK)
        place = os.path.join("bin" if executable else "data", os.path.basename(path))
        target = os.path.join(into, place)
        if not os.path.exists(target):
            shutil.copy(path, target)
            if executable:
                subprocess.run(["strip", target], check=False)
        return place

    manifest["programs"] = {name: carry(path) for name, path in programs.items()}
    for test in manifest["tests"]:
        test["command"] = [carry(word) if os.path.isabs(word) and os.path.isfile(word) else word for word in test["command"]]
    for script in ("measure.py", "peers.py"):
        shutil.copy(os.path.join(ROOT, "bench", script), into)
    with open(os.path.join(into, "manifest.json"), "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)


# --- running ----------------------------------------------------------------------------------------------------------------------
class Run:
    """One run: its folder, its results, its time."""

    def __init__(self, folder: str, results: str, minutes: float) -> None:
        self.folder, self.place = os.path.abspath(folder), os.path.abspath(results)
        self.end = time.monotonic() + 60 * minutes
        with open(os.path.join(self.folder, "manifest.json"), encoding="utf-8") as file:
            self.manifest = json.load(file)
        self.launcher = os.environ.get("SHARDOPT_GPU_LAUNCHER", "").split()
        self.results = {"commit": self.manifest["commit"], "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                        "machine": machine(), "figures": [], "peers": [], "benches": [], "tests": [], "notes": []}
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
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        gpus = []
    return {"gpus": gpus, "cpus": os.cpu_count(), "system": platform.platform()}


def last_json(output: str) -> dict | None:
    begin = output.find("{\"elements\"")
    try:
        return json.loads(output[begin:]) if begin >= 0 else None
    except ValueError:
        return None


def run_figures(run: Run, elements: str) -> None:
    command = run.program("figures")
    if command is None:
        return run.note("figures: not built")
    say("figures")
    code, output = run.execute("figures", [*command, elements], 120)
    figures = last_json(output)
    if code != 0 or figures is None:
        return run.note(f"figures: FAILED, exit code {code}: {output.strip()[-500:]}")
    run.results["figures"] = figures["figures"]
    run.results["elements"] = figures["elements"]


def run_peers(run: Run, elements: str) -> None:
    script = os.path.join(run.folder, "peers.py")
    if not os.path.isfile(script):
        script = os.path.join(ROOT, "bench", "peers.py")
    say("peers")
    code, output = run.execute("peers", [os.environ.get("SHARDOPT_PEERS_PYTHON", "python3"), script, elements], 120)
    figures = last_json(output)
    if code != 0 or figures is None:
        return run.note(f"peers: {output.strip()[-500:]}" if code == 77 else f"peers: FAILED, exit code {code}: {output.strip()[-500:]}")
    run.results["peers"] = figures["figures"]
    run.results["torch"] = figures["torch"]


def run_test(run: Run, test: dict) -> dict:
    begin = time.monotonic()
    code, output = run.execute(test["name"], [*run.launcher, *(run.path(word) for word in test["command"])], 60)
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


def run_tests(run: Run, reserve: float) -> None:
    """All tests, a few at once, but for the time that is reserved for what follows."""
    tests = run.manifest["tests"]
    say(f"{len(tests)} tests")
    run.end -= reserve
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for done, result in enumerate(pool.map(lambda test: run_test(run, test), tests), 1):
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
    for benchmark in content["benchmarks"]:
        for state in benchmark["states"]:
            if state.get("is_skipped"):
                run.note(f"{benchmark['name']} {state['name']}: {state.get('skip_reason')}")
                continue
            summaries = {s["tag"]: {d["name"]: d["value"] for d in s["data"]}.get("value") for s in state["summaries"]}
            seconds, speed = summaries.get("nv/cold/time/gpu/mean"), summaries.get("nv/cold/bw/global/bytes_per_second")
            if seconds is not None and speed is not None:
                axes = ", ".join(str(a.get("value")) for a in state["axis_values"])
                run.results["benches"].append({"name": f"{benchmark['name']}: {axes}", "microseconds": round(1e6 * float(seconds), 2),
                                               "gigabytes_per_second": round(float(speed) / 1e9, 1)})


def run_overlap(run: Run) -> None:
    command = run.program("overlap")
    gpus = len(run.results["machine"]["gpus"])
    if command is None or gpus < 2:
        return run.note(f"overlap: skipped: needs 2 GPUs, there are {gpus}" if command else "overlap: not built")
    say("overlap")
    code, output = run.execute("overlap", [*command, str(gpus), str(1 << 28), "16", str(64 << 20), str(256 << 20), "10"], 60)
    if code != 0:
        return run.note(f"overlap: FAILED, exit code {code}: {output.strip()[-500:]}")
    run.note(f"overlap: an iteration of {gpus} GPUs, 2^28 parameters in 16 layers, takes {output.strip()} ms")


# --- the table --------------------------------------------------------------------------------------------------------------------
def table(header: list[str], lines: list[list]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(str(cell) for cell in row) + " |\n" for row in rows)


def markdown(results: dict) -> str:
    gpus = results["machine"]["gpus"]
    text = f"Commit {results['commit'][:12]}, {results['begun']}, {'; '.join(gpus) or 'no GPU named'}\n\n"
    figures = [*results["figures"], *results["peers"]]
    copy = results["figures"][0]["gigabytes_per_second"] if results["figures"] else 0
    if figures:
        text += table(["2^" + format((results.get("elements", 1) or 1).bit_length() - 1) + " elements", "bytes an element", "GB/s", "of the copy"],
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


def measure(folder: str, place: str, minutes: float, elements: str) -> int:
    run = Run(folder, place, minutes)
    benches = [("bench_update", {"copy": "bytes[pow2]=30", "update": "elements[pow2]=[20,28]"}), ("bench_norm", {"norm": "elements[pow2]=[20,28]"}),
               ("bench_step", {"step_one_rank": "elements[pow2]=[20,28]", "step_eight_ranks": "elements[pow2]=[20,27]"})]
    run_figures(run, elements)
    run.save()
    run_peers(run, elements)
    run.save()
    run_tests(run, reserve=min(150, run.left() / 3))
    run.save()
    for name, sizes in benches:
        run_bench(run, name, sizes)
        run.save()
    run_overlap(run)
    run.results["seconds"] = round(60 * minutes - run.left())
    run.save()
    with open(os.path.join(run.place, "results.md"), encoding="utf-8") as file:
        print(file.read())
    failed = any(test["outcome"] == "failed" for test in run.results["tests"]) or any("FAILED" in note for note in run.results["notes"])
    say(f"{'FAILED' if failed else 'done'} after {run.results['seconds']} s: {run.place}/results.json and results.md")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    manifest = commands.add_parser("manifest")
    manifest.add_argument("build")
    manifest.add_argument("--cmake", default=shutil.which("cmake") or "cmake")
    manifest.add_argument("--into")
    run = commands.add_parser("run")
    run.add_argument("folder")
    run.add_argument("results")
    run.add_argument("--minutes", type=float, default=7)
    run.add_argument("--elements", default=str(1 << 28), help="of the figures")
    arguments = parser.parse_args()
    if arguments.command == "manifest":
        write_manifest(arguments.build, arguments.cmake, arguments.into)
        return 0
    return measure(arguments.folder, arguments.results, arguments.minutes, arguments.elements)


if __name__ == "__main__":
    sys.exit(main())
