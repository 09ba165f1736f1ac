// SPDX-License-Identifier: Apache-2.0
//
// bits_device [--golden FILE]
//
// Computes on the device, in kernels, what cases.hpp asks for, and compares it with the file that the host's
// builds match.

#include <shardopt/core/convert.hpp>

#include "cases.hpp"
#include "device_memory.cuh"

namespace so = shardopt;

namespace {

using bits::DeviceVector;
using bits::throw_if_failed;

__device__ std::size_t this_element() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }

__global__ void operation_kernel(std::size_t which, const float* a, const float* b, const float* c,
                                 float* out, std::size_t count) {
  const std::size_t k = this_element();
  if (k >= count) return;
  float results[bits::operation_count];
  bits::operations<float>(a[k], b[k], c[k], results);
  out[k] = results[which];
}

__global__ void double_operation_kernel(std::size_t which, const double* a, const double* b, const double* c,
                                        double* out, std::size_t count) {
  const std::size_t k = this_element();
  if (k >= count) return;
  double results[bits::double_operation_count];
  bits::double_operations(a[k], b[k], c[k], results);
  out[k] = results[which];
}

template <class T>
__global__ void up_kernel(const T* from, float* to, std::size_t count) {
  const std::size_t k = this_element();
  if (k < count) to[k] = so::to_float(from[k]);
}

template <class T>
__global__ void down_kernel(const float* from, T* to, std::size_t count) {
  const std::size_t k = this_element();
  if (k < count) to[k] = so::from_float<T>(from[k]);
}

template <class Rule>
struct StatePointers {
  float* buffers[so::state_count<Rule> + 1];
};

template <class Rule>
__global__ void constants_kernel(Rule rule, so::StepScalars scalars, typename Rule::Constants* constants) {
  *constants = rule.constants(scalars);
}

template <class Rule, std::size_t... index>
__device__ void update_element(const typename Rule::Constants& constants, float& parameter, float gradient,
                               const StatePointers<Rule>& pointers, std::size_t k,
                               std::index_sequence<index...>) {
  typename Rule::template State<float> state{pointers.buffers[index][k]...};
  parameter = Rule::template update<float>(constants, parameter, gradient, state);
  ((pointers.buffers[index][k] = so::field<index>(state)), ...);
}

template <class Rule>
__global__ void update_kernel(const typename Rule::Constants* constants, float* parameters,
                              const float* gradients, StatePointers<Rule> pointers, std::size_t count) {
  const std::size_t k = this_element();
  if (k >= count) return;
  update_element<Rule>(*constants, parameters[k], gradients[k], pointers, k,
                       std::make_index_sequence<so::state_count<Rule>>{});
}

constexpr unsigned threads = 128;
unsigned blocks(std::size_t count) { return static_cast<unsigned>((count + threads - 1) / threads); }
void check_launch() { throw_if_failed(cudaGetLastError(), "kernel launch"); }

class DeviceEngine {
 public:
  std::vector<float> operation(std::size_t which, const std::vector<float>& a, const std::vector<float>& b,
                               const std::vector<float>& c) {
    const DeviceVector<float> x(a);
    const DeviceVector<float> y(b);
    const DeviceVector<float> z(c);
    const DeviceVector<float> out(a.size());
    operation_kernel<<<blocks(a.size()), threads>>>(which, x.data(), y.data(), z.data(), out.data(),
                                                    a.size());
    check_launch();
    return out.values();
  }

  std::vector<double> double_operation(std::size_t which, const std::vector<double>& a,
                                       const std::vector<double>& b, const std::vector<double>& c) {
    const DeviceVector<double> x(a);
    const DeviceVector<double> y(b);
    const DeviceVector<double> z(c);
    const DeviceVector<double> out(a.size());
    double_operation_kernel<<<blocks(a.size()), threads>>>(which, x.data(), y.data(), z.data(), out.data(),
                                                           a.size());
    check_launch();
    return out.values();
  }

  template <class T>
  std::vector<float> up(const std::vector<std::uint16_t>& patterns) {
    std::vector<T> elements(patterns.size());
    for (std::size_t k = 0; k < elements.size(); ++k) elements[k].bits = patterns[k];
    const DeviceVector<T> from(elements);
    const DeviceVector<float> to(elements.size());
    up_kernel<<<blocks(elements.size()), threads>>>(from.data(), to.data(), elements.size());
    check_launch();
    return to.values();
  }

  template <class T>
  std::vector<std::uint16_t> down(const std::vector<float>& numbers) {
    const DeviceVector<float> from(numbers);
    const DeviceVector<T> to(numbers.size());
    down_kernel<<<blocks(numbers.size()), threads>>>(from.data(), to.data(), numbers.size());
    check_launch();
    std::vector<std::uint16_t> result;
    for (const T element : to.values()) result.push_back(element.bits);
    return result;
  }

  template <class Rule>
  bits::Updated<Rule> run(const Rule& rule, const bits::Inputs& inputs) {
    return run(rule, inputs, std::make_index_sequence<so::state_count<Rule>>{});
  }

 private:
  template <class Rule, std::size_t... index>
  bits::Updated<Rule> run(const Rule& rule, const bits::Inputs& inputs, std::index_sequence<index...>) {
    bits::Updated<Rule> result(inputs);
    const DeviceVector<float> parameters(result.parameters);
    const std::array<DeviceVector<float>, sizeof...(index)> state{
        DeviceVector<float>(result.state[index])...};
    const StatePointers<Rule> pointers{{state[index].data()..., nullptr}};
    const DeviceVector<typename Rule::Constants> constants(std::size_t{1});
    for (std::uint64_t t = 0; t < bits::steps; ++t) {
      const DeviceVector<float> gradients(inputs.gradients[t]);
      constants_kernel<<<1, 1>>>(rule, {.lr_factor = inputs.factors[t], .update = t + 1}, constants.data());
      check_launch();
      update_kernel<Rule><<<blocks(bits::elements), threads>>>(constants.data(), parameters.data(),
                                                               gradients.data(), pointers, bits::elements);
      check_launch();
      throw_if_failed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    result.parameters = parameters.values();
    ((result.state[index] = state[index].values()), ...);
    return result;
  }
};

}  // namespace

int main(int argc, char** argv) try {
  const std::string golden = argc == 3 && std::string(argv[1]) == "--golden" ? argv[2] : "";
  DeviceEngine engine;
  return bits::report(bits::lines(engine), golden);
} catch (const std::exception& error) {
  std::cerr << "bits_device: " << error.what() << '\n';
  return 1;
}
