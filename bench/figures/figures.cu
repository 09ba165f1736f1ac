// SPDX-License-Identifier: Apache-2.0
// figures [ELEMENTS]: how near to the device's own copy the kernels come, as JSON, with the device's name and
// the number of devices. Every figure is the median of repeated runs, beside a copy measured in the same
// process.

#include <bench/workloads.cuh>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace {

namespace so = shardopt;

struct Figure {
  std::string name;
  double bytes_per_element;
  double gigabytes_per_second;
};

/// Times launches on a stream, several to an interval.
class Clock {
 public:
  Clock() {
    so::throw_if_failed(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
    so::throw_if_failed(cudaStreamCreateWithFlags(&comm_stream, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
    so::throw_if_failed(cudaEventCreate(&begin_), "cudaEventCreate");
    so::throw_if_failed(cudaEventCreate(&end_), "cudaEventCreate");
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  ~Clock() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
    static_cast<void>(cudaStreamDestroy(stream));
    static_cast<void>(cudaStreamDestroy(comm_stream));
  }

  /// @return median seconds of one launch
  template <class Workload>
  double seconds(Workload& workload) {
    constexpr int intervals = 7;
    constexpr int launches = 5;
    std::vector<float> milliseconds;
    workload.launch(stream);
    for (int interval = 0; interval < intervals; ++interval) {
      so::throw_if_failed(cudaEventRecord(begin_, stream), "cudaEventRecord");
      for (int launch = 0; launch < launches; ++launch) workload.launch(stream);
      so::throw_if_failed(cudaEventRecord(end_, stream), "cudaEventRecord");
      so::throw_if_failed(cudaEventSynchronize(end_), "cudaEventSynchronize");
      float elapsed = 0;
      so::throw_if_failed(cudaEventElapsedTime(&elapsed, begin_, end_), "cudaEventElapsedTime");
      milliseconds.push_back(elapsed / launches);
    }
    std::nth_element(milliseconds.begin(), milliseconds.begin() + intervals / 2, milliseconds.end());
    return static_cast<double>(milliseconds[intervals / 2]) / 1e3;
  }

  cudaStream_t stream = nullptr;
  cudaStream_t comm_stream = nullptr;

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

template <class Workload>
Figure measure(Clock& clock, const std::string& name, std::int64_t elements, Workload&& workload) {
  const double seconds = clock.seconds(workload);
  const auto bytes = static_cast<double>(workload.bytes().total());
  return {name, bytes / static_cast<double>(elements), bytes / seconds / 1e9};
}

void print(const std::vector<Figure>& figures, std::int64_t elements) {
  cudaDeviceProp properties{};
  int devices = 0;
  so::throw_if_failed(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  so::throw_if_failed(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  std::printf("{\"elements\": %lld, \"device\": \"%s\", \"devices\": %d, \"figures\": [\n",
              static_cast<long long>(elements), properties.name, devices);
  for (std::size_t k = 0; k < figures.size(); ++k) {
    std::printf(
        "  {\"name\": \"%s\", \"bytes_per_element\": %.4g, \"gigabytes_per_second\": %.1f, \"of_copy\": "
        "%.3f}%s\n",
        figures[k].name.c_str(), figures[k].bytes_per_element, figures[k].gigabytes_per_second,
        figures[k].gigabytes_per_second / figures[0].gigabytes_per_second, k + 1 < figures.size() ? "," : "");
  }
  std::printf("]}\n");
}

}  // namespace

int main(int argc, char** argv) try {
  const std::int64_t elements = argc > 1 ? std::atoll(argv[1]) : std::int64_t{1} << 28;
  using Fp32 = so::FullPrecision;
  using Bf16 = so::Mixed<so::bf16, so::bf16, float>;
  using Bf16Fp32 = so::Mixed<so::bf16, float, float>;
  using Fp16 = so::Mixed<so::fp16, so::fp16, float>;
  Clock clock;
  std::vector<Figure> figures;
  figures.push_back(measure(clock, "copy", elements, bench::Copy(4 * elements)));
  figures.push_back(
      measure(clock, "update adamw fp32", elements, bench::Update<so::AdamW, Fp32>(elements, {})));
  figures.push_back(measure(clock, "update adamw bf16 params, fp32 grads, master", elements,
                            bench::Update<so::AdamW, Bf16Fp32>(elements, {})));
  figures.push_back(
      measure(clock, "update adamw bf16, master", elements, bench::Update<so::AdamW, Bf16>(elements, {})));
  figures.push_back(
      measure(clock, "update adamw fp16, master", elements, bench::Update<so::AdamW, Fp16>(elements, {})));
  figures.push_back(measure(clock, "update sgd fp32", elements, bench::Update<so::SGD, Fp32>(elements, {})));
  figures.push_back(measure(clock, "update sgd momentum fp32", elements,
                            bench::Update<so::SGD, Fp32>(elements, {.momentum = 0.9})));
  figures.push_back(measure(clock, "norm fp32", elements, bench::Norm<float>(elements)));
  figures.push_back(measure(clock, "norm bf16", elements, bench::Norm<so::bf16>(elements)));
  figures.push_back(measure(clock, "step adamw fp32, one rank", elements,
                            bench::Step<so::AdamW, Fp32>(elements, {}, clock.stream, clock.comm_stream)));
  figures.push_back(measure(clock, "step adamw bf16, master, one rank", elements,
                            bench::Step<so::AdamW, Bf16>(elements, {}, clock.stream, clock.comm_stream)));
  print(figures, elements);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
