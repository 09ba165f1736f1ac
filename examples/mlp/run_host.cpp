// SPDX-License-Identifier: Apache-2.0
#include "run_host.hpp"

#include <cblas.h>

namespace mlp {

Result run_host(const Run& run) {
  openblas_set_num_threads(1);  // a rank is one thread; products must not depend on how many there are
  return with_precision(run.options.precision,
                        [&]<class Precision>(Type<Precision>) { return run_host_in<Precision>(run); });
}

}  // namespace mlp
