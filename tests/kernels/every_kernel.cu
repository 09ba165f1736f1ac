// SPDX-License-Identifier: Apache-2.0
// Every launch of the library, for every rule and precision that it ships. Compiled by resources.cmake, which
// reads what ptxas says about the kernels; part of no program.
#include <shardopt/cuda.cuh>

#include <cstdint>

namespace so = shardopt;

#define FOR_GRADIENT(Rule, Param, Grad)                                \
  template void so::Cuda::update<Rule, so::Mixed<Param, Grad, float>>( \
      const so::UpdateArguments<Rule, so::Mixed<Param, Grad, float>>&, cudaStream_t) const;
#define INVOKE(...) \
  template void so::Cuda::invoke<so::detail::__VA_ARGS__>(const so::detail::__VA_ARGS__&, cudaStream_t) const;
#define FOR_RULE(Rule)                   \
  FOR_GRADIENT(Rule, float, float)       \
  FOR_GRADIENT(Rule, so::bf16, so::bf16) \
  FOR_GRADIENT(Rule, so::bf16, float)    \
  FOR_GRADIENT(Rule, so::fp16, so::fp16) \
  FOR_GRADIENT(Rule, so::fp16, float)    \
  INVOKE(DecideStep<Rule>)               \
  INVOKE(AssignRule<Rule>)
FOR_RULE(so::Adam)
FOR_RULE(so::AdamAmsgrad)
FOR_RULE(so::AdamW)
FOR_RULE(so::AdamWAmsgrad)
FOR_RULE(so::SGD)

INVOKE(InitializeStep)
INVOKE(SetFactors)
INVOKE(OpenStep)
INVOKE(MeasureStep)
INVOKE(ReadResult)
INVOKE(AssignCounters)

#define FOR_TYPE(T)                                                                                          \
  template void so::Cuda::add_squares<T>(const so::Tile*, std::int64_t, std::int64_t*, std::int64_t*,        \
                                         cudaStream_t) const;                                                \
  template void so::Cuda::pack<T>(const so::Tile*, std::int64_t, so::TileField, T*, cudaStream_t) const;     \
  template void so::Cuda::unpack<T>(const so::Tile*, std::int64_t, so::TileField, const T*, cudaStream_t)    \
      const;                                                                                                 \
  template void so::Cuda::round_masters<T>(const so::Tile*, std::int64_t, const float*, cudaStream_t) const; \
  template void so::Cuda::initialize_masters<T>(const so::Tile*, std::int64_t, float*, cudaStream_t) const;
FOR_TYPE(float)
FOR_TYPE(so::bf16)
FOR_TYPE(so::fp16)

#define FOR_BITS(T)                                                                                          \
  template void so::Cuda::add_digest<T>(const T*, std::int64_t, std::uint64_t, std::uint64_t*, cudaStream_t) \
      const;
FOR_BITS(std::uint16_t)
FOR_BITS(std::uint32_t)
