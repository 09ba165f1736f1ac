// SPDX-License-Identifier: Apache-2.0
//
// bits_optimizer_device [--golden FILE]: the whole optimizer on one device and, where there are three, by
// NCCL on three.

#include <shardopt/cuda.cuh>

#include <exception>
#include <thread>

#include "device_memory.cuh"
#include "optimizer_cases.hpp"

namespace so = shardopt;

namespace {

struct DeviceMemory {
  using Stream = cudaStream_t;
  template <class T>
  using Buffer = bits::DeviceVector<T>;
  static void wait(Stream stream) {
    bits::throw_if_failed(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
};

class OwnStream {
 public:
  OwnStream() {
    bits::throw_if_failed(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

struct DeviceEngine {
  template <class Rule, class Sharding, class Precision>
  std::vector<bits::Trained> ranks(int world, const std::array<Rule, 2>& rules, const Sharding& sharding) {
    std::vector<bits::Trained> result;
    int devices = 0;
    bits::throw_if_failed(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    if (devices < world) {
      std::cout << "left out: " << world << " ranks, there are " << devices << " devices\n";
      return result;
    }
    result.resize(static_cast<std::size_t>(world));
    if (world == 1) {
      const OwnStream stream;
      result[0] = bits::train_rank<DeviceMemory, Rule, Sharding, Precision>(so::Solo<so::Cuda>{stream.get()},
                                                                            stream.get(), rules, sharding);
      return result;
    }
    ncclUniqueId id;
    if (ncclGetUniqueId(&id) != ncclSuccess) throw std::runtime_error("ncclGetUniqueId failed");
    std::vector<std::thread> threads;
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world));
    for (int rank = 0; rank < world; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          bits::throw_if_failed(cudaSetDevice(rank), "cudaSetDevice");
          const OwnStream stream;
          const OwnStream traffic;
          result[static_cast<std::size_t>(rank)] = bits::train_rank<DeviceMemory, Rule, Sharding, Precision>(
              so::Nccl::create(id, rank, world, traffic.get()), stream.get(), rules, sharding);
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
    return result;
  }
};

}  // namespace

int main(int argc, char** argv) try {
  const std::string golden = argc == 3 && std::string(argv[1]) == "--golden" ? argv[2] : "";
  DeviceEngine engine;
  return bits::report(bits::optimizer_lines(engine), golden, false);
} catch (const std::exception& error) {
  std::cerr << "bits_optimizer_device: " << error.what() << '\n';
  return 1;
}
