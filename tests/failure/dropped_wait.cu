// SPDX-License-Identifier: Apache-2.0
// dropped_wait VARIANT [N [RANK]]: two ranks train, or call a collective; RANK (0), or in a captured step
// every rank, forgets the N-th wait of a stream for an event that the library asks for. A launcher that looks
// for unordered accesses must report that (dropped_waits.py asks for each N). Ends with 3 where CUDA refused
// the capture that lacks the wait. Without N: prints how many waits there are. Without VARIANT: their names.

#include <shardopt/cuda.cuh>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace so = shardopt;

namespace {

constexpr int world = 2;

/// Counts one rank's waits and drops one.
struct Waits {
  int count = 0;
  int dropped = -1;
  int made = 0;           ///< with those that do not count
  std::set<int> spare{};  ///< which those are, by `made`

  /// Whether the wait that is made now is to be.
  bool next() { return spare.contains(made++) || count++ != dropped; }
  /// The k-th wait from here on orders nothing in this program.
  void ignore(int k) { spare.insert(made + k); }
};

/// Ranks meet before one waits for its device: that would order what the other enqueues after it.
std::barrier<> all_are_here(world);

/// Of the rank that runs on this thread, while it is in the library.
thread_local Waits* watched = nullptr;

}  // namespace

extern "C" cudaError_t __real_cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags);
extern "C" cudaError_t __wrap_cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                                  unsigned int flags) {
  if (watched != nullptr && !watched->next()) return cudaSuccess;
  return __real_cudaStreamWaitEvent(stream, event, flags);
}

namespace {

void require(cudaError_t status) { so::throw_if_failed(status, "the engine's own call"); }

/// The engine's own order.
void wait(cudaStream_t stream, cudaEvent_t event) { require(__real_cudaStreamWaitEvent(stream, event, 0)); }

/// How a variant trains.
struct Engine {
  std::int64_t gap = 0;  ///< elements between parameters: buckets with a gap are staged
  so::Reduction reduction = so::Reduction::automatic;
  bool captured = false;
  bool calls = false;  ///< beside steps, on a stream of their own
};

/// Streams, events and memory of one rank; its device is current.
template <class Precision>
class Rank {
 public:
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;

  explicit Rank(const Engine& engine) : engine_(engine), extent_(7000 + 2 * engine.gap) {
    for (cudaStream_t* each : {&stream_, &second_, &idle_, &reader_})
      require(cudaStreamCreateWithFlags(each, cudaStreamNonBlocking));
    require(cudaMalloc(&parameters_, bytes<Param>(extent_)));
    require(cudaMalloc(&gradients_, bytes<Grad>(extent_)));
    require(cudaMalloc(&copy_, bytes<Param>(extent_)));
    require(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming));
    require(cudaEventCreateWithFlags(&reduced_, cudaEventDisableTiming));
    require(cudaMemsetAsync(parameters_, 0, bytes<Param>(extent_), stream_));
    require(cudaMemsetAsync(gradients_, 0, bytes<Grad>(extent_), stream_));
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() {
    static_cast<void>(cudaDeviceSynchronize());
    end_graph();
    for (cudaEvent_t each : {begun_, reduced_}) static_cast<void>(cudaEventDestroy(each));
    static_cast<void>(cudaFree(parameters_));
    static_cast<void>(cudaFree(gradients_));
    static_cast<void>(cudaFree(copy_));
    for (cudaStream_t each : {stream_, second_, idle_, reader_}) static_cast<void>(cudaStreamDestroy(each));
  }

  template <class Comm>
  void train(Comm comm) {
    so::ParameterTable table;
    first_ = table.add({.name = "first", .shape = {3000}, .offset = 0});
    last_ = table.add({.name = "last", .shape = {3000}, .offset = 3000 + engine_.gap});
    early_ = table.add({.name = "early", .shape = {1000}, .offset = 6000 + 2 * engine_.gap});
    const cudaStream_t comm_stream = comm.stream();
    so::ZeroOptimizer<so::AdamW, so::FlatSharding, Comm, Precision> optimizer(
        table,
        {.sharding = {.bucket_bytes = static_cast<std::int64_t>(bytes<Grad>(3072))},
         .reduction = engine_.reduction},
        std::move(comm), so::FlatBuffers{parameters_, gradients_}, stream_);
    if (engine_.captured) {
      replay(optimizer);
    } else if (engine_.calls) {
      call_between(optimizer);
    } else {
      step_thrice(optimizer, comm_stream);
    }
    all_are_here.arrive_and_wait();
    require(cudaDeviceSynchronize());  // memory goes, and nothing that lacks a wait may still use it
    end_graph();                       // NCCL's end would wait for it
  }

 private:
  static constexpr int buckets = 3;
  /// A call's first wait is for the last step's update. Its second, for the gathers, covers that: they came
  /// behind the update.
  static constexpr int for_the_update = 0;

  template <class Optimizer>
  void step_thrice(Optimizer& optimizer, cudaStream_t comm_stream) {
    for (int step = 0; step < 3; ++step) {
      if (step == 2) {  // behind its reduction alone, which the discarded step before was
        fill(gradients_ + 6000 + 2 * engine_.gap, 3, 1000, idle_);
        optimizer.gradient_ready(early_, idle_);
      }
      backward(optimizer, step);
      if (step == 1) {
        static_cast<void>(optimizer.reduce({}, stream_));
        require(cudaEventRecord(reduced_, comm_stream));
        wait(idle_, reduced_);
        static_cast<void>(optimizer.discard(stream_));
      } else {
        static_cast<void>(optimizer.step({}, stream_));
        optimizer.wait_parameters(reader_);  // a discarded step changes none
      }
      read_and_zero(optimizer, step != 1);
    }
  }

  void end_graph() noexcept {
    if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(std::exchange(executable_, nullptr)));
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(std::exchange(graph_, nullptr)));
  }

  template <class T>
  static std::size_t bytes(std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(T);
  }

  static void fill(Grad* to, int byte, std::int64_t count, cudaStream_t stream) {
    require(cudaMemsetAsync(to, byte, bytes<Grad>(count), stream));
  }

  /// `behind` goes on behind what `stream` holds now.
  void order(cudaStream_t behind, cudaStream_t stream) {
    require(cudaEventRecord(begun_, stream));
    wait(behind, begun_);
  }

  /// Layers' gradients come from two streams.
  template <class Optimizer>
  void backward(Optimizer& optimizer, int step) {
    order(second_, stream_);
    fill(gradients_ + 3000 + engine_.gap, 1 + step, 3000, second_);
    optimizer.gradient_ready(last_, second_);
    fill(gradients_, 2 + step, 3000, stream_);
    optimizer.gradient_ready(first_, stream_);
  }

  /// Parameters are read on a third stream; they are written again only behind that, gradients behind their
  /// zeroing.
  template <class Optimizer>
  void read_and_zero(Optimizer& optimizer, bool zero) {
    require(cudaMemcpyAsync(copy_, parameters_, bytes<Param>(extent_), cudaMemcpyDeviceToDevice, reader_));
    order(stream_, reader_);
    if (zero) optimizer.zero_gradients(second_);
    order(stream_, second_);
  }

  /// Calls that wait for nothing come behind steps and each other, on other streams, and a step behind them,
  /// by the library's order alone. (After those that wait, the host's order hides the streams'.)
  template <class Optimizer>
  void call_between(Optimizer& optimizer) {
    const auto step = [&](int number) {
      backward(optimizer, number);
      static_cast<void>(optimizer.step({}, stream_));
    };
    step(0);
    static_cast<void>(optimizer.last_result(idle_));
    step(1);
    optimizer.set_rule("default", {.lr = 1e-3}, idle_);
    step(2);
    watched->ignore(for_the_update);
    watched->ignore(2);  // the collective's for the masters: what is made of them next is gathered behind
    optimizer.refresh_masters(idle_);
    watched->ignore(1);            // for the gathers, which the masters came behind
    watched->ignore(2 + buckets);  // the collective's for what was made, which it has gathered
    optimizer.restore_parameters(reader_);
    step(3);
    watched->ignore(for_the_update);
    optimizer.refresh_masters(idle_);
    step(4);
    optimizer.wait_parameters(reader_);
    read_and_zero(optimizer, true);
  }

  /// A step outside a graph, two replays of one, and another step outside.
  template <class Optimizer>
  void replay(Optimizer& optimizer) {
    branched_step(optimizer, 0);
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    try {
      branched_step(optimizer, 1);
      require(cudaStreamEndCapture(stream_, &graph_));
    } catch (const so::CudaError& error) {
      if (error.status() < cudaErrorStreamCaptureUnsupported || error.status() > cudaErrorCapturedEvent)
        throw;
      std::fprintf(stderr, "the capture was refused: %s\n", error.what());
      std::_Exit(3);
    }
    require(cudaGraphInstantiate(&executable_, graph_, 0));
    watched->ignore(for_the_update);
    optimizer.set_inputs(1.0f, 1.0f, stream_);  // so replays come behind the step outside
    for (int replay = 0; replay < 2; ++replay) require(cudaGraphLaunch(executable_, stream_));
    branched_step(optimizer, 2);
  }

  /// All gradients come from two branches, factors from the step's stream, and the first parameter is read on
  /// a fourth: nothing but the library brings the gathers of the others back into the capture.
  template <class Optimizer>
  void branched_step(Optimizer& optimizer, int step) {
    for (cudaStream_t branch : {second_, idle_, reader_}) order(branch, stream_);
    fill(gradients_ + 3000 + engine_.gap, 1 + step, 4000 + engine_.gap, second_);
    optimizer.gradient_ready(last_, second_);
    optimizer.gradient_ready(early_, second_);
    fill(gradients_, 2 + step, 3000, idle_);
    optimizer.gradient_ready(first_, idle_);
    if (step == 1) optimizer.set_inputs(1.0f, 1.0f, stream_);
    static_cast<void>(optimizer.step({}, stream_));
    optimizer.wait_parameters(first_, reader_);
    require(cudaMemcpyAsync(copy_, parameters_, bytes<Param>(3000), cudaMemcpyDeviceToDevice, reader_));
    order(stream_, reader_);
    optimizer.zero_gradients(second_);
    order(stream_, second_);
  }

  Engine engine_;
  std::int64_t extent_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t second_ = nullptr;
  cudaStream_t idle_ = nullptr;
  cudaStream_t reader_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  cudaEvent_t begun_ = nullptr;
  cudaEvent_t reduced_ = nullptr;
  Param* parameters_ = nullptr;
  Grad* gradients_ = nullptr;
  Param* copy_ = nullptr;
  so::ParameterId first_;
  so::ParameterId last_;
  so::ParameterId early_;
};

/// Each call's buffers are written right before it and right after it, on its stream.
void call_each(so::Threads<so::Cuda> comm, Waits& waits) {
  constexpr std::int64_t elements = 1000;
  constexpr std::size_t size = elements * sizeof(std::int64_t);
  const std::vector<std::int64_t> borders{0, elements / 2, elements};
  void* buffer = nullptr;
  require(cudaMalloc(&buffer, size));
  const auto call = [&](const auto& body) {
    require(cudaMemsetAsync(buffer, 1, size, comm.stream()));
    body();
    require(cudaMemsetAsync(buffer, 2, size, comm.stream()));
  };
  call([&] { comm.reduce_scatter(buffer, {borders}, so::Dtype::fp32, so::Reduction::ordered, nullptr); });
  call([&] { comm.all_gather(buffer, {borders}, so::Dtype::fp32); });
  call([&] { comm.all_reduce(static_cast<std::int64_t*>(buffer), 100); });
  for (int root = 0; root < world; ++root) {
    // The root reads nothing: neither what the others had written nor that it would read orders anything.
    waits.ignore(comm.rank() == root ? 0 : 1);
    call([&] { comm.broadcast(buffer, size, root); });
  }
  all_are_here.arrive_and_wait();
  require(cudaStreamSynchronize(comm.stream()));
  all_are_here.arrive_and_wait();  // the others may read later than a dropped wait says
  require(cudaFree(buffer));
}

/// Runs body(rank) on a thread a rank, its waits watched. @return the program's exit code
template <class Body>
int on_ranks(Waits* waits, const Body& body) {
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        watched = &waits[rank];
        body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        failed = 1;
        all_are_here.arrive_and_drop();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failed;
}

template <class Precision>
int on_nccl(Waits* waits, const Engine& engine) {
  ncclUniqueId id;
  if (ncclGetUniqueId(&id) != ncclSuccess) return 1;
  return on_ranks(waits, [&](int rank) {
    require(cudaSetDevice(rank));
    cudaStream_t stream = nullptr;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Rank<Precision>(engine).train(so::Nccl::create(id, rank, world, stream));
    require(cudaStreamDestroy(stream));
  });
}

/// @param last  the second rank's GPU
int on_threads(Waits* waits, int last) {
  auto comms = so::Threads<so::Cuda>::make({{.device = 0}, {.device = last}});
  return on_ranks(waits, [&](int rank) {
    require(cudaSetDevice(rank * last));
    call_each(std::move(comms[static_cast<std::size_t>(rank)]), waits[rank]);
  });
}

using Fp32 = so::FullPrecision;
using Bf16 = so::Mixed<so::bf16, so::bf16, float>;

const std::map<std::string, int (*)(Waits*)> variants{
    {"native", [](Waits* waits) { return on_nccl<Fp32>(waits, {}); }},
    {"ordered", [](Waits* waits) { return on_nccl<Fp32>(waits, {.reduction = so::Reduction::ordered}); }},
    {"staged", [](Waits* waits) { return on_nccl<Bf16>(waits, {.gap = 5}); }},
    {"captured", [](Waits* waits) { return on_nccl<Fp32>(waits, {.captured = true}); }},
    {"captured_staged", [](Waits* waits) { return on_nccl<Bf16>(waits, {.gap = 5, .captured = true}); }},
    {"calls", [](Waits* waits) { return on_nccl<Bf16>(waits, {.gap = 5, .calls = true}); }},
    {"threads", [](Waits* waits) { return on_threads(waits, 0); }},
    {"peers", [](Waits* waits) { return on_threads(waits, 1); }},
};

}  // namespace

int main(int argc, char** argv) {
  const auto variant = variants.find(argc > 1 ? argv[1] : "");
  if (variant == variants.end()) {
    for (const auto& [name, run] : variants) std::printf("%s\n", name.c_str());
    return argc > 1 ? 2 : 0;
  }
  const int rank = argc > 3 ? std::atoi(argv[3]) : 0;
  if (rank < 0 || rank >= world) return 2;
  // Ranks' graphs must hold the same collectives.
  const bool all = variant->first.starts_with("captured");
  Waits waits[world];
  for (int each = 0; argc > 2 && each < world; ++each) {
    if (all || each == rank) waits[each].dropped = std::atoi(argv[2]);
  }
  const int code = variant->second(waits);
  std::printf("%d\n", waits[rank].count);
  return code;
}
