// SPDX-License-Identifier: Apache-2.0
//
// bits_host [--golden FILE] [--flush] [--load SHARED_OBJECT]
//
// Computes on the host what cases.hpp asks for, by floats and by packs, which must agree, and compares it
// with the file. The other options: see options.hpp.

#include <shardopt/core/convert.hpp>
#include <shardopt/core/float_environment.hpp>
#include <shardopt/core/pack_memory.hpp>

#include <algorithm>
#include <stdexcept>

#include "cases.hpp"
#include "options.hpp"

namespace so = shardopt;

namespace {

template <class T>
void require_same(const std::vector<T>& by_floats, const std::vector<T>& by_packs, const std::string& what) {
  bits::Hash one;
  bits::Hash two;
  one.add(by_floats);
  two.add(by_packs);
  if (one.value() != two.value()) throw std::runtime_error(what + ": floats and packs differ");
}

// The functions that compute are not inlined, so that they lie inside the guard's life: their operands come
// from memory.
#define NOT_INLINED __attribute__((noinline)) SHARDOPT_TARGET_AVX2

NOT_INLINED void operation_by_floats(std::size_t which, const float* a, const float* b, const float* c,
                                     float* out, std::size_t count) {
  for (std::size_t k = 0; k < count; ++k) {
    float results[bits::operation_count];
    bits::operations<float>(a[k], b[k], c[k], results);
    out[k] = results[which];
  }
}

NOT_INLINED void double_operation(std::size_t which, const double* a, const double* b, const double* c,
                                  double* out, std::size_t count) {
  for (std::size_t k = 0; k < count; ++k) {
    double results[bits::double_operation_count];
    bits::double_operations(a[k], b[k], c[k], results);
    out[k] = results[which];
  }
}

template <class Rule, std::size_t... index>
NOT_INLINED void step_by_floats(const Rule& rule, const float& factor, std::uint64_t update,
                                const float* gradients, bits::Updated<Rule>& updated,
                                std::index_sequence<index...>) {
  const auto constants = rule.constants({.lr_factor = factor, .update = update});
  for (std::size_t k = 0; k < updated.parameters.size(); ++k) {
    typename Rule::template State<float> state{updated.state[index][k]...};
    updated.parameters[k] =
        Rule::template update<float>(constants, updated.parameters[k], gradients[k], state);
    ((updated.state[index][k] = so::field<index>(state)), ...);
  }
}

#if SHARDOPT_HOST_AVX2
int lanes(std::size_t left) { return static_cast<int>((std::min)(left, std::size_t{so::Pack::size})); }

NOT_INLINED void operation_by_packs(std::size_t which, const float* a, const float* b, const float* c,
                                    float* out, std::size_t count) {
  for (std::size_t k = 0; k < count; k += so::Pack::size) {
    const int n = lanes(count - k);
    so::Pack results[bits::operation_count];
    bits::operations<so::Pack>(so::load_pack(a + k, n), so::load_pack(b + k, n), so::load_pack(c + k, n),
                               results);
    so::store_pack(out + k, results[which], n);
  }
}

template <class Rule, std::size_t... index>
NOT_INLINED void step_by_packs(const Rule& rule, const float& factor, std::uint64_t update,
                               const float* gradients, bits::Updated<Rule>& updated,
                               std::index_sequence<index...>) {
  const auto constants = rule.constants({.lr_factor = factor, .update = update});
  for (std::size_t k = 0; k < updated.parameters.size(); k += so::Pack::size) {
    const int n = lanes(updated.parameters.size() - k);
    typename Rule::template State<so::Pack> state{so::load_pack(updated.state[index].data() + k, n)...};
    float* parameters = updated.parameters.data() + k;
    const so::Pack result = Rule::template update<so::Pack>(constants, so::load_pack(parameters, n),
                                                            so::load_pack(gradients + k, n), state);
    so::store_pack(parameters, result, n);
    (so::store_pack(updated.state[index].data() + k, so::field<index>(state), n), ...);
  }
}

template <class T>
NOT_INLINED void up_by_packs(const T* from, float* to, std::size_t count) {
  for (std::size_t k = 0; k < count; k += so::Pack::size) {
    const int n = lanes(count - k);
    so::store_pack(to + k, so::load_pack(from + k, n), n);
  }
}

template <class T>
NOT_INLINED void down_by_packs(const float* from, T* to, std::size_t count) {
  for (std::size_t k = 0; k < count; k += so::Pack::size) {
    const int n = lanes(count - k);
    so::store_pack(to + k, so::load_pack(from + k, n), n);
  }
}
#endif

class HostEngine {
 public:
  std::vector<float> operation(std::size_t which, const std::vector<float>& a, const std::vector<float>& b,
                               const std::vector<float>& c) {
    const so::FloatEnvironment environment;
    std::vector<float> result(a.size());
    operation_by_floats(which, a.data(), b.data(), c.data(), result.data(), a.size());
#if SHARDOPT_HOST_AVX2
    std::vector<float> packs(a.size());
    operation_by_packs(which, a.data(), b.data(), c.data(), packs.data(), a.size());
    require_same(result, packs, "operation " + std::to_string(which));
#endif
    return result;
  }

  std::vector<double> double_operation(std::size_t which, const std::vector<double>& a,
                                       const std::vector<double>& b, const std::vector<double>& c) {
    const so::FloatEnvironment environment;
    std::vector<double> result(a.size());
    ::double_operation(which, a.data(), b.data(), c.data(), result.data(), a.size());
    return result;
  }

  template <class T>
  std::vector<float> up(const std::vector<std::uint16_t>& patterns) {
    std::vector<T> from(patterns.size());
    for (std::size_t k = 0; k < from.size(); ++k) from[k].bits = patterns[k];
    std::vector<float> result(from.size());
    for (std::size_t k = 0; k < from.size(); ++k) result[k] = so::to_float(from[k]);
#if SHARDOPT_HOST_AVX2
    std::vector<float> packs(from.size());
    up_by_packs(from.data(), packs.data(), from.size());
    require_same(result, packs, "to_float");
#endif
    return result;
  }

  template <class T>
  std::vector<std::uint16_t> down(const std::vector<float>& numbers) {
    std::vector<std::uint16_t> result(numbers.size());
    for (std::size_t k = 0; k < numbers.size(); ++k) result[k] = so::from_float<T>(numbers[k]).bits;
#if SHARDOPT_HOST_AVX2
    std::vector<T> to(numbers.size());
    down_by_packs(numbers.data(), to.data(), to.size());
    std::vector<std::uint16_t> packs(to.size());
    for (std::size_t k = 0; k < to.size(); ++k) packs[k] = to[k].bits;
    require_same(result, packs, "from_float");
#endif
    return result;
  }

  template <class Rule>
  bits::Updated<Rule> run(const Rule& rule, const bits::Inputs& inputs) {
    const so::FloatEnvironment environment;
    constexpr auto indices = std::make_index_sequence<so::state_count<Rule>>{};
    bits::Updated<Rule> result(inputs);
    for (std::uint64_t t = 0; t < bits::steps; ++t) {
      step_by_floats(rule, inputs.factors[t], t + 1, inputs.gradients[t].data(), result, indices);
    }
#if SHARDOPT_HOST_AVX2
    bits::Updated<Rule> packs(inputs);
    for (std::uint64_t t = 0; t < bits::steps; ++t) {
      step_by_packs(rule, inputs.factors[t], t + 1, inputs.gradients[t].data(), packs, indices);
    }
    require_same(result.parameters, packs.parameters, std::string(so::rule_name<Rule>));
    for (std::size_t k = 0; k < result.state.size(); ++k) {
      require_same(result.state[k], packs.state[k], std::string(so::state_names<Rule>[k]));
    }
#endif
    return result;
  }
};

#undef NOT_INLINED

}  // namespace

int main(int argc, char** argv) try {
  const bits::Options options = bits::prepare(argc, argv);
  if (options.skip) return 77;
  HostEngine engine;
  return bits::report(bits::lines(engine), options.golden);
} catch (const std::exception& error) {
  std::cerr << "bits_host: " << error.what() << '\n';
  return 1;
}
