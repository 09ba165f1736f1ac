// SPDX-License-Identifier: Apache-2.0
// injected WAY [lost]: two ranks train three steps while, somewhere, one call fails (inject.py sees to that).
// Ends with 0 if what is promised for a failure held, and says what happened. WAY: flat, native, threads,
// captured. "lost": a kernel faults, after which the device answers no call.

#include <shardopt/cuda.cuh>

#include <failure/first_failure.hpp>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace so = shardopt;
using namespace std::chrono_literals;
using test::first_failure::InEngine;
using test::first_failure::Part;

namespace {

constexpr int world = 2;
constexpr int steps = 3;
constexpr std::int64_t elements = 5000;
/// Whether what fails is a kernel, and with it the device.
bool device_is_lost = false;

/// Whether steps are replayed: of what replays wait for no watching thread knows.
bool replays = false;

/// Whose failure is none for the caller: they give back what is not needed any more.
constexpr std::array<std::string_view, 4> quiet{"cudaEventDestroy", "cudaFree", "cudaFreeHost",
                                                "ncclCommDestroy"};

/// A call of the engine's own has failed: nothing to say about the library.
struct EngineFailure {};

void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  if (!replays || device_is_lost) throw EngineFailure{};
  // The other rank would wait for ever.
  std::printf("the failure: the engine's own\n");
  std::fflush(stdout);
  std::_Exit(0);
}

/// A promise was broken.
struct BrokenPromise {
  std::string text;
};

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

bool is_broken(const so::Error& error) { return contains(error.what(), "the optimizer is broken"); }

std::string kind_of(const so::Error& error) {
  if (dynamic_cast<const so::CudaError*>(&error) != nullptr) return "CudaError";
  if (dynamic_cast<const so::NcclError*>(&error) != nullptr) return "NcclError";
  if (dynamic_cast<const so::CollectiveError*>(&error) != nullptr) return "CollectiveError";
  return "Error";
}

/// What a rank got to see.
struct Report {
  std::string kind;  ///< of the first exception of the library's
  std::string text;  ///< its message
  std::string end;

  void note(const so::Error& error) {
    if (!kind.empty()) return;
    kind = kind_of(error);
    text = error.what();
  }
};

struct Engine {
  explicit Engine(int device) {
    const InEngine engine;
    require(cudaSetDevice(device));
    try {
      require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      require(cudaStreamCreateWithFlags(&comm_stream, cudaStreamNonBlocking));
      require(cudaMalloc(&parameters, elements * sizeof(so::bf16)));
      require(cudaMalloc(&gradients, elements * sizeof(float)));
      require(cudaMemsetAsync(parameters, 0, elements * sizeof(so::bf16), stream));
    } catch (const EngineFailure&) {
      release();
      throw;
    }
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() { release(); }

  void fill_gradients(int step) const {
    const InEngine engine;
    const std::vector<float> values(elements, 0.01f * static_cast<float>(step));
    require(
        cudaMemcpyAsync(gradients, values.data(), elements * sizeof(float), cudaMemcpyHostToDevice, stream));
  }
  template <class T>
  [[nodiscard]] std::vector<T> read(const T* from, std::size_t count) const {
    const InEngine engine;
    std::vector<T> values(count);
    require(cudaMemcpyAsync(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
    require(cudaStreamSynchronize(stream));
    return values;
  }

  cudaStream_t stream = nullptr;
  cudaStream_t comm_stream = nullptr;
  so::bf16* parameters = nullptr;
  float* gradients = nullptr;

 private:
  void release() const noexcept {
    const InEngine engine;
    static_cast<void>(cudaFree(parameters));
    static_cast<void>(cudaFree(gradients));
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
    if (comm_stream != nullptr) static_cast<void>(cudaStreamDestroy(comm_stream));
  }
};

/// What a step changes.
struct Snapshot {
  std::vector<so::bf16> parameters;
  std::map<std::string, std::vector<float>> states;
  std::array<std::int64_t, 2> counters{};

  /// @return of what differs, the first thing
  [[nodiscard]] std::string difference_to(const Snapshot& other) const {
    if (parameters != other.parameters) return "parameters have changed";
    for (const auto& [name, values] : states) {
      if (values != other.states.at(name)) return name + " has changed";
    }
    return counters != other.counters ? "counters have moved" : "";
  }

  [[nodiscard]] std::uint64_t digest() const {
    std::uint64_t result = 14695981039346656037U;
    const auto add = [&](const auto& values) {
      std::vector<unsigned char> bytes(values.size() * sizeof values[0]);
      std::memcpy(bytes.data(), values.data(), bytes.size());
      for (const unsigned char byte : bytes) result = (result ^ byte) * 1099511628211U;
    };
    add(parameters);
    for (const auto& [name, values] : states) add(values);
    add(counters);
    return result;
  }
};

struct Graph {
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    const InEngine engine;
    if (executable != nullptr) static_cast<void>(cudaGraphExecDestroy(executable));
  }

  template <class Body>
  void capture(cudaStream_t stream, const Body& body) {
    const auto begin = [&] {
      const InEngine engine;
      require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    };
    const auto end = [&] {
      const InEngine engine;
      cudaGraph_t graph = nullptr;
      cudaError_t status = cudaStreamEndCapture(stream, &graph);
      if (status == cudaSuccess) status = cudaGraphInstantiate(&executable, graph, 0);
      if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
      return status;
    };
    begin();
    try {
      body();
    } catch (...) {
      static_cast<void>(end());
      throw;
    }
    require(end());
  }
  void launch(cudaStream_t stream) const {
    const InEngine engine;
    require(cudaGraphLaunch(executable, stream));
  }

  cudaGraphExec_t executable = nullptr;
};

/// Makes a call of the optimizer. One that fails and does not break it has had no effect, and works when it
/// is made again.
template <class Body>
auto call(Report& report, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const so::Error& error) {
    report.note(error);
    if (is_broken(error) || dynamic_cast<const so::CollectiveError*>(&error) != nullptr) throw;
  }
  return body();
}

template <class Optimizer>
Snapshot look(const Optimizer& optimizer, const Engine& engine, Report& report) {
  Snapshot result;
  result.parameters = engine.read(engine.parameters, elements);
  for (const char* name : {"exp_avg", "exp_avg_sq", "master"}) {
    const auto state = optimizer.state(name);
    result.states[name] = engine.read(state.data(), state.size());
  }
  const so::StepCounters counters = call(report, [&] { return optimizer.counters(engine.stream); });
  result.counters = {counters.iteration, counters.updates};
  return result;
}

/// "3" of "the gather of bucket 3; …", or nothing.
std::string number_behind(std::string_view text, std::string_view words) {
  const std::size_t at = text.find(words);
  if (at == std::string_view::npos) return "";
  const std::string_view rest = text.substr(at + words.size());
  return std::string(rest.substr(0, rest.find_first_not_of("0123456789")));
}

/// What each later call of a broken optimizer throws.
template <class Optimizer>
std::string later_failure(Optimizer& optimizer, const Engine& engine, const std::string& kind,
                          Report& report) {
  std::string result;
  const auto add = [&](const auto& body) {
    std::string text = "nothing";
    try {
      body();
    } catch (const so::Error& error) {
      text = error.what();
      report.note(error);
      if (kind_of(error) != kind) throw BrokenPromise{"a later call throws another kind: " + text};
    }
    if (device_is_lost && !contains(text, "cudaErrorIllegalAddress"))
      throw BrokenPromise{"a later call of a lost device throws " + text};
    if (!device_is_lost && !result.empty() && result != text)
      throw BrokenPromise{"later calls differ: " + result + "; " + text};
    result = text;
  };
  add([&] { static_cast<void>(optimizer.step({}, engine.stream)); });
  add([&] { optimizer.gradient_ready(so::ParameterId{0}, engine.stream); });
  if (!device_is_lost) add([&] { optimizer.wait_parameters(engine.stream); });  // may have nothing to do
  add([&] { optimizer.zero_gradients(engine.stream); });
  return result;
}

struct Moment {
  int rank;
  int step;
  bool capturing;  ///< nothing that was enqueued has run
  bool enqueuing;  ///< of the step: gradient_ready or step
};

/// After an exception in a step: the cause stays, and what was not updated is as it was.
template <class Optimizer>
void examine(Optimizer& optimizer, const Engine& engine, const Snapshot& before, Report& report,
             const Moment& at, const so::Error& error) {
  const std::string text = error.what();
  if (device_is_lost) {
    if (report.kind == "CudaError") static_cast<void>(later_failure(optimizer, engine, "CudaError", report));
    return;
  }
  if (!is_broken(error)) {
    // A wait has met the failure of another rank: the next call that communicates breaks the optimizer.
    if (dynamic_cast<const so::CollectiveError*>(&error) == nullptr)
      throw BrokenPromise{"fails again: " + text};
    const std::string again = later_failure(optimizer, engine, kind_of(error), report);
    if (!contains(again, text) || !contains(again, "the optimizer is broken"))
      throw BrokenPromise{"a later call reports another cause: " + again + "; not " + text};
    return;
  }
  const std::string iteration = number_behind(text, "rank " + std::to_string(at.rank) + ", iteration ");
  if (iteration.empty() || (at.enqueuing && iteration != std::to_string(at.step)))
    throw BrokenPromise{"the message lacks rank or iteration " + std::to_string(at.step)};
  const std::string again = later_failure(optimizer, engine, kind_of(error), report);
  if (!contains(again, text)) throw BrokenPromise{"a later call reports another cause: " + again};
  if (!at.enqueuing) return;

  for (const char* words : {"the reduction of bucket", "the update of bucket", "the gather of bucket"}) {
    if (contains(text, words) && number_behind(text, std::string(words) + ' ').empty())
      throw BrokenPromise{"the message lacks the bucket's number"};
  }
  const std::string updated = number_behind(text, "the update of bucket ");
  const bool updating = contains(text, "the gather of bucket ") || (!updated.empty() && updated != "0");
  if (updating && !at.capturing) return;
  const std::string difference = look(optimizer, engine, report).difference_to(before);
  if (!difference.empty()) throw BrokenPromise{difference};
}

/// Ranks that have not failed wait for each other here.
class EndOfTraining {
 public:
  explicit EndOfTraining(std::barrier<>& ranks) : ranks_(ranks) {}
  EndOfTraining(const EndOfTraining&) = delete;
  EndOfTraining& operator=(const EndOfTraining&) = delete;
  ~EndOfTraining() { ranks_.arrive_and_drop(); }
  void wait() const { ranks_.arrive_and_wait(); }

 private:
  std::barrier<>& ranks_;
};

/// What a watching thread has met is told by a later call.
template <class Optimizer>
void meet_watched_failure(Optimizer& optimizer, const Engine& engine) {
  const auto failure = test::first_failure::get();
  if (failure.function.empty() || failure.rank != test::first_failure::no_rank) return;
  if (failure.part != Part::library || failure.function == "cudaEventQuery") return;
  const auto end = std::chrono::steady_clock::now() + 5s;
  while (std::chrono::steady_clock::now() < end) {
    optimizer.synchronize(engine.stream);
    std::this_thread::sleep_for(1ms);
  }
}

template <class Sharding, class Comm>
class Training {
 public:
  using Optimizer = so::ZeroOptimizer<so::AdamW, Sharding, Comm, so::Mixed<so::bf16, float, float>>;

  Training(const Engine& engine, int rank, Comm comm, so::Reduction reduction, bool captured, Report& report)
      : engine_(engine),
        rank_(rank),
        captured_(captured),
        report_(report),
        optimizer_(table(), {.sharding = {.bucket_bytes = 8192}, .reduction = reduction, .max_norm = 1.0f},
                   std::move(comm), so::FlatBuffers{engine.parameters, engine.gradients}, engine.stream) {}

  void run() {
    try {
      take_steps();
    } catch (const EngineFailure&) {
      // Whoever meets a lost device first, the library's calls tell it, too.
      if (device_is_lost) static_cast<void>(later_failure(optimizer_, engine_, "CudaError", report_));
      throw;
    }
  }

  [[nodiscard]] Optimizer& optimizer() { return optimizer_; }

 private:
  static so::ParameterTable table() {
    so::ParameterTable result;
    result.add({.name = "a", .shape = {3000}, .offset = 3});
    result.add({.name = "b", .shape = {1500}, .offset = 3100});
    return result;
  }

  void take_steps() {
    for (int step = 1; step <= steps; ++step) {
      const Snapshot before = look(optimizer_, engine_, report_);
      engine_.fill_gradients(step);
      Moment at{rank_, step, captured_ && step == 2, true};
      try {
        take(at);
      } catch (const so::Error& error) {
        report_.note(error);
        examine(optimizer_, engine_, before, report_, at, error);
        throw;
      }
    }
    // What another rank's failure has cut off is read by nobody.
    call(report_, [&] { optimizer_.synchronize(engine_.stream); });
    char digest[17];
    std::snprintf(digest, sizeof digest, "%016llx",
                  static_cast<unsigned long long>(look(optimizer_, engine_, report_).digest()));
    report_.end = std::string("trained ") + digest;
  }

  void take(Moment& at) {
    std::optional<so::StepTicket> ticket;
    if (at.capturing) {
      graph_.capture(engine_.stream, [&] { enqueue(); });
    } else if (graph_.executable == nullptr) {
      ticket = enqueue();
    }
    at.enqueuing = false;
    if (graph_.executable != nullptr) {
      graph_.launch(engine_.stream);
      ticket = call(report_, [&] { return optimizer_.last_result(engine_.stream); });
    }
    const std::int64_t iteration = call(report_, [&] { return ticket->get(); }).iteration;
    if (iteration != at.step) throw BrokenPromise{"iteration " + std::to_string(iteration)};
    call(report_, [&] { optimizer_.wait_parameters(engine_.stream); });
  }

  so::StepTicket enqueue() {
    call(report_, [&] { optimizer_.gradient_ready(so::ParameterId{1}, engine_.stream); });
    return call(report_, [&] { return optimizer_.step({}, engine_.stream); });
  }

  const Engine& engine_;
  int rank_;
  bool captured_;
  Report& report_;
  Optimizer optimizer_;
  Graph graph_;  // goes before the communicator: NCCL waits for graphs
};

template <class Sharding, class Comm, class Join>
void train(int rank, int device, const Join& join, so::Reduction reduction, bool captured,
           std::barrier<>& ranks, Report& report) {
  const EndOfTraining end(ranks);
  const Engine engine(device);
  Training<Sharding, Comm> training(engine, rank, join(rank, engine.comm_stream), reduction, captured,
                                    report);
  training.run();
  end.wait();
  meet_watched_failure(training.optimizer(), engine);
  end.wait();
  test::first_failure::this_part = Part::end;
  test::first_failure::all_ending = true;
}

/// @return one report a rank
template <class Sharding, class Comm, class Join>
std::vector<Report> train_all(const std::array<int, world>& devices, const Join& join,
                              so::Reduction reduction, bool captured) {
  std::vector<Report> reports(world);
  std::barrier<> ranks(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      test::first_failure::this_rank = rank;
      const auto at = static_cast<std::size_t>(rank);
      Report& report = reports[at];
      try {
        train<Sharding, Comm>(rank, devices[at], join, reduction, captured, ranks, report);
      } catch (const so::Error& error) {
        report.note(error);
        report.end = report.kind + ": " + error.what();
      } catch (const EngineFailure&) {
        report.end = "engine";
      } catch (const BrokenPromise& broken) {
        report.end = "BROKEN PROMISE: " + broken.text + "; first: " + report.text;
      } catch (const std::exception& error) {
        report.end = std::string("BROKEN PROMISE: an exception of the wrong kind: ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return reports;
}

std::vector<Report> train_threads() {
  test::first_failure::this_rank = 0;
  std::vector<so::Threads<so::Cuda>> members;
  try {
    members = so::Threads<so::Cuda>::make({{0, nullptr}, {0, nullptr}}, 2s);
  } catch (const so::Error& error) {
    std::vector<Report> reports(world);
    reports[0].note(error);
    for (Report& report : reports) report.end = "not begun";
    return reports;
  }
  const auto join = [&](int rank, cudaStream_t) {
    return std::move(members[static_cast<std::size_t>(rank)]);
  };
  return train_all<so::FlatSharding, so::Threads<so::Cuda>>({0, 0}, join, so::Reduction::ordered, false);
}

std::vector<Report> train_nccl(std::string_view way) {
  ncclUniqueId id;
  {
    const InEngine engine;
    if (ncclGetUniqueId(&id) != ncclSuccess) return {{.kind = "", .text = "", .end = "engine"}};
  }
  const auto join = [&](int rank, cudaStream_t stream) {
    return so::Nccl::create(id, rank, world, stream, {.deadline = 2s});
  };
  if (way == "native") {
    return train_all<so::PerParameterSharding, so::Nccl>({0, 1}, join, so::Reduction::native, false);
  }
  return train_all<so::FlatSharding, so::Nccl>({0, 1}, join, so::Reduction::ordered, replays);
}

/// What a rank must have been told of a failed call of its own.
bool tells(const Report& report, const std::string& function) {
  // To join and to ask for NCCL's state are no calls of the caller's: what they report is the communicator's.
  if (function == "ncclCommInitRankConfig" || function == "ncclCommGetAsyncError")
    return report.kind == "CollectiveError" && contains(report.text, "NCCL reports: ");
  const std::string name = function == "cudaLaunchKernelExC" ? "cudaLaunchKernelEx" : function;
  return report.kind == (name.starts_with("nccl") ? "NcclError" : "CudaError") &&
         contains(report.text, "shardopt: " + name + " failed: ");
}

bool trained(const Report& report) { return report.end.starts_with("trained "); }

/// Prints whose the first failed call was, and what came of it. @return whether that is as promised
bool judge(const std::vector<Report>& reports) {
  const auto failure = test::first_failure::get();
  const bool watching = failure.rank == test::first_failure::no_rank;
  const auto count = [&](const auto& holds) { return std::count_if(reports.begin(), reports.end(), holds); };
  const bool all_trained = count(trained) == world;
  const bool any_told = count([](const Report& report) { return !report.kind.empty(); }) > 0;
  const auto say = [](const char* what, bool holds) {
    std::printf("the failure: %s%s\n", holds ? "" : "NOT ", what);
    return holds;
  };
  if (failure.function.empty()) return say("none came", all_trained && !any_told);
  std::printf("%s failed, of %s\n", failure.function.c_str(),
              watching ? "a watching thread" : ("rank " + std::to_string(failure.rank)).c_str());
  if (device_is_lost && failure.part != Part::end) {
    return say("told", count([](const Report& report) {
                         return report.kind == "CudaError" &&
                                contains(report.text, "cudaErrorIllegalAddress");
                       }) > 0);
  }
  switch (failure.part) {
    case Part::engine:
      return say("the engine's own", true);
    case Part::end:
      return say("at the end", all_trained && !any_told);
    case Part::library:
      break;
  }
  if (std::find(quiet.begin(), quiet.end(), failure.function) != quiet.end())
    return say("of no consequence", all_trained && !any_told);
  // The watching thread only looks whether events have passed: their failures are the next call's to report.
  if (watching && failure.function == "cudaEventQuery")
    return say("of no consequence", all_trained && !any_told);
  if (watching) {
    return say("told by others", count([&](const Report& report) {
                                   return report.kind == "CollectiveError" &&
                                          (contains(report.text, failure.function + " failed: ") ||
                                           tells(report, failure.function));
                                 }) > 0);
  }
  return say("told", tells(reports.at(static_cast<std::size_t>(failure.rank)), failure.function));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view way = argc > 1 ? argv[1] : "flat";
  replays = way == "captured";
  device_is_lost = argc > 2 && std::string_view(argv[2]) == "lost";
  test::first_failure::observe();
  const std::vector<Report> reports = way == "threads" ? train_threads() : train_nccl(way);
  for (std::size_t rank = 0; rank < reports.size(); ++rank)
    std::printf("rank %zu: %s\n", rank, reports[rank].end.c_str());
  bool kept = judge(reports);
  for (const Report& report : reports) kept = kept && !report.end.starts_with("BROKEN PROMISE");
  if (kept) return 0;
  std::fflush(stdout);
  std::_Exit(1);  // a launcher may make another code of a leak
}
