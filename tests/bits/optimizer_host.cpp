// SPDX-License-Identifier: Apache-2.0
//
// bits_optimizer_host [--golden FILE] [--flush] [--load SHARED_OBJECT]: the whole optimizer on the host. See
// host.cpp.

#include "optimizer_cases.hpp"
#include "options.hpp"

namespace so = shardopt;

namespace {

struct HostMemory {
  using Stream = so::Host::Stream;
  template <class T>
  class Buffer {
   public:
    explicit Buffer(const std::vector<T>& values) : values_(values) {}
    [[nodiscard]] T* data() { return values_.data(); }
    void set(const std::vector<T>& values) { std::copy(values.begin(), values.end(), values_.begin()); }
    [[nodiscard]] const std::vector<T>& values() const { return values_; }

   private:
    std::vector<T> values_;
  };
  static void wait(Stream) {}
};

struct HostEngine {
  template <class Rule, class Sharding, class Precision>
  std::vector<bits::Trained> ranks(int world, const std::array<Rule, 2>& rules, const Sharding& sharding) {
    std::vector<bits::Trained> result(static_cast<std::size_t>(world));
    if (world == 1) {
      result[0] =
          bits::train_rank<HostMemory, Rule, Sharding, Precision>(so::Solo<so::Host>{}, {}, rules, sharding);
    } else {
      so::Threads<so::Host>::run(world, [&](so::Threads<so::Host> comm) {
        auto& mine = result[static_cast<std::size_t>(comm.rank())];
        mine = bits::train_rank<HostMemory, Rule, Sharding, Precision>(std::move(comm), {}, rules, sharding);
      });
    }
    return result;
  }
};

}  // namespace

int main(int argc, char** argv) try {
  const bits::Options options = bits::prepare(argc, argv);
  if (options.skip) return 77;
  HostEngine engine;
  return bits::report(bits::optimizer_lines(engine), options.golden);
} catch (const std::exception& error) {
  std::cerr << "bits_optimizer_host: " << error.what() << '\n';
  return 1;
}
